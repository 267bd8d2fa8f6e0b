"""Refused fetches: folders with other files, untrusted archives, and disks that are too small."""

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
from worldsize.data import progress_bar
from worldsize.data.fetch import command, unpack
from worldsize.data.fetch.archives import Member
from worldsize.data.fetch.state import FOLDER
from worldsize.errors import DataError, UserError

# Folders, sources and archives ---------------------------------------------------------------------------------------


def test_a_folder_with_other_files(archive, tmp_path):
    put(tmp_path / "dataset" / "thesis.tex")
    with pytest.raises(UserError, match=r"dataset is not empty \(it contains thesis.tex\); pass a new folder with --to"):
        fetched(archive, tmp_path / "dataset")


def test_a_folder_begun_from_another_source(archive, tmp_path):
    fetched(archive, tmp_path / "dataset")
    with pytest.raises(
        UserError, match=r"dataset contains folder from .*images.zip.*delete this one to fetch folder from .*x.zip"
    ):
        fetched(archive.rename(tmp_path / "x.zip"), tmp_path / "dataset")


@pytest.mark.parametrize("checksum", ["abc", "g" * 64, "sha256:" + "0" * 64, ""])
def test_a_malformed_checksum_is_refused_before_the_download(archive, tmp_path, checksum):
    with Server(archive.read_bytes()) as server, pytest.raises(UserError, match="a SHA-256 has 64 hexadecimal digits"):
        fetched(server.url, tmp_path / "dataset", sha256=checksum)
    assert not server.requests and not (tmp_path / "dataset").exists()


def test_a_checksum_after_completion_is_compared_with_the_one_that_was_verified(archive, tmp_path, capsys):
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    for wanted in (right, right.upper()):
        assert fetched(archive, tmp_path / "checked", sha256=wanted) == 0
    with pytest.raises(DataError, match=f"another checksum, sha256:{right}"):
        fetched(archive, tmp_path / "checked", sha256="0" * 64)
    fetched(archive, tmp_path / "unchecked")
    assert "warning" not in capsys.readouterr().out
    assert fetched(archive, tmp_path / "unchecked", sha256=right) == 0
    assert "warning: --sha256 was not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "--from is required: pass an archive of the images"),
        ("nowhere.zip", "nowhere.zip: no such file"),
        ("https://me:secret@example.org/a.zip", "contains a password"),
        ("http://[::1/a.zip", "is not a valid URL"),
        ("kaggle:", "the competition is missing"),
    ],
)
def test_an_invalid_source(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        command.run(command.Fetch("folder", tmp_path / "dataset", source))
    assert "secret" not in str(caught.value)


def test_a_wrong_checksum_and_then_the_right_one(archive, tmp_path):
    correct = hashlib.sha256(archive.read_bytes()).hexdigest()
    with Server(archive.read_bytes()) as server:
        with pytest.raises(DataError, match=rf"the sha256 of .* is {correct}, but {'0' * 64} is expected: delete the file"):
            fetched(server.url, tmp_path / "dataset", sha256="0" * 64)
        assert not contents(tmp_path / "dataset")
        fetched(server.url, tmp_path / "dataset", sha256=correct.upper())
    assert len(server.requests) == 1


def test_a_web_page_instead_of_an_archive(tmp_path):
    with Server(b"<html>please log in</html>" * 100) as server, pytest.raises(DataError, match="not a zip or tar file"):
        fetched(server.url, tmp_path / "dataset")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_a_damaged_archive(tree, tmp_path, name):
    put(tree / "train/cat/large.png", os.urandom(30_000))
    data = bytearray(pack(tree, tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        fetched(tmp_path / name, tmp_path / "dataset")


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_a_truncated_archive(tree, tmp_path, name):
    put(tree / "train/cat/large.png", os.urandom(30_000))
    data = pack(tree, tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        fetched(tmp_path / name, tmp_path / "dataset")
    assert not contents(tmp_path / "dataset")


def test_a_tar_file_truncated_after_a_member_or_with_a_damaged_header(tree, tmp_path):
    data = pack(tree, tmp_path / "a.tar").read_bytes()
    end = tarfile.open(tmp_path / "a.tar").getmembers()[-1].offset_data + 512  # no image is larger than 512 bytes
    for cut in range(512, end + 1, 512):
        (tmp_path / "a.tar").write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"a.tar is damaged"):
            fetched(tmp_path / "a.tar", tmp_path / "dataset")
    (tmp_path / "a.tar").write_bytes(data[:1024] + b"?" + data[1025:])
    with pytest.raises(DataError, match=r"a.tar is damaged"):
        fetched(tmp_path / "a.tar", tmp_path / "dataset")
    (tmp_path / "a.tar").write_bytes(data)
    assert fetched(tmp_path / "a.tar", tmp_path / "dataset") == 0


class BreakingStream(io.BytesIO):
    """A stream that fails after its first chunk."""

    def read(self, amount: int | None = -1) -> bytes:
        if self.tell():
            raise OSError("gone")
        return super().read(amount)


def test_a_file_is_in_place_complete_or_not_at_all(tmp_path):
    class Archive:
        parallel = False

    def put_in_place(stream: io.BytesIO, length: int) -> None:
        one = Member("train/cat/1.png", length, lambda: stream)
        unpack.unpack(Archive(), iter([one]), tmp_path, 0, lambda _: None, progress_bar.ByteProgress("unpacking"))

    (tmp_path / FOLDER).mkdir()
    with pytest.raises(OSError, match="gone"):
        put_in_place(BreakingStream(bytes(100)), 200)
    with pytest.raises(DataError, match=r"the archive is damaged: train/cat/1.png has 100 bytes instead of 200"):
        put_in_place(io.BytesIO(bytes(100)), 200)
    assert not contents(tmp_path)
    put_in_place(io.BytesIO(bytes(200)), 200)
    assert contents(tmp_path) == {"train/cat/1.png": bytes(200)}


def test_an_archive_without_the_expected_layout(tmp_path):
    put(tmp_path / "tree" / "cats" / "1.png")
    put(tmp_path / "tree" / "dogs" / "1.png")
    with pytest.raises(DataError, match=r"does not contain the expected folder dataset: .*missing: train"):
        fetched(pack(tmp_path / "tree", tmp_path / "a.tar.gz"), tmp_path / "dataset")


def test_an_empty_archive(tmp_path):
    (tmp_path / "tree").mkdir()
    with pytest.raises(DataError, match="contains no files"):
        fetched(pack(tmp_path / "tree", tmp_path / "a.zip"), tmp_path / "dataset")


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
    ("make", "message"),
    [
        (functools.partial(evil_zip, name="../out.png"), "points outside the target folder"),
        (functools.partial(evil_zip, name="train/../../out.png"), "points outside the target folder"),
        (functools.partial(evil_zip, name="/tmp/out.png"), "points outside the target folder"),
        (functools.partial(evil_zip, name="train/cat", mode=stat.S_IFLNK | 0o777, data=b"/etc"), "a link or a device"),
        (functools.partial(evil_zip, name="train/pipe", mode=stat.S_IFIFO | 0o644), "a link or a device"),
        (functools.partial(evil_zip, name="train/cat/1.png"), "twice"),
        (functools.partial(evil_zip, name="./train//cat/1.png"), "twice"),
        (functools.partial(evil_tar, name="../out.png"), "points outside the target folder"),
        (functools.partial(evil_tar, name="/tmp/out.png"), "points outside the target folder"),
        (functools.partial(evil_tar, name="train", kind=tarfile.SYMTYPE, target="/etc"), "a link or a device"),
        (functools.partial(evil_tar, name="train", kind=tarfile.LNKTYPE, target="/etc/passwd"), "a link or a device"),
        (functools.partial(evil_tar, name="train", kind=tarfile.CHRTYPE), "a link or a device"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_nothing_of_an_untrusted_archive_is_written(tmp_path, make, message):
    archive = make(tmp_path / "evil.archive")
    before = {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()}
    with pytest.raises(DataError, match=message):
        fetched(archive, tmp_path / "dataset")
    new = {path for path in {*tmp_path.rglob("*"), *tmp_path.parent.iterdir()} - before if FOLDER not in path.parts}
    assert new == {tmp_path / "dataset"}


def test_an_archive_cannot_forge_the_state(tree, tmp_path):
    put(tree / FOLDER / "state.json", b'{"verified": "by me"}')
    fetched(pack(tree, tmp_path / "a.zip"), tmp_path / "dataset")
    assert state(tmp_path / "dataset")["verified"]["files"] == 5


def test_an_encrypted_archive(tmp_path):
    path = evil_zip(tmp_path / "a.zip", "train/secret.png")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train/secret.png is encrypted"):
        fetched(path, tmp_path / "dataset")


def test_a_file_where_the_folder_should_be(archive, tmp_path):
    put(tmp_path / "dataset", b"a file")
    with pytest.raises(UserError, match=r"dataset.*(Not a directory|File exists)"):
        fetched(archive, tmp_path / "dataset")


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
        pytest.skip("needs permission to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_no_space_for_the_archive(tmp_path, small):
    with Server(os.urandom(3_000_000)) as server:
        with pytest.raises(
            UserError, match=r"not enough space in .*disk/data: 2\.\d MB free, 6\.0 MB needed \(3\.0 MB to download"
        ):
            fetched(server.url, small / "data")
        assert (small / "data" / FOLDER / "archive.part").stat().st_size == 0


def test_no_space_for_the_contents(tree, tmp_path, small):
    put(tree / "train/cat/large.png", bytes(5_000_000))
    with pytest.raises(UserError, match=r"2\.\d MB free, 5\.0 MB needed \(0 bytes to download, 5\.0 MB to unpack"):
        fetched(pack(tree, tmp_path / "a.zip"), small / "data")
    assert not contents(small / "data")


def test_a_disk_that_fills_up_meanwhile(tree, tmp_path, small, monkeypatch):
    put(tree / "train/cat/large.png", bytes(1_500_000))
    archive = pack(tree, tmp_path / "a.zip")
    put(small / "others", bytes(1_000_000))
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _, usage=command.shutil.disk_usage: usage("/"))
    with pytest.raises(UserError, match=r"the disk of .*data is full; free space and rerun this command"):
        fetched(archive, small / "data")
    (small / "others").unlink()
    assert fetched(archive, small / "data") == 0
    assert contents(small / "data") == contents(tree)
