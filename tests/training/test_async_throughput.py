"""The speed of asynchronous runs: updates per time, without the time in which training stands still."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worldsize.parallel.async_sgd.server import Server
from worldsize.parallel.async_sgd.step_ledger import Ledger
from worldsize.training.asynchronous import throughput
from worldsize.training.asynchronous.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until a test moves it: ``clock.now``."""
    at = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: at.now))
    return at


def test_the_speed_is_that_of_all_updates_though_they_arrive_together(clock):
    measured = Throughput(images=10, window=15)
    speeds = []
    for _ in range(20):  # three workers that report at the same time, every two seconds
        clock.now += 2.0
        speeds += [measured.update()[1] for _ in range(3)]
    assert speeds[-15:] == [pytest.approx(15.0)] * 15


def test_time_in_which_training_stands_still_does_not_count(clock):
    measured = Throughput(images=10, window=4)
    clock.now += 1.0
    measured.stand_still(True)
    clock.now += 50.0
    measured.stand_still(True)
    clock.now += 50.0
    measured.stand_still(False)
    clock.now += 1.0
    assert measured.update() == (2.0, 5.0)
    measured.stand_still(True)
    clock.now += 50.0
    assert measured.update() == (0.0, 10.0)
    clock.now += 50.0
    measured.stand_still(False)
    clock.now += 4.0
    assert measured.update() == (4.0, 5.0)


def test_training_stands_still_while_rank_0_is_away_and_no_other_worker_computes():
    still: list[bool] = []
    server = Server(Ledger(10, 4), 2, lambda *_: None, lambda: torch.zeros(1), stand_still=still.append)
    server.pull(1)
    with server.away():
        assert still[-1] is False  # worker 1 computes
        server.hold = lambda: True
        server.pull(1, 0.01)
        assert True in still  # while it waited for work
        assert still[-1] is False
        server.lose(1, RuntimeError("gone"))
        assert still[-1] is True
        with server.away():
            assert still[-1] is True
        assert still[-1] is True
    assert still[-1] is False
