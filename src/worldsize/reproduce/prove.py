"""``worldsize prove``: runs a recipe at several world sizes and compares everything that the steps compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Parallel, Recipe
from worldsize.data import open_dataset
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError
from worldsize.reproduce import compare, scratch_runs
from worldsize.reproduce.compare import StepDifference, TensorDifference, processes
from worldsize.reproduce.options import Prove
from worldsize.reproduce.promise import ROUNDING, Promise
from worldsize.reproduce.scratch_runs import Steps

# What differs between machines and settings, by its name in environment.json.
_CAUSES = {
    "threads": "the number of threads per process",
    "device": "the processor or GPU",
    "instructions": "the processor's instructions",
    "cuda": "the CUDA version",
    "cudnn": "the cuDNN version",
}


@dataclass(frozen=True)
class Compared:
    """A run with ``procs`` processes compared with the first one; None where nothing differs."""

    procs: int
    sha256: str
    samples: StepDifference | None = None
    numbers: StepDifference | None = None
    state: TensorDifference | None = None
    first_step: int = 0  # the first step whose numbers differ; the last step if only the final weights do
    first_state: TensorDifference | None = None  # right after it
    cause: str = ""

    @property
    def identical(self) -> bool:
        return self.samples is None and self.numbers is None and self.state is None


@dataclass(frozen=True)
class Against:
    """A plain PyTorch loop compared with the first run: relative differences of the loss of step 1, and of all weights."""

    loss: float
    weights: float


@dataclass(frozen=True)
class Proof:
    """What was run and compared."""

    strategy: str
    promise: str
    steps: int
    results: list[Compared]
    holds: bool
    against: Against | None = None


def prove(asked: Prove, recipe: Recipe, tell: Callable[[str], None]) -> Proof:
    """Run the recipe's first steps at each world size, and compare.

    Raises:
        UserError: the world sizes cannot share the batch, or nothing can be compared.
        ComputationFailed: a run failed, or was stopped or killed.
    """
    sizes = world_sizes(asked.procs)
    recipe = with_strategy(recipe, asked.strategy)
    _check(asked, recipe)
    recipe = recipe_for_sizes(sizes, recipe, tell)
    recipes = {size: for_size(recipe, size) for size in sizes}
    for size, own in recipes.items():
        parallel.batch_plan(own, size)
    with temporary_folder("worldsize-prove-") as folder:
        proof = _prove(folder, recipe, recipes, asked, tell)
        return _against_torch(proof, folder, recipes, tell) if asked.against else proof


def _check(asked: Prove, recipe: Recipe) -> None:
    """Refuse what would fail only in the first run, or prove nothing."""
    if asked.steps < 1:
        raise UserError(f"--steps {asked.steps}: must be at least 1")
    if asked.interrupt and asked.steps < 2:
        raise UserError("--interrupt stops a run between two of its steps: pass --steps 2 (or more)")
    if parallel.strategy_class(recipe.parallel).asynchronous:
        raise UserError(
            f"strategy {recipe.parallel.strategy} cannot be proved: the order of its updates depends on time, so no two "
            "runs compute the same. Use --strategy bitwise or ddp"
        )


def _number_of_steps(asked: Prove, recipe: Recipe, plan: BatchPlan, folder: Path) -> int:
    """The steps to run: as many as asked for, or those that the recipe has if they are fewer.

    Raises:
        UserError: too few.
    """
    images = len(open_dataset(recipe.data, folder / ".cache").train)  # the runs find what this lists
    steps = min(asked.steps, plan.total_steps(recipe, images))
    if steps < 1:
        raise UserError("the recipe has no steps, so nothing can be proved: pass --max-steps 1 (or more)")
    if asked.interrupt and steps < 2:
        raise UserError("--interrupt stops a run between two of its steps, and the recipe has 1: pass a longer one")
    return steps


def world_sizes(text: str) -> list[int]:
    """The numbers in ``1,2,4``.

    Raises:
        UserError: not at least two different numbers.
    """
    try:
        sizes = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        sizes = []
    if len(sizes) < 2 or min(sizes) < 1:
        raise UserError(f"--procs {text!r}: pass at least two numbers of processes, such as 1,2,4")
    return sizes


def with_strategy(recipe: Recipe, name: str | None) -> Recipe:
    """The recipe with this strategy; without a name, its own, or `bitwise` if it is ``auto``."""
    if name is None and recipe.parallel.strategy != "auto":
        return recipe
    values = recipe.model_dump(mode="json")
    values["parallel"]["strategy"] = name or "bitwise"
    return recipe_files.validate(values, "--strategy")


def for_size(recipe: Recipe, size: int) -> Recipe:
    """The recipe as it runs at this world size: one process cannot run `ddp`, whose numbers are those of `single`."""
    if size > 1 or parallel.strategy_class(recipe.parallel) is not parallel.strategy_class(Parallel()):
        return recipe
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": "auto"})})


def recipe_for_sizes(sizes: list[int], recipe: Recipe, tell: Callable[[str], None]) -> Recipe:
    """The recipe, with the largest micro-batch that lets every world size share the batch.

    Raises:
        UserError: there is none, or the batch depends on the world size.
    """
    if recipe.per_process_batch is not None:
        raise UserError(
            "per_process_batch gives each world size another batch, so their numbers differ: "
            "add --per-process-batch None --global-batch N"
        )
    together = math.lcm(*sizes)
    fitting = [n for n in range(recipe.micro_batch, 0, -1) if recipe.global_batch % (n * together) == 0]
    if not fitting:
        raise UserError(
            f"{' and '.join(map(str, sizes))} processes cannot share a global batch of {recipe.global_batch}: "
            f"pass a --global-batch that is a multiple of {together}"
        )
    if fitting[0] == recipe.micro_batch:
        return recipe
    tell(
        f"micro-batches of {fitting[0]} instead of {recipe.micro_batch}, so that {max(sizes)} processes can share "
        f"the global batch of {recipe.global_batch}"
    )
    return recipe.model_copy(update={"micro_batch": fitting[0]})


def _prove(folder: Path, recipe: Recipe, recipes: dict[int, Recipe], asked: Prove, tell: Callable[[str], None]) -> Proof:
    sizes = list(recipes)
    asked = replace(asked, steps=_number_of_steps(asked, recipe, parallel.batch_plan(recipes[sizes[0]], sizes[0]), folder))
    runs: dict[int, Steps] = {}
    for size in sizes:
        interrupted = ", stopped and resumed once" if asked.interrupt else ""
        tell(f"{processes(size)}: {asked.steps} steps{interrupted}")
        runs[size] = _steps(folder, recipes[size], size, asked)
    results = [Compared(sizes[0], runs[sizes[0]].sha256)]
    results += [_compared(folder, recipes, size, runs, tell) for size in sizes[1:]]
    strategy = parallel.strategy_class(recipe.parallel)
    steps = len(runs[sizes[0]].records)
    if strategy.same_bits:
        return Proof(strategy.name, "the same bits", steps, results, all(r.identical for r in results))
    if not strategy.exact(recipe.parallel):
        holds = all(r.samples is None for r in results)
        return Proof(strategy.name, "the same samples, its own numbers at each world size", steps, results, holds)
    tolerance = _rounding(folder / str(sizes[0]))
    holds = all(r.samples is None and _first_step_agrees(runs[sizes[0]], runs[r.procs], tolerance) for r in results)
    return Proof(strategy.name, f"the same numbers up to rounding ({tolerance:g} in the first step)", steps, results, holds)


def _against_torch(proof: Proof, folder: Path, recipes: dict[int, Recipe], tell: Callable[[str], None]) -> Proof:
    from worldsize.reproduce import plain_loop

    size, recipe = next(iter(recipes.items()))
    ours = scratch_runs.computed(folder / str(size))
    tell(f"a plain PyTorch loop: {proof.steps} steps")
    threads = parallel.threads(recipe.parallel) or cores()
    theirs = plain_loop.train(recipe, folder / ".cache", proof.steps, threads)
    weights = load_file(ours.checkpoint / "model.safetensors")
    difference = Against(
        abs(ours.records[0]["loss"] - theirs.losses[0]) / abs(theirs.losses[0]),
        compare.overall(weights, theirs.parameters),
    )
    agrees = difference.loss <= _rounding(folder / str(size))
    return replace(proof, against=difference, holds=proof.holds and agrees)


def _steps(folder: Path, recipe: Recipe, size: int, asked: Prove) -> Steps:
    half = asked.steps // 2
    if not asked.interrupt:
        return scratch_runs.train(recipe, folder, str(size), size, asked.steps)
    scratch_runs.train(recipe, folder, str(size), size, half)
    return scratch_runs.resume(folder / str(size), size, asked.steps)


def _compared(
    folder: Path, recipes: dict[int, Recipe], size: int, runs: dict[int, Steps], tell: Callable[[str], None]
) -> Compared:
    reference = next(iter(recipes))
    ours, theirs = runs[reference], runs[size]
    samples = compare.first_difference(ours.records, theirs.records, ("samples",))
    numbers = compare.first_difference(ours.records, theirs.records)
    state = compare.tensors(_state(theirs), _state(ours))
    if samples is None and numbers is None and state is None:
        return Compared(size, theirs.sha256)
    first = numbers.step if numbers else len(ours.records)
    tell(f"{size} processes differ from {reference} in step {first}: comparing the weights after it")
    early = [scratch_runs.train(recipes[n], folder, f"{n}-until-{first}", n, first) for n in (reference, size)]
    cause = _cause(folder / str(reference), folder / str(size))
    first_state = compare.tensors(_state(early[1]), _state(early[0]))
    return Compared(size, theirs.sha256, samples, numbers, state, first, first_state, cause)


def _state(steps: Steps) -> dict[str, Any]:
    optimizer = load_file(steps.checkpoint / "optimizer.safetensors")
    return load_file(steps.checkpoint / "model.safetensors") | {f"optimizer {k}": v for k, v in optimizer.items()}


def _cause(a: Path, b: Path) -> str:
    """The likely cause of different bits: what environment.json says differs."""
    one, other = (json.loads((run / "environment.json").read_text("utf-8"))["hardware"] for run in (a, b))
    causes = [f"{_CAUSES[k]} ({one[k]} and {other[k]})" for k in _CAUSES if one[k] != other[k]]
    return "; ".join(causes) or "the order of additions, or a layer that mixes samples of several micro-batches"


def _rounding(run: Path) -> float:
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    return ROUNDING[environment["precision"]]


def _first_step_agrees(a: Steps, b: Steps, tolerance: float) -> bool:
    # The reason does not matter here, only that bits are not promised.
    return Promise("of another world size", tolerance).broken(a.records[:1], b.records[:1]) is None


def table(proof: Proof) -> list[tuple[str, ...]]:
    """Rows of text, the first one with titles."""
    rows: list[tuple[str, ...]] = [("processes", "samples", "loss and gradient", "weights and statistics", "SHA-256")]
    for i, result in enumerate(proof.results):
        if i == 0:
            rows.append((str(result.procs), "-", "-", "-", result.sha256[:16]))
            continue
        samples = "same" if result.samples is None else f"differ from step {result.samples.step}"
        numbers = "same bits" if result.numbers is None else _numbers(result.numbers)
        state = "same bits" if result.state is None else _tensors(result.state)
        rows.append((str(result.procs), samples, numbers, state, result.sha256[:16]))
    return rows


def _numbers(found: StepDifference) -> str:
    return f"step {found.step}: {found.name} differs by {found.relative:.1e}"


def _tensors(found: TensorDifference) -> str:
    return f"{found.count} of {found.total} differ, most in {found.name} by {found.relative:.1e}"


def verdict(proof: Proof) -> list[str]:
    """Lines that explain the table."""
    sizes = ", ".join(str(r.procs) for r in proof.results)
    holds = "holds" if proof.holds else "is BROKEN"
    lines = [f"The promise of {proof.strategy} {holds}: {proof.promise}, with {sizes} processes, after {proof.steps} steps."]
    if proof.against is not None:
        lines.append(
            f"A plain PyTorch loop of one process differs by {proof.against.loss:.1e} in the loss of step 1, "
            f"and by {proof.against.weights:.1e} in the weights after {proof.steps} steps."
        )
    for result in proof.results:
        if result.first_state is not None:
            lines.append(
                f"{result.procs} processes: first differs in step {result.first_step}, most in "
                f"{result.first_state.name} (by {result.first_state.relative:.1e}). Likely cause: {result.cause}"
            )
    return lines
