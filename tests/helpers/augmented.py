"""Images to augment, and the result of some rows of operations."""

from __future__ import annotations

import numpy as np

from worldsize.data.augmentation import apply, operations

FILL = (124, 116, 104)
KINDS = ["noise", "smooth", "flat", "dark", "two levels"]
rng = np.random.default_rng(1)


def image(kind: str, size: int) -> np.ndarray:
    """An image that takes other branches of the operations than the others: few levels, one level, gradients."""
    noise = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, size)
    match kind:
        case "noise":
            return noise
        case "smooth":
            return np.stack([ramp[:, None] + 0 * ramp, ramp + 0 * ramp[:, None], np.add.outer(ramp, ramp) / 2], -1).astype(
                np.uint8
            )
        case "flat":
            return np.full_like(noise, 77)
        case "dark":
            return noise // 8
        case _:
            return np.where(noise > 128, 200, 30).astype(np.uint8)


def applied(pixels: np.ndarray, rows: list[operations.Row], fill=FILL, way=apply.apply) -> np.ndarray:
    out = pixels[None].copy()
    way(out, np.array([rows]), fill)
    return out[0]
