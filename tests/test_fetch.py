"""Fetching data sets: interrupted in every way, refused in every way, and equal to what was packed."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees import opened, put, two_classes
from webserver import Server
from worldsize.data import fetch
from worldsize.data.fetching import Interrupted, download, kaggle, progress, unpack
from worldsize.data.fetching.archives import Member, reading, survey
from worldsize.data.fetching.known import KNOWN
from worldsize.data.fetching.state import FOLDER, State, locked
from worldsize.errors import DataError, Stopped, UserError, WorldsizeError

COMPETITION = "imagenet-object-localization-challenge"

# What runs `worldsize data fetch` in a process of its own.
COMMAND = """
import sys
import tyro
from worldsize.data import fetch
from worldsize.errors import WorldsizeError
try:
    sys.exit(fetch.run(tyro.cli(fetch.Fetch, args=sys.argv[1:])))
except WorldsizeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


# Archives and trees --------------------------------------------------------------------------------------------------


def pack(tree: Path, archive: Path) -> Path:
    """An archive of all files below ``tree``, of the kind that its name says."""
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
            for path in files:
                out.write(path, path.relative_to(tree))
    else:
        with tarfile.open(archive, f"w:{archive.suffix.lstrip('.').replace('tar', '')}") as tar:
            for path in files:
                tar.add(path, path.relative_to(tree))
    return archive


def contents(root: Path) -> dict[str, bytes]:
    """Every file in the tree, but for the fetch's own."""
    paths = (path for path in root.rglob("*") if path.is_file() and FOLDER not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def fetched(source: Path | str, to: Path, dataset="folder", **more) -> int:
    return fetch.run(fetch.Fetch(dataset, to, str(source), **more))


def start(source: Path | str, to: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", COMMAND, "folder", "--to", str(to), "--from", str(source), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state(root: Path) -> dict:
    try:
        return json.loads((root / FOLDER / "state.json").read_text())
    except FileNotFoundError:
        return {}


def until(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.002)


@pytest.fixture
def tree(tmp_path) -> Path:
    return two_classes(tmp_path / "tree")


@pytest.fixture
def archive(tree, tmp_path) -> Path:
    return pack(tree, tmp_path / "pictures.zip")


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, Path]:
    """Some thousand files, which take a while to unpack, and an archive of them."""
    folder = tmp_path_factory.mktemp("large")
    tree = two_classes(folder / "tree")
    for i in range(3000):
        put(tree / f"train/cat/{i:04}.png", os.urandom(100 + i % 50))
    return tree, pack(tree, folder / "large.zip")


@pytest.fixture
def challenge(tmp_path) -> Path:
    """A little of ImageNet, as Kaggle packs it."""
    root = tmp_path / "challenge"
    for i, wnid in enumerate(("n01440764", "n01443537", "n02102040")):
        put(root / f"ILSVRC/Data/CLS-LOC/train/{wnid}/{wnid}_1.JPEG", bytes([i]) * 20_000)
        put(root / f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_0000000{i}.JPEG", bytes([9 - i]) * 20_000)
    rows = ("ImageId,PredictionString", *(f"ILSVRC2012_val_0000000{i},n01440764 1 2 3 4" for i in range(3)))
    put(root / "LOC_val_solution.csv", "\n".join(rows).encode())
    return root


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """A second before the next attempt is long for a test."""
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_what_was_packed_is_what_is_there(tree, tmp_path, name, capsys):
    to = tmp_path / "there"
    assert fetched(pack(tree, tmp_path / name), to) == 0
    assert contents(to) == contents(tree)
    assert len(opened(to, cache=tmp_path / "cache").train) == 3
    summary = capsys.readouterr().out
    assert f"--data.root {to}\n" in summary
    for row in ("classes     2", "training    3 pictures", "validation  2 pictures", "on disk     5 files"):
        assert row in summary


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", "__MACOSX", FOLDER)
)


@given(
    st.dictionaries(st.tuples(names, names), st.binary(max_size=3000), max_size=12),
    st.sampled_from(["a.zip", "a.tar", "a.tar.gz"]),
    st.sampled_from(["", "wrapped"]),
)
def test_any_tree_comes_out_equal(tmp_path_factory, files, name, around):
    folder = tmp_path_factory.mktemp("any")
    tree = two_classes(folder / "tree" / around)
    for (inner, file), data in files.items():
        put(tree / "more" / inner / file, data)
    assert fetched(pack(folder / "tree", folder / name), folder / "there") == 0
    assert contents(folder / "there") == contents(tree)


def test_a_folder_around_the_data_set_is_left_out(tmp_path):
    layout = two_classes(tmp_path / "tree" / "flowers-1.0")
    put(tmp_path / "tree" / "__MACOSX" / "flowers-1.0" / "._x", b"a Mac's")
    fetched(pack(tmp_path / "tree", tmp_path / "a.zip"), tmp_path / "there")
    assert contents(tmp_path / "there") == contents(layout)


def test_a_folder_that_belongs_to_the_data_set_is_not_left_out(tmp_path):
    put(tmp_path / "tree" / "cifar-10-batches-py" / "data_batch_1")
    put(tmp_path / "tree" / "cifar-10-batches-py" / "test_batch")
    archive = pack(tmp_path / "tree", tmp_path / "a.tar.gz")
    with reading(archive) as opened:
        found = survey(opened, (), KNOWN["cifar10"].roots)
        assert (found.files, found.around) == (2, "")
        assert survey(opened, (), ("train",)).around == "cifar-10-batches-py/"


def test_a_second_call_does_nothing(archive, tmp_path, capsys):
    with Server(archive.read_bytes()) as server:
        fetched(server.url, tmp_path / "there")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")}
        asked, first = len(server.asked), capsys.readouterr().out
        fetched(server.url, tmp_path / "there")
    assert len(server.asked) == asked
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")} == before
    assert capsys.readouterr().out == first


def test_the_archive_goes_unless_it_is_kept_and_a_file_of_the_users_stays(archive, tmp_path):
    with Server(archive.read_bytes()) as server:
        fetched(server.url, tmp_path / "a")
        fetched(server.url, tmp_path / "b", keep_archive=True)
    fetched(archive, tmp_path / "c")
    assert not (tmp_path / "a" / FOLDER / "archive").exists()
    assert (tmp_path / "b" / FOLDER / "archive").read_bytes() == archive.read_bytes()
    assert archive.exists()
    fetched(server.url, tmp_path / "b")
    assert not (tmp_path / "b" / FOLDER / "archive").exists()


def test_imagenet_as_kaggle_packs_it(challenge, tmp_path):
    put(challenge / "ILSVRC/Annotations/CLS-LOC/train/n01440764/n01440764_1.xml", b"<boxes/>")
    put(challenge / "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", b"nobody knows")
    archive = pack(challenge, tmp_path / "a.zip")
    with pytest.raises(DataError, match=r"should have 1,000 classes, 1,281,167 .* has 3 classes, 3 .*--subset") as caught:
        fetched(archive, tmp_path / "there", "imagenet")
    assert caught.value.exit_code == 65
    assert fetched(archive, tmp_path / "there", "imagenet", subset=True) == 0
    there = contents(tmp_path / "there")
    assert len(there) == 3 + 3 + 1
    assert there == {name: data for name, data in contents(challenge).items() if name in there}


def test_the_thousand_pictures(shared, tmp_path):
    if not (shared / "imagenet-mini").is_dir():
        pytest.skip("needs shared/data/imagenet-mini")
    archive = pack(shared / "imagenet-mini", tmp_path / "mini.zip")
    assert fetched(archive, tmp_path / "there", "imagenet", subset=True) == 0
    assert contents(tmp_path / "there") == contents(shared / "imagenet-mini")


def test_cifar10s_checksum_is_the_one_that_torchvision_knows():
    from torchvision.datasets import CIFAR10

    assert KNOWN["cifar10"].source == CIFAR10.url
    assert KNOWN["cifar10"].checksum == f"md5:{CIFAR10.tgz_md5}"


# A server that breaks ------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_taken_up_where_it_broke(large, tmp_path, capsys):
    tree, archive = large
    data = archive.read_bytes()
    with Server(data, breaks=[100_000, 0, 300_000]) as server:
        fetched(server.url, tmp_path / "there")
    assert [span for span, _ in server.asked] == [None, "bytes=100000-", "bytes=100000-", "bytes=400000-"]
    assert server.sent == len(data)
    assert contents(tmp_path / "there") == contents(tree)
    assert "the connection ended early; trying again in 0 s" in capsys.readouterr().err


def test_a_server_without_ranges_is_asked_for_all_again(archive, tree, tmp_path):
    with Server(archive.read_bytes(), breaks=[200], ranges=False) as server:
        fetched(server.url, tmp_path / "there")
    assert server.sent == 200 + archive.stat().st_size
    assert contents(tmp_path / "there") == contents(tree)


def test_a_file_that_changes_meanwhile_is_begun_anew(archive, large, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE_S", 0.0)
    with Server(large[1].read_bytes(), breaks=[5000, 0, 0]) as server:
        with pytest.raises(Interrupted, match="does not answer"):
            fetched(server.url, tmp_path / "there")
        server.data, server.etag, server.breaks = archive.read_bytes(), '"two"', []
        fetched(server.url, tmp_path / "there")
    assert server.asked[-1] == ("bytes=5000-", '"one"')
    assert contents(tmp_path / "there") == contents(tree)


def test_a_server_that_does_not_say_how_much_there_is(archive, tree, tmp_path):
    with Server(archive.read_bytes(), tell_length=False) as server:
        fetched(server.url, tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tree)


def test_a_server_that_is_overloaded_is_asked_again(archive, tmp_path, capsys):
    with Server(archive.read_bytes(), statuses=[503, 429]) as server:
        assert fetched(server.url, tmp_path / "there") == 0
    assert "the server says 503 Service Unavailable; trying again" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_server_that_refuses(archive, tmp_path, status):
    with Server(archive.read_bytes(), statuses=[status] * 3) as server:
        with pytest.raises(UserError, match=rf"/pictures.zip: the server says {status} .*check the address") as caught:
            fetched(f"{server.url}?signature=secret", tmp_path / "there")
        assert len(server.asked) == 1
    assert "secret" not in str(caught.value)


def test_what_a_signed_address_is_signed_with_stays_out_of_the_state(archive, tmp_path):
    with Server(archive.read_bytes()) as server:
        fetched(f"{server.url}?signature=secret", tmp_path / "there")
        fetched(f"{server.url}?signature=another", tmp_path / "there")
    assert "secret" not in (tmp_path / "there" / FOLDER / "state.json").read_text()


def test_nobody_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE_S", 0.0)
    with Server(b"") as server:
        pass
    with pytest.raises(Interrupted, match=r"127.0.0.1 cannot be reached \(.*refused\).*same command") as caught:
        fetched(server.url, tmp_path / "there")
    assert caught.value.exit_code == 75


def test_any_store_that_fsspec_knows(archive, tree, tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/bucket/pictures.zip", archive.read_bytes())
    part = tmp_path / "there" / FOLDER / "archive.part"
    put(part, archive.read_bytes()[:1000])
    begun = State(tmp_path / "there", "folder", "memory://bucket/pictures.zip", archive.stat().st_size)
    begun.validator = store.ukey("/bucket/pictures.zip")
    begun.save()
    opener = download.from_store("memory://bucket/pictures.zip")
    assert opener(1000, begun.validator).start == 1000
    assert opener(1000, "of another version").start == 0
    fetched("memory://bucket/pictures.zip", tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tree)
    for address, says in {
        "memory://bucket/nothing.zip": "no such file",
        "memory://bucket": "is a folder",
        "carrier-pigeon://coop/pictures.zip": "carrier-pigeon",
    }.items():
        with pytest.raises(UserError, match=says):
            fetched(address, tmp_path / "other")


def test_a_store_that_does_not_answer_is_tried_again(monkeypatch):
    import fsspec

    def fails(error: Exception):
        def info(*_, **__):
            raise error

        monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)

    fails(RuntimeError("Could not connect to the endpoint URL"))  # botocore's is no OSError
    with pytest.raises(download.Lost, match=r"memory://bucket/a\.zip: RuntimeError: Could not connect"):
        download.from_store("memory://bucket/a.zip")(0, "")
    fails(ValueError("Invalid endpoint"))
    with pytest.raises(UserError, match="Invalid endpoint"):
        download.from_store("memory://bucket/a.zip")(0, "")


# Interrupted ---------------------------------------------------------------------------------------------------------


def test_killed_while_unpacking(large, tmp_path):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.kill()
    process.communicate()
    done = state(to)["unpacked"]
    assert 0 < done < 3005, "the test came too late"
    inodes = {path: path.stat().st_ino for path in to.rglob("*.png") if FOLDER not in path.parts}
    assert len(inodes) >= done
    for path in inodes:
        assert path.read_bytes() == (tree / path.relative_to(to)).read_bytes(), "a file that was not whole"
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)
    again = sum(path.stat().st_ino != inode for path, inode in inodes.items())
    assert again <= len(inodes) - done <= unpack.BATCH, "what was done is not done again"
    assert not (to / FOLDER / "unpacking").exists()


def test_killed_while_downloading(large, tmp_path):
    tree, archive = large
    with Server(archive.read_bytes(), breaks=[100_000]) as server:
        server.stalls.set()
        process = start(server.url, tmp_path / "there")
        part = tmp_path / "there" / FOLDER / "archive.part"
        until(lambda: part.exists() and part.stat().st_size > 50_000, "the first bytes")
        process.kill()
        process.communicate()
        server.stalls.clear()
        have = part.stat().st_size
        fetched(server.url, tmp_path / "there")
    assert server.asked[-1] == (f"bytes={have}-", '"one"')
    assert contents(tmp_path / "there") == contents(tree)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_the_same_command_goes_on(large, tmp_path, number):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "stopped; the same command goes on from here" in said
    assert state(to)["unpacked"] < 3005
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_files_that_did_not_reach_the_disk_are_written_again(large, tmp_path):
    tree, archive = large
    to = tmp_path / "there"
    process = start(archive, to)
    until(lambda: state(to).get("unpacked", 0) > 0, "the first files")
    process.kill()
    process.communicate()
    # As after a power cut: noted as done, and gone.
    lost = sorted((to / "train" / "cat").iterdir())[:3]
    lost[0].unlink()
    lost[1].write_bytes(b"")
    assert fetched(archive, to) == 0
    assert contents(to) == contents(tree)


def test_an_archive_that_is_another_one_the_next_time(challenge, tmp_path):
    archive = pack(challenge, tmp_path / "a.zip")
    with pytest.raises(DataError, match="--subset"):
        fetched(archive, tmp_path / "there", "imagenet")
    for path in challenge.rglob("*.JPEG"):
        path.write_bytes(bytes(20_000))
    pack(challenge, archive)
    fetched(archive, tmp_path / "there", "imagenet", subset=True)
    assert contents(tmp_path / "there") == contents(challenge)


def test_two_at_once(archive, tmp_path):
    with locked(tmp_path / "there"), pytest.raises(Stopped, match=r"another fetch is at work in .*there: wait"):
        fetched(archive, tmp_path / "there")
    assert fetched(archive, tmp_path / "there") == 0


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


# Kaggle's program ----------------------------------------------------------------------------------------------------

# What Kaggle's program prints: 2.2 run against a server that answers so, and as others have reported it.
FORBIDDEN = """403 Client Error: Forbidden for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles

You don't have access to this resource.
If this is a competition, you may need to accept its rules first at
  https://www.kaggle.com/competitions/<competition>/rules"""
FORBIDDEN_JSON = "You must accept this competition's rules before you'll be able to download files."
FORBIDDEN_1 = "403 - Forbidden - You must accept this competition's rules before you'll be able to download files."
DENIED = "403 - Forbidden - Permission 'competitions.get' was denied"
UNKNOWN = "Authentication required to call the Kaggle API.\n\nFirst, you will need a Kaggle account."
UNKNOWN_2 = (
    "401 Client Error: Unauthorized for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles"
)
UNKNOWN_1 = "401 - Unauthorized - Unauthenticated"
MISSING_1 = "OSError: Could not find kaggle.json. Make sure it's located in /root/.kaggle. Or use the environment method."
NOT_FOUND = "404 Client Error: Not Found for url: https://api.kaggle.com/v1/x\n\nThe resource was not found."
BROKEN = "Traceback (most recent call last):\n    import six\nModuleNotFoundError: No module named 'six'"
LOST = "ConnectionError: HTTPSConnectionPool(host='api.kaggle.com', port=443): Max retries exceeded"

PROGRAM = """#!{python}
import json, os, pathlib, sys, time
notes = pathlib.Path({notes!r})
plan = json.loads((notes / "plan").read_text())
(notes / "calls").open("a").write(json.dumps([sys.argv[1:], os.environ.get("KAGGLE_CONFIG_DIR")]) + "\\n")
if plan["says"]:
    print(plan["says"], file=sys.stderr)
    sys.exit(1)
data = (notes / "archive").read_bytes()
out = pathlib.Path(sys.argv[sys.argv.index("-p") + 1]) / (sys.argv[sys.argv.index("-c") + 1] + ".zip")
marker = out.with_name(out.name + ".kaggle-partial")
have = out.stat().st_size if marker.exists() else 0
marker.write_text(json.dumps({{"validator": "x", "size": len(data)}}))
with out.open("ab") as file:
    file.write(data[have : len(data) // 2])
    file.flush()
    time.sleep(plan["waits"])
    file.write(data[max(have, len(data) // 2) :])
marker.unlink()
"""


@pytest.fixture
def program(tmp_path, monkeypatch, challenge):
    """A stand-in for Kaggle's program, first on PATH. program(says=..., waits=...) tells it what to do."""
    notes = tmp_path / "notes"
    put(notes / "archive", pack(challenge, tmp_path / "kaggle.zip").read_bytes())
    path = put(tmp_path / "bin" / "kaggle", PROGRAM.format(python=sys.executable, notes=str(notes)).encode())
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    put(tmp_path / "secret" / "kaggle.json", b'{"username": "me", "key": "canary-in-a-mine"}')
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(tmp_path / "secret"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _, usage=fetch.shutil.disk_usage: Plenty)

    def plan(says: str = "", waits: float = 0.0) -> Path:
        put(notes / "plan", json.dumps({"says": says, "waits": waits}).encode())
        return notes

    plan()
    return plan


class Plenty:
    free = 10**12


def test_from_kaggle(program, tmp_path, challenge):
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0
    [[argv, folder]] = [json.loads(line) for line in (program() / "calls").read_text().splitlines()]
    assert argv[:4] == ["competitions", "download", "-c", COMPETITION]
    assert folder == str(tmp_path / "secret")
    assert contents(tmp_path / "there") == contents(challenge)
    left = [path.name for path in (tmp_path / "there" / FOLDER).rglob("*") if path.is_file()]
    assert sorted(left) == ["lock", "state.json"]


def start_with_kaggle(to: Path) -> subprocess.Popen:
    """A fetch of ImageNet in a process of its own, on a machine that has room for it or not."""
    command = COMMAND.replace("try:", "fetch._require = lambda *_: None\ntry:", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", command, "imagenet", "--to", str(to), "--subset"], stderr=-1, text=True
    )
    archive = kaggle.archive_in(to / FOLDER, COMPETITION)
    until(lambda: archive.exists() and archive.stat().st_size, "half of the archive")
    return process


def test_kaggles_program_is_stopped_with_us_and_goes_on(program, tmp_path):
    program(waits=60.0)
    process = start_with_kaggle(tmp_path / "there")
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 75, said
    with locked(tmp_path / "there"):  # nobody holds the folder any more
        half = kaggle.archive_in(tmp_path / "there" / FOLDER, COMPETITION).stat().st_size
    assert half == (program() / "archive").stat().st_size // 2
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0


def test_kaggles_program_keeps_the_folder_to_itself_when_it_outlives_us(program, tmp_path):
    program(waits=3.0)
    process = start_with_kaggle(tmp_path / "there")
    process.kill()
    process.communicate()
    with pytest.raises(Interrupted, match="another fetch is at work"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True))
    program()

    def goes_on() -> bool:
        with suppress(Interrupted):
            return fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0
        return False

    until(goes_on, "the program's end")


def test_kaggles_archive_with_a_wrong_checksum_is_not_downloaded_again(program, tmp_path):
    right = hashlib.sha256((program() / "archive").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"is {right}, but"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there", sha256="0" * 64, subset=True))
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", sha256=right, subset=True)) == 0
    assert len((program() / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize("says", [FORBIDDEN, FORBIDDEN_JSON, FORBIDDEN_1, DENIED])
def test_kaggles_rules_are_not_accepted(program, tmp_path, says):
    program(says)
    with pytest.raises(UserError, match=rf"accepted the .*rules.*https://www.kaggle.com/competitions/{COMPETITION}/rules"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


@pytest.mark.parametrize("says", [UNKNOWN, UNKNOWN_2, UNKNOWN_1])
def test_kaggle_does_not_know_the_token(program, tmp_path, says):
    program(says)
    with pytest.raises(UserError, match=r"does not accept the token in .*secret/kaggle.json: make a new one at https://"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


@pytest.mark.parametrize("says", [UNKNOWN, MISSING_1])
def test_there_is_no_token(program, tmp_path, says):
    program(says)
    (tmp_path / "secret" / "kaggle.json").unlink()
    with pytest.raises(
        UserError, match=r"wants to know who you are.*worldsize cluster secret create kaggle --from ~/.kaggle/kaggle.json"
    ):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_other_failures_of_kaggles_program(program, tmp_path):
    program(NOT_FOUND)
    with pytest.raises(UserError, match=f"knows no competition '{COMPETITION}'"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))
    program(BROKEN)
    with pytest.raises(UserError, match=r"does not run; pip install --upgrade kaggle(.|\n)*No module named 'six'"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))
    program(LOST)
    with pytest.raises(Interrupted, match=r"same command goes on.*\n  ConnectionError: HTTPSConnectionPool"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_kaggles_program_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kaggle.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Plenty)
    with pytest.raises(UserError, match="pip install kaggle"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_no_room_for_imagenet(tmp_path, monkeypatch):
    class Little:
        free = 200 * 10**9

    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Little)
    with pytest.raises(UserError, match=r"200.0 GB free, but 326.0 GB are needed \(168.0 GB still .*, 158.0 GB to unpack\)"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


# What is told --------------------------------------------------------------------------------------------------------


def test_lines_in_a_log(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    with progress.Meter("downloading", 4_000_000_000) as meter:
        meter.start_at(1_000_000_000)
        time.sleep(0.12)
        meter.add(1_000_000)
        time.sleep(0.06)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "downloading: 1.0 GB of 4.0 GB (25%), 0.0 MB/s"
    assert len(lines) in (3, 4, 5) and lines[-2].endswith(" min left")
    assert lines[-1] == "downloading: 1.0 GB of 4.0 GB (25%)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((12_345_678_901, 155_840_000_000, 113e6), "unpacking: 12.3 GB of 155.8 GB (8%), 113.0 MB/s, 21 min left"),
        ((0, 155_840_000_000, 10e6), "unpacking: 0 bytes of 155.8 GB (0%), 10.0 MB/s, 4 h 20 min left"),
        ((999_000, 1_000_000, 1e6), "unpacking: 999.0 kB of 1.0 MB (100%), 1.0 MB/s, under a minute left"),
        ((5_000_000, None, 1e6), "unpacking: 5.0 MB, 1.0 MB/s"),
        ((5, 10, 0.0), "unpacking: 5 bytes of 10 bytes (50%), 0.0 MB/s"),
    ],
)
def test_a_line(arguments, expected):
    assert progress.line("unpacking", *arguments) == expected


def test_every_error_has_an_exit_code_that_a_job_understands():
    codes = {error.exit_code for error in (UserError, DataError, Interrupted, Stopped)}
    assert codes == {64, 65, 75}
    assert issubclass(Interrupted, WorldsizeError)
