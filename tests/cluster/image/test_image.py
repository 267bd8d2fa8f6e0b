"""Container images: content hashes and tags, the builders' command lines, and what is pushed to a registry."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from test_registry import needs_registry, running_registry

from paths import ROOT
from worldsize.cluster.image import build, registry
from worldsize.cluster.image.build import CONTENT, Ignored, ImageBuild, build_command, contents, digest, push_command
from worldsize.errors import UserError

# Content hash ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A minimal checkout: one file of each kind that matters."""
    folder = tmp_path / "checkout"
    files = {
        "Dockerfile": "FROM scratch AS torch\nCOPY . /\nARG CONTENT\nLABEL worldsize.content=$CONTENT\n",
        ".dockerignore": (ROOT / ".dockerignore").read_text(),
        "src/worldsize/__init__.py": "one",
        "scripts/build_horovod.sh": "two",
        "scripts/other.sh": "three",
        ".git/HEAD": "four",
        "src/worldsize/__pycache__/x.pyc": "five",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def content(folder: Path, target: str = "torch", base: str | None = None, options: tuple[str, ...] = ()) -> str:
    return digest(contents(folder), target, base, options)


def test_the_same_files_elsewhere_are_the_same_content(checkout: Path, tmp_path: Path):
    shutil.copytree(checkout, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "Dockerfile", (0, 0))
    (tmp_path / "copy" / "Dockerfile").chmod(0o600)
    assert content(tmp_path / "copy") == content(checkout)
    assert digest(reversed(contents(checkout)), "torch", None, ()) == content(checkout)


def test_whatever_goes_into_an_image_changes_its_hash(checkout: Path):
    seen = [content(checkout), content(checkout, target="mpi"), content(checkout, base="debian:12")]
    seen += [content(checkout, options=("--no-cache",)), content(checkout, options=("--no-cache", ""))]
    for change in (
        lambda: (checkout / "src/worldsize/__init__.py").write_text("onf"),
        lambda: (checkout / "src/worldsize/__init__.py").chmod(0o755),
        lambda: (checkout / "src/worldsize/__init__.py").rename(checkout / "src/worldsize/other.py"),
        lambda: (checkout / "src/worldsize/link").symlink_to("other.py"),
        lambda: (checkout / "src/worldsize/folder").symlink_to("."),
        lambda: (checkout / "scripts/build_horovod.sh").unlink(),
    ):
        change()
        seen.append(content(checkout))
    assert len(set(seen)) == len(seen)


def test_what_is_ignored_changes_nothing(checkout: Path):
    before = content(checkout)
    for name in (
        ".git/HEAD",
        ".git/new",
        "runs/x/result.json",
        ".venv/bin/python",
        ".env",
        "src/worldsize/__pycache__/y.pyc",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("other")
    (checkout / "scripts/other.sh").write_text("other")
    assert content(checkout) == before


# From Docker's documentation of .dockerignore, and from undocumented behavior of its implementation.
@pytest.mark.parametrize(
    ("rules", "ignored", "kept"),
    [
        ("# comment\n*/temp*", ["somedir/temporary.txt", "somedir/temp/x"], ["temporary.txt", "a/b/temp"]),
        ("*/*/temp*", ["a/b/temporary.txt"], ["a/temporary.txt"]),
        ("temp?", ["tempa", "tempb/x"], ["temp", "tempab"]),
        ("**/*.go", ["x.go", "a/b/x.go"], ["x.got"]),
        ("*.md\n!README.md", ["a.md"], ["README.md", "docs/a.md"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["a.md", "README-secret.md"], ["README-x.md"]),
        ("*.md\nREADME-secret.md\n!README*.md", ["a.md"], ["README-x.md", "README-secret.md"]),
        ("/foo/bar/\nbaz", ["foo/bar", "foo/bar/x", "baz/x"], ["foo/x", "x/baz"]),
        ("a/**\n!a/b/c", ["a/x", "a/b/x"], ["a", "a/b/c", "a/b/c/d"]),
        ("[a-c].txt\n\\*x\n a.b ", ["b.txt", "*x", "a.b"], ["d.txt", "xx", "acb"]),
    ],
)
def test_dockerignore_rules_match_docker(rules: str, ignored: list[str], kept: list[str]):
    rule = Ignored(rules)
    assert [path for path in ignored if not rule.ignores(path)] == []
    assert [path for path in kept if rule.ignores(path)] == []


def test_our_own_context_is_small_and_complete():
    found = {file.path: file for file in contents(ROOT)}
    assert {path.split("/")[0] for path in found} == {
        "Dockerfile", "LICENSE", "README.md", "constraints.txt", "docker", "native", "pyproject.toml", "scripts",
        "setup.py", "src",
    }  # fmt: skip
    assert sum((ROOT / path).stat().st_size for path in found) < 4 << 20
    assert found["docker/worldsize-sshd"].executable
    copies = [line for line in dockerfile() if line.startswith("COPY") and "--from" not in line]
    assert len(copies) >= 5
    for source in " ".join(" ".join(line.split()[1:-1]) for line in copies).split():
        assert any(path == source or path.startswith(source + "/") for path in found), source


def dockerfile() -> list[str]:
    return (ROOT / "Dockerfile").read_text().splitlines()


def test_the_dockerfile_names_no_registry_and_ends_without_root():
    text = "\n".join(dockerfile())
    assert re.findall(r"^(?:FROM|ARG BASE=)\s*(\S+)", text, re.M)[:2] == ["python:3.11-slim-bookworm", "${BASE}"]
    for target in ("torch", "mpi"):
        stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
        assert stage
        words = [line.split()[0] for line in stage[1].splitlines() if line and not line.startswith("#")]
        # RUN checks this content as the image's user, and must precede LABEL: otherwise buildah keeps a cached label.
        assert words == ["COPY", "USER", "WORKDIR", "ARG", "RUN", "LABEL", "ENV"]
        assert "USER 1000:1000\n" in stage[1]
        assert f"LABEL {CONTENT}=$CONTENT\n" in stage[1] + "\n"


# Command lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "base", "options", "words"),
    [
        (
            "docker",
            None,
            (),
            "docker build --file src/Dockerfile --target torch --tag r.example/x:t --build-arg CONTENT=abc src",
        ),
        (
            "podman",
            "debian:12",
            ("--network", "host"),
            "podman build --file src/Dockerfile --target torch --tag r.example/x:t --build-arg CONTENT=abc "
            "--build-arg BASE=debian:12 --network host src",
        ),
        (
            "buildah",
            None,
            ("-v", "/a b:/c:ro"),
            "buildah build --layers --file src/Dockerfile --target torch --tag r.example/x:t --build-arg CONTENT=abc "
            "-v '/a b:/c:ro' src",
        ),
    ],
)
def test_how_it_is_built(builder: build.Builder, base: str | None, options: tuple[str, ...], words: str):
    assert build_command(builder, "torch", "r.example/x:t", "abc", Path("src"), base, options) == shlex.split(words)


@pytest.mark.parametrize(
    ("builder", "insecure", "words"),
    [
        ("docker", False, "docker push r.example/x:t"),
        ("docker", True, "docker push r.example/x:t"),
        ("podman", False, "podman push r.example/x:t"),
        ("podman", True, "podman push --tls-verify=false r.example/x:t"),
        ("buildah", False, "buildah push r.example/x:t"),
        ("buildah", True, "buildah push --tls-verify=false --disable-compression r.example/x:t"),
    ],
)
def test_how_it_is_pushed(builder: build.Builder, insecure: bool, words: str):
    assert push_command(builder, "r.example/x:t", insecure) == shlex.split(words)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """programs(name=exit code) creates programs with these exit codes; no others are on PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**codes: int) -> None:
        for name, code in codes.items():
            (folder / name).write_text(f"#!/bin/sh\nexit {code}\n")
            (folder / name).chmod(0o755)

    return make


def test_the_first_builder_that_works_is_taken(programs):
    with pytest.raises(UserError, match="docker, podman or buildah, and none of them works: install one"):
        build.choose(None)
    programs(docker=1)
    with pytest.raises(UserError, match="its daemon does not answer"):
        build.choose(None)
    programs(buildah=0)
    assert build.choose(None) == "buildah"
    programs(podman=1)
    assert build.choose(None) == "podman"
    programs(docker=0)
    assert build.choose(None) == "docker"
    assert build.choose("buildah") == "buildah"


def test_the_builder_that_was_asked_for_must_be_there(programs):
    programs(docker=0)
    with pytest.raises(UserError, match="--builder podman: podman is not installed"):
        build.choose("podman")


def test_a_failing_builder_is_an_error_with_its_name(programs, checkout: Path, capfd):
    programs(podman=7)
    with pytest.raises(build.BuildFailed, match="`podman build` failed with exit code 7"):
        build.build(ImageBuild(context=checkout))
    assert capfd.readouterr().out == ""


def test_without_push_the_local_name_is_printed(programs, checkout: Path, capfd):
    programs(podman=0)
    assert build.build(ImageBuild(context=checkout), ("--no-cache",)) == 0
    hashed = content(checkout, options=("--no-cache",))
    assert capfd.readouterr().out == f"worldsize:torch-{hashed[:12]}\n"
    build.build(ImageBuild(context=checkout, tag="mine"))
    assert capfd.readouterr().out == "worldsize:mine\n"


@pytest.mark.parametrize("tag", ["latest", "Latest", "", "-a", ".a", "a:b", "a/b", "a b", "ü", "a" * 129])
def test_tags_that_are_refused(tag: str):
    with pytest.raises(UserError, match="--tag"):
        build.checked_tag(tag)


def test_a_folder_that_is_no_checkout(tmp_path: Path):
    with pytest.raises(UserError, match=f"{tmp_path} is not a checkout.*--context"):
        build.build(ImageBuild(context=tmp_path))


# From the checkout to the registry -------------------------------------------------------------------------------------


@pytest.fixture
def buildah(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """buildah with its own storage folder."""
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah")
    settings = tmp_path / "storage.conf"
    settings.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(settings))
    done = subprocess.run(["buildah", "images"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"buildah does not work here: {done.stderr.strip()}")


@needs_registry
def test_an_image_is_built_pushed_found_again_and_never_replaced(checkout: Path, buildah, tmp_path: Path, capfd):
    with running_registry(tmp_path) as host:
        _push_and_push_again(host, checkout, capfd)


def _push_and_push_again(served: str, checkout: Path, capfd) -> None:
    asked = ImageBuild(push=f"{served}/me/worldsize", builder="buildah", insecure=True, context=checkout)
    assert build.build(asked) == 0
    name = capfd.readouterr().out
    assert re.fullmatch(rf"{served}/me/worldsize@sha256:[0-9a-f]{{64}}\n", name)
    tag = f"torch-{content(checkout)[:12]}"
    found = registry.find(registry.parse(f"{served}/me/worldsize"), tag, insecure=True)
    assert found
    assert f"{served}/me/worldsize@{found.digest}\n" == name
    assert found.labels[CONTENT] == content(checkout)

    assert build.build(asked) == 0
    out = capfd.readouterr()
    assert out.out == name
    assert out.err == f"{served}/me/worldsize:{tag} already exists with this content\n"

    (checkout / "src/worldsize/__init__.py").write_text("changed")
    tagged = ImageBuild(push=asked.push, tag=tag, builder="buildah", insecure=True, context=checkout)
    with pytest.raises(UserError, match=f"{tag} already exists with other content"):
        build.build(tagged)
    assert build.build(asked) == 0
    assert capfd.readouterr().out not in ("", name)
    assert registry.find(registry.parse(f"{served}/me/worldsize"), tag, insecure=True) == found


def test_the_builder_sees_the_files_that_are_hashed(checkout: Path, buildah, tmp_path: Path):
    rules = (checkout / ".dockerignore").read_text()
    (checkout / ".dockerignore").write_text(rules + "!a/keep*\n!b/c\n!w?x/b.txt\n!w?y\nb/c/*.no\n")
    for name in ("a/keep.txt", "a/drop", "b/x", "b/c/d/e", "b/c/f.no", "wyx/b.txt", "way/d.txt", "z/b/c"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    command = build_command("buildah", "torch", "x:y", "abc", checkout, None, ("--output", str(tmp_path / "seen")))
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    seen = {str(path.relative_to(tmp_path / "seen")) for path in (tmp_path / "seen").rglob("*") if path.is_file()}
    assert seen == {file.path for file in contents(checkout)}
    assert {"b/c/d/e", "way/d.txt"} < seen
    # An exception with a wildcard does not apply inside an ignored folder.
    assert not {"b/c/f.no", "wyx/b.txt"} & seen
