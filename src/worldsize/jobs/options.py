"""The options that jobs have on every scheduler (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import tyro

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.jobs.spec import MAX_NODES, MAX_PROCS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RENAMED = {"source": "from"}  # options whose field has another name


@dataclass(frozen=True)
class CommonOptions:
    """Options of a job, in addition to its recipe."""

    nodes: int = 1
    """Number of nodes."""
    procs: int = 1
    """Processes per node; each uses one GPU."""
    name: str | None = None
    """Name of the run and the job (default: the recipe's name and a hash of the recipe and the job's shape)."""
    gpus: int | None = None
    """GPUs per node (default: one per process; 0 to train on the CPU)."""
    cpu: str | None = None
    """CPU cores per node."""
    memory: str | None = None
    """Memory per node, such as 64Gi."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable, as NAME=VALUE. Not for secrets: jobs show their variables to others."""
    retries: int = 3
    """Consecutive restarts without a new checkpoint before the job fails."""
    grace: int = 120
    """Seconds for saving when the job must leave a node."""


def shared(recipe: Recipe, name: str, job: CommonOptions) -> dict[str, Any]:
    """The fields of `spec.JobSpec`, except ``resources``, from the recipe and the options.

    Raises:
        UserError: an invalid option.
    """
    return {
        "name": name,
        "recipe": recipe_files.to_yaml(recipe),
        "nodes": job.nodes,
        "procs": job.procs,
        "env": tuple(map(pair("--env"), job.env)),
        "retries": job.retries,
        "grace_s": job.grace,
        "needs_mpi": parallel.strategy_class(recipe.parallel).needs_mpi,
    }


def refuse_empty(asked: DataclassInstance) -> None:
    """Refuse options with an empty value: in scripts, they come from variables that are not set."""
    for option in fields(asked):
        value = getattr(asked, option.name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            name = _RENAMED.get(option.name, option.name.replace("_", "-"))
            raise UserError(f"--{name} is empty; is the shell variable set?")


def check_recipe(recipe: Recipe, nodes: Sequence[int], procs: int) -> dict[int, str]:
    """Refuse a recipe that no node can train, or that no number of nodes in ``nodes`` can share.

    Args:
        procs: processes per node.

    Returns:
        Why the run would fail, for each number of nodes that does not fit.

    Raises:
        UserError: settings that contradict each other, or the reason and the nearest shapes of a job that fit.
    """
    parallel.validate(recipe)
    recipe.data.check_crop_sizes()
    if not 1 <= procs <= MAX_PROCS or not nodes or min(nodes) < 1 or max(nodes) > MAX_NODES:
        return {}  # refused, with all other amounts, by `spec.shape_problems`
    reasons: dict[int, str] = {}
    for count in nodes:
        try:
            parallel.check_size(recipe, count * procs)
        except UserError as error:
            reasons[count] = str(error)
    if len(reasons) == len(nodes):
        first = nodes[0]
        near = [_shape(*shape) for shape in _nearest(recipe, first, procs)]
        listed = f"\nNearest jobs that fit: {', '.join(near)}." if near else ""
        raise UserError(f"{_shape(first, procs)}: {reasons[first]}{listed}")
    return reasons


def _shape(nodes: int, procs: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)} with {procs} process{'es' * (procs > 1)}{' each' * (nodes > 1)}"


def _nearest(recipe: Recipe, nodes: int, procs: int) -> Iterable[tuple[int, int]]:
    """The two nearest (nodes, processes per node) that can train the recipe, with one of the two numbers unchanged."""
    shapes = {*((n, procs) for n in range(1, 2 * nodes + 1)), *((nodes, p) for p in range(1, 2 * procs + 1))}
    fitting = []
    for shape in shapes:
        with suppress(UserError):
            parallel.check_size(recipe, math.prod(shape))
            fitting.append(shape)
    return sorted(fitting, key=lambda shape: (abs(math.log(math.prod(shape) / (nodes * procs))), shape))[:2]


def gpus_per_node(recipe: Recipe, gpus: int | None, procs: int) -> int:
    """GPUs of each node: as given, or one per process unless the recipe trains on the CPU.

    Raises:
        UserError: 0, and the recipe requires GPUs.
    """
    if gpus == 0 and recipe.device == "cuda":
        raise UserError("--gpus 0 and --device cuda exclude each other: leave one out")
    return gpus if gpus is not None else 0 if recipe.device == "cpu" else procs


def pair(flag: str) -> Callable[[str], tuple[str, str]]:
    """A parser of NAME=VALUE, which names ``flag`` in its error."""

    def parse(text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"{flag} {text!r}: expected NAME=VALUE")
        return key, value

    return parse
