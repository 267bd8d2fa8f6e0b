"""uint8 pixels to normalized network input, on the device."""

from __future__ import annotations

import torch
from torch import nn

from worldsize.config.recipe import Data


class Normalise(nn.Module):
    """Move (n, H, W, 3) uint8 to the device, then compute (x / 255 - mean) / std, as (n, 3, H, W).

    Moving uint8 takes a quarter of the bytes of float32. ``channels_last``: the result is in NHWC memory, as the bytes are;
    otherwise in NCHW. Convolutions compute in NHWC as soon as either their input or their weights are in it.
    """

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype, channels_last: bool = True) -> None:
        super().__init__()
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        mean = torch.tensor(data.mean, dtype=torch.float64) * 255
        scale = 1 / (torch.tensor(data.std, dtype=torch.float64) * 255)
        # Buffers, so that replicas on other devices have their own.
        self.mean: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("mean", mean.to(device, dtype).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", scale.to(device, dtype).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        on_device = pixels.to(self.mean.device, non_blocking=True).permute(0, 3, 1, 2)
        # One kernel converts and subtracts.
        return ((on_device - self.mean) * self.scale).contiguous(memory_format=self._layout)
