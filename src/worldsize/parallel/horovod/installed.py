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
from worldsize.distributed.rank import Place
from worldsize.errors import UserError, first_line
from worldsize.parallel.base import Machine, Way

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


def transport(place: Place) -> str:
    """How Horovod's processes communicate under this launcher: ``MPI`` or ``Gloo``."""
    return "MPI" if place.launcher == "Open MPI" else "Gloo"


def ways(name: str, machine: Machine) -> list[Way]:
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
        Way(name, "cpu", "MPI", ("mpirun", "horovodrun"), no_mpi),
        Way(name, "cpu", GLOO, ("--procs", "torchrun", "horovodrun"), no_gloo),
        Way(name, "cuda", "NCCL", ("--procs", "torchrun", "mpirun", "horovodrun"), no_nccl),
    ]


def available(launcher: str) -> bool:
    """Whether this machine has the launcher; those of Python packages may be next to the interpreter."""
    if launcher == "--procs":
        return True
    return shutil.which(launcher) is not None or (Path(sys.executable).parent / launcher).exists()


def check(recipe: Recipe, place: Place) -> None:
    """Refuse, before any process starts, what this Horovod cannot do here.

    Raises:
        UserError: names the remedy.
    """
    build = find()
    over = transport(place)
    if not (build.mpi if over == "MPI" else build.gloo):
        raise UserError(f"{place.launcher} needs a Horovod built with {over}, and the installed one is not: {_BUILD}")
    if over == "Gloo" and place.size > 1:
        _check_gloo(place)
    if recipe.parallel.op == "adasum":
        _check_adasum(recipe, place, build)


def _check_gloo(place: Place) -> None:
    if place.launcher != "horovodrun" and place.local_size != place.size:
        raise UserError(
            f"{place.launcher} cannot start Horovod on several machines: use horovodrun or mpirun "
            f"(mpirun -np {place.size} -H HOST:{place.local_size},... worldsize train ...)"
        )
    if place.launcher == "horovodrun" and "HOROVOD_GLOO_IFACE" not in os.environ:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
        except OSError:
            raise UserError(
                f"this machine's host name, {socket.gethostname()}, does not resolve, and Horovod's Gloo would crash: "
                "add it to /etc/hosts, or start with horovodrun --network-interface lo (or the right interface)"
            ) from None


def _check_adasum(recipe: Recipe, place: Place, build: Build) -> None:
    command = f"mpirun -np {place.size} worldsize train ..."
    if place.size & (place.size - 1):
        raise UserError(
            f"Horovod's Adasum combines processes in pairs, then pairs of pairs: {place.size} is not a power of two"
        )
    if place.size > 1 and transport(place) == "Gloo":
        raise UserError(
            f"Horovod supports Adasum only over MPI: {command}, or --parallel.strategy adasum, which needs no MPI"
        )
    if build.nccl and recipe.device != "cpu" and place.local_size == place.size:
        raise UserError(
            "a Horovod built with NCCL averages inside a machine and uses Adasum only between machines; all processes "
            "are on this one: use --parallel.strategy adasum, or --parallel.op average"
        )
    if recipe.optimizer.clip_norm is not None:
        raise UserError(
            "Horovod's Adasum steps each parameter as soon as its gradient is ready, before the norm is known: "
            "leave --optimizer.clip-norm out, or use --parallel.strategy adasum"
        )
    if recipe.precision == "fp16":
        raise UserError(
            "Horovod's Adasum steps before the loss scale is removed: use --precision bf16 or fp32, "
            "or --parallel.strategy adasum"
        )
    if recipe.parallel.predivide is not None:
        raise UserError("--parallel.predivide applies to averages, not to Adasum: leave it out")
