"""Folders of operating systems beside the class folders: they are no classes, and no images in them are dropped silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import image_bytes, opened, put, relative_names, tree, two_classes
from worldsize import cli
from worldsize.data.datasets import file_index


def with_system_folders(root: Path) -> Path:
    """As unpacked on macOS and kept on network storage."""
    two_classes(root)
    for split in ("train", "val"):
        for hidden in ("__MACOSX/._1.png", "__MACOSX/cat/._2.png", ".cache/1.png"):
            put(root / split / hidden, b"resource fork")
        tree(root, f"{split}/@eaDir/1.png/SYNOPHOTO_THUMB_M.png", f"{split}/cat/@eaDir/1.png")
        (root / split / "lost+found").mkdir()
    put(root / "train" / "Thumbs.db", b"no image")
    put(root / "train" / "cat" / "Thumbs.db", b"no image")
    return root


@pytest.mark.parametrize("layout", ["folder", "imagenet", "multilabel"])
def test_they_are_no_classes(tmp_path, layout):
    root = with_system_folders(tmp_path / "root")
    data = opened(root, layout)
    assert data.classes == ("cat", "dog") and data.notes == ()
    assert relative_names(data.train) == relative_names(opened(two_classes(tmp_path / "other"), layout).train)


@pytest.mark.parametrize("command", [["verify"], ["info"], ["pack", "--out", "shards"]])
def test_commands_accept_what_init_accepts(tmp_path, command, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_system_folders(tmp_path / "root")
    assert cli.main(["init", "root", "--out", "recipe.yaml", "--weights", "none"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["data", command[0], "root", *command[1:]]) == 0, capsys.readouterr().err
    assert "@eaDir" not in capsys.readouterr().out


def test_their_images_are_counted_each_time(tmp_path, capsys):
    root = two_classes(tmp_path / "root")
    tree(root, "train/lost+found/1.png", "train/lost+found/2.png", "train/__MACOSX/3.png")
    counted = "not used: 3 in folders that are no classes (__MACOSX, lost+found); to use them, rename those folders"
    expected = f"{root / 'train'}: {counted}"
    cache = tmp_path / "cache"
    assert [opened(root, cache=cache).notes for _ in range(2)] == [(expected,)] * 2
    put(root / "train" / "lost+found" / "4.png")
    assert "not used: 4 in" in opened(root, cache=cache).notes[0]
    assert cli.main(["data", "info", str(root)]) == 0
    assert "4 in folders that are no classes" in capsys.readouterr().out


def test_predict_does_not_read_them(tmp_path):
    put(tmp_path / "1.png", image_bytes())
    tree(tmp_path, "@eaDir/1.png/thumb.png", "__MACOSX/2.png")
    assert file_index.below(tmp_path) == ["1.png"]
