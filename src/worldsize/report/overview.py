"""The list of runs in a folder."""

from __future__ import annotations

from pathlib import Path

from worldsize.errors import StoreUnreachable, UserError
from worldsize.report import measures
from worldsize.report.reading import Run, read
from worldsize.report.statistics import speed
from worldsize.runs.run_folder import not_a_run

# A run writes metrics every second and after each evaluation. Longer evaluations and steps are rare.
_SILENCE = 120.0


def state(run: Run, now: float) -> str:
    """``finished`` (has a result), ``interrupted`` (stopped and saved, or killed), ``running`` or ``failed``.

    Does not look at the run's lock, which may be held on another machine. A run counts as running if it wrote metrics in the
    last two minutes and its log does not end with a stop or an error.
    """
    if run.result is not None:
        return "finished"
    if run.stopped is not None:
        return "interrupted"
    if run.failure is not None:
        return "failed"
    return "running" if run.modified is not None and abs(now - run.modified) < _SILENCE else "interrupted"


def table(folder: Path, now: float) -> list[tuple[str, ...]]:
    """Titles, and one row per run in ``folder``, the newest first; ``now`` in seconds since 1970.

    Raises:
        UserError: the folder does not exist, or has no runs.
    """
    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist: pass the folder that has the runs (train --out)")
    runs, unreadable = [], []
    for path in sorted(folder.glob("*/recipe.yaml")):
        if not_a_run(path.parent) is not None:
            continue
        try:
            runs.append(read(path.parent))
        except UserError:
            unreadable.append((path.parent.name, "unreadable recipe", "", "", "", ""))
        except (OSError, StoreUnreachable) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).rpartition(": ")[2]
            unreadable.append((path.parent.name, f"cannot be read: {reason}", "", "", "", ""))
    if not runs and not unreadable:
        raise UserError(f"{folder} has no runs: pass the folder that has the runs (train --out)")
    known = measures.every(runs) or [measures.TOP1]
    mixed = len(known) > 1
    titles = ("run", "state", "epoch", "best" if mixed else f"best {known[0].name}", "images/s", "age")
    newest = sorted(runs, key=lambda run: run.modified or 0.0, reverse=True)
    return [titles, *(_row(run, now, mixed) for run in newest), *unreadable]


def _row(run: Run, now: float, mixed: bool) -> tuple[str, ...]:
    """``mixed``: other runs have another measure, so the row names its own."""
    last = run.steps[-1] if run.steps else {}
    best, pace = measures.best(run), speed(run)
    measure = f"{measures.of(run).name} " if mixed else ""
    return (
        run.name,
        state(run, now),
        f"{last.get('epoch') or 0:.4g} of {run.recipe.get('epochs')}",
        "" if best is None else f"{measure}{best:.2%}",
        "" if pace is None else f"{pace:,.4g}",
        "" if run.modified is None else age(now - run.modified),
    )


def age(seconds: float) -> str:
    """A duration in its largest unit, such as ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
