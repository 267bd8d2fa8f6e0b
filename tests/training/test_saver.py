"""When checkpoints are due: every so many seconds on disk, and never so that training waits for the disk."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from worldsize import checkpoint
from worldsize.checkpoint import writer
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training import build, saver
from worldsize.training.precision import Precision
from worldsize.training.progress import Progress

CPU = torch.device("cpu")
WORLD = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
EVERY_S = 30.0


class Disk:
    """Writes a checkpoint when the test allows it; ``now`` is the time in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.begun, self.allowed = threading.Event(), threading.Event()
        write = writer.write

        def slow(*arguments, **options):
            self.begun.set()
            assert self.allowed.wait(60)
            return write(*arguments, **options)

        monkeypatch.setattr(writer, "write", slow)
        for module in (writer, saver):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def saving(disk, tmp_path):
    recipe = Recipe.model_validate({"precision": "fp32", "checkpoint": {"every_seconds": EVERY_S}})
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    network.to(memory_format=torch.channels_last)
    plan = batch_plan.plan(recipe, 1)
    state = build.build_state(recipe, network, plan, WORLD, Precision("fp32", CPU), 10)
    yield saver.Saver(recipe.checkpoint, tmp_path, WORLD, state, "", {})
    disk.allowed.set()


def test_while_the_disk_is_busy_no_checkpoint_is_due(saving, disk):
    disk.now = EVERY_S
    assert saving.due()
    saving.save(Progress(step=1, epoch_step=1))
    assert disk.begun.wait(60)
    disk.now = 10 * EVERY_S
    assert not saving.due()
    disk.allowed.set()
    saving.close()
    assert saving.due()


@pytest.mark.parametrize(("took_s", "after_s"), [(4.0, EVERY_S - 4.0), (100.0, EVERY_S / 2)])
def test_what_is_on_disk_is_no_older_than_the_interval(saving, disk, took_s, after_s):
    """The interval to the next snapshot and the time of writing it, if that takes as long as the last; at least half."""
    saving.save(Progress(step=1, epoch_step=1))
    assert disk.begun.wait(60)
    disk.now = took_s
    disk.allowed.set()
    saving.close()
    disk.now = after_s - 0.1
    assert not saving.due()
    disk.now = after_s
    assert saving.due()


def test_a_prepared_snapshot_allocates_nothing_for_the_weights_and_the_momentum(saving, disk):
    disk.allowed.set()
    saving.prepare()
    prepared = {name: tensor.data_ptr() for name, tensor in saving._memory.items()}
    assert any(name.startswith("model/") for name in prepared) and any(name.startswith("optimizer/") for name in prepared)
    for step in (1, 2):
        with torch.no_grad():
            for parameter in saving._state.model.parameters():
                parameter.add_(1)
        saving.save(Progress(step=step, epoch_step=step))
        assert {name: saving._memory[name].data_ptr() for name in prepared} == prepared
        saving.close()
        stored = checkpoint.read(saving.newest()).model
        assert all(stored[name].equal(tensor) for name, tensor in saving._state.model.named_parameters())


def test_a_snapshot_that_is_being_written_is_not_overwritten(saving, disk, monkeypatch):
    wait = saving._writer.wait

    def waited():
        disk.allowed.set()
        return wait()

    monkeypatch.setattr(saving._writer, "wait", waited)
    weight = saving._state.model[0].weight
    expected = []
    for step in (1, 2):
        expected.append(weight.detach().clone())
        saving.save(Progress(step=step, epoch_step=step))
        saving.settle()
        with torch.no_grad():
            weight.add_(1)
    saving.close()
    stored = [checkpoint.read(path).model["0.weight"] for path in reversed(checkpoint.list_checkpoints(saving._folder))]
    assert [a.equal(b) for a, b in zip(stored, expected, strict=True)] == [True, True]
