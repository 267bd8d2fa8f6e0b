"""The specification of a task on a cloud (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from worldsize.jobs.spec import JobSpec, environment_problems, memory_problems, shape_problems

_END = "END_OF_RECIPE"


@dataclass(frozen=True, kw_only=True)
class CloudSpec(JobSpec):
    """One training job as a task of a launcher for clouds.

    ``out`` is the folder of the runs on every node; it must be shared and outlive the nodes, such as a mounted bucket.
    ``gpu_type`` is the launcher's name of the GPU, such as H100. ``setup`` are shell lines that install worldsize.
    """

    out: PurePosixPath
    gpu_type: str | None = None
    setup: tuple[str, ...] = ("pip install worldsize",)

    @property
    def gpus(self) -> str | None:
        """The GPUs of a node as both launchers write them, such as H100:8; None without GPUs."""
        count = self.resources.gpus
        return None if not count else f"{self.gpu_type}:{count}" if self.gpu_type else str(count)

    @property
    def command(self) -> str:
        """What every node runs, after the setup. One command in bash, because dstack joins commands with ``&&``."""
        agent = ["worldsize", "agent", "--id", self.name, "--procs", str(self.procs), "--"]
        options = ["--out", str(self.out), "--name", self.name, "--autoresume", "--retries", str(self.retries)]
        train = shlex.join([*agent, "train", "recipe.yaml", *options])
        return f"cat > recipe.yaml <<'{_END}' && {train}\n{self.recipe}{_END}\n"


def problems(spec: CloudSpec) -> Iterable[str]:
    """Problems of the spec: one sentence each, with the remedy."""
    yield from shape_problems(spec)
    yield from memory_problems(spec)
    yield from environment_problems(spec)
    cpu = spec.resources.cpu
    if cpu is not None and not (cpu.isdecimal() and int(cpu) >= 1):
        yield f"--cpu {cpu}: expected a number of cores"
    if spec.grace_s != CloudSpec.grace_s:
        yield "--grace does not apply: these launchers decide how long a node has when it is taken away"
    if spec.resources.gpus and spec.gpu_type is None:
        yield "--gpu-type is required, such as H100; or pass --gpus 0"
    if spec.needs_mpi:
        yield "this strategy requires MPI, which these launchers do not start"
