"""A run keeps its classes: resuming it on others would shift the labels, so --allow-changes does not permit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from paths import SMALL_NETWORK
from processes import losses, newest
from worldsize import cli
from worldsize.training import resume

RECIPE = """\
epochs: 3
global_batch: 8
micro_batch: 4
model: {name: NETWORK}
schedule: {warmup_epochs: 0}
evaluate_every: 10
data: {name: folder, root: images, train_crop_size: 32, val_resize_size: 32, val_crop_size: 32}
""".replace("NETWORK", SMALL_NETWORK)


@pytest.fixture
def images(tmp_path) -> Path:
    """Three classes, four images each."""
    dice = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = dice.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{i}.png")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path / "images"


def test_other_classes_are_refused_also_with_allow_changes(images, fails, tmp_path):
    assert cli.main(["train", "mine.yaml", "--out", "some", "--name", "a", "--stop-after", "1"]) == 75
    for split in ("train", "val"):
        (images / split / "ant").rename(images / split / "dog")
    for more in ((), ("--allow-changes",)):
        message = fails("train", "--resume", "some/a", *more)
        assert "gone: 'ant'; new: 'dog'; label 0 was 'ant', is 'bee'" in message
        assert "--allow-changes does not apply" in message and "--model.weights CHECKPOINT/model.safetensors" in message
    for split in ("train", "val"):
        (images / split / "dog").rename(images / split / "ant")
    (images / "train" / "ant" / "0.png").rename(images / "train" / "bee" / "moved.png")
    assert "the dataset: was 12+12 images" in fails("train", "--resume", "some/a")
    assert cli.main(["train", "--resume", "some/a", "--allow-changes"]) == 0
    assert len(losses(tmp_path / "some" / "a")) == 3
    # The margins of the first step belong to images with other numbers.
    visits = load_file(newest(tmp_path / "some" / "a") / "samples.safetensors")["visits"]
    assert int(visits.sum()) == 2 * 8


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "b"], ["b", "a"], "their order; label 0 was 'a', is 'b'"),
        (["a", "b"], ["a", "b", "c"], "new: 'c'"),
        (["a", "b"], ["a"], "gone: 'b'"),
        (["a"], ["a "], "gone: 'a'; new: 'a '; label 0 was 'a', is 'a '"),
        (["caf\u00e9"], ["cafe\u0301"], r"gone: 'caf\xe9'; new: 'cafe\u0301'; label 0 was 'caf\xe9', is 'cafe\u0301'"),
        ([*"abcdefg"], [*"a"], "gone: 'b', 'c', 'd', 'e', 'f' and 1 more"),
    ],
)
def test_the_message_names_the_difference(old, new, expected):
    assert resume.class_changes(old, new) == expected
