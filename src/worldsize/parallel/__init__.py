"""How replicas agree on one model: one module per strategy, one small interface.

A strategy is one module of this package with a class ``Strategy`` derived from `base.Strategy`, an entry in `STRATEGIES`
and its name in `worldsize.recipe.StrategyName`. The loop does not know their names.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize import batch
from worldsize.batch import BatchPlan
from worldsize.errors import UserError
from worldsize.place import Place
from worldsize.recipe import Parallel, Recipe

if TYPE_CHECKING:  # what the front door asks of this package must not cost an import of torch
    from worldsize.parallel.base import Parts, Strategy


@dataclass(frozen=True)
class Kind:
    """What can be said of a strategy without running it.

    Attributes:
        about: one line for people.
        processes: the world sizes it works at: ``one``, ``several``, ``2, 4, 8, ...`` or ``any``.
        module: the file of this package, where it is not the strategy's name.
        rate: what its learning rate is scaled to: the ``global batch``, or the samples of one ``process``.
    """

    about: str
    processes: str
    rate: str = "global batch"
    module: str = ""


STRATEGIES = {
    "single": Kind("one device: the reference", "one"),
    "dataparallel": Kind("nn.DataParallel: several GPUs, slow", "one"),
    "ddp": Kind("averages gradients during backward", "several"),
    "adasum": Kind("combines the steps by their angle", "2, 4, 8, ...", "process"),
    "horovod": Kind("the real Horovod: average or Adasum", "any"),
    "localsgd": Kind("steps alone, then averages weights", "several"),
    "async": Kind("a parameter server: nobody waits", "any", module="parameter_server"),
}


def resolve(settings: Parallel, world_size: int) -> str:
    """The strategy that runs: ``auto`` is `single` for one process and `ddp` for more.

    Raises:
        UserError: the strategy cannot work at this world size.
    """
    name = settings.strategy
    if name == "auto":
        if world_size == 1 and not settings.exact:
            raise UserError(
                "--parallel.compression and --parallel.sync-batchnorm are about what several processes send each other: "
                "add --procs 2 (or more), or leave them out"
            )
        return "single" if world_size == 1 else "ddp"
    processes = STRATEGIES[name].processes
    if processes == "one" and world_size > 1:
        raise UserError(
            f"strategy {name} is for one process and there are {world_size}: use --parallel.strategy ddp, or --procs 1"
        )
    if processes not in ("one", "any") and world_size == 1:
        raise UserError(
            f"strategy {name} needs more than one process: add --procs 2 (or more), or use --parallel.strategy auto"
        )
    if processes == "2, 4, 8, ..." and world_size & (world_size - 1):
        below = 1 << (world_size.bit_length() - 1)
        raise UserError(
            f"strategy {name} combines processes in pairs, then pairs of pairs: {world_size} is not a power of two. "
            f"Use --procs {below} or {2 * below}, or --parallel.strategy ddp"
        )
    if name == "async" and max_staleness(settings, world_size) < world_size - 1:
        raise UserError(
            f"--parallel.max-staleness {settings.max_staleness} with {world_size} processes: at equal speed each gradient "
            f"is {world_size - 1} updates old when it arrives, and all would be dropped; allow at least {world_size - 1}"
        )
    return name


def check(recipe: Recipe, place: Place) -> None:
    """Refuse what cannot work on this machine, before anything is started.

    Raises:
        UserError: says what is missing and how to get it.
    """
    name = resolve(recipe.parallel, place.size)
    if name == "horovod":
        from worldsize.parallel import horovod_build

        horovod_build.check(recipe, place)
    if name == "dataparallel" or recipe.parallel.sync_batchnorm:
        _needs_gpu(recipe, name)
    batch_plan(recipe, place.size)


def _needs_gpu(recipe: Recipe, name: str) -> None:
    import torch

    if recipe.device != "cpu" and torch.cuda.is_available():
        return
    if name == "dataparallel":
        raise UserError(
            "strategy dataparallel spreads a batch over GPUs, and none is used here: "
            "--parallel.strategy ddp with --procs 2 does the same with processes, on CPUs too"
        )
    raise UserError(
        "--parallel.sync-batchnorm is for GPUs (torch's SyncBatchNorm has no CPU form): leave it out; "
        "BatchNorm groups are --micro-batch samples on every device"
    )


def batch_plan(recipe: Recipe, world_size: int) -> BatchPlan:
    """How the recipe's strategy shares a step among ``world_size`` processes.

    Raises:
        UserError: it cannot be shared evenly.
    """
    name = resolve(recipe.parallel, world_size)
    if name == "async":  # each update is one whole global batch, computed by one worker
        return batch.plan(recipe, 1)
    if name == "dataparallel":
        import torch

        return batch.plan(recipe, 1, max(1, torch.cuda.device_count()))
    return batch.plan(recipe, world_size)


def lr_batch(settings: Parallel, plan: BatchPlan, place: Place) -> int:
    """The samples that the learning rate is scaled to: those behind one optimiser's step.

    Averaging makes one step of the whole global batch. Adasum adds up steps that each process makes of its own samples,
    and so keeps the rate that is right for those (Maleki et al. 2020, arXiv 2006.02924, section 5).
    """
    name = resolve(settings, place.size)
    if STRATEGIES[name].rate == "process" or settings.op == "adasum":
        return plan.per_process * (place.local_size if settings.hierarchical else 1)
    return plan.global_batch


def depends_on_world_size(settings: Parallel) -> bool:
    """Whether a run's numbers are other ones at another world size, by more than rounding."""
    # Of async a checkpoint holds the server alone, to which workers may come and go.
    return not settings.exact and settings.strategy != "async"


def max_staleness(settings: Parallel, world_size: int) -> int:
    """async: how many updates old a gradient may be."""
    return 4 * world_size if settings.max_staleness is None else settings.max_staleness


def build(parts: Parts) -> Strategy:
    """The recipe's strategy for these parts."""
    name = resolve(parts.settings, parts.world.size)
    strategy: Strategy = importlib.import_module(f"worldsize.parallel.{STRATEGIES[name].module or name}").Strategy(parts)
    return strategy
