"""`worldsize init` of few images, some of them broken: training accepts what it writes."""

from __future__ import annotations

import os
import shutil
import signal
import tarfile
import zipfile
from pathlib import Path

import pytest

from full_disk import files_up_to
from packing import encode, noise
from processes import records, start_python
from waiting import until
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.initialize import fine_tuning, survey, writing
from worldsize.initialize.writing import Choice


@pytest.fixture
def small(tmp_path: Path, monkeypatch) -> Path:
    """Two training and three validation images of each class, one of these broken; the current folder is the parent."""
    root = tmp_path / "small"
    for split, number in (("train", 2), ("val", 3)):
        for label in range(2):
            for i in range(number):
                path = root / split / f"k{label}" / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(noise(48, 40, 100 * label + 10 * number + i), "JPEG"))
    (root / "val" / "k0" / "0.jpg").write_bytes(b"broken")
    monkeypatch.chdir(tmp_path)
    return root


def test_the_recipe_of_four_images_with_broken_validation_images_trains(small, ranks):
    assert main(["init", "small", "--weights", "none"]) == 0
    recipe = recipe_files.load("small.yaml")
    assert (recipe.global_batch, recipe.micro_batch) == (4, 4)
    assert recipe.data.max_broken == 0.17  # 1 of 6
    quick = ("--epochs", "1", "--schedule.warmup-epochs", "0", "--model.name", "shufflenet_v2_x0_5", "--name", "small")
    ranks(1).run("train", Path("small.yaml").absolute(), *quick, "--model.stem", "imagenet")
    [evaluation] = records(ranks.cwd / "runs" / "small", "epoch")
    assert evaluation["val_broken"] == 1


def test_mirror_images_can_be_ruled_out(small):
    for words, flip in (((), True), (("--no-flip", "--force"), False)):
        assert main(["init", "small", "--weights", "none", *words]) == 0
        assert recipe_files.load("small.yaml").data.flip is flip


@pytest.mark.parametrize("setting", [None, "val_list", "label_list"])
def test_images_that_cannot_be_read_are_named_once(small, capsys, setting):
    if setting == "val_list":
        shutil.rmtree(small / "val")
    elif setting == "label_list":
        shutil.copytree(small / "train" / "k0", small / "train" / "k0" / "deeper")
    (small / "train" / "k1" / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic")
    assert main(["init", "small", "--weights", "none"]) == 0
    assert capsys.readouterr().out.count("not used: 1 of unsupported formats (heic)") == 1
    data = recipe_files.load("small.yaml").data
    assert [name for name in ("val_list", "label_list") if getattr(data, name)] == [setting] * bool(setting)


@pytest.mark.parametrize("name", ["a\x7fb", "a\u200bb\U000e0001", 'a"\\b: #c'])
def test_a_folder_may_have_any_name(small, name):
    small.rename(name)
    assert main(["init", name, "--weights", "none", "--out", "new.yaml"]) == 0
    assert recipe_files.load("new.yaml").data.root == Path(name).resolve()


def test_a_folder_whose_name_is_no_text_is_refused(small, capsys):
    name = os.fsdecode(b"caf\xe9")
    small.rename(name)
    assert main(["init", name, "--weights", "none"]) == 64
    assert r"caf\xe9': the name is not UTF-8: rename the folder" in capsys.readouterr().err
    assert os.listdir() == [name]


def test_the_allowance_is_at_most_all_images(small):
    for path in (small / "val").rglob("*.jpg"):
        path.write_bytes(f"broken {path}".encode())
    assert main(["init", "small", "--weights", "none"]) == 0
    assert recipe_files.load("small.yaml").data.max_broken == 1


def test_tiny_images_get_a_recipe(small):
    for path in small.rglob("*.jpg"):
        path.write_bytes(encode(noise(5, 4, hash(path) % 1000), "JPEG"))
    assert main(["init", "small", "--weights", "none"]) == 0
    assert recipe_files.load("small.yaml").data.train_crop_size == 8


def test_a_recipe_that_would_be_refused_is_not_written(small, monkeypatch):
    monkeypatch.setattr(writing, "text", lambda *_: "data: {train_crop_size: 1}\n")
    assert main(["init", "small", "--weights", "none"]) == 64
    assert os.listdir() == ["small"]


def test_a_batch_has_no_more_images_than_the_dataset():
    for images in range(1, 17):
        batch = fine_tuning.plan(images).global_batch
        assert batch <= images and batch % fine_tuning.micro_batch(batch) == 0


@pytest.mark.parametrize("command", ["verify", "pack"])
def test_verification_and_packing_refuse_what_training_refuses(small, capsys, command):
    asked = ["data", command, "--root", "small", *(["--out", "shards"] if command == "pack" else [])]
    assert main([*asked, "--max-broken", "0.15"]) == 65  # of all images, a tenth is broken
    assert "1 of 6 validation images are broken" in capsys.readouterr().err
    assert main([*asked, "--max-broken", "0.17"]) == 0


@pytest.mark.parametrize(
    ("out", "message"), [("gone/x.yaml", "--out gone/x.yaml: no such folder: "), ("small", "--out small is a folder")]
)
def test_a_recipe_that_cannot_be_written_is_refused_before_the_work(small, capsys, monkeypatch, out, message):
    monkeypatch.setattr(survey, "take", lambda *_: pytest.fail("the images were read"))
    assert main(["init", "small", "--out", out, "--force"]) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model resnet81", "--model resnet81: torchvision has no classification model 'resnet81'; did you mean resnet"),
        ("--model timm:resnet_18 --weights none", "did you mean timm:resnet18"),
        ("--model keras:resnet18 --weights none", "--model keras:resnet18: known prefixes are timm:"),
        ("--model gone.py:build --weights none", "gone.py"),
        ("--weights gone.pth", "--weights gone.pth: --model.weights gone.pth: file not found"),
    ],
)
def test_a_network_that_there_is_not_is_refused_before_the_work(small, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(survey, "take", lambda *_: pytest.fail("the images were read"))
    assert main(["init", "small", *flags.split()]) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("weights", "resize"), [(None, 224), ("w.pth", 256)])
def test_the_images_have_the_size_that_the_network_requires(weights, resize):
    assert writing._sizes(48, Choice("vit_b_16", weights, 0, 224)) == (resize, 224)
    assert writing._sizes(48, Choice("resnet18", None, 0, None)) == (48, 48)


def test_the_recipe_of_a_network_with_one_size_has_it(small):
    assert main(["init", "small", "--model", "vit_b_16", "--weights", "none"]) == 0
    data = recipe_files.load("small.yaml").data
    assert (data.train_crop_size, data.val_crop_size, data.val_resize_size) == (224, 224, 224)


def test_a_full_disk_leaves_nothing_that_the_next_call_refuses(small, capsys):
    shutil.rmtree(small / "val")
    words = ("init", "small", "--out", "f.yaml", "--weights", "none", "--val-share", "0.5")
    with files_up_to(300):
        assert main([*words]) == 64
    assert "cannot write f.yaml: File too large" in capsys.readouterr().err
    assert not [*small.parent.glob("f.*")]
    assert main([*words]) == 0
    assert Path("f.val.txt").is_file()


def test_a_recipe_may_be_in_the_unpacked_folder(small):
    with tarfile.open("small.tar", "w") as tar:
        tar.add("small/train", "train")
    Path("packed").mkdir()
    Path("small.tar").rename("packed/small.tar")
    asked = ["init", "packed", "--unpack", "new", "--out", "new/x.yaml", "--weights", "none"]
    assert main(asked) == 0
    assert recipe_files.load("new/x.yaml").data.root == Path("new").resolve()


def test_a_signal_while_images_are_unpacked_leaves_nothing(tmp_path):
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed" / "many.zip", "w") as archive:
        for i in range(30_000):
            archive.writestr(f"k{i % 2}/{i}.jpg", b"unpacked only")
    running = start_python("init", "packed", "--unpack", "new", "--weights", "none", cwd=tmp_path)
    until(lambda: any(tmp_path.glob("new.tmp-*/*/k1")), "an image is unpacked", running=running)
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=240)
    assert (running.returncode, os.listdir(tmp_path)) == (128 + signal.SIGTERM, ["packed"])
    assert "stopped; nothing was unpacked" in output
