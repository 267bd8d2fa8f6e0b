"""Fetching datasets: the result equals the packed files; progress messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetching import contents, fetched, pack
from trees import opened, put, two_classes
from webserver import Server
from worldsize.data import progress_bar
from worldsize.data.fetch import Interrupted
from worldsize.data.fetch.archives import open_archive, scan
from worldsize.data.fetch.known import KNOWN
from worldsize.data.fetch.state import FOLDER
from worldsize.errors import DataError, Stopped, UserError, WorldsizeError


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_unpacked_files_equal_the_packed_ones(tree, tmp_path, name, capsys):
    to = tmp_path / "dataset"
    assert fetched(pack(tree, tmp_path / name), to) == 0
    assert contents(to) == contents(tree)
    assert len(opened(to, cache=tmp_path / "cache").train) == 3
    summary = capsys.readouterr().out
    assert f"--data.root {to}\n" in summary
    for row in ("classes     2", "training    3 images", "validation  2 images", "on disk     5 files"):
        assert row in summary


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", "__MACOSX", FOLDER)
)


@given(
    st.dictionaries(st.tuples(names, names), st.binary(max_size=3000), max_size=12),
    st.sampled_from(["a.zip", "a.tar", "a.tar.gz"]),
    st.sampled_from(["", "wrapped"]),
)
def test_any_tree_is_unpacked_unchanged(tmp_path_factory, files, name, wrapper):
    folder = tmp_path_factory.mktemp("any")
    tree = two_classes(folder / "tree" / wrapper)
    for (inner, file), data in files.items():
        put(tree / "more" / inner / file, data)
    assert fetched(pack(folder / "tree", folder / name), folder / "dataset") == 0
    assert contents(folder / "dataset") == contents(tree)


def test_a_folder_that_encloses_the_dataset_is_removed(tmp_path):
    expected = two_classes(tmp_path / "tree" / "flowers-1.0")
    put(tmp_path / "tree" / "__MACOSX" / "flowers-1.0" / "._x", b"macOS metadata")
    fetched(pack(tmp_path / "tree", tmp_path / "a.zip"), tmp_path / "dataset")
    assert contents(tmp_path / "dataset") == contents(expected)


def test_a_folder_that_belongs_to_the_dataset_is_kept(tmp_path):
    put(tmp_path / "tree" / "cifar-10-batches-py" / "data_batch_1")
    put(tmp_path / "tree" / "cifar-10-batches-py" / "test_batch")
    archive = pack(tmp_path / "tree", tmp_path / "a.tar.gz")
    with open_archive(archive) as opened:
        found = scan(opened, (), KNOWN["cifar10"].roots)
        assert (found.files, found.prefix) == (2, "")
        assert scan(opened, (), ("train",)).prefix == "cifar-10-batches-py/"


def test_a_second_call_does_nothing(archive, tmp_path, capsys):
    with Server(archive.read_bytes()) as server:
        fetched(server.url, tmp_path / "dataset")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dataset").rglob("*")}
        requests, first = len(server.requests), capsys.readouterr().out
        fetched(server.url, tmp_path / "dataset")
    assert len(server.requests) == requests
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "dataset").rglob("*")} == before
    assert capsys.readouterr().out == first


def test_a_downloaded_archive_is_deleted_and_a_local_one_is_kept(archive, tmp_path):
    with Server(archive.read_bytes()) as server:
        fetched(server.url, tmp_path / "a")
        fetched(server.url, tmp_path / "b", keep_archive=True)
    fetched(archive, tmp_path / "c")
    assert not (tmp_path / "a" / FOLDER / "archive").exists()
    assert (tmp_path / "b" / FOLDER / "archive").read_bytes() == archive.read_bytes()
    assert archive.exists()
    fetched(server.url, tmp_path / "b")
    assert not (tmp_path / "b" / FOLDER / "archive").exists()


def test_a_file_url_is_decoded(archive, tmp_path):
    url = archive.rename(tmp_path / "a b#1%.zip").as_uri()
    assert url.endswith("/a%20b%231%25.zip") and fetched(url, tmp_path / "dataset") == 0


def test_imagenet_as_kaggle_packs_it(challenge, tmp_path):
    put(challenge / "ILSVRC/Annotations/CLS-LOC/train/n01440764/n01440764_1.xml", b"<boxes/>")
    put(challenge / "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", b"unlabeled")
    archive = pack(challenge, tmp_path / "a.zip")
    with pytest.raises(DataError, match=r"should have 1,000 classes, 1,281,167 .* has 3 classes, 3 .*--subset") as caught:
        fetched(archive, tmp_path / "dataset", "imagenet")
    assert caught.value.exit_code == 65
    assert fetched(archive, tmp_path / "dataset", "imagenet", subset=True) == 0
    on_disk = contents(tmp_path / "dataset")
    assert len(on_disk) == 3 + 3 + 1
    assert on_disk == {name: data for name, data in contents(challenge).items() if name in on_disk}


@pytest.mark.slow
def test_the_thousand_images(shared, tmp_path):
    if not (shared / "imagenet-mini").is_dir():
        pytest.skip("needs shared/data/imagenet-mini")
    archive = pack(shared / "imagenet-mini", tmp_path / "mini.zip")
    assert fetched(archive, tmp_path / "dataset", "imagenet", subset=True) == 0
    assert contents(tmp_path / "dataset") == contents(shared / "imagenet-mini")


def test_cifar10_checksum_matches_torchvision():
    from torchvision.datasets import CIFAR10

    assert KNOWN["cifar10"].source == CIFAR10.url
    assert KNOWN["cifar10"].checksum == f"md5:{CIFAR10.tgz_md5}"


# Progress messages ---------------------------------------------------------------------------------------------------


class Clock:
    """The time of a log: each wait for a line lasts as long as asked for, and the next step of the operation follows."""

    def __init__(self, steps):
        self.now, self.steps = 0.0, iter(steps)

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        step = next(self.steps, None)
        if step is None:
            return True  # the operation has ended
        self.now += seconds
        step()
        return False


def test_lines_in_a_log(monkeypatch, capsys):
    meter = progress_bar.ByteProgress("downloading", 4_000_000_000)
    clock = Clock([lambda: None, lambda: meter.add(1_000_000_000), lambda: meter.add(1_000_000_000)])
    monkeypatch.setattr(progress_bar, "time", clock)
    monkeypatch.setattr(meter._finished, "wait", clock.wait)
    meter.start_at(1_000_000_000)
    with meter:
        pass
    assert capsys.readouterr().err.splitlines() == [
        "downloading: 1.0 GB of 4.0 GB (25%), 0.0 MB/s",
        "downloading: 2.0 GB of 4.0 GB (50%), 66.7 MB/s, under a minute left",
        "downloading: 3.0 GB of 4.0 GB (75%), 66.7 MB/s, under a minute left",
        "downloading: 3.0 GB of 4.0 GB (75%), 44.4 MB/s",
    ]


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
    assert progress_bar.line("unpacking", *arguments) == expected


def test_every_error_has_an_exit_code_that_a_job_handles():
    codes = {error.exit_code for error in (UserError, DataError, Interrupted, Stopped)}
    assert codes == {64, 65, 75}
    assert issubclass(Interrupted, WorldsizeError)
