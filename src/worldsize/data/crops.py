"""How a picture is cut: pure functions of the picture's size and of uniform draws.

Each crop turns one decoded picture into uint8 pixels of the final size, and, where all pictures of a
batch are in memory with one size, does the same for the whole batch at once. Where a part of the picture is resized
and nothing else is done, it says so in numbers, for decoders that do both at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize.data.decode import BrokenPicture
from worldsize.recipe import Data

Pixels = NDArray[np.uint8]
Draws = NDArray[np.float64]
Sides = NDArray[np.int64]
# int32 (n, 8): top, left, height, width of a box in the picture; rows, columns that it is resized to; y, x of the result
# therein, which is black where it reaches beyond. A box of height 0 says that the picture cannot be cut.
Cuts = NDArray[np.int32]

_ATTEMPTS = 10

# Pixels that a picture is resized to, where nobody limits Pillow: the limit of the native decoder (native/src/resize.c).
_MOST_PIXELS = 178_956_970


class Crop(ABC):
    """One way to cut pictures to ``size`` x ``size``.

    Attributes:
        size: side of the result, pixels.
        draws: how many uniform draws each sample needs. Draw 0 decides the mirror, the rest the place.
    """

    def __init__(self, size: int, flip: bool) -> None:
        self.size = size
        self.flip = flip

    draws = 1

    def one(self, picture: Image.Image, draws: Draws) -> Pixels:
        """Cut one RGB picture; ``draws`` has shape (self.draws,). Returns (size, size, 3).

        Raises:
            BrokenPicture: its shape is so extreme that it would become too large.
        """
        pixels = self._cut(picture, draws[1:])
        return pixels[:, ::-1] if self.flips(draws[None])[0] else pixels

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts | None:
        """Where pictures of these sizes, shape (n,), are cut with draws (n, self.draws); None where more is done to them."""
        return None

    def flips(self, draws: Draws) -> NDArray[np.bool_]:
        """Which are mirrored left to right, shape (n,), for draws (n, self.draws)."""
        return (draws[:, 0] < 0.5) & self.flip

    def batch(self, pictures: Pixels, draws: Draws) -> Pixels | None:
        """Cut (n, H, W, 3) with draws (n, self.draws) at once to (n, size, size, 3); None where ``one`` must do it."""
        return None

    @abstractmethod
    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels: ...

    def _mirror(self, pixels: Pixels, draws: Draws) -> Pixels:
        mirrored = self.flips(draws)
        pixels[mirrored] = pixels[mirrored, :, ::-1]
        return pixels


class RandomResizedCrop(Crop):
    """A random part, resized: as torchvision's RandomResizedCrop (Szegedy et al. 2014, arXiv 1409.4842, section 6)."""

    draws = 1 + 4 * _ATTEMPTS

    def __init__(self, size: int, flip: bool, area: tuple[float, float], ratio: tuple[float, float]) -> None:
        super().__init__(size, flip)
        self.area = area
        self.ratio = ratio

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        return self._cuts(heights, widths, draws[:, 1:])

    def _cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        boxes = random_boxes(heights, widths, draws, self.area, self.ratio)
        whole = np.array([self.size, self.size, 0, 0])
        return np.concatenate([boxes, np.broadcast_to(whole, boxes.shape)], axis=1).astype(np.int32)

    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels:
        return cut(picture, self._cuts(*_sides(picture), draws[None])[0], self.size)


def random_boxes(
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    draws: Draws,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> NDArray[np.int64]:
    """Boxes of RandomResizedCrop.

    Of ten attempts (area uniform in ``area``, width/height log-uniform in ``ratio``) the first that fits is
    taken; if none fits, the largest centred box whose ratio lies within ``ratio``.

    Args:
        heights, widths: picture sizes, shape (n,), pixels.
        draws: shape (n, 40): four per attempt (area, ratio, top, left).

    Returns:
        int64 (n, 4): top, left, height, width, inside the picture.
    """
    n = len(heights)
    u = draws.reshape(n, _ATTEMPTS, 4)
    h_all, w_all = heights[:, None].astype(float), widths[:, None].astype(float)
    target = h_all * w_all * (area[0] + (area[1] - area[0]) * u[..., 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * u[..., 1])
    w = np.rint(np.sqrt(target * aspect))
    h = np.rint(np.sqrt(target / aspect))
    fits = (w > 0) & (w <= w_all) & (h > 0) & (h <= h_all)
    first = fits.argmax(axis=1)
    row = np.arange(n)
    h, w = h[row, first], w[row, first]
    top = np.floor(u[row, first, 2] * (heights - h + 1))
    left = np.floor(u[row, first, 3] * (widths - w + 1))
    boxes = np.stack([top, left, h, w], axis=1)
    none = ~fits.any(axis=1)
    boxes[none] = _centred_boxes(heights[none], widths[none], ratio)
    return boxes.astype(np.int64)


def _centred_boxes(heights: NDArray[np.int64], widths: NDArray[np.int64], ratio: tuple[float, float]) -> Draws:
    shape = widths / heights
    h = np.where(shape < ratio[0], np.rint(widths / ratio[0]), heights)
    w = np.where(shape > ratio[1], np.rint(heights * ratio[1]), widths)
    h, w = np.clip(h, 1, heights), np.clip(w, 1, widths)
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)


class PadCrop(Crop):
    """Black padding on each side, then a random shift: the CIFAR habit (He et al. 2015, arXiv 1512.03385, section 4.2)."""

    draws = 3

    def __init__(self, size: int, flip: bool, padding: int) -> None:
        super().__init__(size, flip)
        self.padding = padding

    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels:
        pixels = fit(picture, self.size, self.size)
        return self._shift(pixels[None], draws[None])[0]

    def batch(self, pictures: Pixels, draws: Draws) -> Pixels | None:
        if pictures.shape[1:3] != (self.size, self.size):
            return None
        return self._mirror(self._shift(pictures, draws[:, 1:]), draws)

    def _shift(self, pixels: Pixels, draws: Draws) -> Pixels:
        p = self.padding
        padded = np.pad(pixels, ((0, 0), (p, p), (p, p), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.size, self.size), axis=(1, 2))
        top, left = np.floor(draws * (2 * p + 1)).astype(np.int64).T
        return np.ascontiguousarray(windows[np.arange(len(pixels)), top, left].transpose(0, 2, 3, 1))


class CenterCrop(Crop):
    """Resize the shorter side, then cut the centre: the evaluation of almost every recipe."""

    def __init__(self, size: int, flip: bool, resize: int) -> None:
        super().__init__(size, flip)
        self.resize = resize

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        return centred_cuts(heights, widths, self.resize, self.size)

    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels:
        return fit(picture, self.resize, self.size)

    def batch(self, pictures: Pixels, draws: Draws) -> Pixels | None:
        if not pictures.shape[1] == pictures.shape[2] == self.resize == self.size:
            return None
        return self._mirror(pictures.copy(), draws)


def fit(picture: Image.Image, resize: int, size: int) -> Pixels:
    """Shorter side to ``resize`` (bilinear, antialiased), then the centre ``size`` x ``size``, as torchvision does it.

    Raises:
        BrokenPicture: its shape is so extreme that it would become too large.
    """
    return cut(picture, centred_cuts(*_sides(picture), resize, size)[0], size)


def centred_cuts(heights: Sides, widths: Sides, resize: int, size: int) -> Cuts:
    """The cuts of `fit` for pictures of these sizes, shape (n,)."""
    short = np.minimum(heights, widths)
    rows, columns = (np.maximum(1, resize * sides // short) for sides in (heights, widths))
    y, x = (np.rint((grid - size) / 2).astype(np.int64) for grid in (rows, columns))
    limit = Image.MAX_IMAGE_PIXELS  # which many programs set to None
    possible = rows * columns <= (_MOST_PIXELS if limit is None else 2 * limit)
    zero = np.zeros_like(short)
    return np.stack([zero, zero, heights * possible, widths, rows, columns, y, x], axis=1).astype(np.int32)


def cut(picture: Image.Image, where: NDArray[np.int32], size: int) -> Pixels:
    """One row of `Cuts`, done to an RGB picture by Pillow. Returns uint8 (size, size, 3)."""
    top, left, height, width, rows, columns, y, x = (int(v) for v in where)
    if height == 0:
        raise BrokenPicture(f"{picture.width} x {picture.height} would become {columns} x {rows} pixels")
    part = picture.crop((left, top, left + width, top + height))
    resized = part.resize((columns, rows), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((x, y, x + size, y + size)))


def _sides(picture: Image.Image) -> tuple[Sides, Sides]:
    return np.array([picture.height]), np.array([picture.width])


def training_crop(data: Data) -> Crop:
    """The crop the recipe trains with."""
    match data.train_crop:
        case "random_resized":
            return RandomResizedCrop(data.train_crop_size, data.flip, data.crop_area, data.crop_ratio)
        case "pad":
            return PadCrop(data.train_crop_size, data.flip, data.padding)
        case "none":
            return CenterCrop(data.train_crop_size, data.flip, data.train_crop_size)


def evaluation_crop(data: Data) -> Crop:
    """The crop the recipe evaluates with; draws nothing."""
    return CenterCrop(data.val_crop_size, False, data.val_resize_size)
