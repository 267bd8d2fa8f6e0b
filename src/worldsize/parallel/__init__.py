"""How replicas agree on one model: one module per strategy behind one small interface.

A strategy is one package here with a module ``strategy`` that has a class ``Strategy`` derived from `base.Strategy`, and its
name in `worldsize.config.recipe.StrategyName`. The training loop does not know their names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, get_args

from worldsize.config.recipe import Parallel, Recipe, StrategyName
from worldsize.distributed.rank import RankInfo
from worldsize.errors import UserError

if TYPE_CHECKING:
    from worldsize.distributed.batch_plan import BatchPlan
    from worldsize.parallel.base import Strategy, StrategyInputs

# `auto` is the first for one process and the second for more.
_AUTO = ("single", "ddp")
STRATEGIES: tuple[str, ...] = tuple(name for name in get_args(StrategyName) if name != "auto")
# `async` is a keyword, which a package cannot be called.
_PACKAGES = {"async": "async_sgd"}


def load(name: str) -> type[Strategy]:
    """The strategy of this name. Does not import torch."""
    package = f"worldsize.parallel.{_PACKAGES.get(name, name)}"
    strategy: type[Strategy] = importlib.import_module(f"{package}.strategy").Strategy
    return strategy


def strategy_class(settings: Parallel) -> type[Strategy]:
    """The strategy whose settings count: the recipe's own; of ``auto``, the one for several processes."""
    return load(_AUTO[1] if settings.strategy == "auto" else settings.strategy)


def resolve_strategy(settings: Parallel, world_size: int) -> type[Strategy]:
    """The strategy that runs at this world size: ``auto`` is `single` for one process and `ddp` for more.

    Raises:
        UserError: the strategy cannot work at this world size.
    """
    if settings.strategy != "auto":
        strategy = load(settings.strategy)
        _check_processes(strategy, world_size)
        return strategy
    if world_size == 1 and not strategy_class(settings).exact(settings):
        raise UserError(
            "--parallel.compression and --parallel.sync-batchnorm apply to messages between processes: "
            "add --procs 2 (or more), or leave them out"
        )
    return load(_AUTO[0] if world_size == 1 else _AUTO[1])


def _check_processes(strategy: type[Strategy], world_size: int) -> None:
    name, processes = strategy.name, strategy.processes
    if processes == "one" and world_size > 1:
        raise UserError(f"strategy {name} runs in one process, not {world_size}: use --parallel.strategy ddp, or --procs 1")
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


def validate(recipe: Recipe) -> None:
    """Refuse settings that the recipe's strategy does not read, and what it cannot run on any machine.

    Raises:
        UserError: names the setting and the remedy.
    """
    chosen, settings = strategy_class(recipe.parallel), recipe.parallel
    special = {name for strategy in map(load, STRATEGIES) for name in strategy.settings}
    for name in type(settings).model_fields:
        value, default = getattr(settings, name), type(settings).model_fields[name].default
        if name not in special or name in chosen.settings or value == default:
            continue
        readers = [strategy.name for strategy in map(load, STRATEGIES) if name in strategy.settings]
        raise UserError(
            f"parallel.{name} {value} has no effect with strategy {chosen.name}: "
            f"use --parallel.strategy {' or '.join(readers)}, or leave it at {default}"
        )
    if recipe.forward_batch not in (None, recipe.micro_batch) and not chosen.allows_merged_forward(settings):
        because = "parallel.sync_batchnorm" if settings.sync_batchnorm else f"strategy {chosen.name}"
        raise UserError(
            f"forward_batch {recipe.forward_batch} does not work with {because}, which needs each micro-batch of "
            f"{recipe.micro_batch} in a forward pass of its own: leave it out, or raise --micro-batch"
        )
    if recipe.average.name != "none" and not chosen.averages:
        raise UserError(
            f"average.name {recipe.average.name} does not work with strategy {chosen.name}, whose processes have different "
            "weights between averagings: use --average.name none or --parallel.strategy ddp"
        )
    if recipe.optimizer.sam_rho and not chosen.sharpens:
        raise UserError(
            f"optimizer.sam_rho {recipe.optimizer.sam_rho:g} does not work with strategy {chosen.name}: leave it out, or "
            "use --parallel.strategy ddp"
        )
    if recipe.model.unfreeze_epoch is not None and not chosen.unfreezes:
        raise UserError(
            f"model.unfreeze_epoch {recipe.model.unfreeze_epoch} does not work with strategy {chosen.name}: use "
            "--parallel.strategy ddp; or leave it out, and start a second run from --model.weights RUN"
        )
    chosen.validate(recipe)


def check(recipe: Recipe, rank_info: RankInfo) -> None:
    """Refuse what cannot work on this machine, before any process starts.

    Raises:
        UserError: says what is missing and how to get it.
    """
    validate(recipe)
    strategy = resolve_strategy(recipe.parallel, rank_info.size)
    strategy.check(recipe, rank_info)
    strategy.check_size(recipe, rank_info.size)
    strategy.batch_plan(recipe, rank_info.size)


def check_size(recipe: Recipe, world_size: int) -> None:
    """Refuse what cannot work with ``world_size`` processes, on this machine or another.

    Raises:
        UserError: says what would work.
    """
    resolve_strategy(recipe.parallel, world_size).check_size(recipe, world_size)


def identity(recipe: Recipe) -> dict[str, Any]:
    """All settings that determine a run's numbers, as nested values that JSON can hold.

    Of `recipe.Parallel`: nothing if the numbers are those of `single` up to rounding and the strategy promises no more;
    else the strategy and the settings it reads.
    """
    kept = recipe.identity()
    strategy = strategy_class(recipe.parallel)
    if strategy.same_bits or not strategy.exact(recipe.parallel):
        kept["parallel"] = {"strategy": strategy.name} | {
            name: getattr(recipe.parallel, name) for name in strategy.identity_settings
        }
    return kept


def completed(old: dict[str, Any], defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """An `identity` with the defaults of settings that did not exist when it was saved, which change nothing."""
    defaults = Recipe().identity() if defaults is None else defaults
    missing = {name: value for name, value in defaults.items() if name not in old}
    sections = {
        name: completed(value, defaults[name])
        for name, value in old.items()
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
    }
    return old | missing | sections


def batch_plan(recipe: Recipe, world_size: int) -> BatchPlan:
    """How the recipe's strategy shares a step among ``world_size`` processes.

    Raises:
        UserError: it cannot be shared evenly.
    """
    return resolve_strategy(recipe.parallel, world_size).batch_plan(recipe, world_size)


def lr_batch(settings: Parallel, plan: BatchPlan, rank_info: RankInfo) -> int:
    """The number of samples that the learning rate is scaled to."""
    return resolve_strategy(settings, rank_info.size).lr_batch(settings, plan, rank_info)


def threads(settings: Parallel) -> int | None:
    """CPU threads per process, if the strategy's numbers depend on it."""
    return strategy_class(settings).threads(settings)


def build(parts: StrategyInputs) -> Strategy:
    """The recipe's strategy for these parts."""
    return resolve_strategy(parts.settings, parts.world.size)(parts)
