"""The parameter server of asynchronous SGD: the weights, and which worker computes which step.

Dean et al. 2012, "Large scale distributed deep networks", section 4.1. Rank 0 holds the weights and the optimizer. Every
worker (rank 0 is one too) fetches the weights, computes the gradient of one global batch, sends it, and gets the next
batch. The *staleness* of a gradient is the number of updates that others made in between. A gradient more than
``max_staleness`` updates old is dropped and its batch is computed again: the bound always holds, and a slow worker never
holds up a fast one. (In stale synchronous parallel, Ho et al. 2013, fast workers wait at the bound instead, which in the
end slows everyone down to the slowest.)

With one worker this is `single`: same batches, same order, same numbers.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from worldsize.parallel.async_sgd.step_ledger import Ledger

log = logging.getLogger(__name__)

_WARN_AFTER = 10  # dropped gradients of one worker
_LOOK_S = 0.5  # between two looks for workers that send nothing


@dataclass(frozen=True)
class Report:
    """What a worker sends: the gradient of ``step`` at the weights of ``version``.

    ``gradient`` (n,) holds the parameters' gradients, which of them exist, and the step's running statistics, None if the
    loss scale overflowed; ``values`` (3,) float64: loss and hits summed over the batch, gradient norm. ``broken``: the
    images that the worker could not decode since its last report, with the reasons.
    """

    step: int
    version: int
    gradient: torch.Tensor | None
    values: torch.Tensor
    seconds: float
    waited_s: float
    data_s: float
    leaving: bool = False
    broken: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """What a worker gets: the steps to compute, now and next (none: the run is over); the weights (n,) of ``version``."""

    steps: list[int]
    version: int
    weights: torch.Tensor


class Server:
    """The weights and the workers. Every method is thread-safe.

    Args:
        ledger: the steps of the run.
        workers: how many there are at the start; worker 0 is this process.
        apply: updates the weights with (worker, report, staleness); called by one thread at a time.
        weights: returns a copy of the weights.
        hold: while it returns True, workers in other processes get no work.
        stand_still: called with whether training stands still: rank 0 is `away`, and all others wait for work.
    """

    def __init__(
        self,
        ledger: Ledger,
        workers: int,
        apply: Callable[[int, Report, int], None],
        weights: Callable[[], torch.Tensor],
        hold: Callable[[], bool] = lambda: False,
        stand_still: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.ledger = ledger
        self.lock = threading.Condition()
        self._apply = apply
        self._weights = weights
        self.hold = hold
        self._stand_still = stand_still
        self._live = set(range(workers))
        self._waiting: set[int] = set()  # for work
        self._away = 0
        self._heard_at = dict.fromkeys(range(workers), time.monotonic())
        self._longest_s = 0.0  # that a gradient took
        self.silent: set[int] = set()  # workers that were given up although they are still connected
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def workers(self) -> frozenset[int]:
        """The workers that are still connected."""
        return frozenset(self._live)

    def push(self, worker: int, report: Report) -> None:
        """Apply a worker's gradient, unless it is too old, or the worker was given up."""
        with self.lock:
            if worker in self.silent:
                return
            now = time.monotonic()
            self._longest_s = max(self._longest_s, now - self._heard_at[worker])
            self._heard_at[worker] = now
            if report.gradient is None:
                self.ledger.give_back(worker, report.step)
            elif (age := self.ledger.deliver(worker, report.step, report.version)) is not None:
                self._apply(worker, report, age)
            elif self.ledger.dropped[worker] == _WARN_AFTER:
                log.warning(
                    "worker %d: %d gradients were more than %d updates old and were dropped; "
                    "raise --parallel.max-staleness, or leave it out",
                    *(worker, _WARN_AFTER, self.ledger.max_staleness),
                )
            if report.leaving:
                self._remove(worker)
            self.lock.notify_all()

    def pull(self, worker: int, patience_s: float | None = None) -> Grant | None:
        """The worker's next steps and the weights; waits while there is no work but may be some later.

        Returns:
            None when ``patience_s`` ran out.
        """
        with self.lock:
            self._waiting.add(worker)
            self._look()
            waited = self.lock.wait_for(lambda: self._can_answer(worker), patience_s)
            self._waiting.discard(worker)
            self._heard_at[worker] = time.monotonic()
            self._look()
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

    def fail(self, failure: BaseException, serving: int = 0) -> None:
        """Rank 0 failed, while ``serving`` this worker: no worker gets more work, and `check` raises the failure."""
        with self.lock:
            self._failure = self._failure or failure
            self._remove(serving)
            self.lock.notify_all()

    def check(self) -> None:
        """Raise the failure of another thread."""
        if self._failure is not None:
            raise self._failure

    def lose(self, worker: int, why: Exception) -> None:
        """A worker disconnected; others take over its steps."""
        with self.lock:
            if worker not in self._live:
                return
            self._remove(worker)
            # gloo messages begin with the place in its source: "[/pytorch/.../pair.cc:547] Connection closed by peer ..."
            reason = re.sub(r"^\[\S+\] ", "", str(why).strip().partition("\n")[0])
            if self._over:
                log.warning("lost worker %d (%s); the run ends without it", worker, reason)
            else:
                others = len(self._live)
                log.warning("lost worker %d (%s); %d workers continue and take over its batches", worker, reason, others)
            self.lock.notify_all()

    def give_up(self, patience_s: float) -> None:
        """Lose the workers that have sent nothing for this many seconds more than three times the longest gradient took."""
        with self.lock:
            for worker in sorted(self._live - self._waiting - {0}):
                seconds = time.monotonic() - self._heard_at[worker]
                if seconds > patience_s + 3 * self._longest_s:
                    self.silent.add(worker)
                    self.lose(worker, TimeoutError(f"it has sent nothing for {seconds:.0f} s"))

    def stop(self, patience_s: float) -> None:
        """Stop handing out steps, and wait until the workers have sent their last gradients, or are given up."""
        with self.lock:
            self._stopping = True
            self._remove(0)
            self.lock.notify_all()
            while not self.lock.wait_for(lambda: not self._live, min(patience_s, _LOOK_S)):
                self.give_up(patience_s)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Around what rank 0 does instead of computing gradients: evaluating and saving."""
        try:
            with self.lock:
                self._away += 1
                self._look()
            yield
        finally:
            with self.lock:
                self._away -= 1
                self._look()

    def _look(self) -> None:
        self._stand_still(self._away > 0 and self._live - {0} <= self._waiting)

    def _remove(self, worker: int) -> None:
        self._live.discard(worker)
        self.ledger.leave(worker)
        self._look()
