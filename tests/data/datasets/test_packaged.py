"""Datasets that are generated, come with a package or have their own file format: synthetic, digits, CIFAR-10."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from trees import Trap, opened, put, refusal, two_classes
from worldsize.data.samples import Dataset


@pytest.mark.parametrize("command", [("data", "verify", "--root"), ("data", "info"), ("bench", "loader", "--root")])
def test_a_wrong_folder_is_named_without_the_flag_of_another_command(fails, tmp_path, command):
    (tmp_path / "file").write_text("")
    assert "gone: no such folder" in (said := fails(*command, "gone")) and "--data.root" not in said
    assert "file is a file, not a folder" in (said := fails(*command, "file")) and "--data.root" not in said


def test_where_to_get_cifar10_is_said_for_any_command(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    said = fails("data", "verify", "--root", "empty", "--data", "cifar10")
    assert "`worldsize data fetch cifar10 --to DIR`" in said


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return opened(None, "digits", train_crop_size=8, val_resize_size=8, val_crop_size=8)


def test_digits_split_1437_to_360_in_ten_classes(digits):
    assert (len(digits.train), len(digits.val)) == (1437, 360)
    assert digits.classes == tuple("0123456789")
    for split in (digits.train, digits.val):
        assert set(split.labels.tolist()) == set(range(10))


def test_the_splits_of_digits_are_disjoint_and_complete(digits):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    gray = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    expected = sorted((label, g.tobytes()) for label, g in zip(bunch.target, gray, strict=True))
    ours = sorted(
        (label, pixels[..., 0].tobytes())
        for split in (digits.train, digits.val)
        for label, pixels in zip(split.labels, split.pixels, strict=True)
    )
    assert ours == expected


def test_the_fingerprint_of_digits_stays_the_same(digits):
    again = opened(None, "digits", train_crop_size=8, val_resize_size=8, val_crop_size=8)
    assert again.fingerprint == digits.fingerprint
    assert digits.train.fingerprint != digits.val.fingerprint
    labels = hashlib.sha256(digits.val.labels.tobytes()).hexdigest()[:16]
    assert labels == "233abafd14ba2958"


def test_digits_have_the_sizes_of_the_recipe():
    data = opened(None, "digits", train_crop_size=20, val_resize_size=24, val_crop_size=16)
    assert data.train.pixels.shape == (1437, 20, 20, 3)
    assert data.val.pixels.shape == (360, 24, 24, 3)
    assert data.train.image(0).mode == "RGB"


def test_synthetic_images_are_noise_of_the_requested_size_and_classes():
    settings = {"samples": 2000, "classes": 7, "train_crop_size": 9, "val_resize_size": 11, "val_crop_size": 10}
    data = opened(None, "synthetic", **settings)
    assert data.train.pixels.shape == (2000, 9, 9, 3)
    assert data.val.pixels.shape == (1024, 11, 11, 3)
    assert set(data.train.labels.tolist()) == set(range(7))
    assert len(data.classes) == 7
    assert 120 < data.train.pixels.mean() < 135
    assert data.fingerprint == opened(None, "synthetic", **settings).fingerprint
    # Of the version that held each image by itself: its runs must resume.
    assert data.train.fingerprint == "987dc31d1533a8fa60c888b82dd9efd70664b54c97bb813d03ddc2702740757e"
    assert data.val.fingerprint == "00312d09235cac49c0f789557855500b5e629a8462444ca8de22a9c8d27a3e3e"


def test_many_synthetic_images_need_little_memory():
    data = opened(
        None, "synthetic", samples=10_000_000, classes=10, train_crop_size=64, val_resize_size=64, val_crop_size=64
    )
    last = np.array([9_999_999])  # 123 GB, each by itself
    np.testing.assert_array_equal(data.train.several(last), data.train.several(last % 64))
    np.testing.assert_array_equal(data.train.image(9_999_999), data.train.several(last)[0])
    assert data.train.labels[-1] == 9


def test_without_cifar10_the_message_names_both_layouts_and_the_download(tmp_path):
    message = refusal(tmp_path, "cifar10")
    assert "--data.download" in message
    assert "cifar-10-batches-py" in message
    assert "train/CLASS/IMAGE" in message


def test_cifar10_needs_a_root():
    assert "--data.root" in refusal(None, "cifar10")


def test_cifar10_files_with_a_wrong_checksum_are_refused_and_never_unpickled(tmp_path):
    for name in (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
        "batches.meta",
    ):
        put(tmp_path / "cifar-10-batches-py" / name, pickle.dumps(Trap(tmp_path / "executed")))
    assert "checksums" in refusal(tmp_path, "cifar10")
    assert not (tmp_path / "executed").exists()


def test_cifar10_in_its_official_files_is_read(tmp_path, monkeypatch):
    base = tmp_path / CIFAR10.base_folder
    checksums = {}
    rows = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for i, name in enumerate(names):
        part = {"data": rows[4 * i : 4 * i + 4], "labels": [0, 1, 2, 3]}
        checksums[name] = hashlib.md5(put(base / name, pickle.dumps(part)).read_bytes()).hexdigest()
    classes = [f"class {i}" for i in range(10)]
    meta = put(base / CIFAR10.meta["filename"], pickle.dumps({"label_names": classes}))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, checksums[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [[names[5], checksums[names[5]]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": hashlib.md5(meta.read_bytes()).hexdigest()})
    data = opened(tmp_path, "cifar10")
    assert (len(data.train), len(data.val)) == (20, 4)
    assert data.classes == tuple(classes)
    np.testing.assert_array_equal(data.train.pixels[0], rows[0].reshape(3, 32, 32).transpose(1, 2, 0))
    assert data.val.labels.tolist() == [0, 1, 2, 3]


def test_cifar10_in_a_plain_folder_is_read(tmp_path):
    data = opened(two_classes(tmp_path / "root", "test"), "cifar10")
    assert (len(data.train), len(data.val)) == (3, 2)
