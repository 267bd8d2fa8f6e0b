"""Which strategy works here with which launcher, backend and device, and what is missing where one does not."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from worldsize.errors import UserError
from worldsize.parallel import STRATEGIES, horovod_build

_NO_GPU = "torch sees no GPU (see `worldsize env`)"
_LAUNCHERS = ("--procs", "torchrun", "mpirun", "srun")


@dataclass(frozen=True)
class Row:
    """One way to run a strategy; ``missing`` is empty where it works here."""

    strategy: str
    device: str
    backend: str
    launchers: tuple[str, ...]
    missing: str


def rows() -> list[Row]:
    """Every combination, in the order of `STRATEGIES`."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gpu = "" if gpus else _NO_GPU
    no_gloo = "" if dist.is_available() and dist.is_gloo_available() else "this torch is built without gloo"
    no_nccl = no_gpu or ("" if dist.is_nccl_available() else "this torch is built without NCCL")
    found: list[Row] = []
    for name in STRATEGIES:
        if name == "single":
            found += [Row(name, "cpu", "-", (), ""), Row(name, "cuda", "-", (), no_gpu)]
        elif name == "dataparallel":
            found += [Row(name, "cpu", "-", (), "it spreads over GPUs; ddp does the same with processes on CPUs")]
            found += [Row(name, "cuda", "-", (), no_gpu or ("" if gpus > 1 else "there is one GPU: nothing to spread over"))]
        elif name == "horovod":
            found += _horovod(no_gpu)
        else:
            over = "gloo" if name == "async" else "nccl"  # async sends through the hosts, where a peer may vanish
            found += [Row(name, "cpu", "gloo", _LAUNCHERS, no_gloo)]
            found += [Row(name, "cuda", over, _LAUNCHERS, no_gpu or (no_gloo if over == "gloo" else no_nccl))]
    return found


def _horovod(no_gpu: str) -> list[Row]:
    try:
        build, missing = horovod_build.find(), ""
    except UserError as error:
        build, missing = None, str(error)
    no_mpirun = "" if available("mpirun") else "mpirun is not installed (Debian: apt-get install openmpi-bin)"
    no_mpi = missing or ("" if build and build.mpi else "this Horovod is built without MPI") or no_mpirun
    no_gloo = missing or ("" if build and build.gloo else "this Horovod is built without Gloo")
    no_nccl = (
        missing
        or no_gpu
        or ("" if build and build.nccl else "this Horovod is built without NCCL: `make horovod` with a CUDA toolkit")
    )
    return [
        Row("horovod", "cpu", "MPI", ("mpirun", "horovodrun"), no_mpi),
        Row("horovod", "cpu", "Gloo, no Adasum", ("--procs", "torchrun", "horovodrun"), no_gloo),
        Row("horovod", "cuda", "NCCL", ("--procs", "torchrun", "mpirun", "horovodrun"), no_nccl),
    ]


def available(launcher: str) -> bool:
    """Whether this machine has the launcher; those that come with Python packages may lie beside the interpreter."""
    if launcher == "--procs":
        return True
    return shutil.which(launcher) is not None or (Path(sys.executable).parent / launcher).exists()


def show() -> None:
    """Print what there is, and what of it works here; reasons below, each once."""
    console = Console()
    kinds = _table("strategy", "what it does", "processes", "rate is for")
    for name, kind in STRATEGIES.items():
        kinds.add_row(name, kind.about, kind.processes, kind.rate)
    console.print(kinds, "")
    ways = _table("strategy", "device", "backend", "launchers", "here")
    notes: list[str] = []
    named = ""
    for row in rows():
        if row.missing and row.missing not in notes:
            notes.append(row.missing)
        verdict = f"no ({notes.index(row.missing) + 1})" if row.missing else "[green]yes[/green]"
        launchers = " ".join(name if available(name) else f"({name})" for name in row.launchers) or "none needed"
        ways.add_row(row.strategy if row.strategy != named else "", row.device, row.backend, launchers, verdict)
        named = row.strategy
    console.print(ways, "")
    for number, note in enumerate(notes, 1):
        console.print(f"({number}) {note}", markup=False, highlight=False)
    console.print("Launchers in brackets are not installed here.")
    console.print("To use one: worldsize train RECIPE --parallel.strategy NAME", highlight=False)


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, header_style="bold", padding=(0, 2, 0, 0))
