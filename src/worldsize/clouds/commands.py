"""``worldsize render RECIPE --on skypilot|dstack``. Imports no torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

import tyro
import yaml

from worldsize.clouds.spec import CloudSpec, problems
from worldsize.config import command_line
from worldsize.config.command_line import Flat, RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.errors import SUCCESS, UserError
from worldsize.jobs.commands import recipe_argument
from worldsize.jobs.naming import run_name
from worldsize.jobs.options import CommonOptions, check_recipe, gpus_per_node, refuse_empty, shared
from worldsize.jobs.spec import Resources, refuse


@dataclass(frozen=True)
class CloudOptions(CommonOptions):
    """Options of a task, in addition to its recipe."""

    out: str = "/runs"
    """Where run folders are created on the nodes; mount storage there that all nodes share."""
    gpu_type: str | None = None
    """Type of the GPUs, such as H100."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Shell line before training, which installs worldsize (default: pip install worldsize)."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """Print the task for SkyPilot or dstack. Contacts no cloud; submit it with `sky launch` or `dstack apply`.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's.
    """

    on: Literal["skypilot", "dstack"] = "skypilot"
    """The launcher."""
    job: Flat[CloudOptions] = CloudOptions()
    settings: RecipeFlags


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on skypilot|dstack`` is refused: these launchers submit by themselves."""
    on = command_line.value_of("--on", argv)
    submit = {"skypilot": "sky launch task.yaml", "dstack": "dstack apply -f task.dstack.yml"}[str(on)]
    raise UserError(
        f"{on} submits tasks itself: worldsize render RECIPE --on {on} ... > {submit.split()[-1]}, then {submit}"
    )


def render(argv: list[str]) -> int:
    """``worldsize render RECIPE --on skypilot|dstack``."""
    stem, recipe, rest = recipe_argument(argv, "render")
    asked = command_line.parse(
        Render, rest, Render(settings=recipe), f"render {stem} --on {command_line.value_of('--on', argv)}"
    )
    launcher = importlib.import_module(f"worldsize.clouds.{asked.on}")
    spec = to_spec(asked.settings, stem, asked.on, asked.job)
    refuse([*problems(spec), *launcher.problems(spec)])
    task = launcher.render(spec)
    print(yaml.dump(task, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True), end="")
    return SUCCESS


def to_spec(recipe: Recipe, stem: str, on: str, job: CloudOptions) -> CloudSpec:
    """The complete task, not checked; a pure function of the command line.

    Raises:
        UserError: an option that cannot be read.
    """
    refuse_empty(job)
    check_recipe(recipe, [job.nodes], job.procs)
    gpus = gpus_per_node(recipe, job.gpus, job.procs)
    return CloudSpec(
        **shared(recipe, job.name or run_name(stem, recipe, on, job.nodes, job.procs), job),
        resources=Resources(gpus=gpus, cpu=job.cpu, memory=job.memory),
        out=PurePosixPath(job.out),
        gpu_type=job.gpu_type,
        setup=tuple(job.setup) or CloudSpec.setup,
    )


class _Plain(yaml.SafeDumper):
    """Text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)
