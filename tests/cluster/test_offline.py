"""What cannot train is refused before anything is submitted, rendered or started, on every target."""

from __future__ import annotations

import re

import pytest

from worldsize import cli
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.errors import UserError

PODS = ("--image", "registry/me:1", "--volume", "v")
# The shape "two nodes with eight processes each" on each target. A target of one machine has one node.
SHAPES = {
    "local": ("--procs", "16"),
    "pytorchjob": ("--nodes", "2", "--procs", "8", *PODS),
    "mpijob": ("--nodes", "2", "--procs", "8", *PODS),
    "trainjob": ("--nodes", "2", "--procs", "8", *PODS),
    "slurm": ("--nodes", "2", "--procs", "8"),
    "ssh": ("--hosts", "h1:8,h2:8"),
    "skypilot": ("--nodes", "2", "--procs", "8", "--gpu-type", "H100"),
    "dstack": ("--nodes", "2", "--procs", "8", "--gpu-type", "H100"),
}


@pytest.mark.parametrize("on", SHAPES)
def test_processes_that_cannot_share_the_batch_are_refused_by_render(on, fails, capfd):
    message = fails("render", "imagenet", "--on", on, *SHAPES[on])
    assert "16 processes cannot share a global batch of 256 in micro-batches of 32" in message
    assert "--global-batch 512 or --micro-batch 16" in message
    if on != "local":
        assert "1 node with 8 processes, 2 nodes with 4 processes each" in message
    assert cli.main(["render", "imagenet", "--on", on, *SHAPES[on], "--global-batch", "512"]) == 0
    assert "512" in capfd.readouterr().out


@pytest.mark.parametrize("on", ["local", "pytorchjob", "slurm", "ssh"])
def test_train_refuses_them_before_it_contacts_anything(on, fails, use):
    use({"server": "http://127.0.0.1:1"})
    assert "cannot share a global batch" in fails("train", "imagenet", "--on", on, *SHAPES[on])


@pytest.mark.parametrize("on", SHAPES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--global-batch", "512", "--forward-batch", "64"), "--forward-batch 64 does not fit"),
        (("--parallel.strategy", "single"), "runs in one process, not 16"),
        (("--parallel.strategy", "async", "--parallel.max-staleness", "3"), "allow at least 15"),
        (("--global-batch", "512", "--data.train-crop-step", "5"), "is not a multiple of data.train_crop_step"),
    ],
)
def test_what_else_does_not_depend_on_the_machine_is_refused(on, settings, message, fails):
    growing = ("--data.train-crop-sizes", "128", "224", "--data.train-crop-epochs", "0", "60")
    assert message in fails("render", "imagenet", "--on", on, *SHAPES[on], *growing, *settings)


def test_an_elastic_job_is_refused_if_no_number_of_nodes_fits_and_warned_about_if_some_do_not(fails, capfd):
    def render(nodes: str, elastic: str) -> tuple[str, ...]:
        return ("render", "imagenet", "--on", "pytorchjob", "--nodes", nodes, "--elastic", elastic, "--procs", "4", *PODS)

    assert cli.main([*render("1", "1:2")]) == 0
    assert capfd.readouterr().err == ""
    assert cli.main([*render("2", "1:4")]) == 0
    warned = capfd.readouterr().err
    assert "ends with an error: 3, 4 (with 3: 12 processes cannot share" in warned and "Numbers that fit: 1, 2" in warned
    assert "3 nodes with 4 processes each: 12 processes cannot share" in fails(*render("3", "3:5"))


def test_the_amounts_of_a_job_are_checked_first(fails):
    assert "--procs 0 must be at least 1" in fails("render", "digits", "--on", "slurm", "--procs", "0")
    assert "--procs 0" in fails("render", "digits", "--on", "local", "--procs", "0")


@pytest.mark.parametrize("option", ["--nodes", "--procs"])
def test_a_mistyped_number_of_nodes_or_processes_is_refused_at_once(option, fails):
    assert f"{option} 99999999999 must be at most" in fails(
        "render", "digits", "--on", "pytorchjob", option, "99999999999", *PODS
    )


@pytest.mark.parametrize(
    ("settings", "world", "offered"),
    [
        ({"global_batch": 96, "micro_batch": 8}, 8, ["--global-batch 64", "--global-batch 128", "--micro-batch 6"]),
        ({"global_batch": 64, "micro_batch": 32}, 3, ["--global-batch 96"]),
        ({"global_batch": 16, "micro_batch": 16}, 16, ["--global-batch 256"]),
        ({"global_batch": 96, "micro_batch": 8, "forward_batch": 16}, 8, ["--global-batch 128"]),
        ({"per_process_batch": 64, "micro_batch": 32}, 1, ["--per-process-batch 96"]),
    ],
)
def test_what_the_message_offers_works(settings, world, offered):
    recipe, devices = Recipe(**settings), 3 if "per_process_batch" in settings else 1
    with pytest.raises(UserError) as caught:
        batch_plan.plan(recipe, world, devices)
    found = re.findall(r"--([a-z-]+-batch) (\d+)", str(caught.value).rpartition("Or use")[2])
    assert [f"--{name} {size}" for name, size in found] == offered
    for name, size in found:
        changed = recipe_files.validate(recipe.model_dump() | {name.replace("-", "_"): int(size)}, "")
        batch_plan.plan(changed, world, devices)
