"""``--max-steps 0``: the evaluation of weights from elsewhere, and a run of them for the other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file

from processes import bits, newest, records, weights, worldsize
from worldsize.config.recipe import Data
from worldsize.data.datasets.digits import open_dataset

DIGITS = ("train", "digits", "--model.name", "resnet18", "--model.weights", "w.safetensors", "--precision", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It holds w.safetensors: weights of torchvision's network, and running statistics that are not those of a new one."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=10)
    for _ in range(5):
        network(1 + 2 * torch.randn(16, 3, 32, 32))
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / "w.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[float, float]:
    """Their loss and top-1 on the validation images, by torchvision and torch."""
    network = torchvision.models.resnet18(num_classes=10).eval()
    network.load_state_dict(load_file(folder / "w.safetensors"))
    images = open_dataset(Data(name="digits", train_crop_size=32, val_resize_size=32, val_crop_size=32), folder).val
    with torch.inference_mode():
        logits = network((torch.from_numpy(images.pixels).permute(0, 3, 1, 2) / 255 - 0.305) / 0.376)
    labels = torch.from_numpy(images.labels).long()
    return float(torch.nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


def trained(folder: Path, *words: str) -> str:
    done = worldsize(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("strategy", ["single", "ddp", "async"])
def test_the_weights_are_evaluated_and_kept_as_they_are(folder, expected, strategy):
    processes = "1" if strategy == "single" else "2"
    words = ("--max-steps", "0", "--procs", processes, "--parallel.strategy", strategy, "--name", strategy)
    out = trained(folder, *DIGITS, *words)
    assert "of the initial weights" in out and "during training" not in out
    run = folder / "runs" / strategy
    result = json.loads((run / "result.json").read_text())
    assert (result["loss"], result["top1"]) == pytest.approx(expected, rel=1e-5)
    assert records(run, "step") == []
    [epoch] = records(run, "epoch")
    assert epoch["epoch"] == 0 and not {"train_loss", "train_top1"} & {*epoch}
    kept, given = weights(run), load_file(folder / "w.safetensors")
    assert all(torch.equal(kept[name], given[name]) for name in given if not name.endswith("num_batches_tracked"))


def test_other_commands_take_the_run_and_more_steps_continue_it(folder, expected):
    trained(folder, *DIGITS, "--max-steps", "0", "--name", "later")
    assert "\nCONSISTENT" in trained(folder, "audit", "runs/later")
    assert f"top-1 {expected[1]:.2%}" in trained(folder, "eval", "runs/later")
    explained = worldsize("explain", "runs/later", cwd=folder)
    assert explained.returncode == 64 and "no complete line with steps: the run has not done any" in explained.stderr
    trained(folder, "train", "--resume", "runs/later", "--max-steps", "2")
    trained(folder, *DIGITS, "--max-steps", "2", "--name", "at_once")
    later, at_once = folder / "runs" / "later", folder / "runs" / "at_once"
    assert newest(later).name == "step-00000002"
    assert bits(later) == bits(at_once)
    assert [step["chain"] for step in records(later, "step")] == [step["chain"] for step in records(at_once, "step")]
    assert "\nCONSISTENT" in trained(folder, "audit", "runs/later", "--windows", "0")
