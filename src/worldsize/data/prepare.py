"""Encoded pictures to pixels of the final size: by the native decoder where it is built, by Pillow otherwise.

Both give the same pixels, bit for bit, where Pillow too is built with libjpeg-turbo, and call the same pictures broken: what
the native decoder does not know or does not like goes to Pillow. Scaling, which only the native one does, changes pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worldsize.data import native
from worldsize.data.crops import Crop, Draws, Pixels
from worldsize.data.decode import BrokenPicture
from worldsize.data.samples import Read, as_picture


class Preparation:
    """Cuts encoded pictures.

    Args:
        scaling: let the native decoder decode at 1/2 or 1/4 where that suffices: faster for large pictures, and not the
            same pixels.
    """

    def __init__(self, scaling: bool = False) -> None:
        self._scaling = scaling
        self._native = native.load()

    def fill(self, crop: Crop, pictures: Sequence[Read], draws: Draws, out: Pixels) -> list[str | None]:
        """Cut each picture into its place of ``out``, uint8 (n, size, size, 3), contiguous; ``draws`` (n, crop.draws).

        Returns:
            For each, None, or why it is broken; then its place holds nothing of use.
        """
        done = self._natively(crop, pictures, draws, out)
        return [None if done[i] else _by_pillow(crop, pictures[i], draws[i], out[i]) for i in range(len(pictures))]

    def _natively(self, crop: Crop, pictures: Sequence[Read], draws: Draws, out: Pixels) -> NDArray[np.bool_]:
        """Which places were filled."""
        nothing = np.zeros(len(pictures), bool)
        if self._native is None:
            return nothing
        flips, size = crop.flips(draws), crop.size
        raw = [one for one in pictures if isinstance(one, np.ndarray)]
        if len(raw) == len(pictures):
            heights, widths = np.array([one.shape[:2] for one in raw], np.int64).reshape(-1, 2).T
            cuts = crop.cuts(heights, widths, draws)
            return nothing if cuts is None else self._native.raw(raw, cuts, flips, size, out)
        encoded = [one if isinstance(one, (bytes, memoryview)) else b"" for one in pictures]
        heights, widths, known = self._native.headers(encoded)
        # The sides of the others are not known; any will do.
        heights, widths = (np.where(known, sides, 1).astype(np.int64) for sides in (heights, widths))
        cuts = crop.cuts(heights, widths, draws)
        if cuts is None:
            return nothing
        return self._native.cut(encoded, cuts, flips, size, out, scaling=self._scaling)


def _by_pillow(crop: Crop, picture: Read, draws: Draws, out: Pixels) -> str | None:
    try:
        if isinstance(picture, BrokenPicture):
            raise picture
        out[:] = crop.one(as_picture(picture), draws)
        return None
    except BrokenPicture as error:
        return str(error)
