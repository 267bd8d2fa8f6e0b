"""The command-line options of a Slurm job, and their conversion to a `SlurmSpec` (pure)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from worldsize.config.command_line import Flat, RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.jobs.naming import run_name
from worldsize.jobs.options import CommonOptions, check_recipe, gpus_per_node, refuse_empty, shared
from worldsize.jobs.spec import Resources, refuse
from worldsize.slurm.spec import SlurmSpec, problems


@dataclass(frozen=True)
class SlurmOptions(CommonOptions):
    """Options of a Slurm job, in addition to its recipe."""

    out: Path = Path("runs")
    """Where run folders are created; on storage that all nodes share."""
    partition: str | None = None
    """Partition (default: the cluster's)."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit of one allocation, such as 4:00:00 or 1-12:00:00 (default: the partition's)."""
    chain: Literal["auto", "never"] = "auto"
    """auto: when the time limit comes near, save, requeue the job and continue, until the run has finished."""
    constraint: str | None = None
    """Use only nodes with these features."""
    gpu_type: str | None = None
    """Type of the GPUs, as the cluster names it, such as a100."""
    array_seeds: str | None = None
    """One run per seed, such as 0,1,2, as a job array; run NAME-seedN."""
    container: str | None = None
    """Start the ranks in this container image. It sees the folder of submission and --out; data must be below them."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime: srun --container-image (pyxis with enroot), or apptainer exec."""
    python: str | None = None
    """Python that has worldsize, on the nodes (default: the one that runs this command; in a container: python)."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Shell line before training, such as 'module load cuda'."""
    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further option of sbatch, such as --sbatch=--exclude=n7."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """Print the batch script, exactly as `worldsize train --on slurm` submits it. Contacts no Slurm.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's.
    """

    on: Literal["slurm"] = "slurm"
    """Slurm."""
    job: Flat[SlurmOptions] = SlurmOptions()
    settings: RecipeFlags


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Train RECIPE as a Slurm batch job, and follow the job until it ends.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's. Ctrl-C detaches; the job
    keeps running. Exit codes: 0 succeeded, 1 failed, 2 preflight found an error, 3 timed out, 130 detached.
    """

    on: Literal["slurm"] = "slurm"
    """Slurm."""
    detach: bool = False
    """Return as soon as the job is submitted."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3); the job keeps running."""
    preflight: bool = True
    """Run preflight checks before submitting the job."""
    probe: bool = False
    """Also check the nodes with a short srun: the same worldsize version, and the run folder on shared storage."""
    job: Flat[SlurmOptions] = SlurmOptions()
    settings: RecipeFlags


def to_spec(recipe: Recipe, stem: str, job: SlurmOptions) -> SlurmSpec:
    """The complete job; a pure function of the command line and of the running Python's path.

    Raises:
        UserError: invalid options; lists all of them.
    """
    refuse_empty(job)
    check_recipe(recipe, [job.nodes], job.procs)
    gpus, seeds = gpus_per_node(recipe, job.gpus, job.procs), _seeds(job.array_seeds)
    shape = (job.nodes, job.procs, *([list(seeds)] if seeds else []))
    spec = SlurmSpec(
        **shared(recipe, job.name or run_name(stem, recipe, "slurm", *shape), job),
        resources=Resources(gpus=gpus, cpu=job.cpu, memory=job.memory),
        out=job.out,
        python=job.python or ("python" if job.container else sys.executable),
        partition=job.partition,
        account=job.account,
        qos=job.qos,
        time=job.time,
        constraint=job.constraint,
        gpu_type=job.gpu_type,
        chain=job.chain == "auto",
        seeds=seeds,
        container=job.container,
        container_runtime=job.container_runtime,
        setup=tuple(job.setup),
        extra=tuple(job.sbatch),
    )
    refuse(problems(spec))
    return spec


def _seeds(text: str | None) -> tuple[int, ...]:
    words = text.split(",") if text is not None else []
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--array-seeds {text}: expected seeds separated by commas, such as 0,1,2")
    return tuple(map(int, words))
