"""The specification of a Slurm job: the input from which the batch script is rendered (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worldsize.errors import UserError
from worldsize.jobs.quantities import quantity
from worldsize.jobs.spec import JobSpec, environment_problems, memory_problems, name_problems, shape_problems, utf8_problems
from worldsize.jobs.targets import JOBS_FOLDER

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_ENDLESS = ("0", "infinite", "infinity", "unlimited")
_EARLY_S = 60  # Slurm may send the signal of --signal this much earlier


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(JobSpec):
    """One training job as a Slurm batch job.

    ``out`` is the folder of the runs, relative to the folder from which the job is submitted, or absolute; all nodes must
    share it. ``python`` starts worldsize on the nodes. ``time`` is in Slurm's notation; None: the partition's default.
    ``chain``: requeue the job when its time limit is near and the run has not finished. ``seeds``: one run per seed, as a
    job array. ``setup`` are shell lines before training; ``extra`` are further options of sbatch, without ``#SBATCH``.
    """

    out: Path
    python: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    gpu_type: str | None = None
    chain: bool = True
    seeds: tuple[int, ...] = ()
    container: str | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder with the job's script, log and ids."""
        return self.out / JOBS_FOLDER / self.name

    @property
    def time_s(self) -> float | None:
        """The time limit in seconds, math.inf for no limit; None if it is not given.

        Raises:
            UserError: not Slurm's notation.
        """
        return None if self.time is None else seconds(self.time)

    @property
    def cores_per_process(self) -> int | None:
        """CPU cores of each process; None: not requested."""
        return None if self.resources.cpu is None else int(self.resources.cpu) // self.procs

    @property
    def memory_mib(self) -> int | None:
        """Memory of each node in MiB; None: not requested."""
        return None if self.resources.memory is None else int(quantity(self.resources.memory) / 1024**2)


def seconds(text: str) -> float:
    """A time limit of Slurm in seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    0, INFINITE and UNLIMITED are no limit: math.inf.

    Raises:
        UserError: something else.
    """
    if text.lower() in _ENDLESS:
        return math.inf
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"--time {text!r}: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, parts[0], parts[1] if len(parts) == 2 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def problems(spec: SlurmSpec) -> Iterable[str]:
    """Problems of the spec on any Slurm: one sentence each, with the remedy."""
    yield from shape_problems(spec)
    yield from name_problems(spec)
    yield from memory_problems(spec)
    yield from environment_problems(spec)
    cpu = spec.resources.cpu
    if cpu is not None and (not cpu.isdecimal() or int(cpu) < 1 or int(cpu) % max(spec.procs, 1)):
        yield f"--cpu {cpu}: pass a number of cores per node that --procs {spec.procs} divides"
    if spec.time is not None and seconds(spec.time) <= spec.grace_s + _EARLY_S:
        yield (
            f"--time {spec.time} leaves no time to train: saving begins {spec.grace_s} s before the limit, and Slurm may "
            f"signal {_EARLY_S} s earlier; raise --time or lower --grace"
        )
    if len(set(spec.seeds)) != len(spec.seeds):
        yield f"--array-seeds {','.join(map(str, spec.seeds))}: each seed once"
    named = (spec.partition, spec.account, spec.qos, spec.constraint, spec.gpu_type, spec.container, spec.python)
    texts = (spec.name, str(spec.out), *spec.setup, *spec.extra, *(value for _, value in spec.env), *named)
    for text in texts:
        if text is not None and "\n" in text:
            yield f"{text!r}: one line only"
    yield from utf8_problems(texts[1:])  # a name cannot have others than ASCII
    for flag, text in {"out": str(spec.out), "constraint": spec.constraint or ""}.items():
        if any(character in text for character in '"\\'):
            yield f"--{flag} {text}: without quotes and backslashes, which sbatch cannot read"
    if spec.needs_mpi and spec.container:
        yield "--container is not supported with strategies that need mpirun"
