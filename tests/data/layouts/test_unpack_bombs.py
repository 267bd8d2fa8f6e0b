"""Archives of a few bytes that stand for many."""

from __future__ import annotations

import shutil
import tarfile
import tracemalloc
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from worldsize.data.layouts import packed
from worldsize.errors import UserError

BYTES = 64 << 20


def bomb(root: Path, kind: str) -> None:
    """An archive with a file of zeros."""
    zeros = root.with_name("zeros")
    zeros.write_bytes(bytes(BYTES))
    root.mkdir()
    if kind == "zip":
        with zipfile.ZipFile(root / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(zeros, "x/y.bin")
    else:
        with tarfile.open(root / "a.tar.gz", "w:gz") as archive:
            archive.add(zeros, "x/y.bin")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_large_file_in_an_archive_is_not_held_in_memory(tmp_path, kind):
    bomb(tmp_path / "root", kind)
    tracemalloc.start()
    try:
        packed.unpack(tmp_path / "root", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < BYTES / 4
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "a" / "x" / "y.bin").stat().st_size == BYTES


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_does_not_fill_the_disk(tmp_path, monkeypatch, kind):
    bomb(tmp_path / "root", kind)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(BYTES - 1))
    with pytest.raises(UserError, match=r"not enough space to unpack x/y\.bin of .*: 67,108,864 bytes, and 67,108,863 are"):
        packed.unpack(tmp_path / "root", tmp_path / "out")
    assert not (tmp_path / "out").exists()
