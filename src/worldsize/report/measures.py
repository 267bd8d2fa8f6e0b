"""The metric that a run is judged by, the one that chose its best checkpoint. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worldsize.report.reading import Run


@dataclass(frozen=True)
class Measure:
    """A metric of evaluations, 0 to 1, the higher the better.

    ``column`` is its name in a result and in the table of curves. Those ``beside`` it are shown, but judge nothing.
    """

    column: str
    name: str
    beside: tuple[Measure, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the record of an evaluation."""
        return f"val_{self.column}"

    @property
    def best(self) -> str:
        """The name of its highest value in a result."""
        return f"best_{self.column}"

    @property
    def shown(self) -> tuple[Measure, ...]:
        return (self, *self.beside)


TOP1 = Measure("top1", "top-1")
MAP = Measure("map", "mAP", (Measure("f1", "F1"),))


def of(run: Run) -> Measure:
    """mAP if the run's images have several labels, else top-1."""
    if any(epoch.get(MAP.key) is not None for epoch in run.epochs):
        return MAP
    # The records of runs of older versions have no mAP: their images may have several labels.
    data = run.recipe.get("data") or {}
    return MAP if not run.epochs and data.get("name") == "multilabel" else TOP1


def every(runs: Sequence[Run]) -> list[Measure]:
    """Each measure of the runs once, in their order."""
    return list(dict.fromkeys(map(of, runs)))


def best(run: Run) -> float | None:
    """The highest value of the run's measure over all evaluations; None without any."""
    key = of(run).key
    return max((e[key] for e in run.epochs if e.get(key) is not None), default=None)
