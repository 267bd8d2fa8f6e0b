"""Finds the command that is meant, and writes the help about all commands or a group of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worldsize import __version__
from worldsize.cli.command import Command
from worldsize.cli.commands import COMMANDS, SECTIONS
from worldsize.errors import UserError, did_you_mean

_END = """
Help for each command: worldsize train --help
torchrun, mpirun and srun are detected: torchrun --nproc-per-node 8 -m worldsize train RECIPE

Exit codes: 0 success, 1 not verified (prove, replay, audit, export) or not equal (compare), 64 user error, 65 broken images,
66 damaged checkpoints, 69 a process, disk or store is missing, 70 internal error, 71 no progress, 72 a process hung,
73 weights differ, 74 not saved, 75 stopped and saved (continue with --resume), 76 loss not finite, 129, 130, 138 and 143
exited immediately, 137 killed (often: out of memory), 141 the reader of the output left. More: docs/exit-codes.md.
Following a job on a cluster or Slurm: 0 succeeded, 1 failed, 2 refused by preflight, 3 timed out, 130 detached.
"""


def find(words: Sequence[str]) -> Command | None:
    """The command that these words begin with; None if they name a group of commands.

    Raises:
        UserError: no command and no group begins like this.
    """
    for command in COMMANDS:
        own = command.words.split()
        if list(words[: len(own)]) == own:
            return command
    for length in range(1, len(words) + 1):
        prefix = [*words[:length]]
        choices = [*dict.fromkeys(_words_after(prefix[:-1]))]
        if prefix[-1] in choices:
            continue
        if length > 1 and prefix[-1].startswith("-"):
            return None
        before = " ".join(["worldsize", *prefix[:-1]])
        what = f"unknown command {prefix[-1]!r}" if length == 1 else f"{before} has no command {prefix[-1]!r}"
        raise UserError(what + (did_you_mean(prefix[-1], choices) or f"; commands: {', '.join(choices)}"))
    return None


def complete_help() -> str:
    """What ``worldsize --help`` prints."""
    lines = [f"worldsize {__version__}: train image classifiers at any world size"]
    for section in SECTIONS:
        rows = section.brief or _ways(section.commands)
        lines += ["", f"{section.title}:", *map(_row, rows)]
    return "\n".join(lines) + "\n" + _END


def group_help(words: Sequence[str]) -> str:
    """What ``worldsize GROUP --help`` prints."""
    prefix = " ".join(word for word in words if not word.startswith("-"))
    commands = [command for command in COMMANDS if command.words.startswith(f"{prefix} ")]
    example = f"worldsize {commands[0].words} --help"
    return "\n".join(
        [f"usage: worldsize {prefix} COMMAND ...", "", *map(_row, _ways(commands)), "", f"Help for each: {example}", ""]
    )


def _words_after(prefix: list[str]) -> Iterator[str]:
    for command in COMMANDS:
        own = command.words.split()
        if own[: len(prefix)] == prefix and len(own) > len(prefix):
            yield own[len(prefix)]


def _ways(commands: Sequence[Command]) -> Iterator[tuple[str, str]]:
    """The ways to call these commands, and what each does."""
    for command in commands:
        yield f"{command.words} {command.usage}".rstrip(), command.summary
        yield from ((f"{command.words} {usage}", summary) for usage, summary in command.more)


def _row(way: tuple[str, str]) -> str:
    usage, summary = way
    return f"  {f'worldsize {usage}':<58}  {summary}"
