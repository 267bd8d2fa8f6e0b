"""Gradients that a compiler loses without an error.

torch 2.11 does for functions with a gradient of their own whose forward pass ends in an operation that returns its input,
such as a conversion to the same type: everything below them stays as it was initialized.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from worldsize.training.objective import Objective

_FEW = 2  # images: enough for norm layers


class LostGradients(Exception):
    """A compiled network does not learn all that it should."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")


def require(
    objective: Objective,
    gradients: Mapping[str, torch.Tensor | None],
    pixels: torch.Tensor,
    labels: torch.Tensor,
    mix: torch.Tensor | None = None,
    draws: bool = False,
) -> None:
    """Compare the ``gradients`` of a compiled network with those that it has without the compiler.

    Changes the network's buffers.

    Args:
        gradients: of the loss of images with content, by the parameters' names in the network.
        pixels, labels, mix: of the images; the first two are computed without the compiler, if a gradient is missing.
        draws: the network draws random numbers, and the generators are as they were before the gradients were computed. All
            images are computed again, so that the network leaves out the same parts by chance.

    Raises:
        LostGradients: parameters without a gradient have one.
    """
    missing = [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]
    if not missing:
        return
    parameters = dict(objective.network.named_parameters())
    n = len(pixels) if draws else _FEW
    losses, _ = objective(pixels[:n], labels[:n], *(() if mix is None else (mix[:n],)))
    found = torch.autograd.grad(losses.sum(), [parameters[name] for name in missing], allow_unused=True)
    lost = [name for name, own in zip(missing, found, strict=True) if own is not None and own.any()]
    if lost:
        raise LostGradients(lost)
