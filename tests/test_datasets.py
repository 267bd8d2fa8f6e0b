"""Finding the pictures: layouts, listings that are remembered, and what is said when something is missing."""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from worldsize.data import index, open_dataset
from worldsize.data.crops import RandomResizedCrop
from worldsize.data.loader import Loader
from worldsize.data.samples import Dataset, FileSamples
from worldsize.errors import UserError
from worldsize.recipe import Data

COLOURS = ["red", "lime", "blue", "white", "black", "yellow"]
LONG_AGO = 1_600_000_000_000_000_000


def picture_bytes(colour: str = "red", kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(out, kind)
    return out.getvalue()


def put(path: Path, data: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture_bytes() if data is None else data)
    return path


def tree(root: Path, *paths: str) -> Path:
    for i, path in enumerate(paths):
        put(root / path, picture_bytes(COLOURS[i % len(COLOURS)]))
    return root


def two_classes(root: Path, val: str = "val") -> Path:
    return tree(root, "train/cat/1.png", "train/cat/2.png", "train/dog/3.png", f"{val}/cat/4.png", f"{val}/dog/5.png")


def settle(folder: Path) -> None:
    """Give all folders an old modification time, so that any change is a change of it."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.utime(path, ns=(LONG_AGO, LONG_AGO))


def opened(root: Path | None, name: str = "folder", cache: Path | None = None, **settings) -> Dataset:
    if cache is None and root is not None:
        cache = root.parent / "cache"
    return open_dataset(Data(name=name, root=root, **settings), cache or Path("nowhere"))


def refusal(root: Path | None, name: str = "folder") -> str:
    with pytest.raises(UserError) as caught:
        opened(root, name)
    return str(caught.value)


def relative_names(samples: FileSamples) -> list[str]:
    return [os.path.relpath(samples.name(i), samples.root) for i in range(len(samples))]


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """The folders that were listed."""
    listed: list[str] = []
    real = os.scandir

    def counting(path):
        listed.append(os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", counting)
    return listed


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_the_held_out_folder_may_have_any_of_three_names(tmp_path, val):
    data = opened(two_classes(tmp_path / "root", val))
    assert (len(data.train), len(data.val)) == (3, 2)
    assert data.classes == data.val.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.val.labels.tolist() == [0, 1]
    assert data.train.labels.dtype == np.int32


def test_val_is_preferred_to_test(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, "test/cat/x.png", "test/dog/y.png", "test/dog/z.png")
    assert relative_names(opened(root).val) == ["cat/4.png", "dog/5.png"]


def test_pictures_are_the_ones_named(tmp_path):
    data = opened(two_classes(tmp_path / "root"))
    assert [data.train.picture(i).getpixel((0, 0)) for i in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_what_is_no_picture_is_not_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    for name, content in {
        "README.txt": b"about these",
        "LICENSE": b"free",
        ".DS_Store": b"\0\0\0\1Bud1",
        "._1.png": picture_bytes(),
        "labels.csv": b"a,b",
        "Thumbs.db": b"\xd0\xcf\x11\xe0",
        "empty": b"",
    }.items():
        put(root / "train" / "cat" / name, content)
    (root / "train" / "cat" / "subfolder").mkdir()
    (root / "train" / ".git").mkdir()
    put(root / "train" / "README.md", b"about this")
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "dog/3.png"]


def test_a_folder_named_like_a_picture_is_not_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    (root / "train" / "cat" / "odd.png").mkdir()
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "dog/3.png"]


def test_a_picture_is_found_by_its_content_or_its_extension(tmp_path):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "cat" / "no_extension")
    put(root / "train" / "cat" / "n01.dat", picture_bytes(kind="JPEG"))
    put(root / "train" / "cat" / "UPPER.JPEG", picture_bytes())
    assert relative_names(opened(root).train) == [
        "cat/1.png",
        "cat/2.png",
        "cat/UPPER.JPEG",
        "cat/n01.dat",
        "cat/no_extension",
        "dog/3.png",
    ]
    assert opened(root).train.picture(2).size == (8, 8)


def test_classes_and_pictures_are_sorted_by_their_bytes(tmp_path):
    names = ["Zebra", "apple", "äther", "b10", "b9", "éclair"]
    paths = [f"{split}/{c}/{f}.png" for split in ("train", "val") for c in names for f in ("b", "B", "ä", "10", "9")]
    data = opened(tree(tmp_path / "root", *paths))
    assert data.classes == tuple(sorted(names, key=os.fsencode)) == ("Zebra", "apple", "b10", "b9", "äther", "éclair")
    assert relative_names(data.train)[:5] == [f"Zebra/{f}.png" for f in ("10", "9", "B", "b", "ä")]


def test_names_that_are_not_utf8_are_read_as_they_are(tmp_path):
    root = two_classes(tmp_path / "root")
    try:
        Path(os.fsdecode(os.fsencode(root / "train" / "cat") + b"/\xff\xfe.png")).write_bytes(picture_bytes())
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    assert opened(root).train.picture(2).size == (8, 8)


def test_a_class_whose_name_is_not_utf8_is_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    try:
        for split in ("train", "val"):
            put(Path(os.fsdecode(os.fsencode(root / split) + b"/\xff/1.png")))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    data = opened(root)
    assert len(data.classes) == 3
    assert data.train.picture(3).size == (8, 8)


def test_a_linked_class_is_a_class(tmp_path):
    root = two_classes(tmp_path / "root")
    put(tmp_path / "elsewhere" / "6.png")
    for split in ("train", "val"):
        (root / split / "emu").symlink_to(tmp_path / "elsewhere")
    assert opened(root).classes == ("cat", "dog", "emu")


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    two_classes(tmp_path / "root")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened(Path("~/root"), cache=tmp_path / "cache").train) == 3


def test_no_root_is_refused():
    assert "--data.root" in refusal(None)


def test_a_root_that_is_missing_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "gone")


def test_a_root_that_is_a_file_is_refused(tmp_path):
    assert "is a file" in refusal(put(tmp_path / "file"))


def test_an_empty_root_is_told_the_layout(tmp_path):
    (tmp_path / "root").mkdir()
    message = refusal(tmp_path / "root")
    assert "missing: train" in message
    assert "train/CLASS/PICTURE" in message


def test_a_root_without_validation_is_told_its_names(tmp_path):
    message = refusal(tree(tmp_path / "root", "train/cat/1.png", "train/dog/2.png"))
    assert "missing: val" in message
    assert "validation or test" in message


def test_a_single_class_is_refused(tmp_path):
    message = refusal(tree(tmp_path / "root", "train/cat/1.png", "val/cat/2.png"))
    assert "only one class, 'cat'" in message


def test_a_train_folder_without_classes_is_refused(tmp_path):
    root = two_classes(tmp_path / "root")
    shutil.rmtree(root / "train")
    put(root / "train" / "1.png")
    assert "holds no class folders" in refusal(root)


def test_classes_that_differ_are_named(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, "train/emu/1.png", "val/fox/1.png")
    message = refusal(root)
    assert "only in the first: emu" in message
    assert "only in the second: fox" in message


def test_of_many_classes_that_differ_only_some_are_named(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, *(f"train/emu{i}/1.png" for i in range(50)))
    message = refusal(root)
    assert "and more" in message
    assert len(message) < 500


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_without_pictures_is_named(tmp_path, split):
    root = two_classes(tmp_path / "root")
    for path in (root / split / "dog").iterdir():
        path.unlink()
    put(root / split / "dog" / "notes.txt", b"to do")
    assert refusal(root) == f"{root / split / 'dog'} holds no pictures"


@pytest.mark.parametrize("forbidden", ["train", "train/dog", "val"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, forbidden):
    root = two_classes(tmp_path / "root")
    real = os.scandir

    def refusing(path):
        if Path(path) == root / forbidden:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert refusal(root) == f"cannot list {root / forbidden}: Permission denied"


@pytest.fixture
def settled(tmp_path) -> Path:
    root = two_classes(tmp_path / "root")
    settle(root)
    return root


def test_a_second_listing_looks_into_no_class(settled, scans):
    first = opened(settled)
    assert str(settled / "train" / "cat") in scans
    scans.clear()
    second = opened(settled)
    assert set(scans) <= {str(settled / "train"), str(settled / "val")}
    assert second.fingerprint == first.fingerprint
    assert relative_names(second.train) == relative_names(first.train)
    assert second.train.labels.tolist() == first.train.labels.tolist()
    assert second.train.picture(2).getpixel((0, 0)) == (0, 0, 255)


def test_the_same_folder_by_another_path_is_remembered(settled, scans, tmp_path):
    opened(settled)
    (tmp_path / "link").symlink_to(settled)
    scans.clear()
    opened(tmp_path / "link")
    assert len(scans) == 2


@pytest.mark.parametrize("change", ["add", "rename", "remove", "new class"])
def test_a_changed_folder_is_listed_again(settled, change):
    opened(settled)
    cat = settled / "train" / "cat"
    match change:
        case "add":
            put(cat / "9.png")
        case "rename":
            (cat / "2.png").rename(cat / "0.png")
        case "remove":
            (cat / "2.png").unlink()
        case "new class":
            tree(settled, "train/emu/1.png", "val/emu/1.png")
    expected = sorted(os.path.relpath(p, settled / "train") for p in (settled / "train").rglob("*.png"))
    assert relative_names(opened(settled).train) == expected


@pytest.mark.parametrize("damage", [b"", b"not an index", bytes(1000), "half", "zeroed"])
def test_a_damaged_cache_is_survived_and_mended(settled, caplog, scans, damage):
    whole = opened(settled).fingerprint
    for store in (settled.parent / "cache").iterdir():
        data = store.read_bytes()
        if damage == "half":
            store.write_bytes(data[: len(data) // 2])
        elif damage == "zeroed":
            store.write_bytes(data[: len(data) // 3] + bytes(50) + data[len(data) // 3 + 50 :])
        else:
            store.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert opened(settled).fingerprint == whole
    assert "damaged" in caplog.text
    scans.clear()
    assert opened(settled).fingerprint == whole
    assert len(scans) == 2


def test_a_cache_holds_no_pickles_that_are_run(settled):
    whole = opened(settled).fingerprint
    stores = list((settled.parent / "cache").iterdir())
    for store in stores:
        np.savez(store, stamp=np.array([Trap(settled / "sprung")], object), files=1, ends=1, labels=1)
    assert opened(settled).fingerprint == whole
    assert not (settled / "sprung").exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_that_cannot_be_written_is_only_slow(settled, caplog, below):
    file = put(settled.parent / "file")
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert len(opened(settled, cache=file / below).train) == 3
    assert "cannot cache" in caplog.text


def test_no_temporary_files_are_left(settled):
    opened(settled)
    assert {p.suffix for p in (settled.parent / "cache").iterdir()} == {".npz"}


@pytest.mark.parametrize("change", ["add", "rename", "move", "rename class"])
def test_a_fingerprint_changes_with_the_files(tmp_path, change):
    root = two_classes(tmp_path / "root")
    settle(root)
    before = opened(root).train.fingerprint
    train = root / "train"
    match change:
        case "add":
            put(train / "cat" / "9.png")
        case "rename":
            (train / "cat" / "2.png").rename(train / "cat" / "7.png")
        case "move":
            (train / "cat" / "2.png").rename(train / "dog" / "2.png")
        case "rename class":
            for split in ("train", "val"):
                (root / split / "cat").rename(root / split / "cow")
    assert opened(root).train.fingerprint != before


def test_a_fingerprint_does_not_change_with_the_place(tmp_path):
    root = two_classes(tmp_path / "root")
    before = opened(root).fingerprint
    shutil.move(root, tmp_path / "moved")
    assert opened(tmp_path / "moved").fingerprint == before


def test_names_do_not_run_together_in_a_fingerprint(tmp_path):
    one = tree(tmp_path / "one", *(f"{s}/{c}/{f}" for s in ("train", "val") for c in "ab" for f in ("x.png", "y.png")))
    two = tree(tmp_path / "two", *(f"{s}/{c}/{f}" for s in ("train", "val") for c in "ab" for f in ("x.pngy.png",)))
    assert opened(one).train.fingerprint != opened(two).train.fingerprint


def test_an_index_costs_at_most_150_bytes_a_sample(tmp_path, monkeypatch):
    classes, each = 100, 1000
    names = {f"n{c:08}": [b"n%08d_%d.JPEG" % (c, 10_000 + i) for i in range(each)] for c in range(classes)}
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(index, "_pictures", lambda folder: names[folder.name])
    for _ in ("listed", "from the cache"):
        gc.collect()
        tracemalloc.start()
        samples = index.list_classes(tmp_path, names, tmp_path / "cache")
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(samples) == classes * each
        assert kept / len(samples) <= 150
        assert peak / len(samples) <= 300
        assert samples.name(12_345) == str(tmp_path / "n00000012" / "n00000012_10345.JPEG")


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
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    everything = sorted((label, g.tobytes()) for label, g in zip(bunch.target, grey, strict=True))
    ours = sorted(
        (label, pixels[..., 0].tobytes())
        for split in (digits.train, digits.val)
        for label, pixels in zip(split.labels, split.pixels, strict=True)
    )
    assert ours == everything


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
    assert data.train.picture(0).mode == "RGB"


def test_synthetic_pictures_are_noise_of_the_size_and_classes_asked_for():
    settings = {"samples": 2000, "classes": 7, "train_crop_size": 9, "val_resize_size": 11, "val_crop_size": 10}
    data = opened(None, "synthetic", **settings)
    assert data.train.pixels.shape == (2000, 9, 9, 3)
    assert data.val.pixels.shape == (1024, 11, 11, 3)
    assert set(data.train.labels.tolist()) == set(range(7))
    assert len(data.classes) == 7
    assert 120 < data.train.pixels.mean() < 135
    assert data.fingerprint == opened(None, "synthetic", **settings).fingerprint


class Trap:
    """Unpickling it leaves a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_root_without_cifar10_is_told_both_layouts_and_the_download(tmp_path):
    message = refusal(tmp_path, "cifar10")
    assert "--data.download" in message
    assert "cifar-10-batches-py" in message
    assert "train/CLASS/PICTURE" in message


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
        put(tmp_path / "cifar-10-batches-py" / name, pickle.dumps(Trap(tmp_path / "sprung")))
    assert "checksums" in refusal(tmp_path, "cifar10")
    assert not (tmp_path / "sprung").exists()


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


WNIDS = ["n01440764", "n01443537", "n02102040"]


@pytest.fixture
def kaggle(tmp_path) -> Path:
    """Kaggle's layout: the folder that holds ILSVRC and the solution."""
    root = tmp_path / "kaggle"
    pictures = root / "ILSVRC" / "Data" / "CLS-LOC"
    for wnid in WNIDS:
        put(pictures / "train" / wnid / f"{wnid}_1.JPEG", picture_bytes(kind="JPEG"))
    rows = ["ImageId,PredictionString"]
    for i, wnid in enumerate([WNIDS[2], WNIDS[0], WNIDS[1], WNIDS[0]]):
        name = f"ILSVRC2012_val_{i + 1:08}"
        put(pictures / "val" / f"{name}.JPEG", picture_bytes(COLOURS[i]))
        rows.insert(1, f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8 ")
    (root / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return root


def test_imagenet_in_torchvisions_layout(tmp_path):
    data = opened(two_classes(tmp_path / "root"), "imagenet")
    assert (len(data.train), len(data.val)) == (3, 2)


@pytest.mark.parametrize("place", ["", "ILSVRC"])
def test_kaggles_layout_from_either_folder(kaggle, place):
    data = opened(kaggle / place, "imagenet", cache=kaggle / "cache")
    assert data.classes == data.val.classes == tuple(WNIDS)
    assert (len(data.train), data.val.labels.tolist()) == (3, [2, 0, 1, 0])
    assert data.val.name(1).endswith("CLS-LOC/val/ILSVRC2012_val_00000002.JPEG")
    assert data.val.picture(1).getpixel((0, 0)) == (0, 255, 0)


def test_kaggles_layout_from_within(kaggle, monkeypatch):
    monkeypatch.chdir(kaggle / "ILSVRC")
    assert len(opened(Path(), "imagenet", cache=kaggle / "cache").val) == 4


def test_the_solution_may_lie_in_ilsvrc(kaggle):
    shutil.move(kaggle / "LOC_val_solution.csv", kaggle / "ILSVRC")
    assert len(opened(kaggle, "imagenet").val) == 4


def test_a_solution_saved_with_a_byte_order_mark_is_read(kaggle):
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text(), "utf-8-sig")
    assert len(opened(kaggle, "imagenet").val) == 4


def test_a_flat_val_beside_train_needs_only_the_solution(kaggle):
    flat = kaggle / "ILSVRC" / "Data" / "CLS-LOC"
    shutil.copy(kaggle / "LOC_val_solution.csv", flat)
    assert opened(flat, "imagenet").val.labels.tolist() == [2, 0, 1, 0]


def test_val_sorted_into_classes_needs_no_solution(kaggle):
    (kaggle / "LOC_val_solution.csv").unlink()
    val = kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val"
    for path, wnid in zip(sorted(val.iterdir()), [*WNIDS, WNIDS[0]], strict=True):
        (val / wnid).mkdir(exist_ok=True)
        shutil.move(path, val / wnid)
    assert opened(kaggle, "imagenet").val.labels.tolist() == [0, 0, 1, 2]


def test_a_hidden_folder_does_not_make_a_flat_val_sorted(kaggle):
    (kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val" / ".ipynb_checkpoints").mkdir()
    assert len(opened(kaggle, "imagenet").val) == 4


def test_a_solution_may_know_more_pictures_than_there_are(kaggle):
    (kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()
    assert opened(kaggle, "imagenet").val.labels.tolist() == [2, 1, 0]


def test_labels_move_the_fingerprint(kaggle):
    before = opened(kaggle, "imagenet").val.fingerprint
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text().replace(f"1,{WNIDS[2]}", f"1,{WNIDS[1]}"))
    assert opened(kaggle, "imagenet").val.fingerprint != before


def test_a_missing_solution_is_named_with_its_place(kaggle):
    (kaggle / "LOC_val_solution.csv").unlink()
    message = refusal(kaggle, "imagenet")
    assert "LOC_val_solution.csv" in message
    assert str(kaggle) in message


def test_a_picture_without_label_is_named(kaggle):
    put(kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000009.JPEG")
    message = refusal(kaggle, "imagenet")
    assert "1 pictures" in message
    assert "ILSVRC2012_val_00000009" in message


def test_a_label_of_an_unknown_class_is_named(kaggle):
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text().replace(WNIDS[1], "n99999999"))
    message = refusal(kaggle, "imagenet")
    assert "n99999999" in message
    assert "ILSVRC2012_val_00000003" in message


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00\x01"])
def test_a_solution_that_is_none_is_refused(kaggle, content):
    (kaggle / "LOC_val_solution.csv").write_bytes(content)
    assert "LOC_val_solution.csv" in refusal(kaggle, "imagenet")


def test_a_download_without_val_is_incomplete(kaggle):
    shutil.rmtree(kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val")
    assert "has no val folder" in refusal(kaggle, "imagenet")


def test_a_root_without_imagenet_is_told_the_layouts(tmp_path):
    message = refusal(tmp_path, "imagenet")
    assert "holds no ImageNet" in message
    assert "CLS-LOC" in message


@pytest.fixture
def mini(shared) -> Path:
    root = shared / "imagenet-mini"
    if not root.is_dir():
        pytest.skip("needs ../shared/data/imagenet-mini")
    return root


def test_the_thousand_classes_of_mini_imagenet_are_found_from_either_folder(mini, tmp_path):
    for root in (mini, mini / "ILSVRC"):
        data = opened(root, "imagenet", cache=tmp_path / "cache")
        assert (len(data.classes), len(data.train), len(data.val)) == (1000, 1000, 100)
        assert data.train.labels.tolist() == list(range(1000))
        assert data.classes[0] == "n01440764"


def test_validation_pictures_of_mini_imagenet_are_labelled_as_their_twins_in_train(mini, tmp_path):
    data = opened(mini, "imagenet", cache=tmp_path / "cache")
    for i in range(0, 100, 10):
        twin = data.train.name(int(data.val.labels[i]))
        assert Path(twin).read_bytes() == Path(data.val.name(i)).read_bytes()


def test_all_pictures_of_mini_imagenet_decode(mini, tmp_path):
    data = opened(mini, "imagenet", cache=tmp_path / "cache")
    loader = Loader(
        data.train, RandomResizedCrop(32, True, (0.08, 1), (3 / 4, 4 / 3)), seed=0, workers=2, prefetch=4, pin=False
    )
    count = sum(len(batch.labels) for batch in loader.evaluation(0, 1, 50))
    loader.close()
    assert count == 1000
    assert loader.broken.new == {}
