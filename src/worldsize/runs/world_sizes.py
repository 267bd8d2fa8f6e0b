"""How many processes computed each step of a run, which may have been resumed with another number of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from worldsize.runs.run_folder import RunFolder


def of_steps(run: RunFolder, first: int, last: int, otherwise: int) -> list[int]:
    """The world sizes of the steps ``first`` to ``last``, in order.

    Args:
        otherwise: that of steps before the first recorded start; older runs have recorded none.
    """
    known = starts(_history(run))
    return [at(known, step, otherwise) for step in range(first, last + 1)]


def to_compare(sizes: list[int], procs: int) -> int:
    """Of steps with these world sizes, the one to compare with ``procs``: another one, if some step has it."""
    return next((size for size in sizes if size != procs), procs)


def at(starts: Sequence[tuple[int, int]], step: int, otherwise: int) -> int:
    """The world size of a step, of a run with these `starts`."""
    # A resumed run computes again what was done after its checkpoint, so of several the last has written the record.
    return next((size for before, size in reversed(starts) if before < step), otherwise)


def starts(history: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Each start of a run with this history, in order: the last step that was completed then, and the world size."""
    found = []
    for line in history:
        with suppress(ValueError, KeyError, TypeError):
            if line["event"] == "started":
                found.append((int(line["step"]), int(line["world_size"])))
    return found


def _history(run: RunFolder) -> list[dict[str, Any]]:
    found = []
    for line in run.history.read_text("utf-8", errors="replace").splitlines() if run.history.is_file() else ():
        with suppress(ValueError):  # a line that a crash has cut
            found.append(json.loads(line))
    return found
