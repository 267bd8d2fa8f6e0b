"""Images and recipes of the tests about exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

QUICK = (
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--precision", "fp32"),
    *("--data.val-resize-size", "20", "--schedule.warmup-epochs", "0", "--checkpoint.keep", "1"),
    *("--average.name", "ema", "--average.decay", "0.7", "--device", "cpu"),
)
SIZES = ((60, 48), (31, 97), (97, 31), (200, 41), (16, 16), (20, 20), (5, 3), (133, 260))  # height, width
Exported = Callable[..., Path]


def picture(seed: int, size: tuple[int, int]) -> np.ndarray:
    """Noise with structure, uint8 (height, width, 3)."""
    small = np.random.default_rng(seed).integers(0, 256, (size[0] // 3 + 2, size[1] // 3 + 2, 3), np.uint8)
    return np.ascontiguousarray(small.repeat(3, 0).repeat(3, 1)[: size[0], : size[1]])


def pictures(count: int) -> list[np.ndarray]:
    return [picture(i, SIZES[i % len(SIZES)]) for i in range(count)]
