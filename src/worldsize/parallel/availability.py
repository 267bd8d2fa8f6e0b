"""Which strategy works on this machine with which launcher, backend and device, and what is missing if one does not."""

from __future__ import annotations

from worldsize.config import tables
from worldsize.parallel import STRATEGIES, load
from worldsize.parallel.base import Machine, StrategySupport
from worldsize.parallel.horovod.installed import available


def support() -> list[StrategySupport]:
    """Every way to run a strategy, in the order of `STRATEGIES`."""
    machine = _this_machine()
    return [way for name in STRATEGIES for way in load(name).support(machine)]


def _this_machine() -> Machine:
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gloo = "" if dist.is_available() and dist.is_gloo_available() else "this torch is built without gloo"
    no_nccl = "" if dist.is_available() and dist.is_nccl_available() else "this torch is built without NCCL"
    return Machine(gpus, "" if gpus else "torch finds no GPU (see `worldsize env`)", no_gloo, no_nccl)


def show() -> None:
    """Print the strategies and which ways to run them work here; then each reason once."""
    console = tables.console()
    kinds = tables.table("strategy", "what it does", "processes", "lr scaled to")
    for strategy in map(load, STRATEGIES):
        kinds.add_row(strategy.name, strategy.about, strategy.processes, strategy.rate)
    console.print(kinds, "")
    table = tables.table("strategy", "device", "backend", "launchers", "usable here")
    notes: list[str] = []
    named = ""
    for row in support():
        if row.missing and row.missing not in notes:
            notes.append(row.missing)
        verdict = f"no ({notes.index(row.missing) + 1})" if row.missing else "[green]yes[/green]"
        launchers = " ".join(name if available(name) else f"({name})" for name in row.launchers) or "none needed"
        table.add_row(row.strategy if row.strategy != named else "", row.device, row.backend, launchers, verdict)
        named = row.strategy
    console.print(table, "")
    for number, note in enumerate(notes, 1):
        console.print(f"({number}) {note}", markup=False, highlight=False)
    console.print("Launchers in parentheses are not installed here.")
    console.print("Usage: worldsize train RECIPE --parallel.strategy NAME", highlight=False)
