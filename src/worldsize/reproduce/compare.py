"""Where two computations of the same steps differ, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.runs.step_hashes import COVERED

if TYPE_CHECKING:
    import torch

# The numbers of a step that are compared.
NUMBERS = tuple(name for name in COVERED if name not in ("step", "samples"))


@dataclass(frozen=True)
class StepDifference:
    """The first step at which a number of metrics.jsonl differs; ``relative`` difference of its values."""

    step: int
    name: str
    a: Any
    b: Any

    @property
    def relative(self) -> float:
        if not isinstance(self.a, (int, float)) or not isinstance(self.b, (int, float)):
            return float("inf")
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b), 1e-300)


@dataclass(frozen=True)
class TensorDifference:
    """The tensor that differs most: its name, the norm of the difference relative to its own; ``count`` of those that
    differ, of ``total``."""

    name: str
    relative: float
    count: int
    total: int


def first_difference(
    a: list[dict[str, Any]], b: list[dict[str, Any]], names: tuple[str, ...] = NUMBERS
) -> StepDifference | None:
    """The first difference of two lists of step records, which begin with the same step.

    Numbers without a fingerprint, as old runs have, are compared with the seven digits that metrics.jsonl had then.
    """
    for one, other in zip(a, b, strict=False):
        exact = bool(one.get("chain"))
        for name in names:
            if one[name] != (other[name] if exact or not isinstance(other[name], float) else float(f"{other[name]:.7g}")):
                return StepDifference(one["step"], name, one[name], other[name])
    return None


def tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> TensorDifference | None:
    """The largest difference of two state dicts with the same names; None: they have the same bits."""
    import torch

    different = {name: relative(a[name], b[name]) for name in a if not torch.equal(a[name], b[name])}
    if not different:
        return None
    worst = max(different, key=lambda name: different[name])
    return TensorDifference(worst, different[worst], len(different), len(a))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def overall(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The relative difference of all tensors of ``b`` together, as one vector, from those of ``a`` with the same names."""
    squared = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return (squared / sum(float(tensor.double().square().sum()) for tensor in b.values())) ** 0.5


def processes(count: int) -> str:
    """``1 process``, ``2 processes``."""
    return f"{count} process{'es' * (count != 1)}"
