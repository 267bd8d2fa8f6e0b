"""`worldsize data pack`: the same images give the same bytes; the command; training on shards."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import OPTIONS, encode, files, noise, packed
from paths import SMALL_NETWORK
from processes import identical, weights, worldsize
from trees import opened, put, two_classes
from worldsize.data import shards
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.shards.format import Encoding
from worldsize.data.shards.images import How
from worldsize.data.shards.pack import pack
from worldsize.data.shards.write import plan

# Deterministic output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_the_number_of_workers_does_not_change_a_byte(root, tmp_path, how):
    packed(root, tmp_path / "one", workers=1, **how)
    packed(root, tmp_path / "four", workers=4, **how)
    assert files(tmp_path / "one") == files(tmp_path / "four")
    assert len(list((tmp_path / "one").glob("train-*.tar"))) > 1


def test_shards_of_shards_record_all_conversions(root, tmp_path):
    first = packed(root, tmp_path / "first", reencode=80)
    pack(first, tmp_path / "second", How(), 5000, 2, 1.0)
    second = shards.open_dataset(tmp_path / "second")
    assert second.train.made == first.train.made != {}
    assert second.fingerprint == first.fingerprint


def test_times_modes_and_location_of_the_originals_do_not_matter(root, tmp_path):
    other = shutil.copytree(root, tmp_path / "elsewhere")
    for file in other.rglob("*.*"):
        os.utime(file, (1e9, 1e9))
        if file.is_file():
            file.chmod(0o600)
    packed(root, tmp_path / "one")
    packed(other, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_shards_can_be_packed_into_new_shards(root, tmp_path, how):
    """Packing shards of another size gives the same bytes as packing the original files."""
    packed(root, tmp_path / "small", shard_bytes=5000)
    pack(shards.open_dataset(tmp_path / "small"), tmp_path / "again", How(**how), 20_000, 2, 1.0)
    packed(root, tmp_path / "straight", **how)
    assert files(tmp_path / "again") == files(tmp_path / "straight")


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([512, 1536, 2048])), max_size=60), st.integers(1, 20_000))
def test_a_plan_holds_every_image_once_and_no_shard_is_too_large(images, limit):
    lengths, heads = np.array(images, np.int64).reshape(-1, 2).T
    tasks = plan("train", lengths, heads, limit)
    assert [i for task in tasks for i in range(task.start, task.stop)] == list(range(len(lengths)))
    assert [task.number for task in tasks] == list(range(len(tasks)))
    assert all(task.bytes <= limit or task.stop - task.start == 1 for task in tasks)
    assert all(one.bytes + two.bytes > limit for one, two in pairwise(tasks) if two.stop - two.start == 1)


def test_a_plan_predicts_the_bytes(root, tmp_path):
    samples = packed(root, tmp_path / "out").train
    lengths = np.array([samples.length(i) for i in range(len(samples))])
    for task, shard in zip(plan("train", lengths, samples.records["head"], 20_000), samples.shards, strict=True):
        assert shard.bytes == task.bytes


@pytest.mark.parametrize("extension", ["webp", "jpg"])
@pytest.mark.parametrize("length", [60, 91, 92, 93, 94, 200])  # of the name; a tar header holds 100
def test_no_shard_exceeds_the_limit_even_with_long_names(tmp_path, length, extension):
    data = encode(noise(8, 8), {"jpg": "JPEG"}.get(extension, extension))
    for path in ("train/a", "train/b", "val/a", "val/b"):
        for i in range(10):
            put(tmp_path / "root" / path / f"{i}".rjust(length, "n"), data)
    for source in (opened(tmp_path / "root"), packed(tmp_path / "root", tmp_path / "whole")):
        out = tmp_path / type(source.train).__name__
        pack(source, out, How(), 20_000, 2, 0)
        sizes = [file.stat().st_size for file in out.glob("*.tar")]
        assert 9_000 < max(sizes) <= 20_000


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--reencode", "90", "--raw", "256"], "cannot be combined"),
        (["--max-side", "500"], "--max-side requires --reencode"),
        (["--reencode", "0"], "1 to 100"),
        (["--reencode", "90", "--max-side", "0"], "65,500"),
        (["--raw", "1"], "4,096"),
        (["--shard-mb", "0"], "--shard-mb 0"),
        (["--workers", "0"], "--workers 0"),
    ],
)
def test_invalid_options_are_refused(fails, tmp_path, options, expected):
    two_classes(tmp_path / "root")
    assert expected in fails("data", "pack", "--root", "root", "--out", "out", *options)
    assert not list(tmp_path.glob("out/*.tar"))


def test_a_folder_that_is_gone_is_named(fails):
    assert "worldsize: gone: no such folder" in fails("data", "pack", "gone", "--out", "out")


def test_too_many_broken_images_exit_with_65(fails, root):
    assert "are broken" in fails("data", "pack", "--root", root, "--out", "out", code=65)


@pytest.mark.slow
def test_real_images_are_preserved(shared, tmp_path):
    """Shards of ImageNet's images hold the original bytes and sizes."""
    root = shared / "imagenet-mini"
    if not root.is_dir():
        pytest.skip(f"{root} does not exist")
    assert worldsize("data", "pack", "--root", root, "--out", "shards", "--shard-mb", "20", cwd=tmp_path).returncode == 0
    samples, before = shards.open_dataset(tmp_path / "shards").train, opened(root, "imagenet", tmp_path / "cache").train
    for i in range(len(before)):
        assert bytes(samples.encoded(i)) == before.encoded(i)
        with pytest.raises(BrokenImage) if samples.records["kind"][i] == Encoding.BROKEN else np.errstate():
            assert samples.image(i).size[::-1] == tuple(samples.sizes(np.array([i]))[0])


def test_training_on_shards_gives_the_weights_of_training_on_the_originals(ranks, larger):
    """Also for a run that starts on the originals and resumes on the shards."""
    packed(larger, ranks.cwd / "shards", shard_bytes=300_000)
    settings = ["--data.name", "folder", "--model.name", SMALL_NETWORK, "--data.train-crop", "random_resized"]
    settings += ["--epochs", "1", "--global-batch", "12", "--micro-batch", "6", "--deterministic"]
    settings += ["--schedule.warmup-epochs", "0", "--precision", "fp32"]

    def train(name: str, root: Path, *options: str) -> Path:
        ranks(1).run("train", "digits", *settings, "--name", name, "--data.root", root, *options)
        return ranks.cwd / "runs" / name

    originals = train("originals", larger)
    assert identical(weights(train("shards", ranks.cwd / "shards")), weights(originals))
    resumed = train("resumed", larger, "--max-steps", "2")
    ranks(1).run("train", "--resume", resumed, "--data.root", ranks.cwd / "shards", "--max-steps", "5")
    assert identical(weights(resumed), weights(originals))
