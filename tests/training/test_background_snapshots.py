"""A snapshot that is copied during the next step contains the state after the last one, however late the copy is."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch

from paths import SMALL_NETWORK
from worldsize import checkpoint, cli
from worldsize.checkpoint import writer
from worldsize.training import saver, step

SMALL = (
    *("--model.name", SMALL_NETWORK, "--global-batch", "8", "--micro-batch", "4", "--precision", "fp32", "--name", "a"),
    *("--max-steps", "3", "--checkpoint.every-steps", "1", "--checkpoint.keep", "3"),
)
OPTIMIZERS = {
    "momentum": (),
    "adamw": ("--optimizer.name", "adamw", "--optimizer.lr", "0.01"),
    "sharpness": ("--optimizer.sam-rho", "0.5"),
    "averaged weights": ("--average.name", "ema"),
    "bitwise": ("--parallel.strategy", "bitwise"),
}


@pytest.fixture
def saved(monkeypatch):
    """The weights and the optimizer's state at each save, by step. The next update comes before the thread that writes."""
    updates: defaultdict[int, threading.Event] = defaultdict(threading.Event)
    states: dict[int, checkpoint.Tensors] = {}
    save, run, write = saver.Saver.save, step.StepRunner.run, writer.Writer._run

    def noted(self, progress, wait=False):
        tensors = dict(self._state.model.named_parameters()) | self._optimizer()
        states[progress.step] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if wait:
            updates[progress.step].set()
        save(self, progress, wait)

    def updated(self, batches, number, *arguments):
        result = run(self, batches, number, *arguments)
        updates[number].set()
        return result

    def late(self, snapshot, save):
        assert updates[snapshot.step].wait(120)
        write(self, snapshot, save)

    monkeypatch.setattr(saver.Saver, "save", noted)
    monkeypatch.setattr(step.StepRunner, "run", updated)
    monkeypatch.setattr(writer.Writer, "_run", late)
    return states


@pytest.mark.parametrize("more", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_checkpoint_has_the_state_after_its_step_however_late_it_is_copied(saved, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "digits", *SMALL, *more]) == 0
    paths = checkpoint.list_checkpoints(tmp_path / "runs/a/checkpoints")
    assert sorted(map(checkpoint.step_of, paths)) == sorted(saved) == [1, 2, 3]
    for path in paths:
        stored, expected = checkpoint.read(path), saved[checkpoint.step_of(path)]
        tensors = stored.model | stored.optimizer
        assert len(expected) > 20
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
