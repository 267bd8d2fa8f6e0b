"""`worldsize init` with a network of the user's own, or of a run: training accepts what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packing import encode, noise
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.models import factory, pretrained

OWN = """from torch import nn
def head(classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch) -> Path:
    """Images of 16 pixels in two classes; the current folder is next to theirs."""
    for split in ("train", "val"):
        for i in range(8):
            path = tmp_path / "tiny" / split / f"k{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(noise(16, 16, i + 10 * (split == "val")), "JPEG"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "tiny"


@pytest.mark.parametrize("file", ["resnet_mine.py", "../a #1: b.py"])
def test_the_recipe_of_an_own_network_builds_it(tiny, file):
    Path(file).write_text(OWN)
    assert main(["init", str(tiny), "--model", f"{file}:head", "--weights", "none"]) == 0
    recipe = recipe_files.load("tiny.yaml")
    assert (recipe.model.name.rpartition("#")[0], recipe.model.stem) == (f"{file}:head", "imagenet")
    assert factory.build(recipe, 2, torch.device("cpu"), torch.float32)[-1].out_features == 2


@pytest.mark.parametrize(
    ("model", "more", "stem"), [("resnet18", ("--model.blurpool",), "cifar"), ("worldsize:cifarnet", (), "imagenet")]
)
def test_the_weights_of_a_run_come_with_its_network(tiny, ranks, model, more, stem):
    assert main(["init", str(tiny), "--model", model, "--weights", "none"]) == 0
    quick = ("--max-steps", "1", "--out", Path("runs").absolute(), "--name", "one", *more)
    ranks(1).run("train", Path("tiny.yaml").absolute(), *quick)
    assert main(["init", str(tiny), "--weights", "runs/one", "--out", "next.yaml"]) == 0
    recipe = recipe_files.load("next.yaml")
    assert (recipe.model.name, recipe.model.stem, recipe.model.blurpool) == (model, stem, bool(more))
    pretrained.load(factory.build(recipe, 2, torch.device("cpu"), torch.float32), recipe)


def test_the_weights_of_a_run_of_an_own_network_need_its_file(tiny, ranks, capsys):
    Path("net.py").write_text(OWN)
    assert main(["init", str(tiny), "--model", f"{Path('net.py').absolute()}:head", "--weights", "none"]) == 0
    quick = ("--max-steps", "1", "--out", Path("runs").absolute(), "--name", "one")
    ranks(1).run("train", Path("tiny.yaml").absolute(), *quick)
    asked = ["init", str(tiny), "--weights", "runs/one", "--out", "next.yaml"]
    assert main(asked) == 64
    assert "its network is your own: pass --model" in capsys.readouterr().err
    assert main([*asked, "--model", "net.py:head"]) == 0
    assert recipe_files.load("next.yaml").model.weights == str(Path("runs/one").resolve())
