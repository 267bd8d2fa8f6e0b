"""``worldsize eval`` refuses a split with more broken images than ``data.max_broken`` allows, as training does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from folders import folder_recipe, images
from processes import worldsize
from worldsize import cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``runs/a`` and its images."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = folder_recipe(folder, images(folder / "images", {"cat": 8, "dog": 8}, {"cat": 9, "dog": 9}))
    done = worldsize("train", recipe, "--name", "a", "--max-steps", "0", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def damaged(trained: Path, tmp_path: Path) -> Path:
    """The same images, 4 of the 18 for validation broken."""
    root = shutil.copytree(trained / "images", tmp_path / "images")
    for path in sorted((root / "val").rglob("*.png"))[7:11]:
        path.write_bytes(b"not an image")
    return root


TOO_MANY = "4 of 18 images cannot be decoded, more than the allowed 0.10%; see the warnings above for their names."


@pytest.mark.parametrize("processes", ["1", "2"])
def test_too_many_broken_images_end_an_evaluation_with_65(trained: Path, damaged: Path, processes: str):
    words = ("eval", trained / "runs" / "a", "--data.root", damaged, "--procs", processes)
    refused = worldsize(*words, cwd=trained)
    assert refused.returncode == 65, refused.stdout + refused.stderr
    assert refused.stdout == ""
    assert refused.stderr.count(TOO_MANY) == 1
    assert "raise --data.max-broken" in refused.stderr
    assert refused.stderr.count("warning: broken image") == refused.stderr.count("broken image") == 4
    allowed = worldsize(*words, "--data.max-broken", "0.23", cwd=trained)
    assert allowed.returncode == 0, allowed.stderr
    assert "4 images not counted: could not be decoded" in allowed.stdout


def test_as_training_does(trained: Path, damaged: Path):
    refused = worldsize("train", "mine.yaml", "--data.root", damaged, "--max-steps", "0", cwd=trained)
    assert refused.returncode == 65
    assert TOO_MANY.replace("the warnings above", "log.txt") in refused.stderr


def test_images_of_ones_own_count_too_and_no_page_is_written(trained: Path, damaged: Path, tmp_path: Path, capfd):
    words = ["eval", str(trained / "runs" / "a"), "--images", str(damaged / "val"), "--details", str(tmp_path / "page")]
    assert cli.main(words) == 65
    assert TOO_MANY in capfd.readouterr().err
    assert not (tmp_path / "page").exists()


def test_predictions_name_them_and_go_on(trained: Path, damaged: Path, capfd):
    assert cli.main(["predict", str(trained / "runs" / "a"), "--data.root", str(damaged), "--format", "csv"]) == 0
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 19
    assert "4 of 18 images could not be decoded" in err
