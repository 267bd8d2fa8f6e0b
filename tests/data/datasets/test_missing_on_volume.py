"""Datasets that are missing: in the pods of a job, the message names the command that brings them onto the volume."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from worldsize.config import job_pod
from worldsize.config.recipe import Data
from worldsize.data.datasets import file_index, folder, missing
from worldsize.errors import UserError


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a pod's volumes would be; there is one, ``v``."""
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr(job_pod, "RECIPE", PurePosixPath(tmp_path / "recipe.yaml"))
    monkeypatch.setattr(job_pod, "VOLUMES", PurePosixPath(tmp_path / "mnt"))
    (tmp_path / "mnt/v").mkdir(parents=True)
    return tmp_path / "mnt"


FETCH = "To download the dataset onto the volume: worldsize cluster data fetch imagenet --volume v --image IMAGE"


def refused(root: Path, name: str = "folder") -> str:
    with pytest.raises(UserError) as caught:
        folder.required_root(Data(name=name, root=root))
    return str(caught.value)


def test_a_dataset_that_can_be_fetched(volumes):
    root = volumes / "v/data/imagenet"
    assert refused(root, "imagenet") == f"{root}: no such folder. {FETCH}"
    with pytest.raises(UserError, match=FETCH):
        file_index.class_folders(root / "train")


def test_a_dataset_that_must_be_copied(volumes):
    put = ". To copy a folder of your machine onto the volume: worldsize cluster files put FOLDER v:/{} --image IMAGE"
    for place in ("data/folder", "cats/small"):
        assert refused(volumes / "v" / place) == f"{volumes / 'v' / place}: no such folder" + put.format(place)
    assert refused(volumes / "v/my data").endswith("files put FOLDER 'v:/my data' --image IMAGE")
    assert refused(volumes / "other").endswith("no such folder")


def test_elsewhere_no_command_of_a_cluster_is_named(tmp_path, monkeypatch):
    assert missing.on_volume(Path("/mnt/v/data/imagenet")) == ""
    monkeypatch.chdir(tmp_path)
    assert refused(Path("images")) == f"images: no such folder in {tmp_path}"
    with pytest.raises(UserError, match=r"/a/train: no such folder$"):
        file_index.class_folders(tmp_path / "a/train")
