"""uint8 pixels to normalized network input, on the device."""

from __future__ import annotations

import torch

from worldsize.recipe import Data


class Normalise:
    """Move (n, H, W, 3) uint8 to the device, then compute (x / 255 - mean) / std, as (n, 3, H, W) in NHWC memory.

    Moving uint8 takes a quarter of the bytes of float32.
    """

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        mean = torch.tensor(data.mean, dtype=torch.float64) * 255
        scale = 1 / (torch.tensor(data.std, dtype=torch.float64) * 255)
        self._mean = mean.to(device, dtype).view(1, 3, 1, 1)
        self._scale = scale.to(device, dtype).view(1, 3, 1, 1)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        on_device = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        return (on_device.to(self._dtype) - self._mean) * self._scale
