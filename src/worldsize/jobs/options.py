"""The options that jobs have on every scheduler (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tyro

from worldsize import catalog, parallel
from worldsize.errors import UserError
from worldsize.recipe import Recipe


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
        UserError: an invalid option, or settings of the strategy that contradict each other.
    """
    parallel.validate(recipe)
    return {
        "name": name,
        "recipe": catalog.to_yaml(recipe),
        "nodes": job.nodes,
        "procs": job.procs,
        "env": tuple(map(pair("--env"), job.env)),
        "retries": job.retries,
        "grace_s": job.grace,
        "needs_mpi": parallel.named(recipe.parallel).needs_mpi,
    }


def gpus_per_node(recipe: Recipe, gpus: int | None, procs: int) -> int:
    """GPUs of each node: as given, or one per process unless the recipe trains on the CPU."""
    return gpus if gpus is not None else 0 if recipe.device == "cpu" else procs


def pair(flag: str) -> Callable[[str], tuple[str, str]]:
    """A parser of NAME=VALUE, which names ``flag`` in its error."""

    def parse(text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"{flag} {text!r}: expected NAME=VALUE")
        return key, value

    return parse
