"""Asynchronous SGD with a parameter server: no worker waits for another.

Dean et al. 2012, "Large scale distributed deep networks", section 4.1. Rank 0 holds the weights and the optimiser. Every
worker (rank 0 is one too) fetches weights, computes the gradient of one whole global batch with them, hands it in, and
gets the next batch. The updates that others made in between are the gradient's *staleness*. One that is more than
``max_staleness`` updates old is dropped and its batch computed anew: the bound always holds, and a slow worker never holds
up a fast one. (The other way, stale synchronous parallel of Ho et al. 2013, lets fast workers wait at the bound, which
in the end sets everybody to the slowest one's pace.)

With one worker this is `single`: same batches, same order, same numbers.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worldsize import parallel
from worldsize.parallel import base
from worldsize.parallel.ledger import Ledger

log = logging.getLogger(__name__)

_TELL_AFTER = 10  # dropped gradients of one worker before the user is told


class Strategy(base.Strategy):
    """What a worker's replica needs: nothing. The loop is `worldsize.asynchronous`."""

    name = "async"
    asynchronous = True

    def __init__(self, parts: base.Parts) -> None:
        super().__init__(parts)
        self._bound = parallel.max_staleness(parts.settings, parts.world.size)

    def describe(self) -> str:
        return f"{self.name} (gradients at most {self._bound} updates old)"


@dataclass(frozen=True)
class Report:
    """What a worker brings: the gradient of ``step`` at the weights of ``version``.

    ``gradient`` (n,) holds the parameters' gradients and then the step's running statistics, one after the other, None where
    the loss scale overflowed; ``values`` (3,) float64: loss and hits summed over the batch, gradient norm.
    """

    step: int
    version: int
    gradient: torch.Tensor | None
    values: torch.Tensor
    seconds: float
    waited_s: float
    data_s: float
    leaving: bool = False


@dataclass(frozen=True)
class Grant:
    """What a worker gets: the steps to compute, now and next, and the weights (n,) of ``version``. No steps: all is done."""

    steps: list[int]
    version: int
    weights: torch.Tensor


class Server:
    """The weights and who works on them. Every method may be called from any thread.

    Args:
        ledger: the steps of the run.
        workers: how many there are in the beginning; 0 is this process itself.
        apply: moves the weights by one worker's report of that staleness; called by one thread at a time.
        weights: gives a copy of them.
        hold: while it answers True, workers in other processes get nothing to do.
    """

    def __init__(
        self,
        ledger: Ledger,
        workers: int,
        apply: Callable[[int, Report, int], None],
        weights: Callable[[], torch.Tensor],
        hold: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ledger = ledger
        self.lock = threading.Condition()
        self._apply = apply
        self._weights = weights
        self.hold = hold
        self._live = set(range(workers))
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def workers(self) -> frozenset[int]:
        """Those that are still there."""
        return frozenset(self._live)

    def push(self, worker: int, report: Report) -> None:
        """Take a worker's gradient in, unless it is too old."""
        with self.lock:
            if report.gradient is None:
                self.ledger.give_back(worker, report.step)
            elif (age := self.ledger.deliver(worker, report.step, report.version)) is not None:
                self._apply(worker, report, age)
            elif self.ledger.dropped[worker] == _TELL_AFTER:
                log.warning(
                    "worker %d: %d gradients came more than %d updates late and were dropped; "
                    "raise --parallel.max-staleness, or leave it out",
                    *(worker, _TELL_AFTER, self.ledger.max_staleness),
                )
            if report.leaving:
                self._remove(worker)
            self.lock.notify_all()

    def pull(self, worker: int, patience_s: float | None = None) -> Grant | None:
        """The worker's next steps and the weights; waits while there is nothing to do but may be again.

        Returns:
            None when ``patience_s`` ran out.
        """
        with self.lock:
            waited = self.lock.wait_for(lambda: self._can_answer(worker), patience_s)
            if not waited:
                return None
            steps = [] if self._over or worker not in self._live else list(self.ledger.claim(worker))
            if not steps:
                self._remove(worker)
                self.lock.notify_all()
            return Grant(steps, self.ledger.version, self._weights())

    def _can_answer(self, worker: int) -> bool:
        if self._over or worker not in self._live:
            return True
        held = worker != 0 and self.hold()
        return not held and bool(self.ledger.claim(worker))

    @property
    def _over(self) -> bool:
        return self._stopping or self.ledger.finished or self._failure is not None

    def fail(self, failure: BaseException) -> None:
        """Something broke on rank 0: nobody gets any more work, and `check` raises it."""
        with self.lock:
            self._failure = self._failure or failure
            self.lock.notify_all()

    def check(self) -> None:
        """Raise what broke in another thread."""
        if self._failure is not None:
            raise self._failure

    def lose(self, worker: int, why: Exception) -> None:
        """A worker is gone without a word; others take over what it had in hand."""
        with self.lock:
            if worker not in self._live:
                return
            self._remove(worker)
            # gloo begins with the place in its source: "[/pytorch/.../pair.cc:547] Connection closed by peer ..."
            reason = re.sub(r"^\[\S+\] ", "", str(why).strip().partition("\n")[0])
            log.warning("worker %d is lost (%s); %d go on, and its batches go to them", worker, reason, len(self._live))
            self.lock.notify_all()

    def stop(self, patience_s: float) -> None:
        """Hand out nothing more, and wait until the workers have handed in what they are at."""
        with self.lock:
            self._stopping = True
            self._remove(0)
            self.lock.notify_all()
            self.lock.wait_for(lambda: not self._live, patience_s)

    def _remove(self, worker: int) -> None:
        self._live.discard(worker)
        self.ledger.leave(worker)
