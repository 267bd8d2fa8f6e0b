"""Reading shards: few file descriptors, little memory, and remote stores, including failing ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from packing import files
from worldsize.config.recipe import Data
from worldsize.data import open_dataset, shards
from worldsize.data.images import native
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.shards import tar
from worldsize.data.shards.format import RECORD, Packed, Shard, Split, identity
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local, Remote
from worldsize.errors import DataError, StoreUnreachable, UserError


def open_files_below(folder):
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # a link may be gone by now
    return sum(link.readlink().is_relative_to(folder) for link in links)


def test_more_shards_than_file_descriptors(packed_root, tmp_path):
    copy = shutil.copytree(packed_root, tmp_path / "copy")  # no other test has files of this folder open
    samples, expected = (shards.open_dataset(root).train for root in (copy, packed_root))
    samples._store._max_open, before = 1, open_files_below(copy)
    assert [samples.encoded(i) for i in range(len(samples))] == [expected.encoded(i) for i in range(len(samples))]
    assert open_files_below(copy) - before == 1 < len(samples.shards)


@pytest.mark.skipif(native.load() is None, reason="needs the native reader")
def test_many_images_from_many_shards_need_few_file_descriptors(packed_root, monkeypatch):
    samples = shards.open_dataset(packed_root).train
    expected = [bytes(samples.stored(i)) for i in range(len(samples))]
    file_counts, read = [], native.Native.read_together

    def counted(self, files, *pieces):
        file_counts.append(len(set(files)))
        return read(self, files, *pieces)

    monkeypatch.setattr(native.Native, "read_together", counted)
    samples._store._max_open = 256
    assert [bytes(one) for one in samples.several(np.arange(len(samples)))] == expected
    assert len(samples.shards) > 2 and max(file_counts) == 2


def test_readers_that_share_one_descriptor_get_their_own_images(packed_root):
    """While the readers evict each other's files."""
    samples = shards.open_dataset(packed_root).train
    expected = [samples.encoded(i) for i in range(len(samples))]
    samples._store._max_open = 1
    with ThreadPoolExecutor(8) as pool:
        chosen = np.random.default_rng(0).integers(0, len(samples), 4000).tolist()
        assert list(pool.map(samples.encoded, chosen)) == [expected[i] for i in chosen]


def test_a_shard_that_is_truncated_while_it_is_read_breaks_its_images(copied):
    """With a memory-mapped file, SIGBUS would kill the process."""
    samples = shards.open_dataset(copied).train
    samples.encoded(0)
    os.truncate(copied / "train-00000.tar", 100)
    with pytest.raises(BrokenImage, match="damaged at byte"):
        samples.encoded(0)


def synthetic(folder: Path, samples: int, count: int) -> None:
    """An index of ``samples`` samples and ``count`` matching sparse shards without content."""
    each = samples // count
    with open(folder / "train.index", "wb") as file:
        file.truncate(samples * RECORD.itemsize)
    part = identity("train", bytes(each * RECORD.itemsize))
    described = Split("0" * 64, (Shard(each, 100_000_000, part),) * count)
    for i in range(count):
        with open(folder / f"train-{i:05d}.tar", "wb") as file:
            file.write(tar.beginning(part))
            file.truncate(100_000_000)
    (folder / "val.index").write_bytes(b"")
    metadata = Packed(("a", "b"), {"train": described, "val": Split("0" * 64, ())}, {}, "0" * 64)
    (folder / "index.json").write_text(metadata.to_json())


def test_of_fifty_million_samples_only_what_is_needed_is_read(tmp_path):
    """The index has 2 GB: whoever reads it, or loops over its samples, reads its pages into memory."""
    synthetic(tmp_path, 50_000_000, 10_000)
    program = (
        "import sys, numpy as np; from worldsize.data import shards\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "def read(): return int(open('/proc/self/io').read().split('rchar:')[1].split()[0])\n"
        "before = peak(), read()\n"
        "samples = shards.open_dataset(sys.argv[1]).train\n"
        "samples.sizes(np.arange(0, 50_000_000, 500_000)); samples.encoded(31_415_926)\n"
        "print(peak() - before[0], read() - before[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    memory, read = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    for file in tmp_path.iterdir():
        file.unlink()  # 1 TB of sparse files; pytest would keep them
    assert memory < 100e6 and read < 100e6


def test_remote_shards_are_read_too(packed_root):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name, data in files(packed_root).items():
        store.pipe_file(f"/bucket/shards/{name}", data)
    remote, local = shards.open_dataset("memory://bucket/shards").train, shards.open_dataset(packed_root).train
    for i in range(len(local)):
        assert bytes(remote.encoded(i)) == bytes(local.encoded(i))
        assert remote.path(i) == local.path(i)
    store.rm_file("/bucket/shards/train-00001.tar")
    with pytest.raises(DataError, match=r"train-00001\.tar is missing"):
        shards.open_dataset("memory://bucket/shards")


class Fault(Exception):
    """An exception type of a storage library."""


class NoCredentialsError(Exception):
    """Named like botocore's."""


def test_an_unreachable_store_is_reported_with_its_own_message(packed_root, monkeypatch):
    def fails(*_, **__):
        raise Fault("could not connect")

    remote = Remote(f"file://{packed_root}")
    monkeypatch.setattr(type(remote._files), "cat_file", fails)
    with pytest.raises(StoreUnreachable, match=r"index\.json cannot be read: Fault: could not connect"):
        shards.open_dataset(remote)
    monkeypatch.setattr(type(remote._files), "cat_file", lambda *_, **__: int("no number"))
    with pytest.raises(UserError, match=r"index\.json: invalid literal"):
        shards.open_dataset(remote)


def test_a_failed_remote_read_is_retried(packed_root, monkeypatch):
    samples, slept = shards.open_dataset(f"file://{packed_root}").train, []
    expected, cat = bytes(samples.encoded(0)), type(samples._store._files).cat_file
    monkeypatch.setattr("time.sleep", slept.append)

    def fails(times: int, error: Exception):
        left = iter(range(times))

        def cat_file(*arguments, **options):
            if next(left, None) is not None:
                raise error
            return cat(*arguments, **options)

        monkeypatch.setattr(type(samples._store._files), "cat_file", cat_file)

    fails(5, Fault("reset by peer"))
    assert bytes(samples.encoded(0)) == expected and slept == [1, 2, 4, 8, 8]
    fails(6, Fault("reset by peer"))
    with pytest.raises(StoreUnreachable, match=r"train-00000\.tar cannot be read: Fault: reset by peer"):
        samples.encoded(0)
    slept.clear()
    for error in (PermissionError("no"), NoCredentialsError("no")):
        fails(1, error)
        with pytest.raises(UserError, match=r"train-00000\.tar: access denied, check the credentials.*no"):
            samples.encoded(0)
    fails(1, FileNotFoundError("no"))
    with pytest.raises(BrokenImage, match="no"):
        samples.encoded(0)
    fails(1, Fault("reset by peer"))
    assert samples.name(0).endswith("sample 0") and slept == []
    fails(1, Fault("reset by peer"))
    assert not samples.path(0).startswith("sample") and slept == [1]  # packing stores the path, so it is retried


def test_a_recipe_may_name_a_url(packed_root, tmp_path):
    remote, local = (open_dataset(Data(root=Path(root)), tmp_path) for root in (f"file://{packed_root}", packed_root))
    assert isinstance(remote.train._store, Remote)
    assert remote.fingerprint == local.fingerprint
    assert bytes(remote.val.encoded(0)) == bytes(local.val.encoded(0))
    with pytest.raises(UserError, match="teleport://bucket/shards"):
        open_dataset(Data(root=Path("teleport://bucket/shards")), tmp_path)


def test_a_local_store_is_what_a_path_opens(packed_root):
    assert isinstance(shards.open_dataset(packed_root).train, ShardSamples)
    assert isinstance(shards.open_dataset(packed_root).train._store, Local)
