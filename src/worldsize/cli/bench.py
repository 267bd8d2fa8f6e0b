"""The commands of ``worldsize bench`` that write a folder with a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.bench import options
from worldsize.config import command_line
from worldsize.distributed.stop_signals import interruptible

if TYPE_CHECKING:
    from worldsize.runs.run_folder import RunFolder

_STOPPED = "stopped before its end; what was measured is kept"


def scaling(argv: list[str]) -> int:
    """``worldsize bench scaling``."""
    from worldsize.bench.scaling import command

    with interruptible(_STOPPED):
        folder, code = command.run(argv, _line)
    print(f"\nAll measurements: {folder.path / 'results.jsonl'}\n\n{(folder.path / 'table.md').read_text('utf-8')}", end="")
    return code


def step(argv: list[str]) -> int:
    """``worldsize bench step``."""
    asked = command_line.parse(options.BenchStep, argv, None, "bench step")
    from worldsize.bench import step

    return _show(step.run(asked, _line))


def strategies(argv: list[str]) -> int:
    """``worldsize bench strategies``."""
    asked = command_line.parse(options.BenchStrategies, argv, options.BenchStrategies(), "bench strategies")
    from worldsize.bench import strategies

    with interruptible(_STOPPED):
        return _show(strategies.run(asked, _line))


def loader(argv: list[str]) -> int:
    """``worldsize bench loader``."""
    asked = command_line.parse(options.BenchLoader, argv, None, "bench loader")
    from worldsize.bench import loader

    return _show(loader.run(asked, _line))


def _line(text: str) -> None:
    print(text, flush=True)


def _show(folder: RunFolder) -> int:
    print(f"\n{(folder.path / 'table.md').read_text('utf-8')}\nAll measurements: {folder.path / 'results.jsonl'}")
    return 0
