"""Encoded images to pixels of the final size, with the native decoder if it was built, otherwise with Pillow.

Both give bit-identical pixels if Pillow also uses libjpeg-turbo, and both report the same images as broken: the native
decoder leaves to Pillow every image that it does not support or finds damaged. Scaling, which only the native decoder
supports, changes the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worldsize.data.images import native
from worldsize.data.images.crops import Crop, Draws, Pixels
from worldsize.data.images.pillow import LONGEST, BrokenImage
from worldsize.data.samples import Read, as_image


class Preparation:
    """Decode and crop images.

    Args:
        scaling: let the native decoder decode at 1/2 or 1/4 of the size if that is large enough. Faster for large
            images, but the pixels differ.
    """

    def __init__(self, scaling: bool = False) -> None:
        self._scaling = scaling
        self._native = native.load()

    def fill(self, crop: Crop, images: Sequence[Read] | Pixels, draws: Draws, out: Pixels) -> list[str | None]:
        """Crop each image into its place in ``out``.

        Args:
            images: as they are stored; images in memory of one size can be an array (n, height, width, 3).
            draws: (n, crop.draws).
            out: uint8 (n, size, size, 3), contiguous; written in place.

        Returns:
            For each image None, or the reason why it is broken; then its pixels in ``out`` are undefined.
        """
        if self._native is None and isinstance(images, np.ndarray) and crop.crops_batches(*images.shape[1:3]):
            out[:] = crop.batch(images, draws)
            return [None] * len(images)
        done = self._with_native(crop, images, draws, out).tolist()
        return [None if ok else _with_pillow(crop, images[i], draws[i], out[i]) for i, ok in enumerate(done)]

    def _with_native(self, crop: Crop, images: Sequence[Read] | Pixels, draws: Draws, out: Pixels) -> NDArray[np.bool_]:
        """Returns bool (n,): which places were filled."""
        none = np.zeros(len(images), bool)
        if self._native is None:
            return none
        flips, size = crop.flips(draws), crop.size
        raw = images if isinstance(images, np.ndarray) else [image for image in images if isinstance(image, np.ndarray)]
        if len(raw) == len(images):
            cuts = crop.cuts(*_sides(raw), draws)
            return none if cuts is None else self._native.raw(raw, cuts, flips, size, out, crop.bicubic)
        encoded = [image if isinstance(image, (bytes, memoryview)) else b"" for image in images]
        heights, widths, known = self._native.headers(encoded)
        known &= np.maximum(heights, widths) <= LONGEST * np.minimum(heights, widths).astype(np.int64)
        encoded = [data if ours else b"" for data, ours in zip(encoded, known, strict=True)]
        # The sizes of the other images are unknown; the native decoder ignores their cuts.
        rows, columns = (np.where(known, sides, 1).astype(np.int64) for sides in (heights, widths))
        cuts = crop.cuts(rows, columns, draws)
        if cuts is None:
            return none
        return self._native.cut(encoded, cuts, flips, size, out, crop.bicubic, self._scaling)


def _sides(images: Sequence[Pixels] | Pixels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Heights and widths."""
    if isinstance(images, np.ndarray):
        return np.full(len(images), images.shape[1]), np.full(len(images), images.shape[2])
    heights, widths = np.array([image.shape[:2] for image in images], np.int64).reshape(-1, 2).T
    return heights, widths


def _with_pillow(crop: Crop, image: Read, draws: Draws, out: Pixels) -> str | None:
    try:
        if isinstance(image, BrokenImage):
            raise image
        out[:] = crop.one(as_image(image), draws)
        return None
    except BrokenImage as error:
        return str(error)
