"""Everything that talks to Slurm: its commands, with output in formats that every version since 20.11 has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from worldsize.errors import ServiceFailed, UserError

_TIMEOUT_S = 60.0
_WHOLE_ARRAYS = {"SLURM_BITSTR_LEN": "0"}  # squeue cuts a list of waiting tasks after 64 characters by default
# Variables of sbatch that are not named as their option, or contradict it.
_OTHER_VARIABLES = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
_MISSING = "not on this machine: run this on a login node of the Slurm cluster"


class SlurmError(ServiceFailed):
    """Slurm refused a request or does not answer."""


@dataclass(frozen=True)
class SlurmJob:
    """A job, or a task of a job array, that Slurm knows.

    ``job_id`` is as in ``123``, ``123_4`` or, for tasks that have not started, ``123_[4-6]`` or ``123_[0-30:10]``;
    ``state`` is Slurm's, such as ``RUNNING``; ``reason`` why it waits, or empty.
    """

    job_id: str
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: int

    @property
    def array_task(self) -> str:
        """The task's number in its array; empty for other jobs."""
        return self.job_id.partition("_")[2]


@dataclass(frozen=True)
class Partition:
    """A partition, as one of its groups of equal nodes: limits, and the nodes' cores, memory (MiB) and GPUs."""

    name: str
    default: bool
    up: bool
    time_limit: str
    nodes: int
    cores: int
    memory_mib: int
    gpus: int


def submit(script: Path) -> str:
    """Submit the batch script from the current folder. Returns the job's id.

    Raises:
        SlurmError: Slurm refuses it.
    """
    # Ctrl-C must not end sbatch, which may have submitted the job already.
    return _run("sbatch", "--parsable", str(script), without=overriding(script), apart=True).strip().partition(";")[0]


def would_accept(script: Path) -> str | None:
    """Why Slurm would refuse the script; None if it would accept it. Nothing is submitted."""
    try:
        _run("sbatch", "--test-only", str(script), without=overriding(script))
    except SlurmError as error:
        return str(error)
    return None


def overriding(script: Path) -> set[str]:
    """sbatch's variables for the options that the script sets; sbatch would prefer them to the script."""
    options = [line.partition("--")[2] for line in script.read_text().splitlines() if line.startswith("#SBATCH --")]
    names = {option.partition("=")[0] for option in options}
    same = {name.upper().replace("-", "_") for name in names}
    return {f"SBATCH_{name}" for name in same.union(*(_OTHER_VARIABLES.get(name, ()) for name in names))}


def jobs(ids: Sequence[str]) -> list[SlurmJob]:
    """The jobs, and tasks of job arrays, with these ids that Slurm still knows; recently ended ones included."""
    fields = ("JobArrayID", "State", "Reason", "NodeList", "RestartCnt", "exit_code")
    pattern = ",".join(f"{field}:|" for field in fields)
    found = []
    for line in _run("squeue", "--noheader", "--me", "--states=all", f"--Format={pattern}").splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) < len(fields) or values[0].partition("_")[0] not in ids:
            continue
        array_id, state, reason, nodes, restarts, code = values[: len(fields)]
        waits = reason if state == "PENDING" else ""
        found.append(SlurmJob(array_id, state, waits, nodes, _number(restarts), _number(code)))
    return found


def signal_ranks(job_id: str, name: str) -> None:
    """Send a signal to the job's tasks, not to its batch shell."""
    _run("scancel", f"--signal={name}", job_id)


def signal_shell(job_id: str, name: str) -> None:
    """Send a signal to the job's batch shell, not to its tasks."""
    _run("scancel", "--batch", f"--signal={name}", job_id)


def cancel(job_id: str) -> None:
    """Remove a waiting job, or end a running one: SIGTERM, and after Slurm's KillWait SIGKILL."""
    _run("scancel", job_id)


def partitions() -> list[Partition]:
    """The partitions and their nodes."""
    found = []
    for line in _run("sinfo", "--all", "--noheader", "--format=%P|%a|%l|%D|%c|%m|%G").splitlines():
        name, up, limit, nodes, cores, memory, gres = line.split("|")
        found.append(
            Partition(
                name=name.rstrip("*"),
                default=name.endswith("*"),
                up=up == "up",
                time_limit=limit,
                nodes=_number(nodes),
                cores=_number(cores.rstrip("+")),
                memory_mib=_number(memory.rstrip("+")),
                gpus=_gpus(gres),
            )
        )
    return found


def on_nodes(nodes: int, options: Sequence[str], command: Sequence[str]) -> str:
    """Run the command once on each of ``nodes`` nodes, within two minutes; its output, each line with the node's number.

    Args:
        options: of srun, which choose the nodes.

    Raises:
        SlurmError: it fails on a node, or Slurm does not start it.
    """
    words = [f"--nodes={nodes}", "--ntasks-per-node=1", "--label", "--time=2", "--immediate=60", *options, *command]
    return _run("srun", *words, timeout=180.0)


def _run(command: str, *words: str, timeout: float = _TIMEOUT_S, without: Collection[str] = (), apart: bool = False) -> str:
    """The output of a command; with ``apart``, signals of the terminal do not reach it."""
    env = {name: value for name, value in os.environ.items() if name not in without} | _WHOLE_ARRAYS
    try:
        done = subprocess.run(
            [command, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            start_new_session=apart,
        )
    except FileNotFoundError:
        raise UserError(f"Slurm's {command} is {_MISSING}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command} did not answer within {timeout:.0f} s; is slurmctld running?") from None
    if done.returncode:
        lines = [line.partition("error: ")[2] or line for line in done.stderr.splitlines() if line.strip()]
        raise SlurmError(f"{command}: {'; '.join(lines) or f'failed with {done.returncode}'}")
    return done.stdout


def _number(text: str) -> int:
    digits = text.strip()
    return int(digits) if digits.isdigit() else 0


def _gpus(gres: str) -> int:
    """GPUs in a node's generic resources, such as ``gpu:a100:8(S:0-1),nvme:1``."""
    entries = [entry.partition("(")[0].split(":") for entry in gres.split(",")]
    return sum(_number(entry[-1]) for entry in entries if entry[0] == "gpu")
