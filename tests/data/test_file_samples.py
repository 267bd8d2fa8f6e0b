"""Many files are read in one call, and each is what reading it alone gives."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpegs import NATIVE, needs_native
from worldsize.data.file_samples import FileSamples
from worldsize.data.images import native
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import Read, stored_or_error
from worldsize.errors import DataChanged
from worldsize.watchdog import heartbeat


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What can be found under the names of images."""
    path = tmp_path_factory.mktemp("folder")
    (path / "image").write_bytes(b"pixels")
    (path / "empty").touch()
    (path / "larger than the room").write_bytes(np.random.default_rng(0).bytes(3 * native._ROOM))
    (path / "as large as the room").write_bytes(bytes(native._ROOM))
    (path / "folder").mkdir()
    os.mkfifo(path / "FIFO")
    (path / "link").symlink_to("image")
    (path / "dangling link").symlink_to("nothing")
    (path / "circle").symlink_to("circle")
    (path / os.fsdecode(b"caf\xe9")).write_bytes(b"not UTF-8")
    (path / "grün").write_bytes(b"UTF-8")
    (path / "device").symlink_to("/dev/null")
    (path / "size unknown").symlink_to("/proc/version")  # 0 bytes, according to its status
    (path / ("a" * 250)).write_bytes(b"a long name")
    return path


@pytest.fixture
def changing(tmp_path: Path) -> tuple[Path, FileSamples]:
    """The last of three files, which the test changes after it was read."""
    names = ["first", "second", "third"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path / "third", samples_of(tmp_path, names)


def samples_of(folder: Path, names: list[str]) -> FileSamples:
    encoded = [os.fsencode(name) for name in names]
    ends = np.cumsum([len(name) for name in encoded])
    return FileSamples(folder, (), b"".join(encoded), ends, np.zeros((len(names), 1), np.uint8), ("a",))


def shown(read: Read) -> bytes | str:
    return str(read) if isinstance(read, BrokenImage) else bytes(read)


@needs_native
@given(st.data())
def test_reading_together_is_reading_one_by_one(folder: Path, data: st.DataObject):
    names = data.draw(st.lists(st.sampled_from([*sorted(os.listdir(folder)), "nothing"]), min_size=1, max_size=12))
    together, alone = samples_of(folder, names), samples_of(folder, names)
    expected = [shown(stored_or_error(alone, i)) for i in range(len(names))]
    assert [shown(read) for read in together.several(np.arange(len(names)))] == expected


@needs_native
def test_absolute_names_are_not_looked_for_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "image").write_bytes(b"pixels")
    decoy = tmp_path / "cwd" / str(tmp_path / "image").lstrip("/")
    decoy.parent.mkdir(parents=True)
    decoy.write_bytes(b"others")
    (tmp_path / "cwd" / "relative").write_bytes(b"here")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(FileSamples, "encoded", None)
    samples = samples_of(Path(), [str(tmp_path / "image"), "relative"])
    assert [bytes(read) for read in samples.several(np.arange(2))] == [b"pixels", b"here"]


@needs_native
def test_after_a_file_that_cannot_be_read_each_is_read_alone(folder: Path):
    assert NATIVE is not None
    contents, _ = NATIVE.files([os.fsencode(folder / name) for name in ("image", "nothing", "image", "link")])
    assert contents == [b"pixels", None, None, None]


@needs_native
def test_no_more_memory_is_held_than_the_files_have(folder: Path):
    assert NATIVE is not None
    image, _, other = NATIVE.files([os.fsencode(folder / name) for name in ("image", "larger than the room", "link")])[0]
    assert image is not None and other is not None
    assert image.nbytes == image.obj.nbytes == other.nbytes == other.obj.nbytes == len(b"pixels")


def test_no_images_are_read_for_none(folder: Path):
    assert list(samples_of(folder, ["image"]).several(np.zeros(0, np.int64))) == []


@needs_native
def test_images_are_read_in_the_order_asked_for_and_several_times(folder: Path):
    samples = samples_of(folder, ["image", "link", "grün"])
    assert [bytes(read) for read in samples.several(np.array([2, 0, 2, 1]))] == [b"UTF-8", b"pixels", b"UTF-8", b"pixels"]


@needs_native
@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 400))
def test_any_room_gives_the_same_bytes_and_checksums(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], room: int):
    assert NATIVE is not None
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    expected = [rng.bytes(size) for size in sizes]
    for number, content in enumerate(expected):
        (folder / f"{number}").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_ROOM", room)
        contents, checksums = NATIVE.files([os.fsencode(folder / f"{number}") for number in range(len(sizes))])
    assert contents == expected
    assert checksums.tolist() == [crc32c.crc32c(content) for content in expected]


@needs_native
def test_intact_files_are_not_read_a_second_time(folder: Path, monkeypatch: pytest.MonkeyPatch):
    names = ["image", "empty", "larger than the room", "link", "as large as the room", os.fsdecode(b"caf\xe9"), "grün"]
    monkeypatch.setattr(FileSamples, "encoded", None)
    assert len(samples_of(folder, names).several(np.arange(len(names)))) == len(names)


@pytest.mark.parametrize("before", ["together", "alone"])
def test_a_file_that_changes_is_named_when_others_are_read_with_it(changing: tuple[Path, FileSamples], before: str):
    path, samples = changing
    if before == "together":
        samples.several(np.arange(3))
    else:
        samples.encoded(2)
    path.write_bytes(b"other")
    with pytest.raises(DataChanged, match="/third is not what this run first read there: it changed"):
        samples.several(np.arange(3))
    with pytest.raises(DataChanged, match="/third is not what this run first read there: it changed"):
        samples.encoded(2)


def test_a_file_that_was_deleted_is_named_when_others_are_read_with_it(changing: tuple[Path, FileSamples]):
    path, samples = changing
    samples.several(np.arange(3))
    path.unlink()
    with pytest.raises(DataChanged, match="/third was deleted since this run first read it"):
        samples.several(np.arange(3))


@needs_native
@pytest.mark.parametrize(
    ("names", "named"), [(["image"], "/image"), (["grün", "image", "link"], "/grün or one of 2 others")]
)
def test_the_watchdog_knows_what_is_being_read(folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], named: str):
    read, seen = native.Native.files, []
    with mmap.mmap(-1, heartbeat.SIZE) as memory, heartbeat.beating(memory):

        def files(self: native.Native, paths: list[bytes]) -> Any:
            seen.append(heartbeat.oldest_read(memory))
            return read(self, paths)

        monkeypatch.setattr(native.Native, "files", files)
        samples_of(folder, names).several(np.arange(len(names)))
    assert seen[0] is not None and seen[0][0].endswith(named)
