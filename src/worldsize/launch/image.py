"""``worldsize image build``: the images that pods run, tagged by what is in them, built by docker, podman or buildah."""

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

from worldsize.errors import UserError, WorldsizeError
from worldsize.launch import registry

Builder = Literal["docker", "podman", "buildah"]

# The label that bears the hash of all that an image was made from.
CONTENT = "worldsize.content"
_STDERR = 2
_DAEMON_PATIENCE_S = 20


@dataclass(frozen=True)
class ImageBuild:
    """Build the image that pods run, from a checkout of worldsize, with docker, podman or buildah.

    The last line on stdout is the image: its local name, or with --push REPOSITORY@DIGEST. What follows `--` is handed to
    the builder, such as `-- --build-arg HTTP_PROXY=...`.
    """

    target: Literal["torch", "mpi"] = "torch"
    """What is in it: PyTorch, or also ssh, Open MPI and Horovod, for --on mpijob."""
    push: str | None = None
    """Repository to push to, such as registry.example/me/worldsize."""
    tag: str | None = None
    """Tag (default: TARGET-HASH, by what is in the image)."""
    base: str | None = None
    """Image to build on: any Debian or Ubuntu, NVIDIA's included (default: the Dockerfile's)."""
    builder: Builder | None = None
    """What builds it (default: the first of docker, podman and buildah that works here)."""
    insecure: bool = False
    """The registry speaks plain http."""
    context: Path = Path()
    """The checkout's folder."""


class BuildFailed(WorldsizeError):
    """The builder ended with an error; what it had to say was shown."""

    exit_code = 1


@dataclass(frozen=True)
class Content:
    """A file that goes into an image: its path with slashes, relative to the context, and the SHA-256 of what is in it.

    Of a link, where it leads.
    """

    path: str
    executable: bool
    holds: str


def build(asked: ImageBuild, options: Sequence[str] = ()) -> int:
    """Build and push what was asked for, unless it is in the registry already. Returns the exit code.

    Raises:
        UserError: no checkout, no builder, a name that cannot be, or a tag that is taken.
        BuildFailed, RegistryError: it was tried.
    """
    context = _checkout(asked.context)
    content = digest(contents(context), asked.target, asked.base, options)
    tag = checked_tag(asked.tag or f"{asked.target}-{content[:12]}")
    repository = registry.parse(asked.push) if asked.push else None
    name = f"{repository or 'worldsize'}:{tag}"
    if repository is not None and (there := registry.find(repository, tag, asked.insecure)) is not None:
        if there.labels.get(CONTENT) != content:
            raise UserError(f"{name} is there already, with other content: choose another --tag, or leave --tag out")
        _say(f"{name} is there already, with this content")
        print(f"{repository}@{there.digest}")
        return 0
    builder = choose(asked.builder)
    _say(f"{builder} builds {name}")
    _run(build_command(builder, asked.target, name, content, context, asked.base, options))
    if repository is None:
        print(name)
        return 0
    _run(push_command(builder, name, asked.insecure))
    pushed = registry.find(repository, tag, asked.insecure)
    if pushed is None or pushed.labels.get(CONTENT) != content:
        raise BuildFailed(f"{name} was pushed, but the registry has something else there: push again")
    print(f"{repository}@{pushed.digest}")
    return 0


def build_command(
    builder: Builder, target: str, name: str, content: str, context: Path, base: str | None, options: Sequence[str]
) -> list[str]:
    """The command that builds the image (pure)."""
    arguments = ["--build-arg", f"CONTENT={content}"]
    if base is not None:
        arguments += ["--build-arg", f"BASE={base}"]
    # The others keep layers for the next build unasked.
    layers = ["--layers"] if builder == "buildah" else []
    file = str(context / "Dockerfile")
    return [builder, "build", *layers, "--file", file, "--target", target, "--tag", name, *arguments, *options, str(context)]


def push_command(builder: Builder, name: str, insecure: bool) -> list[str]:
    """The command that pushes the image (pure). docker is told in its daemon's settings which registries are insecure."""
    if builder == "docker" or not insecure:
        return [builder, "push", name]
    # A registry that speaks plain http is near: to compress gigabytes takes longer than to send them.
    quick = ["--disable-compression"] if builder == "buildah" else []
    return [builder, "push", "--tls-verify=false", *quick, name]


def checked_tag(tag: str) -> str:
    """The tag, if it can be one and may be.

    Raises:
        UserError: says why not.
    """
    if tag.lower() == "latest":
        raise UserError("--tag latest: which image that is would change under running jobs; leave --tag out")
    if not re.fullmatch(r"\w[\w.-]{0,127}", tag, re.ASCII):
        raise UserError(f"--tag {tag!r}: up to 128 letters, digits, '_', '.' and '-', beginning with none of the last two")
    return tag


def choose(asked: Builder | None) -> Builder:
    """The builder that was asked for, or the first one that works here.

    Raises:
        UserError: there is none.
    """
    builders: tuple[Builder, ...] = ("docker", "podman", "buildah") if asked is None else (asked,)
    for builder in builders:
        # Of docker there may be the command alone.
        if shutil.which(builder) and (asked or builder != "docker" or _docker_answers()):
            return builder
    if asked:
        raise UserError(f"--builder {asked}: there is no {asked} here")
    idle = " (docker is there, but its daemon does not answer)" if shutil.which("docker") else ""
    raise UserError(f"images are built by docker, podman or buildah, and none of them works here{idle}: install one")


def digest(files: Iterable[Content], target: str, base: str | None, options: Sequence[str]) -> str:
    """SHA-256 in hex of all that an image is made from (pure); the order of the files does not matter."""
    made_from = [target, base, list(options), sorted((f.path, f.executable, f.holds) for f in files)]
    return hashlib.sha256(repr(made_from).encode()).hexdigest()


def contents(context: Path) -> list[Content]:
    """The files of a context that its .dockerignore lets through."""
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
    """The rules of a .dockerignore file: the last pattern that fits a path or a folder above it decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        self._rules: list[tuple[bool, str, re.Pattern[str]]] = []
        for line in filter(None, lines):
            pattern = os.path.normpath(line.removeprefix("!").strip()).strip("/")
            self._rules.append((not line.startswith("!"), pattern, _regex(pattern)))

    def ignores(self, path: str) -> bool:
        """Whether the file at ``path`` stays outside."""
        parts = path.split("/")
        above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        verdict = False
        for excludes, _, regex in self._rules:
            if any(regex.fullmatch(one) for one in above):
                verdict = excludes
        return verdict

    def skips(self, folder: str) -> bool:
        """Whether nothing in ``folder`` is looked at: it is ignored, and no exception names it or what is below it.

        As with the builders, a wildcard names nothing here.
        """
        names = (pattern for excludes, pattern, _ in self._rules if not excludes)
        return self.ignores(folder) and not any(f"{name}/".startswith(f"{folder}/") for name in names)


def _regex(pattern: str) -> re.Pattern[str]:
    """``*`` and ``?`` stay within a name, ``**`` does not; ``[a-z]`` and a backslash as in a shell."""
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
        raise UserError(f"{folder.absolute()} is not a checkout of worldsize: name its folder with --context")
    return folder


def _docker_answers() -> bool:
    try:
        asked = subprocess.run(["docker", "version"], capture_output=True, timeout=_DAEMON_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _run(command: list[str]) -> None:
    """Run the builder; whatever it prints goes to stderr, because stdout is for the image's name alone."""
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False).returncode
    if code:
        raise BuildFailed(f"`{command[0]} {command[1]}` failed with exit code {code}; its own words are above")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
