"""``worldsize completion``: scripts for bash and zsh, which tyro writes from the table of commands and their flags."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import make_dataclass
from typing import Annotated, Any, Union

import tyro

from worldsize.cli.command import Command, load
from worldsize.cli.commands import COMMANDS
from worldsize.config.command_line import asks_help
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError

SHELLS = ("bash", "zsh")
_USAGE = """usage: worldsize completion bash|zsh

Prints a script that completes commands and flags. For bash, once:

  mkdir -p ~/.local/share/bash-completion/completions
  worldsize completion bash > ~/.local/share/bash-completion/completions/worldsize

For zsh, once, into a folder of $fpath:

  worldsize completion zsh > ~/.zfunc/_worldsize
"""


def run(argv: list[str]) -> int:
    """``worldsize completion``."""
    if not argv or asks_help(argv):
        print(_USAGE, end="")
        return 0 if argv else UserError.exit_code
    if len(argv) > 1 or argv[0] not in SHELLS:
        raise UserError(f"worldsize completion {' '.join(argv)}: expected one of {', '.join(SHELLS)}")
    print(script(argv[0]), end="")
    return 0


def script(shell: str) -> str:
    """The script for this shell."""
    kind = make_dataclass("Worldsize", [("command", _choices([]))])
    markers = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    with temporary_folder() as folder:
        path = folder / "script"
        with suppress(SystemExit):  # tyro ends the program when the file is written
            tyro.cli(kind, prog="worldsize", args=["--tyro-write-completion", shell, str(path)], config=markers)
        text = path.read_text("utf-8")
    # Where no command or flag fits, such as for RECIPE, bash completes files.
    return text.replace("complete -F ", "complete -o bashdefault -o default -F ") if shell == "bash" else text


def _choices(prefix: list[str]) -> Any:
    """The union of the dataclasses of the commands and groups that can follow these words."""
    found: dict[str, list[Command]] = {}
    for command in COMMANDS:
        words = command.words.split()
        if words[: len(prefix)] == prefix:
            found.setdefault(words[len(prefix)], []).append(command)
    return Union[tuple(_choice([*prefix, name], below) for name, below in found.items())]  # noqa: UP007 - made at runtime


def _choice(words: list[str], below: list[Command]) -> Any:
    name, first = words[-1], below[0]
    if first.words.split() != words:
        kind, text = make_dataclass(name.title(), [("command", _choices(words))]), f"{name} commands"
    else:
        kind, text = load(first.options) if first.options else make_dataclass(name.title(), []), first.summary
    return Annotated[kind, tyro.conf.subcommand(name, description=text, prefix_name=False)]
