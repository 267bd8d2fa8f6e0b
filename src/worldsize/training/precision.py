"""The number format of the model's computations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError


@dataclass(frozen=True)
class Precision:
    """``name``: fp32, tf32, bf16, fp16 or fp64. Weights are float32 (float64 for fp64); bf16 and fp16 are autocast.

    tf32 is fp32 whose convolutions and matrix products round their inputs to 10 bits of mantissa, on GPUs since Ampere.
    """

    name: str
    device: torch.device

    @property
    def weights(self) -> torch.dtype:
        """Type of the weights and of the normalized input."""
        return torch.float64 if self.name == "fp64" else torch.float32

    def apply(self) -> None:
        """Set what torch decides for the whole process: without tf32, fp32 is fp32, also in cuDNN's convolutions.

        Sums of products of bf16 and fp16 are fp32 to the end: by default, cuBLAS may round in between.
        """
        _rules_of(self.name == "tf32").set()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """`apply` within this context only. Threads share it; one that needs the other setting waits."""
        _SHARED.enter(self.name == "tf32")
        try:
            yield
        finally:
            _SHARED.leave()

    def autocast(self) -> AbstractContextManager[object]:
        """Context manager for forward passes."""
        if self.name in ("bf16", "fp16"):
            return torch.autocast(self.device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)
        return nullcontext()

    @contextmanager
    def weights_cast_once(self) -> Iterator[None]:
        """Within this context each `autocast` reuses the weights that an earlier one has cast: they must not change."""
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def scaler(self, local_gradients: bool = False) -> GradScaler:
        """Loss scaling for fp16 (Micikevicius et al. 2017, arXiv 1710.03740); disabled for the other formats.

        Args:
            local_gradients: ranks have different gradients; if one overflows, all must skip the step.
        """
        enabled = self.name == "fp16"
        if enabled and local_gradients:
            from worldsize.training.rank_scaler import RankScaler

            return RankScaler(self.device.type)
        return GradScaler(self.device.type, enabled=enabled)


class _Rules(NamedTuple):
    """What torch may do less exactly on GPUs, in the whole process."""

    tf32_convolutions: bool
    tf32_products: bool
    bf16_sums: bool
    fp16_sums: bool

    def set(self) -> None:
        torch.backends.cudnn.allow_tf32 = self.tf32_convolutions
        products = torch.backends.cuda.matmul
        products.allow_tf32 = self.tf32_products
        products.allow_bf16_reduced_precision_reduction = self.bf16_sums
        products.allow_fp16_reduced_precision_reduction = self.fp16_sums


def _rules_of(tf32: bool) -> _Rules:
    return _Rules(tf32, tf32, False, False)


def _rules_now() -> _Rules:
    products = torch.backends.cuda.matmul
    return _Rules(
        torch.backends.cudnn.allow_tf32,
        products.allow_tf32,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )


class _SharedRules:
    """The process's rules, as the threads that are inside `Precision.applied` need them: they differ in TF32 only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._allowed = False
        self._before = _rules_of(False)

    def enter(self, allowed: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._inside or self._allowed == allowed)
            if not self._inside:
                self._before = _rules_now()
                self._allowed = allowed
                _rules_of(allowed).set()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._before.set()
                self._changed.notify_all()


_SHARED = _SharedRules()


def resolve(recipe: Recipe, device: torch.device) -> Precision:
    """The precision to use: ``auto`` is bf16 if the hardware supports bf16 matrix multiplication.

    Otherwise ``auto`` is fp16 on GPUs since Volta (V100, T4), which have units for that, unless the recipe does not work
    with a loss scale; and fp32.

    Raises:
        UserError: the device does not support the chosen format.
    """
    choice = recipe.precision
    if choice == "auto":
        return Precision(_fastest(recipe, device), device)
    if choice == "tf32" and device.type != "cuda":
        raise UserError("--precision tf32 is a format of GPUs, and this run computes on a CPU: use fp32 or bf16")
    if choice == "fp16" and device.type != "cuda" and recipe.device != "cpu":
        raise UserError(
            "--precision fp16 is for GPUs, and torch finds none here: use bf16 or fp32, or add --device cpu to compute it "
            "slowly on the CPU"
        )
    if choice in ("bf16", "tf32") and device.type == "cuda" and not computes_bf16(device):
        raise UserError(
            f"--precision {choice}: {torch.cuda.get_device_name(device)} has no units for it (they came with Ampere, "
            "compute capability 8.0); use fp16 or fp32"
        )
    return Precision(choice, device)


def _fastest(recipe: Recipe, device: torch.device) -> str:
    if computes_bf16(device):
        return "bf16"
    scaled = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 7
    return "fp16" if scaled and recipe.parallel.compression != "powersgd" else "fp32"


def computes_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 matrix units: Ampere or later, or a CPU with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    features = get_capabilities() if get_capabilities is not None else {}
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))
