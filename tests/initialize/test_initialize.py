"""`worldsize init`: a recipe from a folder of images that trains as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from packing import encode, noise
from processes import records
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data import open_dataset
from worldsize.data.datasets.validation_split import apart, stratified
from worldsize.errors import UserError
from worldsize.initialize import fine_tuning
from worldsize.initialize.command import _command


def jpeg(seed: int) -> bytes:
    return encode(noise(48, 40, seed), "JPEG")


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch) -> Path:
    """CLASS/IMAGE without a split, with a broken file, a text and a copy; the current folder is its parent."""
    root = tmp_path / "my # pets: 2"
    for label in range(3):
        (root / f"class {label}").mkdir(parents=True)
        for i in range(20):
            (root / f"class {label}" / f"{i:02}.jpg").write_bytes(jpeg(100 * label + i))
    (root / "class 0" / "broken.jpg").write_bytes(jpeg(0)[:300])
    (root / "class 1" / "notes.txt").write_text("not an image")
    (root / "class 2" / "copy.jpg").write_bytes(jpeg(200))
    monkeypatch.chdir(tmp_path)
    return root


def test_the_recipe_of_a_mixed_folder_trains(mixed, capsys, ranks):
    before = {path: path.read_bytes() for path in mixed.rglob("*.*")}
    assert main(["init", str(mixed), "--weights", "none", "--out", "pets.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "3 classes, 56 training and 6 validation images" in printed
    assert "class 0/broken.jpg" in printed and "1 image is a copy of another" in printed
    assert "worldsize train pets.yaml" in printed
    assert {path: path.read_bytes() for path in mixed.rglob("*.*")} == before
    small = ("--epochs", "1", "--schedule.warmup-epochs", "0", "--model.name", "shufflenet_v2_x0_5")
    more = ("--model.stem", "imagenet", "--global-batch", "16", "--micro-batch", "4", "--name", "pets")
    ranks(2).run("train", Path("pets.yaml").absolute(), *small, *more)
    [evaluation] = records(ranks.cwd / "runs" / "pets", "epoch")
    assert (evaluation["val_samples"], evaluation["val_broken"]) == (6, 0)


def test_pretrained_weights_lead_to_the_fine_tuning_rule(mixed):
    state = torchvision.models.resnet18(num_classes=9).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, "w.safetensors")
    assert main(["init", str(mixed), "--model", "resnet18", "--weights", "w.safetensors"]) == 0
    recipe = recipe_files.load("my # pets: 2.yaml")
    plan = fine_tuning.plan(56, 64)
    assert (recipe.model.weights, recipe.model.zero_head) == (str(Path("w.safetensors").resolve()), True)
    assert (recipe.epochs, recipe.global_batch) == (plan.epochs, plan.global_batch)
    assert (recipe.optimizer.lr, recipe.optimizer.lr_reference_batch, recipe.optimizer.weight_decay) == (0.003, 512, 0)
    assert recipe.schedule.milestones == plan.milestones
    assert recipe.data.max_broken == 0.02


def test_without_a_network_connection_it_trains_from_scratch(mixed, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(mixed.parent / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert main(["init", str(mixed), "--model", "resnet18"]) == 0
    assert "no pretrained weights: cannot download" in capsys.readouterr().out
    assert recipe_files.load("my # pets: 2.yaml").model.weights is None


def test_a_folder_with_a_split_keeps_it(mixed):
    for split in ("train", "test"):
        for label in range(2):
            folder = mixed.parent / "split" / split / f"{label}"
            folder.mkdir(parents=True)
            for i in range(8):
                (folder / f"{i}.jpg").write_bytes(jpeg(10 * label + i + 1000 * (split == "test")))
    assert main(["init", "split", "--weights", "none"]) == 0
    recipe = recipe_files.load("split.yaml")
    assert recipe.data.val_list is None and not Path("split.val.txt").exists()
    dataset = open_dataset(recipe.data, mixed.parent / "cache")
    assert (len(dataset.train), len(dataset.val)) == (16, 16)


@pytest.fixture
def patients(tmp_path, monkeypatch) -> Path:
    """Images in two parts, and a table with several labels and a patient for each; the current folder is their parent."""
    root = tmp_path / "scans"
    rows = ["Image Index,Finding Labels,Patient ID"]
    for i in range(48):
        path = root / f"part_{i % 2}" / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
        rows.append(f"{i:03}.jpg,{('Mass', 'Nodule', 'Mass|Nodule', 'No Finding')[i // 3 % 4]},{i // 3}")
    (root / "labels.csv").write_text("\n".join([*rows, "gone.jpg,Mass,99\n"]))
    (root / "part_0" / "other.jpg").write_bytes(jpeg(99))
    monkeypatch.chdir(tmp_path)
    return root


def test_the_recipe_of_a_table_with_several_labels_trains(patients, capsys, ranks):
    assert main(["init", str(patients), "--weights", "none", "--out", "scans.yaml"]) == 0
    printed = capsys.readouterr().out
    said = [
        "labels: the column 'Finding Labels' of labels.csv; an image may have several",
        "images with the same Patient ID are on one side",
        "'No Finding' in labels.csv is read as no label",
        "1 image has no label and is not used, in part_0",
        "1 label is of an image that is not there: gone.jpg",
    ]
    comments = "".join(line for line in Path("scans.yaml").read_text().splitlines() if line.startswith("#"))
    assert all(sentence in printed and sentence in comments for sentence in said)
    recipe = recipe_files.load("scans.yaml")
    dataset = open_dataset(recipe.data, patients.parent / "cache")
    assert (dataset.classes, len(dataset.train) + len(dataset.val)) == (("Mass", "Nodule"), 48)
    sides = [{int(Path(one.path(i)).stem) // 3 for i in range(len(one))} for one in (dataset.train, dataset.val)]
    assert sides[1] and not sides[0] & sides[1]
    small = ("--epochs", "1", "--schedule.warmup-epochs", "0", "--model.name", "shufflenet_v2_x0_5", "--max-steps", "1")
    more = ("--model.stem", "imagenet", "--global-batch", "8", "--micro-batch", "4", "--name", "scans")
    ranks(2).run("train", Path("scans.yaml").absolute(), *small, *more)


def test_flags_decide_what_is_unclear(patients, capsys):
    table = (patients / "labels.csv").read_text().replace("Finding Labels", "genre").replace("Patient ID", "emotion")
    (patients / "labels.csv").write_text(table.replace("No Finding", "Mass").replace("Mass|Nodule", "Mass"))
    init = ["init", str(patients), "--weights", "none"]
    assert main(init) == 64
    assert "labels.csv has 2 columns that may have the labels (genre, emotion)" in capsys.readouterr().err
    assert not list(Path().glob("scans.*"))
    assert main([*init, "--labels", "labels.csv", "--label-column", "genre"]) == 0
    assert recipe_files.load("scans.yaml").data.name == "folder"
    listed = Path("scans.labels.csv").read_text()
    assert main(["init", str(patients / "labels.csv"), "--weights", "none", "--label-column", "genre", "--force"]) == 0
    assert Path("scans.labels.csv").read_text() == listed


def test_test_images_are_listed_and_not_used(mixed):
    for split in ("Training", "valid", "Test"):
        for label in range(2):
            folder = mixed.parent / "split" / split / f"k{label}"
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}.jpg").write_bytes(jpeg(10 * label + i + 100 * len(split)))
    assert main(["init", "split", "--weights", "none"]) == 0
    dataset = open_dataset(recipe_files.load("split.yaml").data, mixed.parent / "cache")
    assert (len(dataset.train), len(dataset.val)) == (6, 6)
    assert Path("split.labels.csv").read_text().count(",test\n") == 6


def test_a_leftover_list_matters_only_if_a_list_is_written(mixed, capsys):
    Path("a.val.txt").write_text("kept")
    assert main(["init", str(mixed), "--weights", "none", "--out", "a.yaml"]) == 64
    assert "a.val.txt already exists" in capsys.readouterr().err
    assert Path("a.val.txt").read_text() == "kept" and not Path("a.yaml").exists()
    for split in ("train", "val"):
        for label in range(2):
            (mixed.parent / "split" / split / f"{label}").mkdir(parents=True)
            (mixed.parent / "split" / split / f"{label}" / "0.jpg").write_bytes(jpeg(label + 10 * (split == "val")))
    assert main(["init", "split", "--weights", "none", "--out", "a.yaml"]) == 0
    assert Path("a.val.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("gpus", "command"), [(0, "'my # pets: 2.yaml'"), (4, "'my # pets: 2.yaml' --procs 4"), (7, "x.yaml --procs 4")]
)
def test_the_command_can_be_pasted_and_uses_the_gpus(gpus, command):
    recipe = Recipe(global_batch=128, micro_batch=32)
    assert _command(Path(shlex.split(command)[0]), recipe, gpus) == f"worldsize train {command}"


def test_names_with_spaces_and_line_separators_are_found_in_the_list(mixed):
    odd = ["0\u2028.jpg", " 1\x85 .jpg", "2\x1c .jpg"]
    for name in odd:
        (mixed / "class 1" / name).write_bytes(jpeg(hash(name) % 1000 + 500))
    Path("list.txt").write_bytes("".join(f"class 1/{name}\n" for name in odd).encode())
    settings = {"name": "folder", "root": str(mixed), "val_list": "list.txt"}
    dataset = open_dataset(recipe_files.validate({"data": settings}, "recipe").data, mixed.parent / "cache")
    assert sorted(dataset.val.path(i) for i in range(len(dataset.val))) == sorted(f"class 1/{name}" for name in odd)


def test_the_names_of_the_images_do_not_matter(mixed):
    def chosen() -> set[bytes]:
        assert main(["init", str(mixed), "--weights", "none", "--out", "a.yaml", "--force"]) == 0
        return {(mixed / name).read_bytes() for name in Path("a.val.txt").read_text().splitlines()}

    before = chosen()
    for path in list((mixed / "class 1").glob("*.jpg")):
        path.rename(path.with_name(f"{hash(path.name) % 100}-{path.name}"))
    assert len(before) == 6 and chosen() == before


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=80), st.floats(0.05, 0.5))
def test_a_split_is_stratified_and_keeps_copies_together(images, share):
    labels = np.array([label for label, _ in images], np.int32)
    contents = np.array([content for _, content in images])
    digests = np.repeat(contents[:, None], 16, 1).astype(np.uint8)
    validation = stratified(labels, digests, share)
    for label in set(labels.tolist()):
        inside, outside = (set(contents[(labels == label) & side].tolist()) for side in (validation, ~validation))
        assert not inside & outside and outside
        different = len(inside | outside)
        assert len(inside) == min(max(round(share * different), int(different > 1)), different - 1)
    order = np.random.default_rng(0).permutation(len(images))
    np.testing.assert_array_equal(stratified(labels[order], digests[order], share), validation[order])


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0.05, 0.5),
)
def test_a_split_keeps_groups_together_and_a_training_image_of_each_class(images, share):
    labels = np.array([[label in found for label in range(4)] for found, _, _ in images], np.uint8)
    digests = np.repeat(np.array([[content] for _, content, _ in images]), 16, 1).astype(np.uint8)
    groups = [f"{group}" if group else None for _, _, group in images]
    validation = apart(labels, digests, groups, share)
    for of in ([content for _, content, _ in images], groups):
        sides = [{key for key, side in zip(of, validation, strict=True) if side == which and key} for which in (True, False)]
        assert not sides[0] & sides[1]
    assert (labels[~validation].any(0) == labels.any(0)).all() and not validation.all()


def test_a_split_by_group_has_about_the_share_of_each_class():
    labels = np.arange(2000, dtype=np.int32) % 5
    digests = np.random.default_rng(0).integers(0, 256, (2000, 16), np.uint8)
    validation = apart(labels, digests, [f"{i // 4}" for i in range(2000)], 0.1)
    counts = np.bincount(labels[validation])
    assert counts.min() >= 36 and counts.max() <= 46
    by_driver = apart(labels, digests, [f"{i // 500}" for i in range(2000)], 0.1)  # each group is a quarter of the images
    assert by_driver.sum() == 500


@pytest.mark.parametrize("procs", [1, 2])
def test_few_images_can_be_shared_by_processes(mixed, ranks, procs):
    assert main(["init", str(mixed), "--weights", "none", "--out", "few.yaml"]) == 0
    quick = ("--max-steps", "1", "--model.name", "shufflenet_v2_x0_5", "--model.stem", "imagenet", "--name", f"few{procs}")
    ranks(procs).run("train", Path("few.yaml").absolute(), *quick)
    assert len(records(ranks.cwd / "runs" / f"few{procs}", "step")) == 1


@pytest.mark.parametrize("largest", [64, 512])
def test_the_micro_batches_of_a_step_suffice_for_four_processes(largest):
    for images in range(8, 3000):
        batch = fine_tuning.plan(images, largest).global_batch
        shares = batch // fine_tuning.micro_batch(batch)
        assert batch <= images and batch % fine_tuning.micro_batch(batch) == 0
        assert shares % (4 if images >= 16 else 2) == 0


@pytest.mark.parametrize(
    ("images", "supports", "mixup"),
    [
        (500, [100, 200, 300, 400, 500], 0),
        (19_999, [100, 200, 300, 400, 500], 0),
        (20_000, [500, 3000, 6000, 9000, 10_000], 0.1),
        (499_999, [500, 3000, 6000, 9000, 10_000], 0.1),
        (1_281_167, [500, 6000, 12_000, 18_000, 20_000], 0.1),
    ],
)
def test_the_rule_is_bits(images, supports, mixup):
    """The values are those of get_schedule and get_mixup in bit_hyperrule.py."""
    warmup, *drops, steps = supports
    plan = fine_tuning.plan(images)
    per_epoch = images // plan.global_batch
    assert steps <= plan.epochs * per_epoch < steps + per_epoch
    assert plan.mixup == mixup
    assert plan.warmup_epochs / plan.epochs == pytest.approx(warmup / steps, abs=0.01)
    assert [milestone / plan.epochs for milestone in plan.milestones] == pytest.approx([d / steps for d in drops], abs=0.01)


def test_the_recipe_finetune_is_the_plan_for_5000_images():
    recipe, plan = recipe_files.load("finetune"), fine_tuning.plan(5000)
    assert (recipe.epochs, recipe.global_batch) == (plan.epochs, plan.global_batch)
    assert (recipe.schedule.milestones, recipe.schedule.warmup_epochs) == (plan.milestones, plan.warmup_epochs)
    assert (recipe.optimizer.lr, recipe.optimizer.lr_reference_batch) == (fine_tuning.LR, fine_tuning.REFERENCE_BATCH)
    assert recipe.augment.mixup == plan.mixup


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "gone: no such folder"),
        (["ROOT", "--val-share", "1"], "must be between 0 and 1"),
        (["ROOT", "--weights", "gone.pth"], "file not found"),
        (["ROOT", "--out", "there.yaml"], "there.yaml already exists"),
        (["ROOT", "--out", "digits"], "--out digits is the name of a shipped recipe"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_written(mixed, capsys, arguments, message):
    Path("there.yaml").write_text("kept")
    assert main(["init", *[str(mixed) if word == "ROOT" else word for word in arguments]]) == 64
    assert message in capsys.readouterr().err
    assert Path("there.yaml").read_text() == "kept"
    assert {path.name for path in Path().iterdir()} == {mixed.name, "there.yaml"}


@pytest.mark.parametrize(
    ("names", "message"),
    [("class 0/nobody.jpg", "names 1 image not in"), ("", "names no image of")],
)
def test_a_wrong_list_is_refused(mixed, names, message):
    Path("list.txt").write_text(names)
    settings = {"name": "folder", "root": str(mixed), "val_list": "list.txt"}
    with pytest.raises(UserError, match=message):
        open_dataset(recipe_files.validate({"data": settings}, "recipe").data, mixed.parent / "cache")
