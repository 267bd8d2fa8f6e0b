"""Fetching that is refused: folders of others, archives that cannot be trusted, and disks that are too small."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fetching import contents, fetched, pack, state
from trees import put
from webserver import Server
from worldsize.data import fetch
from worldsize.data.fetching import progress, unpack
from worldsize.data.fetching.archives import Member
from worldsize.data.fetching.state import FOLDER
from worldsize.errors import DataError, UserError

# Refused -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_ours(archive, tmp_path):
    put(tmp_path / "there" / "thesis.tex")
    with pytest.raises(UserError, match=r"there is not empty \(thesis.tex is in it\): name a new folder with --to"):
        fetched(archive, tmp_path / "there")


def test_a_folder_begun_from_another_source(archive, tmp_path):
    fetched(archive, tmp_path / "there")
    with pytest.raises(
        UserError, match=r"there holds folder from .*pictures.zip.*remove this one to fetch folder from .*x.zip"
    ):
        fetched(archive.rename(tmp_path / "x.zip"), tmp_path / "there")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "name an archive of the pictures with --from"),
        ("nowhere.zip", "nowhere.zip: there is no such file"),
        ("https://me:secret@example.org/a.zip", "a password in it"),
        ("http://[::1/a.zip", "is not an address"),
        ("kaggle:", "names no competition"),
    ],
)
def test_a_source_that_is_none(tmp_path, monkeypatch, source, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        fetch.run(fetch.Fetch("folder", tmp_path / "there", source))
    assert "secret" not in str(caught.value)


def test_a_wrong_checksum_and_then_the_right_one(archive, tmp_path):
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    with Server(archive.read_bytes()) as server:
        with pytest.raises(DataError, match=rf"the sha256 of .* is {right}, but {'0' * 64} is expected: remove the file"):
            fetched(server.url, tmp_path / "there", sha256="0" * 64)
        assert not contents(tmp_path / "there")
        fetched(server.url, tmp_path / "there", sha256=right.upper())
    assert len(server.asked) == 1


def test_a_web_page_instead_of_an_archive(tmp_path):
    with Server(b"<html>please log in</html>" * 100) as server, pytest.raises(DataError, match="no zip or tar file"):
        fetched(server.url, tmp_path / "there")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_a_damaged_archive(tree, tmp_path, name):
    put(tree / "train/cat/large.png", os.urandom(30_000))
    data = bytearray(pack(tree, tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        fetched(tmp_path / name, tmp_path / "there")


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_an_archive_that_was_cut_short(tree, tmp_path, name):
    put(tree / "train/cat/large.png", os.urandom(30_000))
    data = pack(tree, tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        fetched(tmp_path / name, tmp_path / "there")
    assert not contents(tmp_path / "there")


def test_a_tar_file_that_ends_after_a_whole_member_or_has_a_damaged_header(tree, tmp_path):
    data = pack(tree, tmp_path / "a.tar").read_bytes()
    end = tarfile.open(tmp_path / "a.tar").getmembers()[-1].offset_data + 512  # no picture is longer
    for cut in range(512, end + 1, 512):
        (tmp_path / "a.tar").write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"a.tar is damaged"):
            fetched(tmp_path / "a.tar", tmp_path / "there")
    (tmp_path / "a.tar").write_bytes(data[:1024] + b"?" + data[1025:])
    with pytest.raises(DataError, match=r"a.tar is damaged"):
        fetched(tmp_path / "a.tar", tmp_path / "there")
    (tmp_path / "a.tar").write_bytes(data)
    assert fetched(tmp_path / "a.tar", tmp_path / "there") == 0


class Breaks(io.BytesIO):
    """A stream that breaks after its first piece."""

    def read(self, amount: int | None = -1) -> bytes:
        if self.tell():
            raise OSError("gone")
        return super().read(amount)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    class Archive:
        parallel = False

    def put_in_place(stream: io.BytesIO, length: int) -> None:
        one = Member("train/cat/1.png", length, lambda: stream)
        unpack.unpack(Archive(), iter([one]), tmp_path, 0, lambda _: None, progress.Meter("unpacking"))

    (tmp_path / FOLDER).mkdir()
    with pytest.raises(OSError, match="gone"):
        put_in_place(Breaks(bytes(100)), 200)
    with pytest.raises(DataError, match=r"train/cat/1.png has 100 bytes in the archive instead of 200"):
        put_in_place(io.BytesIO(bytes(100)), 200)
    assert not contents(tmp_path)
    put_in_place(io.BytesIO(bytes(200)), 200)
    assert contents(tmp_path) == {"train/cat/1.png": bytes(200)}


def test_an_archive_that_is_not_laid_out(tmp_path):
    put(tmp_path / "tree" / "cats" / "1.png")
    put(tmp_path / "tree" / "dogs" / "1.png")
    with pytest.raises(DataError, match=r"does not hold what folder should be: .*missing: train"):
        fetched(pack(tmp_path / "tree", tmp_path / "a.tar.gz"), tmp_path / "there")


def test_an_empty_archive(tmp_path):
    (tmp_path / "tree").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        fetched(pack(tmp_path / "tree", tmp_path / "a.zip"), tmp_path / "there")


def evil_zip(path: Path, name: str, mode: int = stat.S_IFREG | 0o644, data: bytes = b"evil") -> Path:
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("train/cat/1.png", b"good")
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        out.writestr(info, data)
    return path


def evil_tar(path: Path, name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Path:
    with tarfile.open(path, "w:gz") as out:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        out.addfile(info, io.BytesIO())
        inside = tarfile.TarInfo(f"{name}/passwd")
        inside.size = 4
        out.addfile(inside, io.BytesIO(b"evil"))
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (functools.partial(evil_zip, name="../out.png"), "points out of the folder"),
        (functools.partial(evil_zip, name="train/../../out.png"), "points out of the folder"),
        (functools.partial(evil_zip, name="/tmp/out.png"), "points out of the folder"),
        (functools.partial(evil_zip, name="train/cat", mode=stat.S_IFLNK | 0o777, data=b"/etc"), "a link or a device"),
        (functools.partial(evil_zip, name="train/pipe", mode=stat.S_IFIFO | 0o644), "a link or a device"),
        (functools.partial(evil_zip, name="train/cat/1.png"), "twice"),
        (functools.partial(evil_zip, name="./train//cat/1.png"), "twice"),
        (functools.partial(evil_tar, name="../out.png"), "points out of the folder"),
        (functools.partial(evil_tar, name="/tmp/out.png"), "points out of the folder"),
        (functools.partial(evil_tar, name="train", kind=tarfile.SYMTYPE, target="/etc"), "a link or a device"),
        (functools.partial(evil_tar, name="train", kind=tarfile.LNKTYPE, target="/etc/passwd"), "a link or a device"),
        (functools.partial(evil_tar, name="train", kind=tarfile.CHRTYPE), "a link or a device"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_nothing_is_written_of_an_archive_that_cannot_be_trusted(tmp_path, make, says):
    archive = make(tmp_path / "evil.archive")
    before = {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()}
    with pytest.raises(DataError, match=says):
        fetched(archive, tmp_path / "there")
    new = {path for path in {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()} - before if FOLDER not in path.parts}
    assert new == {tmp_path / "there"}


def test_our_own_notes_cannot_be_forged(tree, tmp_path):
    put(tree / FOLDER / "state.json", b'{"verified": "by me"}')
    fetched(pack(tree, tmp_path / "a.zip"), tmp_path / "there")
    assert state(tmp_path / "there")["verified"]["files"] == 5


def test_an_encrypted_archive(tmp_path):
    path = evil_zip(tmp_path / "a.zip", "train/secret.png")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train/secret.png is encrypted"):
        fetched(path, tmp_path / "there")


def test_a_file_where_the_folder_should_be(archive, tmp_path):
    put(tmp_path / "there", b"a file")
    with pytest.raises(UserError, match=r"there.*(Not a directory|File exists)"):
        fetched(archive, tmp_path / "there")


# A small disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_no_room_for_the_archive(tmp_path, small):
    with Server(os.urandom(3_000_000)) as server:
        with pytest.raises(
            UserError, match=r"disk/data has 2\.\d MB free, but 6\.0 MB are needed \(3\.0 MB still to download"
        ):
            fetched(server.url, small / "data")
        assert (small / "data" / FOLDER / "archive.part").stat().st_size == 0


def test_no_room_for_what_is_in_it(tree, tmp_path, small):
    put(tree / "train/cat/large.png", bytes(5_000_000))
    with pytest.raises(UserError, match=r"has 2\.\d MB free, but 5\.0 MB are needed \(0 bytes still .*, 5\.0 MB to unpack"):
        fetched(pack(tree, tmp_path / "a.zip"), small / "data")
    assert not contents(small / "data")


def test_a_disk_that_others_fill_meanwhile(tree, tmp_path, small, monkeypatch):
    put(tree / "train/cat/large.png", bytes(1_500_000))
    archive = pack(tree, tmp_path / "a.zip")
    put(small / "others", bytes(1_000_000))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _, usage=fetch.shutil.disk_usage: usage("/"))
    with pytest.raises(UserError, match=r"the disk of .*data is full: free some, and run the same command again"):
        fetched(archive, small / "data")
    (small / "others").unlink()
    assert fetched(archive, small / "data") == 0
    assert contents(small / "data") == contents(tree)
