"""Where runs differ: settings, data, environment, results. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from worldsize.config.listing import flat, shown
from worldsize.report import measures
from worldsize.report.reading import Record, Run
from worldsize.report.statistics import settings, speed

Row = tuple[str, ...]
# Times differ between any two runs: they are shown, but do not make results differ.
_RESULTS = ("chain", "top1", "top5", "map", "f1", "loss", "best_top1", "best_map", "best_epoch", "steps", "epochs")


def recipes(runs: Sequence[Run]) -> list[Row]:
    """(setting, value of each run) for the settings that differ."""
    return _rows(runs, settings)


def environments(runs: Sequence[Run]) -> list[Row]:
    """The same for the machine, its versions and the digests of the dataset; packages that not all have are only counted."""
    everywhere = set.intersection(*({*_packages(run)} for run in runs))
    own = [("packages that not all have", *(str(len(_packages(run).keys() - everywhere)) for run in runs))]

    def compared(run: Run) -> Record:
        common = {name: version for name, version in _packages(run).items() if name in everywhere}
        return flat({name: value for name, value in run.environment.items() if name != "command"} | {"packages": common})

    return [*_rows(runs, compared), *(own if any(_packages(run).keys() > everywhere for run in runs) else [])]


def results(runs: Sequence[Run]) -> list[Row]:
    """The same for what the runs computed: the final metrics, or the last step and the best evaluation without them."""
    return _rows(runs, _result)


def speeds(runs: Sequence[Run]) -> list[Row]:
    """The speed of each run, which never counts as a difference."""
    return [("median images/s", *(f"{value:,.4g}" if (value := speed(run)) else "" for run in runs))]


def _packages(run: Run) -> Record:
    found = run.environment.get("packages")
    return found if isinstance(found, dict) else {}


def _result(run: Run) -> Record:
    if run.result is not None:
        return {name: run.result.get(name) for name in _RESULTS}
    last = run.steps[-1] if run.steps else {}
    best = {measures.of(run).best: measures.best(run)}
    return {"chain": last.get("chain"), "loss": last.get("loss")} | best | {"steps": last.get("step")}


def _rows(runs: Sequence[Run], values: Callable[[Run], Record]) -> list[Row]:
    every = [values(run) for run in runs]
    names = dict.fromkeys(name for one in every for name in one)
    differ = (name for name in names if any(one.get(name) != every[0].get(name) for one in every))
    return [(name, *(_text(name, one.get(name)) for one in every)) for name in differ]


def _text(name: str, value: Any) -> str:
    """A digest by its first 12 characters."""
    text = "none" if value is None else shown(value)
    return text[:12] if name in ("chain", "data.train", "data.val") else text
