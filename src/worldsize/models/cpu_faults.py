"""Networks for which torch's library for CPUs has a fault."""

from __future__ import annotations

import torch
from torch import nn


def warning(network: nn.Module, device: torch.device, precision: str, channels_last: bool) -> str | None:
    """What to say of a network whose gradients oneDNN can compute wrongly on this processor; None: nothing.

    The backward pass of a strided 1x1 convolution in NHWC and fp32 writes outside of its memory if it has fewer input
    channels than a block of the processor (oneDNN, issue 6035). Images of a few pixels are not affected.
    """
    if device.type != "cpu" or precision != "fp32" or not channels_last or not torch.backends.mkldnn.is_available():
        return None
    block = {"AVX2": 8, "AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 0)
    names = [name for name, module in network.named_modules() if _is_strided_1x1(module) and module.in_channels < block]
    if not names:
        return None
    return (
        f"{', '.join(names)}: oneDNN, torch's library for CPUs, writes outside of its memory in the backward pass of 1x1 "
        f"convolutions with a stride and fewer than {block} input channels; the run may crash or have wrong gradients. Pass "
        "--model.no-channels-last"
    )


def _is_strided_1x1(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and max(module.stride) > 1 and module.groups == 1
