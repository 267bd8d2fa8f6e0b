"""Which Horovod is installed, if any, and what it supports; refuses early what it cannot do. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from worldsize.config.recipe import Recipe
from worldsize.distributed.rank import RankInfo
from worldsize.errors import UserError, first_line
from worldsize.parallel.base import Machine, StrategySupport

GLOO = "Gloo, no Adasum"

_BUILD = "`make horovod` in worldsize's folder builds it against the installed torch, in about two minutes"


@dataclass(frozen=True)
class Build:
    """What the installed Horovod was compiled with."""

    version: str
    mpi: bool
    gloo: bool
    nccl: bool


def find() -> Build:
    """The Horovod of this environment.

    Raises:
        UserError: none is installed, or it cannot be loaded; says what to do.
    """
    if importlib.util.find_spec("horovod") is None:
        raise UserError(f"Horovod is not installed: {_BUILD}. --parallel.strategy ddp and adasum work without it")
    try:
        import horovod
        import horovod.torch as hvd
    except ImportError as error:
        # It was compiled for another torch, or its libmpi is missing.
        raise UserError(f"Horovod is installed but does not load ({first_line(error)}): {_BUILD}") from None
    return Build(horovod.__version__, bool(hvd.mpi_built()), bool(hvd.gloo_built()), bool(hvd.nccl_built()))


def transport(rank_info: RankInfo) -> str:
    """How Horovod's processes communicate under this launcher: ``MPI`` or ``Gloo``."""
    return "MPI" if rank_info.launcher == "Open MPI" else "Gloo"


def support(name: str, machine: Machine) -> list[StrategySupport]:
    """The ways to run Horovod on this machine; ``name`` is the strategy's."""
    try:
        build, missing = find(), ""
    except UserError as error:
        build, missing = None, str(error)
    no_mpirun = "" if available("mpirun") else "mpirun is not installed (Debian: apt-get install openmpi-bin)"
    no_mpi = missing or ("" if build and build.mpi else "this Horovod is built without MPI") or no_mpirun
    no_gloo = missing or ("" if build and build.gloo else "this Horovod is built without Gloo")
    no_nccl = (
        missing
        or machine.no_gpu
        or ("" if build and build.nccl else "this Horovod is built without NCCL: `make horovod` with a CUDA toolkit")
    )
    return [
        StrategySupport(name, "cpu", "MPI", ("mpirun", "horovodrun"), no_mpi),
        StrategySupport(name, "cpu", GLOO, ("--procs", "torchrun", "srun", "horovodrun"), no_gloo),
        StrategySupport(name, "cuda", "NCCL", ("--procs", "torchrun", "mpirun", "horovodrun"), no_nccl),
    ]


def available(launcher: str) -> bool:
    """Whether this machine has the launcher; those of Python packages may be next to the interpreter."""
    if launcher == "--procs":
        return True
    return shutil.which(launcher) is not None or (Path(sys.executable).parent / launcher).exists()


def check(recipe: Recipe, rank_info: RankInfo) -> None:
    """Refuse, before any process starts, what this Horovod cannot do here.

    Raises:
        UserError: names the remedy.
    """
    build = find()
    over = transport(rank_info)
    if not (build.mpi if over == "MPI" else build.gloo):
        raise UserError(f"{rank_info.launcher} needs a Horovod built with {over}, and the installed one is not: {_BUILD}")
    if over == "Gloo" and rank_info.size > 1:
        _check_gloo(rank_info)
    if recipe.parallel.op == "adasum":
        _check_adasum(recipe, rank_info, build)


def _check_gloo(rank_info: RankInfo) -> None:
    if rank_info.launcher != "horovodrun" and rank_info.local_size != rank_info.size:
        raise UserError(
            f"{rank_info.launcher} cannot start Horovod on several machines: use horovodrun or mpirun "
            f"(mpirun -np {rank_info.size} -H HOST:{rank_info.local_size},... worldsize train ...)"
        )
    if rank_info.launcher == "horovodrun" and "HOROVOD_GLOO_IFACE" not in os.environ:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
        except OSError:
            raise UserError(
                f"this machine's host name, {socket.gethostname()}, does not resolve, and Horovod's Gloo would crash: "
                "add it to /etc/hosts, or start with horovodrun --network-interface lo (or the right interface)"
            ) from None


def _check_adasum(recipe: Recipe, rank_info: RankInfo, build: Build) -> None:
    command = f"mpirun -np {rank_info.size} worldsize train ..."
    if rank_info.size & (rank_info.size - 1):
        raise UserError(
            f"Horovod's Adasum combines processes in pairs, then pairs of pairs: {rank_info.size} is not a power of two"
        )
    if rank_info.size > 1 and transport(rank_info) == "Gloo":
        raise UserError(
            f"Horovod supports Adasum only over MPI: {command}, or --parallel.strategy adasum, which needs no MPI"
        )
    if build.nccl and recipe.device != "cpu" and rank_info.local_size == rank_info.size:
        raise UserError(
            "a Horovod built with NCCL averages inside a machine and uses Adasum only between machines; all processes "
            "are on this one: use --parallel.strategy adasum, or --parallel.op average"
        )
    for name in recipe.optimizer.clips:
        raise UserError(
            "Horovod's Adasum steps each parameter as soon as its gradient is ready, before it can be clipped: "
            f"leave --optimizer.{name.replace('_', '-')} out, or use --parallel.strategy adasum"
        )
    if recipe.precision == "fp16":
        raise UserError(
            "Horovod's Adasum steps before the loss scale is removed: use --precision bf16 or fp32, "
            "or --parallel.strategy adasum"
        )
    if recipe.parallel.predivide is not None:
        raise UserError("--parallel.predivide applies to averages, not to Adasum: leave it out")
