"""Where metrics go. A tracker is one module with a class ``Tracker(base.Tracker)`` and its name in
`worldsize.recipe.TrackerName`; console and JSONL are always there.

A tracker that fails is dropped with a warning; it never stops training.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from worldsize.errors import UserError
from worldsize.recipe import Track
from worldsize.run import RunFolder
from worldsize.track.base import Epoch, Facts, Step, Summary, Tracker

log = logging.getLogger(__name__)


class Trackers:
    """Hands everything to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def begin(self, facts: Facts) -> None:
        """Before the first step."""
        self._each(lambda t: t.begin(facts))

    def steps(self, steps: Sequence[Step]) -> None:
        """Steps that were done since the last call, in order."""
        self._each(lambda t: t.steps(steps))

    def evaluating(self, done: int, total: int) -> None:
        """While evaluating: samples done by this rank, of its share."""
        self._each(lambda t: t.evaluating(done, total))

    def epoch(self, epoch: Epoch) -> None:
        """After each evaluation."""
        self._each(lambda t: t.epoch(epoch))

    def end(self, summary: Summary | None) -> None:
        """Last of all; ``summary`` is None when the run did not reach its end."""
        self._each(lambda t: t.end(summary))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except (Exception, SystemExit) as error:  # whatever a tracker's library does, training goes on
                self._trackers.remove(tracker)
                _left_out(type(tracker).__module__, error)


def check(settings: Track) -> None:
    """Refuse, before any work, trackers whose packages are missing."""
    for name in settings.trackers:
        _module(name)


def build(settings: Track, folder: RunFolder, resumed_step: int) -> Trackers:
    """Console, JSONL and the recipe's trackers, for rank 0."""
    trackers = []
    for name in ("console", "jsonl", *settings.trackers):
        try:
            trackers.append(_module(name).Tracker(settings, folder, resumed_step))
        except Exception as error:
            _left_out(name, error)
    return Trackers(trackers)


def _left_out(name: str, error: BaseException) -> None:
    log.warning("the tracker %s failed and is left out from here on: %r", name.rpartition(".")[2], error)


def silent() -> Trackers:
    """For all other ranks."""
    return Trackers([])


def _module(name: str):  # type: ignore[no-untyped-def]
    try:
        return importlib.import_module(f"worldsize.track.{name}")
    except ImportError as error:
        raise UserError(
            f"tracker {name} needs a package that is missing ({error.name}): pip install 'worldsize[{name}]'"
        ) from None
