"""The ledger of an asynchronous run: whatever workers do, each step is applied once and no gradient is too old."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.parallel.async_sgd.step_ledger import Ledger


class Workers:
    """Workers that fetch, submit, fail and leave at random, in a run that is stopped and resumed at random."""

    def __init__(self, rng: random.Random, total: int, bound: int, workers: int) -> None:
        self.rng = rng
        self.applied: list[int] = []
        self.begin(Ledger(total, bound), workers)

    def begin(self, ledger: Ledger, workers: int) -> None:
        self.ledger = ledger
        self.live = list(range(workers))
        self.ages: list[int] = []
        self.drops: dict[int, int] = {}
        self.fetched: dict[int, int] = {}  # the weights version that each worker computes with
        self.dropped_by: dict[int, int] = {}  # who dropped a step that no worker has taken over yet

    def move(self, worker: int) -> None:
        (self.submit if self.ledger.claims.get(worker) else self.fetch)(worker)
        self.check()

    def fetch(self, worker: int) -> None:
        for ahead in (1, 2):
            before, fresh = list(self.ledger.claims.get(worker, [])), self.ledger.fresh
            mine = self.ledger.claim(worker, ahead)
            assert mine[: len(before)] == before
            assert len(mine) <= max(ahead, len(before))
            for step in mine[len(before) :]:
                assert self.dropped_by.pop(step, None) != worker or fresh == self.ledger.total
            if len(mine) < ahead:  # only if no step is available
                assert self.ledger.fresh == self.ledger.total and not self.ledger.returned
        self.fetched[worker] = self.ledger.version

    def submit(self, worker: int) -> None:
        step, bound = self.ledger.claims[worker][0], self.ledger.max_staleness
        expected = self.ledger.version - self.fetched[worker]
        age = self.ledger.deliver(worker, step, self.fetched[worker])
        assert age == (expected if expected <= bound else None)
        if age is None:
            self.drops[worker] = self.drops.get(worker, 0) + 1
            self.dropped_by[step] = worker
        else:
            self.applied.append(step)
            self.ages.append(age)
        self.fetch(worker)

    def overflow(self, worker: int) -> None:
        if self.ledger.claims.get(worker):
            self.ledger.give_back(worker, self.ledger.claims[worker][0])
            self.fetch(worker)

    def leave(self, worker: int) -> None:
        if len(self.live) > 1:
            self.live.remove(worker)
            for step in self.ledger.claims.get(worker, []):
                self.dropped_by.pop(step, None)
            self.ledger.leave(worker)

    def resume(self) -> None:
        old, bound = self.ledger, self.rng.randint(0, 3)
        fresh = old.version + len(old.missing)
        self.begin(Ledger.resume(old.total, bound, old.version, fresh, old.missing), self.rng.randint(1, 4))

    def check(self) -> None:
        missing = self.ledger.missing
        assert missing == sorted(missing)
        assert sorted(self.applied + missing) == list(range(self.ledger.fresh))  # each exactly once, applied or missing
        assert self.ledger.version == len(self.applied)
        assert self.ledger.fresh == self.ledger.version + len(missing) <= self.ledger.total
        assert self.ledger.staleness == [self.ages.count(age) for age in range(max(self.ages, default=-1) + 1)]
        assert self.ledger.dropped == self.drops


@given(seed=st.integers(0, 2**32), total=st.integers(1, 40), bound=st.integers(0, 4), workers=st.integers(1, 4))
def test_each_step_is_applied_once_whatever_workers_do(seed, total, bound, workers):
    rng = random.Random(seed)
    run = Workers(rng, total, bound, workers)
    for _ in range(rng.randint(0, 3 * total)):
        worker, what = rng.choice(run.live), rng.random()
        if what < 0.9:
            run.move(min(worker, rng.choice(run.live)))  # workers with higher numbers are slower
        elif what < 0.95:
            run.overflow(worker)
        elif what < 0.98:
            run.leave(worker)
        else:
            run.resume()
        run.check()
    # In any state, a single remaining worker can finish the run; its first gradient may be too old.
    last = rng.choice(run.live)
    for other in [worker for worker in run.live if worker != last]:
        run.leave(other)
    for _ in range(2 + total - run.ledger.version):
        run.move(last)
    assert run.ledger.finished
    assert sorted(run.applied) == list(range(total))
    assert not run.ledger.claim(last)


@given(total=st.integers(1, 40), bound=st.integers(0, 4))
def test_one_worker_gets_the_steps_in_order(total, bound):
    ledger, order = Ledger(total, bound), []
    while not ledger.finished:
        order.append(ledger.claim(0)[0])
        assert ledger.deliver(0, order[-1], ledger.version) == 0
    assert order == list(range(total))
    assert (ledger.staleness, ledger.dropped, ledger.missing) == ([total], {}, [])


@given(data=st.data(), total=st.integers(1, 30), workers=st.integers(1, 4))
def test_a_resumed_run_does_the_missing_steps_and_then_the_rest(data, total, workers):
    fresh = data.draw(st.integers(0, total))
    missing = sorted(data.draw(st.sets(st.integers(0, fresh - 1), max_size=8))) if fresh else []
    ledger, order = Ledger.resume(total, workers, fresh - len(missing), fresh, missing), []
    while not ledger.finished:
        for worker in range(workers):
            if ledger.claim(worker, ahead=1):
                order.append(ledger.claims[worker][0])
                assert ledger.deliver(worker, order[-1], ledger.version) == 0
    assert order == [*missing, *range(fresh, total)]


def test_a_run_shortened_below_its_position_is_finished():
    assert Ledger.resume(3, max_staleness=1, version=4, fresh=6, missing=[1, 5]).finished
    assert not Ledger.resume(5, max_staleness=1, version=4, fresh=6, missing=[1, 5]).finished


def late(total: int) -> Ledger:
    """Worker 1 fetched steps 0 and 1 at version 0; worker 0 has made two updates since."""
    ledger = Ledger(total, max_staleness=1)
    ledger.claim(1)
    for _ in range(2):
        ledger.deliver(0, ledger.claim(0)[0], ledger.version)
    return ledger


def test_a_dropped_step_goes_to_another_worker():
    ledger = late(10)
    assert ledger.deliver(1, 0, version=0) is None
    assert ledger.claim(1) == [1, 5]  # 2 and 3 are done, 4 is claimed
    assert ledger.claim(0) == [4, 0]


def test_a_dropped_step_returns_to_the_same_worker_if_no_other_step_is_left():
    ledger = late(4)
    assert ledger.deliver(1, 0, version=0) is None
    assert ledger.claim(1) == [1, 0]


def test_steps_of_a_lost_worker_come_first_and_go_to_any_worker():
    ledger = late(10)
    ledger.deliver(1, 0, version=0)
    ledger.leave(1)
    assert ledger.claim(0, ahead=4) == [4, 1, 0, 5]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_gradient_exactly_at_the_bound_is_applied(bound):
    ledger = Ledger(20, bound)
    ledger.claim(1)
    for _ in range(bound):
        ledger.deliver(0, ledger.claim(0)[0], ledger.version)
    assert ledger.deliver(1, 0, version=0) == bound
    assert ledger.deliver(1, 1, version=0) is None
