"""Which runs a scaling benchmark makes (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.errors import UserError, did_you_mean
from worldsize.parallel.base import Variant
from worldsize.reproduce.scratch_runs import only_steps

Scaling = Literal["weak", "strong"]
KINDS = ("local", "pytorchjob", "mpijob", "trainjob")


@dataclass(frozen=True)
class Case:
    """One configuration: a strategy (the name of its variant) on ``nodes`` nodes with ``procs`` processes each.

    ``on`` is ``local`` or a kind of job on clusters.
    """

    strategy: str
    scaling: Scaling
    nodes: int
    procs: int
    on: str = "local"

    @property
    def world_size(self) -> int:
        return self.nodes * self.procs

    @property
    def name(self) -> str:
        """A name for folders and jobs. Names of jobs are short, hence only the first letter of its kind."""
        kind = "" if self.on == "local" else f"-{self.on[0]}"
        return f"{self.strategy}-{self.scaling}-{self.nodes}x{self.procs}{kind}".replace(" ", "-").lower()

    def means(self, variant: Variant) -> bool:
        """Whether this is the variant: by its name, or, for the first variant of a strategy, by the strategy's."""
        return self.strategy in (variant.name, variant.name.partition(" ")[0])

    def __str__(self) -> str:
        kind = "" if self.on == "local" else f", {self.on}"
        return f"{self.strategy}, {self.scaling}, {self.nodes} x {self.procs}{kind}"


def kinds_of(text: str) -> list[str]:
    """The values of ``--on``.

    Raises:
        UserError: one of them is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in KINDS:
            raise UserError(f"--on {name!r} is unknown{did_you_mean(name, KINDS)}; available: {', '.join(KINDS)}")
    return names


def cases(
    strategies: Sequence[str], scalings: Sequence[Scaling], nodes: str, procs: str, kinds: Sequence[str] = ("local",)
) -> list[Case]:
    """All combinations; those of one kind, strategy and scaling ascend in the world size.

    Raises:
        UserError: ``nodes`` or ``procs`` are no lists of positive numbers, or there is only one world size.
    """
    sizes = sorted(itertools.product(_numbers("--nodes", nodes), _numbers("--procs", procs)), key=lambda s: (s[0] * s[1], s))
    found = [Case(name, scaling, n, p, on) for on in kinds for name in strategies for scaling in scalings for n, p in sizes]
    if len({case.world_size for case in found}) < 2:
        raise UserError("scaling needs several world sizes: pass more values to --procs or --nodes, such as --procs 1,2")
    return found


def in_rounds(found: Sequence[Case], rounds: int) -> Iterable[tuple[int, Case]]:
    """(round, case) in the order of the runs: every second round is reversed, so that a slow drift affects all alike."""
    for turn in range(1, rounds + 1):
        for case in found if turn % 2 else reversed(found):
            yield turn, case


def recipe_of(case: Case, base: Recipe, smallest: int, steps: int, synthetic: bool) -> Recipe:
    """The recipe of a run of ``steps`` steps, without evaluations and checkpoints before its end.

    Args:
        smallest: the smallest world size of the benchmark, whose global batch is the recipe's.

    Raises:
        UserError: the batch cannot be divided among the processes.
    """
    values: dict[str, Any] = only_steps(base).model_dump(mode="json")
    grows = case.scaling == "weak" and base.per_process_batch is None
    if grows and base.global_batch % smallest:
        raise UserError(f"--global-batch {base.global_batch} is not divisible by {smallest}, the smallest world size")
    if grows:
        values["global_batch"] = base.global_batch // smallest * case.world_size
    elif case.scaling == "strong" and base.per_process_batch is not None:
        values |= {"global_batch": base.per_process_batch * smallest, "per_process_batch": None}
    recipe = recipe_files.validate(values, "bench scaling")
    plan = batch_plan.plan(recipe, case.world_size)
    if synthetic:
        samples = plan.global_batch * (steps + 1)
        no_files = {"root": None, "val_list": None, "label_list": None, "labels": None}
        data = recipe.data.model_copy(update={"name": "synthetic", "samples": samples, **no_files})
        recipe = recipe.model_copy(update={"data": data})
    return recipe


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UserError(f"{flag} {text!r}: pass positive numbers separated by commas, such as 1,2,4")
    return numbers
