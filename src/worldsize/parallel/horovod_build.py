"""Which Horovod is here, if any, and what it can do; early refusals of what it cannot. Imports nothing heavy by itself."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass

from worldsize.errors import UserError
from worldsize.place import Place
from worldsize.recipe import Recipe

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
        UserError: there is none, or it cannot be loaded; says what to do.
    """
    if importlib.util.find_spec("horovod") is None:
        raise UserError(f"Horovod is not installed: {_BUILD}. --parallel.strategy ddp and adasum need nothing")
    try:
        import horovod
        import horovod.torch as hvd
    except ImportError as error:
        # A library that was compiled for another torch, or whose libmpi is gone.
        raise UserError(f"Horovod is installed but does not load ({str(error).splitlines()[0]}): {_BUILD}") from None
    return Build(horovod.__version__, bool(hvd.mpi_built()), bool(hvd.gloo_built()), bool(hvd.nccl_built()))


def transport(place: Place) -> str:
    """How Horovod's processes talk when this launcher starts them: ``MPI`` or ``Gloo``."""
    return "MPI" if place.launcher == "Open MPI" else "Gloo"


def check(recipe: Recipe, place: Place) -> None:
    """Refuse, before anything starts, what this Horovod cannot do here.

    Raises:
        UserError: says what would be right.
    """
    build = find()
    over = transport(place)
    if not (build.mpi if over == "MPI" else build.gloo):
        raise UserError(f"{place.launcher} needs a Horovod built with {over}, and this one is not: {_BUILD}")
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
                f"this machine's own name, {socket.gethostname()}, does not resolve, and Horovod's Gloo would crash on it: "
                "add it to /etc/hosts, or start with horovodrun --network-interface lo (or the right interface)"
            ) from None


def _check_adasum(recipe: Recipe, place: Place, build: Build) -> None:
    command = f"mpirun -np {place.size} worldsize train ..."
    if place.size & (place.size - 1):
        raise UserError(
            f"Horovod's Adasum combines processes in pairs, then pairs of pairs: {place.size} is not a power of two"
        )
    if place.size > 1 and transport(place) == "Gloo":
        raise UserError(f"Horovod has Adasum over MPI alone: {command}, or --parallel.strategy adasum, which needs no MPI")
    if build.nccl and recipe.device != "cpu" and place.local_size == place.size:
        raise UserError(
            "a Horovod built with NCCL averages inside a machine and does Adasum between machines only; all processes are "
            "on this one: use --parallel.strategy adasum, or --parallel.op average"
        )
    if recipe.optimizer.clip_norm is not None:
        raise UserError(
            "Horovod's Adasum steps each parameter as soon as its gradient is there, before a norm could be known: "
            "leave --optimizer.clip-norm out, or use --parallel.strategy adasum"
        )
    if recipe.precision == "fp16":
        raise UserError(
            "Horovod's Adasum steps before a loss scale could be taken out: use --precision bf16 or fp32, "
            "or --parallel.strategy adasum"
        )
    if recipe.parallel.predivide is not None:
        raise UserError("--parallel.predivide splits an average, and Adasum is none: leave it out")
