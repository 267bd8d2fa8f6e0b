"""Metric trackers. A tracker is a module with a class ``Tracker(base.Tracker)``, listed in
`worldsize.config.recipe.TrackerName`; console and JSONL are always active.

A tracker that fails is disabled with a warning; it never stops training. Only a run whose record (JSONL) cannot be written
from the beginning does not start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from worldsize.config.recipe import Track
from worldsize.errors import UserError
from worldsize.runs.run_folder import RunFolder
from worldsize.track import kubeflow
from worldsize.track.base import Epoch, RunFacts, Step, Summary, Tracker, Window

log = logging.getLogger(__name__)


class Trackers:
    """Forwards every event to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def begin(self, facts: RunFacts) -> None:
        """Called before the first step."""
        self._each(lambda t: t.begin(facts))

    def steps(self, steps: Sequence[Step]) -> None:
        """Called with the steps completed since the last call, in order."""
        self._each(lambda t: t.steps(steps))

    def window(self, window: Window) -> None:
        """Called after `steps`, with where their time went."""
        self._each(lambda t: t.window(window))

    def evaluating(self, done: int, total: int) -> None:
        """Called during evaluation, with the number of samples this rank has completed and its total."""
        self._each(lambda t: t.evaluating(done, total))

    def epoch(self, epoch: Epoch) -> None:
        """Called after each evaluation."""
        self._each(lambda t: t.epoch(epoch))

    def end(self, summary: Summary | None) -> None:
        """Called last; ``summary`` is None if the run did not finish."""
        self._each(lambda t: t.end(summary))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except (Exception, SystemExit) as error:  # training must survive any failure of a tracker's library
                self._trackers.remove(tracker)
                _warn_disabled(type(tracker).__module__, error)


def check(settings: Track) -> None:
    """Raise UserError, before any work, if a tracker's package is missing."""
    for name in settings.trackers:
        _module(name)


def build(settings: Track, folder: RunFolder, resumed_step: int, rank: int = 0) -> Trackers:
    """Console, JSONL, the recipe's trackers and, in a TrainJob's pod, Kubeflow's, for rank 0. Other ranks have none.

    Raises:
        OSError: the files of the run's record cannot be read or written. Another start may write them.
    """
    if rank != 0:
        return Trackers([])
    trackers = []
    in_trainjob = ["kubeflow"] if kubeflow.requested() else []
    for name in ("console", "jsonl", *settings.trackers, *in_trainjob):
        try:
            trackers.append(_module(name).Tracker(settings, folder, resumed_step))
        except Exception as error:
            if name == "jsonl" and isinstance(error, OSError):
                raise
            _warn_disabled(name, error)
    return Trackers(trackers)


def _warn_disabled(name: str, error: BaseException) -> None:
    log.warning("tracker %s failed and is now disabled: %r", name.rpartition(".")[2], error)


def _module(name: str):  # type: ignore[no-untyped-def]
    try:
        return importlib.import_module(f"worldsize.track.{name}")
    except ImportError as error:
        raise UserError(
            f"tracker {name} requires a missing package ({error.name}): pip install 'worldsize[{name}]'"
        ) from None
