"""What this process's GPU did since the last reading: its power and utilization, which NVML knows, and its memory.

NVML is NVIDIA's library of the driver; nvidia-ml-py (pip install 'worldsize[nvml]') reads it. Energy is a counter of the
GPU since Volta; a MIG slice has neither energy nor utilization.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from worldsize.track.base import GPU


class DeviceUsage:
    """Of the GPU ``device``. ``restart`` leaves out what came before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml, self._gpu = _nvml(device)
        self.restart()

    def restart(self) -> None:
        self._began, self._joules = time.perf_counter(), self._energy_j()

    def take(self) -> torch.Tensor:
        """Since the last call or `restart`, float64 (3,): mean power in watts, the share of the time in which a kernel ran
        (0 to 1, as NVML sampled it last), and the most memory that tensors have ever had, in 10^9 bytes. NaN: unknown."""
        began, joules = self._began, self._joules
        self.restart()
        watts = (self._joules - joules) / max(self._began - began, 1e-9)
        memory = torch.cuda.max_memory_allocated(self._device) / 1e9
        return torch.tensor([watts, self._utilization(), memory], dtype=torch.float64)

    def _energy_j(self) -> float:
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", lambda millijoules: millijoules / 1000)

    def _utilization(self) -> float:
        return self._ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100)

    def _ask(self, function: str, convert: Any) -> float:
        if self._gpu is None:
            return math.nan
        try:
            return float(convert(getattr(self._nvml, function)(self._gpu)))
        except self._nvml.NVMLError:  # this GPU does not know
            return math.nan


def of_all(ranks: torch.Tensor) -> dict[str, Any]:
    """The fields of `track.base.Step` from what each rank has taken, (W, 3)."""
    watts, busy, memory = ranks.T
    values = zip(GPU, (float(watts.sum()), float(busy.mean()), float(memory.max())), strict=True)
    return {name: None if math.isnan(value) else value for name, value in values}


def _nvml(device: torch.device) -> tuple[Any, Any]:
    """NVML and its handle of the GPU; (None, None) without NVML."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        # By its UUID: NVML numbers all GPUs of the machine, torch those in CUDA_VISIBLE_DEVICES.
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None, None
