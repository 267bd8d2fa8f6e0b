"""What a strategy sends in each step: the sizes of its messages, and when the backward pass lets them start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.plan.model import Message, Traffic

STRATEGIES = ("auto", "single", "ddp", "bitwise", "horovod", "localsgd")
_FIRST_BUCKET = 2**20  # bytes: `parallel.bitwise.tree_reduce` starts with a small bucket
FUSION = 128 * 2**20  # bytes: the default of HOROVOD_FUSION_THRESHOLD (Horovod 0.28.1, common/operations.cc)


@dataclass(frozen=True)
class Tensor:
    """The gradient of one parameter. ``done`` is the share of the backward pass after which it is complete (0 to 1)."""

    name: str
    shape: tuple[int, ...]
    done: float

    @property
    def elements(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


def of_recipe(recipe: Recipe, tensors: Sequence[Tensor], fusion: float = FUSION) -> Traffic:
    """The traffic of the recipe's strategy.

    Args:
        tensors: the gradients of the trained parameters, in the order in which the backward pass completes them.
        fusion: bytes that Horovod sends at once, at most.

    Raises:
        UserError: the model does not cover the strategy.
    """
    settings = recipe.parallel
    if settings.strategy not in STRATEGIES or (settings.strategy == "horovod" and settings.op == "adasum"):
        name = "horovod with op adasum" if settings.strategy == "horovod" else settings.strategy
        raise UserError(
            f"plan has no model of strategy {name}: add --parallel.strategy ddp (or bitwise, horovod, localsgd), "
            "or measure it with `worldsize bench strategies`"
        )
    element = 8 if recipe.precision == "fp64" else 4
    if settings.strategy == "localsgd":
        copies = 1 + (optimizer_tensors(recipe) if settings.average_momentum else 0)
        size = copies * element * sum(t.elements for t in tensors)
        synchronous = min(1.0, settings.local_after / recipe.epochs)
        return Traffic((Message(1.0, size),), 1 / (synchronous + (1 - synchronous) / settings.local_steps))
    if settings.compression == "powersgd":
        return Traffic(tuple(Message(1.0, element * n) for n in powersgd_elements(tensors, settings.powersgd_rank)))
    limit = settings.bucket_mb * 2**20
    sent = 2 if settings.compression in ("fp16", "bf16") else element
    if settings.strategy == "horovod":  # compresses each gradient before it puts them together
        filled = buckets(tensors, sent, fusion, exceed=False)
    else:
        # torch's DDP starts with a small bucket only without an explicit bucket size. Its hooks compress filled buckets.
        filled = buckets(tensors, element, limit, first=_FIRST_BUCKET if settings.strategy == "bitwise" else limit)
    messages = tuple(Message(b[-1].done, sent * sum(t.elements for t in b)) for b in filled)
    return Traffic(messages, gradients=gradients(recipe))


def gradients(recipe: Recipe) -> float:
    """How many gradients a step computes, the mean over steps: sharpness-aware minimization computes two in some."""
    settings = recipe.optimizer
    return 1 + 1 / settings.sam_every if settings.sam_rho else 1.0


def buckets(
    tensors: Iterable[Tensor], element: int, limit: float, first: float | None = None, exceed: bool = True
) -> list[list[Tensor]]:
    """The gradients that are sent together, in order; a tensor is never split.

    A bucket is closed once it has reached ``limit`` bytes, the first one at ``first``; so do torch's DDP and
    `parallel.bitwise.tree_reduce`. Without ``exceed`` it is closed before it would exceed the limit; so does Horovod.
    """
    filled: list[list[Tensor]] = []
    current: list[Tensor] = []
    size = 0
    for tensor in tensors:
        own = element * tensor.elements
        if not exceed and current and size + own > limit:
            filled.append(current)
            current, size = [], 0
        current.append(tensor)
        size += own
        if exceed and size >= (limit if filled or first is None else first):
            filled.append(current)
            current, size = [], 0
    return [*filled, current] if current else filled


def powersgd_elements(tensors: Iterable[Tensor], rank: int) -> tuple[int, int]:
    """Elements of the two messages of `ddp.compression.PowerSGD`: the Ps with all that is not compressed, and the Qs."""
    first = second = 0
    for tensor in tensors:
        n = tensor.shape[0] if tensor.shape else 1
        m = tensor.elements // n
        r = min(rank, n, m)
        if len(tensor.shape) >= 2 and 2 * r * (n + m) < n * m:
            first, second = first + r * n, second + r * m
        else:
            first += tensor.elements
    return first, second


def optimizer_tensors(recipe: Recipe) -> int:
    """How many numbers the recipe's optimizer keeps for each parameter; muon: for those of matrices, which are most."""
    name, momentum = recipe.optimizer.name, recipe.optimizer.momentum > 0
    match name:
        case "adamw" | "nadamw" | "lamb":
            return 2
        case "rmsprop":
            return 1 + momentum
        case "muon" | "lion":
            return 1
        case _:
            return int(momentum)
