"""What computes with a network after training has the numbers of the run's own evaluation, also where torch has a defect.

In bf16 on a CPU, training computes convolutions of images of one pixel in fp32 (`models.one_pixel`).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from processes import worldsize
from worldsize import checkpoint
from worldsize.config import recipe_files
from worldsize.config.command_line import Evaluate
from worldsize.data import open_dataset
from worldsize.distributed.rank import RankInfo
from worldsize.inference import opening
from worldsize.inference.evaluate_checkpoint import evaluate_checkpoint
from worldsize.training import new_network, supervision
from worldsize.training.precision import Precision

CPU = torch.device("cpu")
ONE_PIXEL = (  # the feature maps of the last stage of a ResNet
    *("--model.name", "resnet18", "--model.stem", "imagenet", "--model.no-zero-init", "--device", "cpu"),
    *("--data.name", "synthetic", "--data.samples", "32", "--data.classes", "10", "--data.val-resize-size", "18"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--global-batch", "16", "--micro-batch", "8"),
    *("--epochs", "1", "--schedule.warmup-epochs", "0", "--precision", "bf16"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-pixel")
    done = worldsize("train", "digits", *ONE_PIXEL, "--name", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def path(run) -> Path:
    return checkpoint.find(run)


def network(run: Path, name: str) -> nn.Module:
    source = opening.find(run)
    return source.load(source.recipe, Precision(name, CPU), False).network


def own_forwards(module: nn.Module) -> list[str]:
    """The layers whose computation is not that of their class."""
    return [name for name, layer in module.named_modules() if "forward" in vars(layer)]


def logits(module: nn.Module) -> torch.Tensor:
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return module(images.to(memory_format=torch.channels_last))


def test_an_evaluation_is_the_runs_own(run, path):
    asked = Evaluate(settings=recipe_files.load(str(path / "recipe.yaml")))
    result = evaluate_checkpoint(path, asked, RankInfo("none", 0, 1, 0, 1))
    assert result.loss == json.loads((run / "result.json").read_text())["loss"]


def test_a_teacher_computes_as_its_run(run, path, tmp_path):
    recipe = opening.find(run).recipe
    aims = supervision.build(recipe, open_dataset(recipe.data, tmp_path), path, Precision("bf16", CPU))
    trained = network(run, "bf16")
    assert torch.equal(logits(aims.teacher), logits(trained))
    plain = copy.deepcopy(trained)
    for name in own_forwards(plain):
        del plain.get_submodule(name).forward
    assert not torch.equal(logits(plain), logits(trained))  # else these images show no difference


def test_other_formats_and_exports_have_the_network_as_it_is(run):
    assert own_forwards(network(run, "bf16"))
    assert own_forwards(network(run, "fp32")) == []  # also what exports take
    recipe = opening.find(run).recipe
    for one in (Precision("fp64", CPU), Precision("bf16", torch.device("meta"))):
        assert own_forwards(new_network.build(recipe, 10, one)) == []
