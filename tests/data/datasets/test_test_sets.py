"""Evaluation on other test sets: class folders, ImageNet-V2's numbers, ImageNet-ReaL's labels."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from packing import encode
from paths import SMALL_NETWORK
from worldsize.data.datasets import test_sets
from worldsize.errors import UserError

CLASSES = ("ant", "bee", "cat")


def write(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    path.write_bytes(encode(Image.fromarray(pixels), "PNG"))


def folder(root, *files):
    for seed, name in enumerate(files):
        write(root / name, seed)
    return root


def test_folders_have_the_names_of_the_classes_or_their_numbers(tmp_path):
    named = test_sets.open_folder(folder(tmp_path / "a", "cat/1.png", "ant/2.png", "ant/3.png"), CLASSES, tmp_path)
    assert [(named.path(i), int(named.labels[i])) for i in range(3)] == [
        ("ant/2.png", 0),
        ("ant/3.png", 0),
        ("cat/1.png", 2),
    ]
    assert named.classes == CLASSES and named.image(2).size == (20, 20)
    # As text, 10 comes before 2.
    many = tuple(f"n{i:08}" for i in range(12))
    numbered = test_sets.open_folder(folder(tmp_path / "b", "10/x.png", "2/y.png", "0/z.png"), many, tmp_path)
    assert {numbered.path(i): int(numbered.labels[i]) for i in range(3)} == {"10/x.png": 10, "2/y.png": 2, "0/z.png": 0}
    # Of a run whose classes are numbers, they are names.
    own = test_sets.open_folder(folder(tmp_path / "c", "1/x.png", "2/y.png"), ("1", "2"), tmp_path)
    assert own.labels.tolist() == [0, 1]


@pytest.mark.parametrize(("name", "message"), [("dog/1.png", "no class 'dog'"), ("3/1.png", "no class '3'")])
def test_unknown_folders_are_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        test_sets.open_folder(folder(tmp_path, name), CLASSES, tmp_path)
    with pytest.raises(UserError, match="no class"):
        test_sets.open_folder(folder(tmp_path / "mixed", "ant/1.png", "2/1.png"), CLASSES, tmp_path)


VAL = ("ant/ILSVRC2012_val_00000002.png", "ant/ILSVRC2012_val_00000003.png", "bee/ILSVRC2012_val_00000001.png")


def test_reassessed_labels_are_found_by_name(tmp_path):
    samples = test_sets.open_folder(folder(tmp_path / "v", *VAL), CLASSES, tmp_path)
    (tmp_path / "real.json").write_text("[[1, 2], [], [0]]")
    chosen = test_sets.reassessed(samples, tmp_path / "real.json")
    found = {chosen.path(i): chosen.labels[i].tolist() for i in range(len(chosen))}
    assert found == {VAL[1]: [1, 0, 0], VAL[2]: [0, 1, 1]}
    assert chosen.image(0).tobytes() == samples.image(1).tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1]]", "has no entry among 1"),
        ("[[3], [], []]", "class numbers from 0 to 2"),
        ('{"a": 1}', "must be a list of lists"),
        ("[[", "is not JSON"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    samples = test_sets.open_folder(folder(tmp_path / "v", *VAL), CLASSES, tmp_path)
    if text is not None:
        (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=message):
        test_sets.reassessed(samples, tmp_path / "real.json")


def test_other_names_are_refused(tmp_path):
    samples = test_sets.open_folder(folder(tmp_path / "v", "ant/1.png"), CLASSES, tmp_path)
    (tmp_path / "real.json").write_text("[[1]]")
    with pytest.raises(UserError, match="is not named ILSVRC2012_val"):
        test_sets.reassessed(samples, tmp_path / "real.json")


@pytest.mark.slow
def test_eval_counts_every_image_of_another_test_set_once(ranks):
    root = ranks.cwd / "data"
    names = [f"{CLASSES[i % 3]}/ILSVRC2012_val_{i + 1:08}.png" for i in range(21)]
    folder(root / "train", *(f"{CLASSES[i % 3]}/{i}.png" for i in range(12)))
    folder(root / "val", *names)
    for i, name in enumerate(names):
        write(ranks.cwd / "numbered" / str(CLASSES.index(name[:3])) / f"{i}.png", i)
    sizes = ("--data.train-crop-size", "16", "--data.val-resize-size", "20", "--data.val-crop-size", "16")
    small = ("--model.name", SMALL_NETWORK, "--data.name", "folder", "--data.root", root, "--precision", "fp64", *sizes)
    batch = ("--epochs", "1", "--global-batch", "8", "--micro-batch", "4", "--schedule.warmup-epochs", "0")
    ranks(1).run("train", "imagenet", *small, *batch, "--name", "r")
    run = ranks.cwd / "runs" / "r"
    own = ranks(1).run("eval", run).splitlines()[-1]
    for size in (1, 2):
        assert ranks(size).run("eval", run, "--images", ranks.cwd / "numbered").splitlines()[-1] == own
    # With all labels allowed every prediction is right, with none but the own ones the accuracy is the usual one.
    real = ranks.cwd / "real.json"
    for labels, size in (([[0, 1, 2]] * 21, 1), ([[0, 1, 2]] * 21, 2)):
        real.write_text(json.dumps(labels))
        assert "ReaL top-1 100.00% on 21 images" in ranks(size).run("eval", run, "--real-labels", real)
    real.write_text(json.dumps([[i % 3] for i in range(21)]))
    top1 = re.search(r"top-1 [\d.]+%", own)[0]
    assert f"ReaL {top1} on 21 images" in ranks(2).run("eval", run, "--real-labels", real)
    real.write_text(json.dumps([[i % 3] if i < 10 else [] for i in range(21)]))
    assert "on 10 images" in ranks(2).run("eval", run, "--real-labels", real)
