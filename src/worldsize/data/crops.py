"""How a picture is cut: pure functions of the picture's size and of uniform draws.

Each crop turns one decoded picture into uint8 pixels of the final size, and, where all pictures of a
batch are in memory with one size, does the same for the whole batch at once.
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

_ATTEMPTS = 10


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
        """Cut one RGB picture; ``draws`` has shape (self.draws,). Returns (size, size, 3)."""
        pixels = self._cut(picture, draws[1:])
        return pixels[:, ::-1] if self.flip and draws[0] < 0.5 else pixels

    def batch(self, pictures: Pixels, draws: Draws) -> Pixels | None:
        """Cut (n, H, W, 3) with draws (n, self.draws) at once to (n, size, size, 3); None where ``one`` must do it."""
        return None

    @abstractmethod
    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels: ...

    def _mirror(self, pixels: Pixels, draws: Draws) -> Pixels:
        if self.flip:
            mirrored = draws[:, 0] < 0.5
            pixels[mirrored] = pixels[mirrored, :, ::-1]
        return pixels


class RandomResizedCrop(Crop):
    """A random part, resized: as torchvision's RandomResizedCrop (Szegedy et al. 2014, arXiv 1409.4842, section 6)."""

    draws = 1 + 4 * _ATTEMPTS

    def __init__(self, size: int, flip: bool, area: tuple[float, float], ratio: tuple[float, float]) -> None:
        super().__init__(size, flip)
        self.area = area
        self.ratio = ratio

    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels:
        width, height = picture.size
        boxes = random_boxes(np.array([height]), np.array([width]), draws[None], self.area, self.ratio)
        top, left, h, w = (int(v) for v in boxes[0])
        part = picture.crop((left, top, left + w, top + h))
        return np.asarray(part.resize((self.size, self.size), Image.Resampling.BILINEAR))


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

    def _cut(self, picture: Image.Image, draws: Draws) -> Pixels:
        return fit(picture, self.resize, self.size)

    def batch(self, pictures: Pixels, draws: Draws) -> Pixels | None:
        if not pictures.shape[1] == pictures.shape[2] == self.resize == self.size:
            return None
        return self._mirror(pictures.copy(), draws)


def fit(picture: Image.Image, resize: int, size: int) -> Pixels:
    """Shorter side to ``resize`` (bilinear, antialiased), then the centre ``size`` x ``size``, as torchvision does it."""
    width, height = picture.size
    short = min(width, height)
    if short != resize:
        wanted = (max(1, int(resize * width / short)), max(1, int(resize * height / short)))
        if wanted[0] * wanted[1] > 2 * (Image.MAX_IMAGE_PIXELS or 0):
            raise BrokenPicture(f"{width} x {height} would become {wanted[0]} x {wanted[1]} pixels")
        picture = picture.resize(wanted, Image.Resampling.BILINEAR)
    width, height = picture.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(picture.crop((left, top, left + size, top + size)))


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
