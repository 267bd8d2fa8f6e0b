"""Grad-CAM: where a network looks (Selvaraju et al. 2017, arXiv 1610.02391)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

_OVERLAY = (230, 40, 30)
_LAST_PART = 0.75  # of the convolutions come before the layer


def maps(network: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor | None:
    """How much each place of the last feature map supports a class, 0 to 1, float32 (n, height, width) on the CPU.

    Args:
        images: the network's normalized input, (n, 3, size, size).
        classes: the class to explain for each image, int64 (n,).

    Returns:
        None for networks with attention, whose features are not maps, and for those whose last maps have only one place.
    """
    if any("Attention" in type(module).__name__ for module in network.modules()):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        images = images.clone().requires_grad_()  # also if all weights are frozen
        layer = _last_map(network, images[:1])
        if layer is None:
            return None
        kept: list[torch.Tensor] = []
        hook = layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        try:
            logits = network(images)
        finally:
            hook.remove()
        (features,) = kept
        (slope,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), features)
    weighted = (slope.mean((2, 3), keepdim=True) * features).sum(1).relu().detach().float()
    return (weighted / weighted.amax((1, 2), keepdim=True).clamp(min=1e-12)).cpu()


def _last_map(network: nn.Module, image: torch.Tensor) -> nn.Module | None:
    """The last module that is called once and returns features with more than one place.

    None if it is not in the last part of the network: what an early layer sees does not explain the prediction.
    """
    found: list[tuple[nn.Module, int]] = []
    calls: Counter[nn.Module] = Counter()
    convolutions = 0

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal convolutions
        calls[module] += 1
        convolutions += isinstance(module, nn.Conv2d)
        if isinstance(output, torch.Tensor) and output.ndim == 4 and output.shape[-1] > 1:
            found.append((module, convolutions))

    hooks = [module.register_forward_hook(note) for module in network.modules() if module is not network]
    try:
        network(image)
    finally:
        for hook in hooks:
            hook.remove()
    once = [(module, before) for module, before in found if calls[module] == 1]  # a shared ReLU has several outputs
    return once[-1][0] if once and once[-1][1] >= _LAST_PART * convolutions else None


def overlay(pixels: NDArray[np.uint8], places: torch.Tensor) -> Image.Image:
    """The image (height, width, 3) with the places (h, w) in red: the redder, the more they support the class."""
    height, width = pixels.shape[:2]
    strength = Image.fromarray((places.numpy() * 190).astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR)
    return Image.composite(Image.new("RGB", (width, height), _OVERLAY), Image.fromarray(pixels), strength)
