"""Messages: nouns agree with their numbers, and commands can be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from packing import encode, noise
from paths import SMALL_NETWORK
from trees import put
from worldsize.config import wording
from worldsize.config.recipe import Data
from worldsize.data.datasets.folder import open_dataset
from worldsize.data.datasets.validation_split import by_list
from worldsize.data.survey import verify_report
from worldsize.errors import UserError
from worldsize.runs.run_folder import check_name
from worldsize.training.evaluation import Result


def test_nouns_agree_with_their_numbers():
    assert [wording.count(n) for n in (0, 1, 2, 1200)] == ["0 images", "1 image", "2 images", "1,200 images"]
    assert (wording.count(1, "class", "classes"), wording.count(2, "class", "classes")) == ("1 class", "2 classes")
    assert [wording.form(n, "epoch") for n in (0.333, 1.0, 2)] == ["epochs", "epoch", "epochs"]
    assert str(Result(1.0, 1.0, 1.0, 1, 0)).endswith("on 1 image")


@pytest.fixture
def small(tmp_path):
    """Four training images, two validation images; the path has a blank."""
    for label in "ab":
        for i in range(2):
            put(tmp_path / "my data" / "train" / label / f"{i}.png", encode(noise(40, 40, i), "PNG"))
        put(tmp_path / "my data" / "val" / label / "0.png", encode(noise(40, 40, 9), "PNG"))
    return tmp_path / "my data"


def test_one_image_is_one_image(small, tmp_path):
    dataset = open_dataset(Data(name="folder", root=small), tmp_path / "cache")
    (tmp_path / "list").write_text("a/9.png\n")
    with pytest.raises(UserError, match=r"names 1 image not in"):
        by_list(dataset.train, tmp_path / "list")
    (tmp_path / "list").write_text("a/1.png\n")
    assert "  val   1 image; per class" in "\n".join(verify_report.overview(by_list(dataset.train, tmp_path / "list")))


def test_a_path_in_a_command_is_no_flag():
    assert wording.quoted(Path("-out/run 1")) == "'./-out/run 1'"
    assert wording.quoted(Path("/out/-run")) == "/out/-run"


def test_commands_in_messages_are_quoted(small, tmp_path, ranks):
    model = ("--model.name", SMALL_NETWORK, "--global-batch", "4", "--micro-batch", "4", "--max-steps", "2")
    settings = ("--data.name", "folder", "--data.root", small, *model, "--out", "my runs", "--name", "r")
    stopped = ranks(1).run("train", "digits", *settings, "--stop-after", "1", code=75)
    [again] = re.findall("Continue with: (.*)", stopped)
    assert shlex.split(again) == ["worldsize", "train", "--resume", "my runs/r"]
    ended = ranks(1).run(*shlex.split(again)[1:])
    [following] = re.findall("Next: (.*)", ended)
    assert shlex.split(following) == ["worldsize", "eval", "my runs/r"]
    with pytest.raises(UserError, match=r"--resume '.*my runs/r'"):
        check_name(ranks.cwd / "my runs", "r")
    with pytest.raises(UserError, match=r"`worldsize init '.*my data/train'`"):
        open_dataset(Data(name="folder", root=small / "train"), tmp_path / "cache")
