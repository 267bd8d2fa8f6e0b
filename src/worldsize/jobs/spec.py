"""The specification of a training job, independent of the scheduler that runs it (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from worldsize.errors import UserError
from worldsize.jobs.quantities import quantity
from worldsize.runs.run_folder import name_problem

# More is a typing error. Some checks try each number up to the one that was asked for.
MAX_NODES, MAX_PROCS = 100_000, 1024


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one node.

    ``cpu`` and ``memory`` are quantities in the scheduler's notation; None: not requested.
    """

    gpus: int = 0
    cpu: str | None = None
    memory: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One training job.

    ``name`` is the name of the run and of the job. ``recipe`` is the recipe as YAML. ``procs`` is the number of processes
    per node, each with one GPU if GPUs are requested.
    ``retries`` is the number of restarts without a new checkpoint in between. ``grace_s`` is the time to save a
    checkpoint when the job must leave a node. ``needs_mpi``: the ranks must be started by mpirun.
    """

    name: str
    recipe: str
    nodes: int = 1
    procs: int = 1
    resources: Resources = field(default_factory=Resources)
    env: tuple[tuple[str, str], ...] = ()
    retries: int = 3
    grace_s: int = 120
    needs_mpi: bool = False

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.procs


def shape_problems(spec: JobSpec) -> Iterable[str]:
    """Problems with the amounts of the spec: one sentence each, with the remedy."""
    if spec.resources.gpus not in (0, spec.procs):
        yield f"--gpus {spec.resources.gpus} and --procs {spec.procs} must be equal: each process uses one GPU"
    limits = {"nodes": (spec.nodes, 1), "procs": (spec.procs, 1), "retries": (spec.retries, 0), "grace": (spec.grace_s, 1)}
    for flag, (number, minimum) in limits.items():
        if number < minimum:
            yield f"--{flag} {number} must be at least {minimum}"
    for flag, number, maximum in (("nodes", spec.nodes, MAX_NODES), ("procs", spec.procs, MAX_PROCS)):
        if number > maximum:
            yield f"--{flag} {number} must be at most {maximum}"


def name_problems(spec: JobSpec) -> Iterable[str]:
    """The problem of a name that cannot be that of a run folder."""
    if problem := name_problem(spec.name):
        yield f"--name {problem}"


def environment_problems(spec: JobSpec) -> Iterable[str]:
    """The problem of names that are not those of environment variables."""
    wrong = [name for name, _ in spec.env if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    if wrong:
        yield f"--env {', '.join(wrong)}: names of variables have letters, digits and _, and no digit first"


def memory_problems(spec: JobSpec) -> Iterable[str]:
    """The problem of a --memory that is no quantity, or less than 1 MiB."""
    memory = spec.resources.memory
    try:
        enough = memory is None or quantity(memory) >= 1024**2
    except ValueError:
        enough = False
    if not enough:
        yield f"--memory {memory!r}: expected a quantity such as 64Gi"


def utf8_problems(texts: Iterable[str | None]) -> Iterable[str]:
    """The problem of each text, such as a path, that is not UTF-8: it would not arrive as it is here."""
    for text in dict.fromkeys(texts):
        if text is not None and any("\ud800" <= one <= "\udfff" for one in text):  # what stands for the bytes of others
            yield f"{text!r} is not UTF-8: a job needs names and values that are"


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems as one `UserError`; do nothing if there are none."""
    found = list(problems)
    if found:
        raise UserError("this job cannot run:\n" + "\n".join(f"  {problem}" for problem in found))
