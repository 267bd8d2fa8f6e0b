"""Rank and world size from the launcher's environment (torchrun, horovodrun, MPI, Slurm), without importing torch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worldsize.distributed import cgroups
from worldsize.errors import UserError

# Set in the processes that `worldsize --procs N` starts.
LOCAL_LAUNCH = "WORLDSIZE_LOCAL_LAUNCH"


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher: of several of one kind, the first that is set counts.

    It is recognized by its rank and a local rank, or by ``signs`` where it may leave out the local variables: then it
    started one process, or all on one node. ``job`` has variables that are equal for all processes of a job, and only for
    them; ``job_default`` is used without them, None: then MASTER_PORT is required.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()
    job_default: str | None = None
    signs: tuple[str, ...] = ()

    def started(self, env: Mapping[str, str]) -> bool:
        if self.signs:
            return all(name in env for name in self.signs)
        return self.rank in env and any(name in env for name in self.local_rank)


# In this order: MVAPICH and PALS set PMI_* too. In a Slurm allocation, the processes of mpirun also have the variables of a
# job step, but that step only started the launcher's own daemons. Not here: torchrun, of whose variables Kubeflow leaves out
# some, and Slurm, which lists nodes in a syntax of its own.
_LAUNCHERS = (
    # With Gloo; with MPI, horovodrun starts mpirun, so Open MPI's variables apply.
    _Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
        "",
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),  # the first since version 5
        "",
        ("OMPI_COMM_WORLD_SIZE",),
    ),
    *(
        _Launcher("MVAPICH", f"{world}_RANK", (f"{world}_SIZE",), (f"{world}_LOCAL_RANK",), (f"{world}_LOCAL_SIZE",))
        for world in ("MV2_COMM_WORLD", "MVP_COMM_WORLD")  # before version 3, and since
    ),
    _Launcher(
        "PALS",
        "PALS_RANKID",
        ("PMI_SIZE",),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        ("PALS_APID",),
    ),
    _Launcher(
        "MPICH",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("I_MPI_HYDRA_UUID",),
    ),
)
# Variables that name a local rank, or the size of a world of several processes, for processes that cannot read their place.
LOCAL_RANKS = ("LOCAL_RANK", *(name for launcher in _LAUNCHERS for name in launcher.local_rank), "SLURM_LOCALID")
LAUNCHED = (*dict.fromkeys(name for launcher in _LAUNCHERS for name in launcher.size), "SLURM_STEP_ID")


@dataclass(frozen=True)
class RankInfo:
    """What the launcher reports about this process.

    ``master`` is the (address, port) where rank 0 listens; None for a single process.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: tuple[str, int] | None = None


def discover_rank_info(env: Mapping[str, str] = os.environ) -> RankInfo:
    """This process's place, from the environment variables that its launcher set.

    Checks the variables of torchrun, then horovodrun, then Open MPI (4 and 5), then other MPIs, then a Slurm job step.

    Raises:
        UserError: the variables contradict each other or are incomplete.
    """
    rank_info = _torchrun(env) if {"RANK", "WORLD_SIZE"} <= env.keys() else _mpi_or_slurm(env) or _alone(env)
    return _check_expected(rank_info, env)


def _mpi_or_slurm(env: Mapping[str, str]) -> RankInfo | None:
    launcher = next((one for one in _LAUNCHERS if one.started(env)), None)
    if launcher is not None:
        return _of_launcher(launcher, env)
    if "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return _slurm(env)
    return None


def _alone(env: Mapping[str, str]) -> RankInfo:
    """Refuses a launcher of several processes that worldsize does not know: each would train on its own."""
    sizes = ("PMI_SIZE", *(one.size[0] for one in _LAUNCHERS), "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "ALPS_APP_SIZE")
    ranks = ("PMI_RANK", *(one.rank for one in _LAUNCHERS), "PMIX_RANK", "FLUX_TASK_RANK")
    ranks += ("JSM_NAMESPACE_RANK", "ALPS_APP_PE")
    several = [name for name in sizes if env.get(name, "1") != "1"] + [name for name in ranks if env.get(name, "0") != "0"]
    if several:
        raise UserError(
            f"{several[0]}={env[several[0]]}: this process is one of several, but its launcher did not set its local rank; "
            "use torchrun, srun, or mpirun of Open MPI, MPICH, Intel MPI or MVAPICH, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return RankInfo("none", 0, 1, 0, 1)


def _check_expected(rank_info: RankInfo, env: Mapping[str, str]) -> RankInfo:
    """Reject a world that differs from what the job asked for: some launchers silently fall back to one machine."""
    if "WORLDSIZE_NODES" in env and "WORLDSIZE_PROCS" in env:
        nodes, procs = _number(env, "WORLDSIZE_NODES"), _number(env, "WORLDSIZE_PROCS")
        if (rank_info.size, rank_info.local_size) != (nodes * procs, procs):
            raise UserError(
                f"the job asked for {nodes} nodes with {procs} processes each, but {rank_info.launcher} started "
                f"{rank_info.size}, "
                f"{rank_info.local_size} of them on this node; check the launcher's host list"
            )
    return rank_info


def local_rank_info(processes: int) -> RankInfo:
    """The place of rank 0 in a world of ``processes`` that `worldsize --procs` will start."""
    return RankInfo("worldsize --procs" if processes > 1 else "none", 0, processes, 0, processes)


def _torchrun(env: Mapping[str, str]) -> RankInfo:
    size = _number(env, "WORLD_SIZE")
    rank = _number(env, "RANK")
    master = _master(env, None, None) if size > 1 else None
    if "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" not in env:
        # A script under srun or mpirun often sets RANK and WORLD_SIZE alone: the processes of a node must still differ.
        around = _mpi_or_slurm(env)
        if around is not None and (around.rank, around.size) == (rank, size):
            return replace(around, master=master)
    # Kubeflow's operators set neither of the local variables in pods with one process.
    local_size = _number(env, "LOCAL_WORLD_SIZE", size if "LOCAL_RANK" in env else 1)
    local_rank = _number(env, "LOCAL_RANK", 0 if local_size == 1 else None)
    launcher = "worldsize --procs" if LOCAL_LAUNCH in env else "torchrun"
    return _validated(RankInfo(launcher, rank, size, local_rank, local_size, master))


def _of_launcher(launcher: _Launcher, env: Mapping[str, str]) -> RankInfo:
    def first(names: tuple[str, ...], default: int | None = None) -> int:
        return _number(env, next((name for name in names if name in env), names[0]), default)

    size = first(launcher.size)
    local_size = first(launcher.local_size, size if launcher.signs else None)
    local_rank = first(launcher.local_rank, 0 if launcher.signs else None)
    name = "Intel MPI" if launcher.name == "MPICH" and "I_MPI_HYDRA_UUID" in env else launcher.name
    job = next((env[variable] for variable in launcher.job if variable in env), launcher.job_default)
    master = _master(env, "127.0.0.1" if local_size == size else None, job) if size > 1 else None
    return _validated(RankInfo(name, _number(env, launcher.rank), size, local_rank, local_size, master))


def _slurm(env: Mapping[str, str]) -> RankInfo:
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", 1)
    # "4(x2)" means four tasks on each of two nodes; uneven nodes list one number each ("4,2").
    per_node = [
        int(count.split("(")[0])
        for count in env.get("SLURM_STEP_TASKS_PER_NODE", str(size // nodes)).split(",")
        for _ in range(int(count.split("(x")[1].rstrip(")")) if "(x" in count else 1)
    ]
    node = _number(env, "SLURM_NODEID", 0)
    local_size = per_node[node] if node < len(per_node) else size // nodes
    first = first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
    job = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    rank_info = RankInfo(
        "Slurm",
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID", 0),
        local_size,
        _master(env, "127.0.0.1" if nodes == 1 else first, job) if size > 1 else None,
    )
    return _validated(rank_info)


def _master(env: Mapping[str, str], address: str | None, job: str | None) -> tuple[str, int]:
    """Where rank 0 listens. Without MASTER_PORT, the port is derived from the job's id, so that two jobs differ."""
    address = env.get("MASTER_ADDR") or address
    if address is None:
        raise UserError(
            "this process is one of several, but rank 0's address is unknown: set MASTER_ADDR to rank 0's host "
            "(mpirun -x MASTER_ADDR=HOST; MPICH, Intel MPI: mpirun -genv MASTER_ADDR HOST) and MASTER_PORT to a free port "
            "there"
        )
    if "MASTER_PORT" in env:
        return address, _number(env, "MASTER_PORT")
    if job is None:
        raise UserError(
            "MASTER_PORT is not set: set it to a free port on rank 0's host (MPICH: mpirun -genv MASTER_PORT PORT)"
        )
    return address, 20000 + zlib.crc32(job.encode()) % 12000


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None:
        if default is None:
            raise UserError(f"the launcher did not set {name}")
        return default
    try:
        return int(value)
    except ValueError:
        raise UserError(f"environment variable {name} is {value!r}, not a number") from None


def _validated(rank_info: RankInfo) -> RankInfo:
    if not (0 <= rank_info.rank < rank_info.size and 0 <= rank_info.local_rank < rank_info.local_size <= rank_info.size):
        raise UserError(
            f"{rank_info.launcher} set rank {rank_info.rank} of {rank_info.size} and local rank {rank_info.local_rank} of "
            f"{rank_info.local_size}, which is inconsistent; check the environment variables it set"
        )
    return rank_info


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, after = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + after.split(",")[0]


def cores(root: Path = cgroups.ROOT, membership: Path = cgroups.MEMBERSHIP) -> int:
    """Number of CPU cores this process may use: its affinity, or its `cpu_quota` if that is smaller."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root, membership)
    return available if quota is None else min(available, max(1, int(quota)))


def cpu_quota(root: Path = cgroups.ROOT, membership: Path = cgroups.MEMBERSHIP) -> float | None:
    """The cores that the limit of a container or of systemd allows, such as 0.8: the smallest quota of the cgroups.

    None: no limit.
    """
    quotas = []
    for folder in cgroups.folders("cpu", root, membership):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):
                quota, period = (int(word) for name in files for word in (folder / name).read_text().split())
                quotas += [quota / period] if quota > 0 else []
    return min(quotas, default=None)


def threads_per_process(rank_info: RankInfo, env: Mapping[str, str] = os.environ) -> int:
    """This process's fair share of the cores, unless the user set OMP_NUM_THREADS.

    Ignored are the 1 that torchrun sets if it is unset, and PBS's number, which is that of all processes. Slurm may bind
    each task to cores of its own, which are then not shared with the other processes of the machine.
    """
    chosen = env.get("OMP_NUM_THREADS", "")
    set_by_torchrun = chosen == "1" and "TORCHELASTIC_RUN_ID" in env and LOCAL_LAUNCH not in env
    set_by_pbs = "PBS_JOBID" in env and chosen == env.get("NCPUS")
    if chosen.isdigit() and int(chosen) > 0 and not (set_by_torchrun or set_by_pbs):
        return int(chosen)
    own = env.get("SLURM_CPUS_PER_TASK", "")
    if rank_info.launcher == "Slurm" and own.isdigit():
        return max(1, min(cores(), int(own)))
    return max(1, cores() // rank_info.local_size)
