"""ImageNet in the layouts of torchvision and Kaggle, and a thousand real images of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trees import COLORS, image_bytes, opened, put, refusal, two_classes
from worldsize.data.images.crops import RandomResizedCrop
from worldsize.data.loading.loader import Loader

WNIDS = ["n01440764", "n01443537", "n02102040"]


@pytest.fixture
def kaggle(tmp_path) -> Path:
    """Kaggle's layout: the parent folder of ILSVRC and the solution."""
    root = tmp_path / "kaggle"
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    for wnid in WNIDS:
        put(images / "train" / wnid / f"{wnid}_1.JPEG", image_bytes(kind="JPEG"))
    rows = ["ImageId,PredictionString"]
    for i, wnid in enumerate([WNIDS[2], WNIDS[0], WNIDS[1], WNIDS[0]]):
        name = f"ILSVRC2012_val_{i + 1:08}"
        put(images / "val" / f"{name}.JPEG", image_bytes(COLORS[i]))
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
    assert data.val.image(1).getpixel((0, 0)) == (0, 255, 0)


def test_kaggles_layout_from_within(kaggle, monkeypatch):
    monkeypatch.chdir(kaggle / "ILSVRC")
    assert len(opened(Path(), "imagenet", cache=kaggle / "cache").val) == 4


def test_the_solution_may_be_in_ilsvrc(kaggle):
    shutil.move(kaggle / "LOC_val_solution.csv", kaggle / "ILSVRC")
    assert len(opened(kaggle, "imagenet").val) == 4


def test_a_solution_saved_with_a_byte_order_mark_is_read(kaggle):
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text(), "utf-8-sig")
    assert len(opened(kaggle, "imagenet").val) == 4


def test_a_flat_val_next_to_train_requires_only_the_solution(kaggle):
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


def test_a_solution_may_list_more_images_than_exist(kaggle):
    (kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()
    assert opened(kaggle, "imagenet").val.labels.tolist() == [2, 1, 0]


def test_labels_change_the_fingerprint(kaggle):
    before = opened(kaggle, "imagenet").val.fingerprint
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text().replace(f"1,{WNIDS[2]}", f"1,{WNIDS[1]}"))
    assert opened(kaggle, "imagenet").val.fingerprint != before


def test_the_error_for_a_missing_solution_names_its_folder(kaggle):
    (kaggle / "LOC_val_solution.csv").unlink()
    message = refusal(kaggle, "imagenet")
    assert "LOC_val_solution.csv" in message
    assert str(kaggle) in message


def test_an_image_without_label_is_named(kaggle):
    put(kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000009.JPEG")
    message = refusal(kaggle, "imagenet")
    assert "1 images" in message
    assert "ILSVRC2012_val_00000009" in message


def test_a_label_of_an_unknown_class_is_named(kaggle):
    solution = kaggle / "LOC_val_solution.csv"
    solution.write_text(solution.read_text().replace(WNIDS[1], "n99999999"))
    message = refusal(kaggle, "imagenet")
    assert "n99999999" in message
    assert "ILSVRC2012_val_00000003" in message


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00\x01", b"a" * 200_000])
def test_an_invalid_solution_is_refused(kaggle, content):
    (kaggle / "LOC_val_solution.csv").write_bytes(content)
    assert "LOC_val_solution.csv" in refusal(kaggle, "imagenet")


def test_a_download_without_val_is_incomplete(kaggle):
    shutil.rmtree(kaggle / "ILSVRC" / "Data" / "CLS-LOC" / "val")
    assert "has no val folder" in refusal(kaggle, "imagenet")


def test_the_error_for_a_root_without_imagenet_names_the_layouts(tmp_path):
    message = refusal(tmp_path, "imagenet")
    assert "does not contain ImageNet" in message
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


def test_validation_images_of_mini_imagenet_are_labelled_as_their_twins_in_train(mini, tmp_path):
    data = opened(mini, "imagenet", cache=tmp_path / "cache")
    for i in range(0, 100, 10):
        twin = data.train.name(int(data.val.labels[i]))
        assert Path(twin).read_bytes() == Path(data.val.name(i)).read_bytes()


def test_all_images_of_mini_imagenet_decode(mini, tmp_path):
    data = opened(mini, "imagenet", cache=tmp_path / "cache")
    loader = Loader(
        data.train, RandomResizedCrop(32, True, (0.08, 1), (3 / 4, 4 / 3)), seed=0, workers=2, prefetch=4, pin=False
    )
    count = sum(len(batch.labels) for batch in loader.evaluation(0, 1, 50))
    loader.close()
    assert count == 1000
    assert loader.broken.new == {}
