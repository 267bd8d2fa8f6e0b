"""``worldsize image build``: container images for pods, tagged by content hash, built with docker, podman or buildah.

The rules of .dockerignore are read here because docker's package, which has them too, is not needed for anything else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worldsize.cluster.image import registry
from worldsize.errors import SUCCESS, ServiceFailed, UserError

Builder = Literal["docker", "podman", "buildah"]

# Label with the hash of everything that the container image is built from.
CONTENT = "worldsize.content"
_STDERR = 2
_DAEMON_TIMEOUT_S = 20


@dataclass(frozen=True)
class ImageBuild:
    """Build the container image that pods run, from a checkout of worldsize, with docker, podman or buildah.

    The last line on stdout is the image's local name, or with --push, REPOSITORY@DIGEST. Arguments after `--` are passed to
    the builder, such as `-- --build-arg HTTP_PROXY=...`.
    """

    target: Literal["torch", "mpi"] = "torch"
    """Contents: torch has PyTorch; mpi adds ssh, Open MPI and Horovod, for --on mpijob."""
    push: str | None = None
    """Repository to push to, such as registry.example/me/worldsize."""
    tag: str | None = None
    """Tag (default: TARGET-HASH, with the content hash)."""
    base: str | None = None
    """Base image: any Debian or Ubuntu image, such as NVIDIA's (default: the Dockerfile's)."""
    builder: Builder | None = None
    """Builder (default: the first of docker, podman and buildah that works on this machine)."""
    insecure: bool = False
    """Use plain HTTP for the registry."""
    context: Path = Path()
    """Folder of the checkout."""


class BuildFailed(ServiceFailed):
    """The builder failed; its output was shown."""


@dataclass(frozen=True)
class Content:
    """A file of the build context: its path with slashes, relative to the context, and the SHA-256 of its contents.

    For a symbolic link, ``holds`` names the link's target instead.
    """

    path: str
    executable: bool
    holds: str


def build(asked: ImageBuild, options: Sequence[str] = ()) -> int:
    """Build and push the container image, unless the registry already has it. Returns the exit code.

    Raises:
        UserError: no checkout, no builder, an invalid name, or a tag that already exists with other content.
        BuildFailed, RegistryError: the build, the push or the registry failed.
    """
    context = _checkout(asked.context)
    content = digest(contents(context), asked.target, asked.base, options)
    tag = checked_tag(asked.tag or f"{asked.target}-{content[:12]}")
    repository = registry.parse(asked.push) if asked.push else None
    name = f"{repository or 'worldsize'}:{tag}"
    if repository is not None and (existing := registry.find(repository, tag, asked.insecure)) is not None:
        if existing.labels.get(CONTENT) != content:
            raise UserError(f"{name} already exists with other content: choose another --tag, or omit --tag")
        _log(f"{name} already exists with this content")
        print(f"{repository}@{existing.digest}")
        return SUCCESS
    builder = choose(asked.builder)
    _log(f"Building {name} with {builder}")
    _run(build_command(builder, asked.target, name, content, context, asked.base, options))
    if repository is None:
        print(name)
        return SUCCESS
    _run(push_command(builder, name, asked.insecure))
    pushed = registry.find(repository, tag, asked.insecure)
    if pushed is None or pushed.labels.get(CONTENT) != content:
        raise BuildFailed(f"{name} was pushed, but the registry has other content under this tag: push again")
    print(f"{repository}@{pushed.digest}")
    return SUCCESS


def build_command(
    builder: Builder, target: str, name: str, content: str, context: Path, base: str | None, options: Sequence[str]
) -> list[str]:
    """The command that builds the image (pure)."""
    arguments = ["--build-arg", f"CONTENT={content}"]
    if base is not None:
        arguments += ["--build-arg", f"BASE={base}"]
    # docker and podman cache layers by default; buildah does not.
    layers = ["--layers"] if builder == "buildah" else []
    file = str(context / "Dockerfile")
    return [builder, "build", *layers, "--file", file, "--target", target, "--tag", name, *arguments, *options, str(context)]


def push_command(builder: Builder, name: str, insecure: bool) -> list[str]:
    """The command that pushes the image (pure). For docker, insecure registries are listed in the daemon's settings."""
    if builder == "docker" or not insecure:
        return [builder, "push", name]
    # A plain-HTTP registry is usually local: compressing gigabytes takes longer than sending them.
    uncompressed = ["--disable-compression"] if builder == "buildah" else []
    return [builder, "push", "--tls-verify=false", *uncompressed, name]


def checked_tag(tag: str) -> str:
    """The tag, if it is valid and allowed.

    Raises:
        UserError: it is invalid, or `latest`.
    """
    if tag.lower() == "latest":
        raise UserError(
            "--tag latest is not allowed: its image would change under running jobs; choose another --tag, or omit it"
        )
    if not re.fullmatch(r"\w[\w.-]{0,127}", tag, re.ASCII):
        raise UserError(
            f"--tag {tag!r}: use at most 128 letters, digits, '_', '.' and '-'; the first must not be '.' or '-'"
        )
    return tag


def choose(asked: Builder | None) -> Builder:
    """The requested builder, or the first one that works on this machine.

    Raises:
        UserError: there is none.
    """
    builders: tuple[Builder, ...] = ("docker", "podman", "buildah") if asked is None else (asked,)
    for builder in builders:
        # The docker command may be installed without a running daemon.
        if shutil.which(builder) and (asked or builder != "docker" or _docker_answers()):
            return builder
    if asked:
        raise UserError(f"--builder {asked}: {asked} is not installed")
    hint = " (docker is installed, but its daemon does not answer)" if shutil.which("docker") else ""
    raise UserError(
        f"building a container image requires docker, podman or buildah, and none of them works{hint}: install one"
    )


def digest(files: Iterable[Content], target: str, base: str | None, options: Sequence[str]) -> str:
    """SHA-256 in hex of everything that the image is built from (pure); independent of the order of the files."""
    inputs = [target, base, list(options), sorted((f.path, f.executable, f.holds) for f in files)]
    return hashlib.sha256(repr(inputs).encode()).hexdigest()


def contents(context: Path) -> list[Content]:
    """The files of a build context that its .dockerignore does not exclude."""
    ignored = Ignored(_text(context / ".dockerignore"))
    found: list[Content] = []
    for folder, folders, files in os.walk(context):
        here = Path(folder).relative_to(context)
        folders[:] = [name for name in folders if not ignored.skips((here / name).as_posix())]
        links = [name for name in folders if (context / here / name).is_symlink()]
        for name in [*files, *links]:
            path = (here / name).as_posix()
            if not ignored.ignores(path):
                found.append(_content(context, path))
    return found


class Ignored:
    """The rules of a .dockerignore file: the last pattern that matches a path or one of its parent folders applies."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        self._rules: list[tuple[bool, str, re.Pattern[str]]] = []
        for line in filter(None, lines):
            pattern = os.path.normpath(line.removeprefix("!").strip()).strip("/")
            self._rules.append((not line.startswith("!"), pattern, _regex(pattern)))

    def ignores(self, path: str) -> bool:
        """Whether the file at ``path`` is excluded."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        ignored = False
        for excludes, _, regex in self._rules:
            if any(regex.fullmatch(prefix) for prefix in prefixes):
                ignored = excludes
        return ignored

    def skips(self, folder: str) -> bool:
        """Whether ``folder`` is not searched at all: it is ignored, and no exception names it or a path below it.

        As in the builders, an exception with a wildcard does not count here.
        """
        names = (pattern for excludes, pattern, _ in self._rules if not excludes)
        return self.ignores(folder) and not any(f"{name}/".startswith(f"{folder}/") for name in names)


def _regex(pattern: str) -> re.Pattern[str]:
    """``*`` and ``?`` match within one path component, ``**`` across components; ``[a-z]`` and backslash as in a shell."""
    out = ""
    for piece in re.split(r"(\*\*/?|\*|\?|\[[^]]+\]|\\.)", pattern):
        if piece == "**/":
            out += "(.*/)?"
        elif piece in ("**", "*", "?"):
            out += {"**": ".*", "*": "[^/]*", "?": "[^/]"}[piece]
        elif piece.startswith("[") and piece.endswith("]"):
            out += piece
        else:
            out += re.escape(piece.removeprefix("\\"))
    return re.compile(out, re.DOTALL)


def _content(context: Path, path: str) -> Content:
    file = context / path
    if file.is_symlink():
        return Content(path, False, f"link to {file.readlink()}")
    return Content(path, bool(file.stat().st_mode & 0o100), hashlib.sha256(file.read_bytes()).hexdigest())


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _checkout(folder: Path) -> Path:
    if not (folder / "Dockerfile").is_file() or not (folder / "src" / "worldsize").is_dir():
        raise UserError(f"{folder.absolute()} is not a checkout of worldsize: pass its folder with --context")
    return folder


def _docker_answers() -> bool:
    try:
        done = subprocess.run(["docker", "version"], capture_output=True, timeout=_DAEMON_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _run(command: list[str]) -> None:
    """Run the builder with its output on stderr: stdout is reserved for the image's name."""
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False).returncode
    if code:
        raise BuildFailed(f"`{command[0]} {command[1]}` failed with exit code {code}; see its output above")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
