"""What a command is, and how it is run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from worldsize.distributed.stop_signals import nothing_was
from worldsize.launch import garbage


@dataclass(frozen=True)
class Command:
    """One command.

    ``words`` name it, ``usage`` are its arguments and ``summary`` what it does, in a few words; ``more`` are other ways to
    call it. ``function`` is MODULE:NAME below `worldsize`, imported when the command runs; ``options`` is the dataclass with
    its flags. With ``on_cluster``, the function takes the parsed options and the cluster instead of a list of words.
    """

    words: str
    usage: str
    summary: str
    function: str
    options: str = ""
    more: tuple[tuple[str, str], ...] = ()
    on_cluster: bool = False

    def run(self, argv: list[str]) -> int:
        """Run it with these arguments; returns the exit code."""
        with garbage.not_sought(), nothing_was("done"):
            function = load(self.function)
        if not self.on_cluster:
            code: int = function(argv)
            return code
        from worldsize.cluster.commands import connected

        return connected(self.words, load(self.options), function, argv)


@dataclass(frozen=True)
class Section:
    """Commands that belong together in the help, where ``brief`` stands for them if there are many."""

    title: str
    commands: tuple[Command, ...]
    brief: tuple[tuple[str, str], ...] = ()


def load(path: str) -> Any:
    """What MODULE:NAME below `worldsize` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"worldsize.{module}"), name)
