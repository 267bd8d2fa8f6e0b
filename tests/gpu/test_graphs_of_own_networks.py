"""A CUDA graph repeats kernels, and not what a network does in Python: one that draws numbers there is not captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory, training_pass, trusted_code
from worldsize.training import build, cuda_graph
from worldsize.training.precision import Precision
from worldsize.training.state import TrainState

CPU = torch.device("cpu")
CODE = """
import random

import numpy as np
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        return self.head(x.mean((2, 3))) * (DRAWN if self.training else 1)
"""


def built(folder: Path, drawn: str, cuda_graphs: object) -> TrainState:
    """The state of a run with a network that draws so."""
    file = folder / "net.py"
    file.write_text(CODE.replace("DRAWN", drawn))
    recipe = Recipe.model_validate(
        {
            "model": {"name": f"{file}:Scaled", "compile": False},
            "data": {"train_crop_size": 8},
            "global_batch": 8,
            "micro_batch": 4,
            "precision": "fp32",
            "device": "cpu",
            "cuda_graphs": cuda_graphs,
        }
    )
    trusted_code.trust(recipe)
    network = factory.build(recipe, 10, CPU, torch.float32).train()
    world = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
    return build.build_state(recipe, network, batch_plan.plan(recipe, 1), world, Precision("fp32", CPU), 10)


@pytest.mark.parametrize(
    "drawn", ["torch.rand(())", "random.random()", "np.random.rand()", "(1 if random.random() < 0.5 else 2)"]
)
def test_numbers_drawn_on_the_host_are_drawn_in_each_step(tmp_path, monkeypatch, caplog, drawn):
    """docs/recipes.md promises it. A replay has the number of the capture; the pass before it may have another branch."""
    with pytest.raises(UserError, match=r"--cuda-graphs: \S+ draws random numbers on the host, .* Leave it out, pass"):
        built(tmp_path, drawn, True)
    monkeypatch.setattr(cuda_graph, "wanted", lambda *_: True)  # as on a GPU, where the network is compiled
    assert not built(tmp_path, drawn, "auto").graphs
    assert "the steps are not replayed as CUDA graphs, so the host launches each kernel: " in caplog.text


@pytest.mark.parametrize("drawn", ["2", "len(x)"])
def test_a_network_that_draws_nothing_there_is_captured(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr(cuda_graph, "wanted", lambda *_: True)
    assert built(tmp_path, drawn, "auto").graphs


def test_numbers_drawn_on_a_gpu_are_not_those_of_the_host(monkeypatch):
    """The seed of a step enters the graph, so a network that draws on its GPU is captured."""
    states = iter([b"before", b"after"])
    monkeypatch.setattr(training_pass, "_gpu_generator", lambda _: next(states))
    trial = training_pass.tried(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), 8, 2)
    assert trial.drew and not trial.drew_on_host
