"""The time of copying images to a device is a part of a step of its own."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from worldsize.attribution.step_time import PARTS
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.parallel.base import Exchange
from worldsize.training import step_metrics
from worldsize.training.gradients import Computed
from worldsize.training.step_metrics import StepMetrics

CPU = torch.device("cpu")


class Alone:
    """The strategy of a test: nothing is sent."""

    local_gradients = False
    exchange: ClassVar[Exchange] = Exchange(CPU)


def test_copying_is_no_waiting_for_images(monkeypatch):
    stamps = iter([0.0, 0.0, 1.0])  # seconds: the meter begins twice, and the step ends
    monkeypatch.setattr(step_metrics, "stamp", lambda device: next(stamps))
    meter = StepMetrics(World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1), BatchPlan(8, 4, 1), Alone())
    meter.restart()
    meter.begin()
    waits, copies = [(0.125, 0.25), (0.5, 0.5625)], [(0.1875, 0.25)]
    meter.add(1, 0.5, 0.1, Computed(torch.ones(2, 2).double(), [7, 9], waits, [], copies), torch.tensor(5.0))
    [step], [window] = meter.collect(0)
    meter.close()
    assert (step.step_ms, step.data_ms, step.copy_ms) == (1000, 125, 62.5)
    assert step.data_ms + step.copy_ms + step.compute_ms + step.overhead_ms == pytest.approx(1000)
    assert window.mean_ms["copy_ms"] == 62.5
    assert sum(window.mean_ms[part] for part in PARTS) == pytest.approx(1000)


def test_nothing_is_copied_on_a_cpu():
    host = Batch(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), np.arange(2))
    assert next(Feed(iter([host]), CPU)).copied is None
