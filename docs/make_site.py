"""Builds the documents as a site: ``python docs/make_site.py OUT``. A warning, such as about a broken link, is an error."""

from __future__ import annotations

import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path

import worldsize
from worldsize import cli
from worldsize.cli.commands import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "native/README.md",
    "benchmarks/README.md",
)
FOLDERS = ("docs", "benchmarks/results")


def collect(folder: Path) -> None:
    """Copy the pages to where they are in the checkout, so that their links stay right, and generate the references."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.py", "mkdocs.yml", "__pycache__"))
    (folder / "docs" / "api.md").write_text(api(), "utf-8")
    (folder / "docs" / "commands.md").write_text(commands(), "utf-8")


def api() -> str:
    """The page of the Python API: each public name with its signature and docstring."""
    lines = ["# Python API", "", "Generated from the code. [Examples](python.md)."]
    for name in worldsize.__all__:
        value = getattr(worldsize, name)
        if not callable(value):
            continue
        lines += ["", f"## {name}", "", _described(name, value)]
        if inspect.isclass(value) and name != "Recipe":
            members = [(key, one) for key, one in vars(value).items() if not key.startswith("_")]
            for key, one in members:
                if isinstance(one, property) or inspect.isfunction(one):
                    text = inspect.getdoc(one) or "" if isinstance(one, property) else _described(key, one)
                    lines += ["", f"### {name}.{key}", "", text]
    return "\n".join(lines) + "\n"


def _described(name: str, value: object) -> str:
    signature = ""
    with suppress(TypeError, ValueError):
        signature = f"```python\n{name}{_plain(inspect.signature(value))}\n```\n\n"
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")
    text = re.sub(r"\n((?: *>>> .*\n?)+)", lambda found: f"\n\n```python\n{inspect.cleandoc(found[1])}\n```\n", text)
    return signature + re.sub(r"^(Args|Returns|Raises|Attributes):$", r"**\1**\n", text, flags=re.MULTILINE)


class _Annotation(str):
    """An annotation that is shown as it is written, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """The signature without ``self``, with annotations as they are written."""
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    shown = [one.replace(annotation=_shown(one.annotation)) for one in parameters]
    return signature.replace(parameters=shown, return_annotation=_shown(signature.return_annotation))


def _shown(annotation: object) -> object:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def commands() -> str:
    """The page of the commands: what each prints with --help, without the settings of the recipe."""
    lines = ["# Commands", "", "Generated from the code. Settings of a recipe are flags as well: [recipe.md](recipe.md)."]
    for section in SECTIONS:
        lines += ["", f"## {section.title}"]
        for command in section.commands:
            text = _help(command.words)
            lines += [
                "",
                f"### {command.words}",
                "",
                f"{command.summary[0].upper()}{command.summary[1:]}.",
                "",
                "```text",
                text,
                "```",
            ]
    return "\n".join(lines) + "\n"


def _help(words: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        cli.main([*words.split(), "--help"])
    boxes = printed.getvalue().split("╭─")
    kept = [box for box in boxes if not re.match(r" \w+ options", box)]
    return (
        re.sub(r"^│ ?(.*?) *│$|^╰─*╯$", r"\1", "".join(kept), flags=re.MULTILINE).replace("─", "").replace("╮", "").strip()
    )


def build(out: Path) -> int:
    """Write the site to ``out``. Returns the exit code of mkdocs."""
    with tempfile.TemporaryDirectory() as temporary:
        source, config = Path(temporary, "source"), Path(temporary, "mkdocs.yml")
        collect(source)
        text = (ROOT / "docs" / "mkdocs.yml").read_text("utf-8")
        config.write_text(f"{text}docs_dir: {source}\nsite_dir: {out.resolve()}\n", "utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
        return subprocess.run(command, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
