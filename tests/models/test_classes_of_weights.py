"""Initial weights of a run with other classes: what becomes of the classifier is said."""

from __future__ import annotations

import pytest
import torch
import torchvision

from interruptions import SETTINGS
from trees import two_classes

TWO, FOLDER = ("--data.classes", "2"), ("--data.name", "folder", "--data.root", "animals")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return tmp_path_factory.mktemp("begun") / "first"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), ""),
        (FOLDER, "is kept, but its classes differ from the data's: label 0 is '0' there and 'cat' here"),
        ((*FOLDER, "--model.zero-head"), ""),
        (("--data.classes", "5"), "for another number of classes, so the classifier has random weights"),
        (("--data.classes", "5", "--model.zero-head"), ""),
    ],
)
def test_the_classifier_of_other_classes_has_a_warning(ranks, begun, more, message):
    train = ("train", "digits", *SETTINGS, *TWO, "--global-batch", "2", "--micro-batch", "2")
    if not (ranks.cwd / "animals").exists():
        two_classes(ranks.cwd / "animals")
    if not begun.exists():
        ranks(1).run(*train, "--max-steps", "1", "--out", begun.parent, "--name", begun.name)
    output = ranks(1).run(*train, *more, "--max-steps", "0", "--model.weights", begun)
    assert message in output
    assert ("warning: the " in output) == bool(message)


def test_weights_without_a_classifier_are_called_so(ranks):
    network = torchvision.models.resnet18(num_classes=10)
    torch.save({k: v for k, v in network.state_dict().items() if not k.startswith("fc.")}, ranks.cwd / "body.pth")
    words = ("--model.name", "resnet18", "--model.weights", "body.pth", "--max-steps", "0")
    assert "the weights body.pth have no classifier, so the classifier has random weights" in ranks(1).run(
        "train", "digits", *words
    )
