"""A folder of noise images, and a recipe that trains on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from paths import SMALL_NETWORK


def images(root: Path, train: dict[str, int], val: dict[str, int], size: int = 40) -> Path:
    """A folder data set of noise."""
    noise = np.random.default_rng(0)
    for split, classes in (("train", train), ("val", val)):
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(0, 256, (size, size + 3, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i:03}.png")
    return root


def folder_recipe(cwd: Path, root: Path) -> str:
    (cwd / "mine.yaml").write_text(
        f"epochs: 1\nglobal_batch: 8\nmicro_batch: 4\nmax_steps: 2\nmodel: {{name: {SMALL_NETWORK}}}\n"
        f"data: {{name: folder, root: {root}, train_crop_size: 32, val_resize_size: 36, val_crop_size: 32}}\n"
    )
    return "mine.yaml"
