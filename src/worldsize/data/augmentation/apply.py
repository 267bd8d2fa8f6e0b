"""Applies the operations of an augmentation policy to images: with the native library if it was built, else with Pillow."""

from __future__ import annotations

from worldsize.data.augmentation import operations
from worldsize.data.augmentation.operations import Color, Pixels, Program
from worldsize.data.images import native


def apply(pixels: Pixels, program: Program, fill: Color) -> None:
    """Apply to each image its operations, in place. Both ways give the same pixels.

    Args:
        pixels: (n, size, size, 3), contiguous.
        program: (n, slots, 8), see `operations`.
        fill: color of what rotations, shears and translations bring in.
    """
    library = native.load()
    if library is None:
        operations.with_pillow(pixels, program, fill)
    else:
        library.augment(pixels, program, fill)
