"""``worldsize replay``: computes past steps of a run again, and shows what the model saw."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worldsize.config import output_files, recipe_files
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import CheckpointError, Diverged, UserError
from worldsize.reproduce import page, promise, scratch_runs
from worldsize.reproduce.compare import processes
from worldsize.reproduce.page import Replay
from worldsize.reproduce.promise import Promise
from worldsize.reproduce.training_process import ComputationFailed
from worldsize.runs import world_sizes
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
        procs: number of processes (default: those that computed the first of the steps).
        from_start: allow to start at step 0 if no checkpoint is early enough.
        out: the page (default: ``RUN-step-N.html`` in the current folder).

    Raises:
        UserError: the run is asynchronous, or does not have the step, or no checkpoint before it.
        ComputationFailed: the training failed, or was stopped or killed.
    """
    first, last = steps(wanted)
    out = out or Path(f"{run.name}-step-{first}.html")
    output_files.check("--out", out)
    recipe = recipe_files.load(str(run.recipe))
    scratch_runs.check_order(run, recipe, "")
    _recorded(run, first, last)
    start, path = _start(run, first, from_start)
    scratch_runs.check_device(run, "")
    environment = scratch_runs.environment_of(run)
    newest = int(environment["world_size"])  # environment.json is about the newest session
    sizes = world_sizes.of_steps(run, start + 1, last, newest)
    size = procs or sizes[first - start - 1]
    kept = promise.of(environment, recipe, world_sizes.to_compare(sizes, size), size)
    for warning in scratch_runs.warnings(run, recipe, procs or newest):
        tell(f"the bits may differ: {warning}")
    tell(f"computing steps {start + 1:,} to {last:,} again, with {processes(size)}")
    with temporary_folder("worldsize-replay-") as folder:
        os.environ[VARIABLE] = f"{first}:{first}:{folder}"
        try:
            again = _again(run, path, last, size, folder)
        finally:
            del os.environ[VARIABLE]
        recorded = _recorded(run, start + 1, last)
        broken = kept.broken(recorded, again)
        recorded, again = (records[first - start - 1 :] for records in (recorded, again))
        found = Promise().broken(recorded, again)
        result = Replay(first, last, start, size, kept, recorded, again, found, broken, out)
        with output_files.written(out):
            page.write(out, run, result, page.read_step(folder, first, size))
    return result


def _again(run: RunFolder, start: Path | None, last: int, procs: int, folder: Path) -> list[dict[str, Any]]:
    """The records of the steps from the checkpoint ``start`` to ``last``, which may be the one that diverged."""
    try:
        return scratch_runs.compute_again(run, start, last, procs, folder).records
    except ComputationFailed as failed:
        if failed.exit_code != Diverged.exit_code:
            raise
        records = scratch_runs.steps_of(scratch_runs.folder_of_steps(folder))
        if not records or records[-1]["step"] < last:
            raise
        return records


def _recorded(run: RunFolder, first: int, last: int) -> list[dict[str, Any]]:
    records = {record["step"]: record for record in scratch_runs.steps_of(run)}
    missing = [step for step in range(first, last + 1) if step not in records]
    if missing:
        raise UserError(f"{run.path} has the steps 1 to {max(records, default=0):,}, but not step {missing[0]:,}")
    return [records[step] for step in range(first, last + 1)]


def _start(run: RunFolder, first: int, from_start: bool) -> tuple[int, Path | None]:
    """The newest checkpoint before the step: (its step, its path); (0, None) is the beginning of the run."""
    try:
        found = scratch_runs.checkpoints(run)
    except CheckpointError:  # as of a run that diverged early
        found = {}
    before = [step for step in found if step < first]
    if before:
        return max(before), found[max(before)][0]
    if not from_start and first > 1:
        others = f", only at {', '.join(f'{s:,}' for s in sorted(found))}" if found else ""
        raise UserError(
            f"{run.path} has no checkpoint before step {first:,}{others}. "
            f"Pass --from-start to compute all {first:,} steps again, or a step after the first checkpoint. "
            "For future runs: --checkpoint.every-epochs 1 --checkpoint.history thin keeps older checkpoints"
        )
    return 0, None


def report(result: Replay) -> list[str]:
    """What the user reads."""
    count = f"step {result.first:,}" if result.first == result.last else f"steps {result.first:,} to {result.last:,}"
    found = result.broken or result.difference
    if found is None:
        verdict = f"{count}: bit-identical to metrics.jsonl"
    else:
        verdict = f"{count}: from step {found.step:,}, {found.name} is {found.b} instead of {found.a} ({found.relative:.1e})"
    if found is not None and result.promise.no_bits:
        holds = "this does not hold" if result.broken else "this holds"
        verdict += f". Bits are not promised, because {result.promise.no_bits}, but {result.promise}: {holds}"
    return [verdict, f"what the model saw in step {result.first:,}: {result.page}"]
