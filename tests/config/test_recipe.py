"""Recipes: what loads, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe, Section
from worldsize.errors import UserError


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, "utf-8")
    return str(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        recipe_files.load(write(folder, text))
    return str(caught.value)


def test_the_shipped_recipes_are_listed():
    assert {"digits", "cifar10", "imagenet"} <= set(recipe_files.names())
    assert recipe_files.names() == sorted(recipe_files.names())


def test_cifar10_also_has_the_name_of_its_network():
    named, plain = recipe_files.load("cifar10-resnet50"), recipe_files.load("cifar10")
    assert named.model_copy(update={"about": plain.about}) == plain


@pytest.mark.parametrize("name", [name for name in recipe_files.names() if "ffcv" in name])
def test_a_recipe_of_ffcv_states_its_own_file(name):
    recipe, network = recipe_files.load(name), name.split("-")[2]
    assert f"{network}_configs/{network}_{recipe.epochs}_epochs.yaml" in recipe.source


@pytest.mark.parametrize("name", recipe_files.names())
def test_a_shipped_recipe_loads_and_says_what_it_is(name):
    recipe = recipe_files.load(name)
    assert recipe.about
    assert recipe.reaches
    assert recipe.source
    assert recipe.global_batch % recipe.micro_batch == 0


@pytest.mark.parametrize("name", recipe_files.names())
def test_a_shipped_recipe_survives_being_written_and_read(name, tmp_path):
    recipe = recipe_files.load(name)
    assert recipe_files.load(write(tmp_path, recipe_files.to_yaml(recipe))) == recipe


@settings(max_examples=15)
@given(
    st.fixed_dictionaries(
        {
            "about": st.text(
                st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=("Cc", "Cs")), max_size=30
            ),
            "seed": st.integers(0, 2**64 - 1),
            "label_smoothing": st.just(0.0) | st.floats(1e-30, 1, exclude_max=True),
            "max_steps": st.none() | st.integers(1, 10**9),
        }
    ),
    st.floats(1e-30, 1e30),
    st.none() | st.sampled_from(["/data/images", "relative/ö", "~/x", "no", "1"]),
)
def test_any_recipe_survives_being_written_and_read(tmp_path_factory, top, lr, path):
    recipe = Recipe.model_validate(
        top | {"optimizer": {"lr": lr}, "data": {"root": path}, "model": {"weights": path}, "track": {"trackers": ["wandb"]}}
    )
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(recipe_files.to_yaml(recipe), "utf-8")
    assert recipe_files.load(str(file)) == recipe


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError):
        Recipe().epochs = 3


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("epoch: 3", "epoch", "epochs"),
        ("globl_batch: 3", "globl_batch", "global_batch"),
        ("data: {rot: x}", "data.rot", "data.root"),
        ("optimizer: {momentun: 0.5}", "optimizer.momentun", "optimizer.momentum"),
        ("scheduel: {name: cosine}", "scheduel", "schedule"),
        ("optimizer: {lr_scalling: none}", "optimizer.lr_scalling", "optimizer.lr_scaling"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, text, unknown, nearest):
    assert f"unknown setting {unknown!r}; did you mean {nearest!r}?" in refusal(tmp_path, text)


def test_an_unknown_key_like_no_other_is_named_alone(tmp_path):
    message = refusal(tmp_path, "zzzzzzzz: 3")
    assert "unknown setting 'zzzzzzzz'" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("epochs: many", ["epochs"]),
        ("epochs: 0", ["epochs"]),
        ("epochs: 1.5", ["epochs"]),
        ("seed: -1", ["seed"]),
        ("seed: 18446744073709551616", ["seed"]),
        ("data: 5", ["data"]),
        ("data:", ["data"]),
        ("data: {flip: 7}", ["data.flip"]),
        ("data: {mean: [1]}", ["data.mean"]),
        ("data: {std: [1, 0, 1]}", ["data", "std"]),
        ("data: {name: mnist}", ["data.name"]),
        ("data: {flip: false, alternate_flips: true}", ["data", "alternate_flips", "requires flip"]),
        ("data: {crop_area: [0.5, 0.1]}", ["data", "crop_area"]),
        ("data: {crop_ratio: [0, 1]}", ["data", "crop_ratio"]),
        ("optimizer: {lr: .nan}", ["optimizer.lr"]),
        ("optimizer: {lr: 0}", ["optimizer.lr"]),
        ("track: {trackers: [mlflow]}", ["track.trackers"]),
        ("epochs: x\nseed: y\ndata: {padding: z}", ["epochs", "seed", "data.padding"]),
        ("1: 2", ["1"]),
        ("global_batch: 100", ["global_batch", "micro_batch", "96", "128"]),
        ("global_batch: 20", ["global_batch", "micro_batch", "32"]),
        ("per_process_batch: 40", ["per_process_batch", "micro_batch", "32", "64"]),
        ("data: {val_crop_size: 300}", ["data", "val_crop_size", "val_resize_size", "300"]),
        ("epochs: 60\nschedule: {name: step}", ["schedule.milestones", "epochs"]),
        ("schedule: {name: step, milestones: [30, 20]}", ["schedule.milestones", "increasing"]),
        ("schedule: {name: step, milestones: [30, 30]}", ["schedule.milestones", "increasing"]),
        ("epochs: 5\nschedule: {warmup_epochs: 5}", ["schedule.warmup_epochs", "epochs"]),
        ("optimizer: {momentum: 0}", ["optimizer", "nesterov", "momentum"]),
    ],
)
def test_values_that_cannot_be_name_their_fields(tmp_path, text, fields):
    message = refusal(tmp_path, text)
    assert "mine.yaml" in message
    for field in fields:
        assert field in message


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {name: adamw, momentum: 0}",
        "optimizer: {nesterov: false, momentum: 0}",
        "epochs: 10\nschedule: {name: cosine}",
        "global_batch: 100\nper_process_batch: 64",
        "optimizer: {lr: 1e-3}",
        "schedule: {name: step, milestones: []}",
    ],
)
def test_settings_that_fit_together_load(tmp_path, text):
    assert isinstance(recipe_files.load(write(tmp_path, text)), Recipe)


def test_a_base_is_merged_section_by_section(tmp_path):
    recipe = recipe_files.load(write(tmp_path, "base: digits\nepochs: 99\noptimizer: {lr: 0.5}\ndata: {mean: [0, 0, 0]}\n"))
    digits = recipe_files.load("digits")
    assert recipe.epochs == 99
    assert recipe.data.mean == (0, 0, 0)
    assert recipe.optimizer == digits.optimizer.model_copy(update={"lr": 0.5})
    assert recipe.schedule == digits.schedule
    assert recipe.data.train_crop_size == digits.data.train_crop_size


def test_a_base_may_have_a_base(tmp_path):
    middle = write(tmp_path, "base: digits\nseed: 5\nepochs: 50\n", "middle.yaml")
    recipe = recipe_files.load(write(tmp_path, f"base: {middle}\nepochs: 60\n"))
    assert (recipe.seed, recipe.epochs, recipe.data.name) == (5, 60, "digits")


def test_a_base_is_looked_for_beside_the_file_that_names_it(tmp_path, monkeypatch):
    write(tmp_path, "seed: 5\n", "middle.yaml")
    mine = write(tmp_path, "base: middle.yaml\nepochs: 60\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert recipe_files.load(mine).seed == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"shuffle": "block", "block": 32, "pool": 31}}, "pool 31 must be at least block 32"),
        ({"data": {"shuffle": "block"}, "parallel": {"strategy": "async"}}, "incompatible with strategy async: use"),
    ],
)
def test_a_block_shuffle_that_cannot_be_is_refused(changes, words):
    with pytest.raises((ValueError, UserError), match=words):
        parallel.validate(Recipe(**changes))
    changes["data"]["shuffle"] = "full"
    Recipe(**changes)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_base_that_leads_back_to_itself_is_refused(tmp_path, length):
    paths = [tmp_path / f"{i}.yaml" for i in range(length)]
    for path, base in zip(paths, paths[1:] + paths[:1], strict=True):
        path.write_text(f"base: {base}\n")
    with pytest.raises(UserError, match="refers back to itself"):
        recipe_files.load(str(paths[0]))


def test_a_base_that_leads_back_by_another_path_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: ../{tmp_path.name}/mine.yaml\n")
    with pytest.raises(UserError, match="refers back to itself"):
        recipe_files.load(str(tmp_path / "mine.yaml"))


def test_a_base_that_is_not_there_is_named(tmp_path):
    assert "digitz" in refusal(tmp_path, "base: digitz\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2\n", "list"),
        ("", "mine.yaml"),
        ("# nothing yet\n", "mine.yaml"),
        ("just words", "str"),
        ("a: [1", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("\tepochs: 3", "not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("source: 2024-02-30", "not valid YAML: day "),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: no", "max_steps: expected a number, not False (no in YAML)"),
        ("epochs: yes", "epochs: expected a number, not True (yes in YAML)"),
        ("data: {max_broken: yes}", "data: max_broken: expected a number, not True"),
    ],
)
def test_an_answer_is_no_number(tmp_path, text, message):
    assert message in refusal(tmp_path, text)
    assert (
        recipe_files.validate({"cuda_graphs": False, "model": {"compile": True}, "data": {"flip": False}}, "").data.flip
        is False
    )


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("epochs: 3\nseed: 1\nepochs: 4\n", ["epochs appears in lines 1 and 3"]),
        ("epochs: 3\nepochs: 3\n'epochs': 4\n", ["epochs appears in lines 1, 2 and 3"]),
        ("data:\n  root: a\nseed: 1\ndata:\n  name: digits\n", ["data appears in lines 1 and 4"]),
        (
            "data:\n  samples: 1\n  root: b\n  samples: 2\nseed: 1\nseed: 2\n",
            ["seed appears", "data.samples appears in lines 2 and 4"],
        ),
        ("data: {samples: 1, samples: 2}\n", ["data.samples appears in lines 1 and 1"]),
        ("base: digits\nseed: 1\nbase: imagenet\n", ["base appears in lines 1 and 3"]),
        ("x: &x {seed: 1}\ny: *x\nz: [*x, {epochs: 1, epochs: 2}]\n", ["z.epochs appears in lines 3 and 3"]),
    ],
)
def test_a_key_that_appears_twice_is_refused_with_its_lines(tmp_path, text, repeated):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "child.yaml").write_text("base: mine.yaml\nseed: 3\n")
    for name in ("mine", "child"):
        with pytest.raises(UserError) as caught:
            recipe_files.load(str(tmp_path / f"{name}.yaml"))
        assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:\n")
        assert all(line in str(caught.value) for line in repeated), str(caught.value)
        assert str(caught.value).count(" appears in ") == len(repeated)


def test_keys_of_other_sections_and_merged_keys_do_not_appear_twice():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {x: 1}\n"
    assert recipe_files.parse(text, "here") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1}}
    assert recipe_files.parse("", "here") is None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.yaml.*No such file"):
        recipe_files.load(str(tmp_path / "gone.yaml"))


@pytest.mark.parametrize("content", [bytes(range(256)), b"epochs: 3\0", b"\xff\xfe\x00", b"\x7fELF\x02\x01\x01" + bytes(50)])
def test_a_binary_file_is_refused(tmp_path, content):
    path = tmp_path / "binary.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"binary\.yaml"):
        recipe_files.load(str(path))


@pytest.mark.parametrize("name", ["folder", "folder.yaml"])
def test_a_directory_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        recipe_files.load(str(tmp_path / name))


def test_a_file_needs_no_yaml_in_its_name(tmp_path):
    assert recipe_files.load(write(tmp_path, "epochs: 3\n", "recipe.txt")).epochs == 3


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(UserError, match="did you mean 'digits'") as caught:
        recipe_files.load("digit")
    for name in recipe_files.names():
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_mb": 10}, None),
        (
            {"strategy": "adasum", "bucket_mb": 10},
            "parallel.bucket_mb 10.0 has no effect with strategy adasum: use .*ddp or bitwise, or",
        ),
        ({"strategy": "single", "op": "adasum"}, "use --parallel.strategy horovod, or leave it at average"),
        ({"strategy": "localsgd", "predivide": 2}, "use --parallel.strategy ddp or horovod"),
        ({"strategy": "horovod", "compression": "bf16"}, "Horovod cannot send gradients as bf16"),
        ({"max_staleness": 3}, "use --parallel.strategy async"),
    ],
)
def test_a_setting_that_the_strategy_does_not_read_is_refused(settings, message):
    recipe = recipe_files.validate({"parallel": settings}, "test")
    if message is None:
        parallel.validate(recipe)
        return
    with pytest.raises(UserError, match=message):
        parallel.validate(recipe)


def test_every_setting_is_described():
    def undescribed(section: type[Section], prefix: str = "") -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            if recipe_files.is_class(field.annotation) and issubclass(field.annotation, Section):
                found += undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                found.append(prefix + name)
        return found

    assert undescribed(Recipe) == []


def test_flat_keys_reach_every_section():
    keys = list(recipe_files.flat_keys(Recipe))
    assert {"epochs", "data", "data.root", "optimizer.lr", "track.wandb_project"} <= set(keys)
    assert len(keys) == len(set(keys))
