"""``worldsize replay``: computes past steps of a run again, and shows what the model saw."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.errors import UserError
from worldsize.reproduce import compare, page, scratch_runs
from worldsize.reproduce.compare import Replay, processes
from worldsize.runs.run_folder import RunFolder
from worldsize.training.step_recorder import VARIABLE


def steps(text: str) -> tuple[int, int]:
    """``81342`` or ``20:25`` as (first, last).

    Raises:
        UserError: neither.
    """
    if not (match := re.fullmatch(r"(\d+)(?::(\d+))?", text)):
        raise UserError(f"--step {text!r}: pass a step such as 120, or a range such as 120:125")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise UserError(f"--step {text}: steps are counted from 1, and a range must not be empty")
    return first, last


def replay(
    run: RunFolder, wanted: str, procs: int | None, from_start: bool, out: Path | None, tell: Callable[[str], None]
) -> Replay:
    """Compute the steps again in a scratch folder, and write the page of the first one.

    Args:
        procs: number of processes (default: those of the run).
        from_start: allow to start at step 0 if no checkpoint is early enough.
        out: the page (default: ``RUN-step-N.html`` in the current folder).

    Raises:
        UserError: the run does not have the step, or no checkpoint before it.
    """
    first, last = steps(wanted)
    recorded = _recorded(run, first, last)
    start, path = _start(run, first, from_start)
    size = procs or int(scratch_runs.environment_of(run)["world_size"])
    recipe = recipe_files.load(str(run.recipe))
    for warning in scratch_runs.warnings(run, recipe, size):
        tell(f"the bits may differ: {warning}")
    tell(f"computing steps {start + 1:,} to {last:,} again, with {processes(size)}")
    out = out or Path(f"{run.name}-step-{first}.html")
    with tempfile.TemporaryDirectory(prefix="worldsize-replay-") as folder:
        os.environ[VARIABLE] = f"{first}:{first}:{folder}"
        try:
            again = scratch_runs.compute_again(run, path, last, size, Path(folder)).records
        finally:
            del os.environ[VARIABLE]
        again = [record for record in again if first <= record["step"] <= last]
        names = tuple(name for name in ("samples", *compare.NUMBERS) if name in recorded[0])
        found = compare.first_difference(recorded, again, names)
        same_size = size == scratch_runs.environment_of(run)["world_size"]
        promised = same_size or parallel.strategy_class(recipe.parallel).same_bits
        result = Replay(first, last, start, size, promised, recorded, again, found, out)
        page.write(out, run, result, page.read_step(Path(folder), first, size))
    return result


def _recorded(run: RunFolder, first: int, last: int) -> list[dict[str, Any]]:
    records = {record["step"]: record for record in scratch_runs.steps_of(run)}
    missing = [step for step in range(first, last + 1) if step not in records]
    if missing:
        raise UserError(f"{run.path} has the steps 1 to {max(records, default=0):,}, but not step {missing[0]:,}")
    return [records[step] for step in range(first, last + 1)]


def _start(run: RunFolder, first: int, from_start: bool) -> tuple[int, Path | None]:
    """The newest checkpoint before the step: (its step, its path); (0, None) is the beginning of the run."""
    found = scratch_runs.checkpoints(run)
    before = [step for step in found if step < first]
    if before:
        return max(before), found[max(before)][0]
    if not from_start and first > 1:
        raise UserError(
            f"{run.path} has no checkpoint before step {first:,}, only at {', '.join(f'{s:,}' for s in sorted(found))}. "
            f"Pass --from-start to compute all {first:,} steps again, or a step after the first checkpoint. "
            "For future runs: --checkpoint.every-epochs 1 --checkpoint.history thin keeps older checkpoints"
        )
    return 0, None


def report(result: Replay) -> list[str]:
    """What the user reads."""
    count = f"step {result.first:,}" if result.first == result.last else f"steps {result.first:,} to {result.last:,}"
    if result.difference is None:
        verdict = f"{count}: bit-identical to metrics.jsonl"
    else:
        found = result.difference
        verdict = f"{count}: from step {found.step:,}, {found.name} is {found.b} instead of {found.a} ({found.relative:.1e})"
        verdict += "" if result.promised else "; this strategy promises equal bits only with the run's number of processes"
    return [verdict, f"what the model saw in step {result.first:,}: {result.page}"]
