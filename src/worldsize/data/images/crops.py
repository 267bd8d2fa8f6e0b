"""How an image is cropped: pure functions of the image's size and of uniform draws.

A crop turns one decoded image into uint8 pixels of the final size. If all images of a batch are in memory with the same
size, it can process the batch at once. A crop that only resizes a part of the image can return that part's coordinates
(`Cuts`), for decoders that crop and resize while decoding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize.config.recipe import Data
from worldsize.data.images.pillow import LONGEST, BrokenImage

Pixels = NDArray[np.uint8]  # of a decoded image: (height, width, 3), RGB
Draws = NDArray[np.float64]
Sides = NDArray[np.int64]
# int32 (n, 8): top, left, height, width of a box in the image; rows, columns of the grid it is resized to; y, x of the
# result in that grid. The result is black outside the grid. Height 0: the image cannot be cropped so; only `Crop.one` can
# tell whether it can be cropped at all.
Cuts = NDArray[np.int32]

_ATTEMPTS = 10

# The limit for the resized image if Pillow's own limit is off: that of the native decoder (native/src/resize.c).
_MAX_PIXELS = 178_956_970
_MIDDLE = 4  # how many times as long as wide the middle of an image is


class Crop(ABC):
    """A way to crop images to ``size`` x ``size``.

    Attributes:
        size: side of the result, pixels.
        bicubic: whether images are resized with bicubic instead of bilinear interpolation; both are antialiased.
        draws: number of uniform draws per sample. Draw 0 decides about the flip, the others about the position.
        alternates: whether the flips of an epoch are those of the first one, in odd epochs (the first is 0) the opposite.
    """

    alternates = False

    def __init__(self, size: int, flip: bool, bicubic: bool = False) -> None:
        self.size = size
        self.flip = flip
        self.bicubic = bicubic

    draws = 1

    def one(self, image: Image.Image, draws: Draws) -> Pixels:
        """Crop one RGB image; ``draws`` has shape (self.draws,). Returns (size, size, 3).

        Raises:
            BrokenImage: the resized image would be too large, see `fit`.
        """
        pixels = self._cut(image, draws[1:])
        return pixels[:, ::-1] if self.flips(draws[None])[0] else pixels

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts | None:
        """Cuts for images of these sizes, shape (n,), with draws (n, self.draws); None if the crop does more than cut."""
        return None

    def flips(self, draws: Draws) -> NDArray[np.bool_]:
        """Which images are flipped horizontally: shape (n,), for draws (n, self.draws)."""
        return (draws[:, 0] < 0.5) & self.flip

    def crops_batches(self, height: int, width: int) -> bool:
        """Whether `batch` supports images of this size; otherwise `one` must be used instead."""
        return False

    def batch(self, images: Pixels, draws: Draws) -> Pixels:
        """Crop (n, H, W, 3) with draws (n, self.draws) to (n, size, size, 3)."""
        raise NotImplementedError

    @abstractmethod
    def _cut(self, image: Image.Image, draws: Draws) -> Pixels: ...

    def _flipped(self, pixels: Pixels, draws: Draws) -> Pixels:
        flips = self.flips(draws)
        pixels[flips] = pixels[flips, :, ::-1]
        return pixels


class RandomResizedCrop(Crop):
    """torchvision's RandomResizedCrop (Szegedy et al. 2014, arXiv 1409.4842, section 6): a random part, resized."""

    draws = 1 + 4 * _ATTEMPTS

    def __init__(
        self, size: int, flip: bool, area: tuple[float, float], ratio: tuple[float, float], bicubic: bool = False
    ) -> None:
        super().__init__(size, flip, bicubic)
        self.area = area
        self.ratio = ratio

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        return self._cuts(heights, widths, draws[:, 1:])

    def _cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        cuts = np.zeros((len(heights), 8), np.int32)
        cuts[:, :4] = random_boxes(heights, widths, draws, self.area, self.ratio)
        cuts[:, 4:6] = self.size
        return cuts

    def _cut(self, image: Image.Image, draws: Draws) -> Pixels:
        return cut(image, self._cuts(*_sides(image), draws[None])[0], self.size, self.bicubic)


def random_boxes(
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    draws: Draws,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> NDArray[np.int64]:
    """Compute the boxes of RandomResizedCrop.

    Uses the first of ten attempts (area uniform in ``area``, width/height log-uniform in ``ratio``) that fits into the
    image. If none fits, uses the largest centered box whose ratio is within ``ratio``.

    Args:
        heights, widths: image sizes, shape (n,), pixels.
        draws: shape (n, 40): four per attempt (area, ratio, top, left).

    Returns:
        int64 (n, 4): top, left, height, width, inside the image.
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
    if none.any():
        boxes[none] = _centered_boxes(heights[none], widths[none], ratio)
    return boxes.astype(np.int64)


def _centered_boxes(heights: NDArray[np.int64], widths: NDArray[np.int64], ratio: tuple[float, float]) -> Draws:
    shape = widths / heights
    h = np.where(shape < ratio[0], np.rint(widths / ratio[0]), heights)
    w = np.where(shape > ratio[1], np.rint(heights * ratio[1]), widths)
    h, w = np.clip(h, 1, heights), np.clip(w, 1, widths)
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)


class PadCrop(Crop):
    """Black padding on each side, then a random crop: standard for CIFAR (He et al. 2015, arXiv 1512.03385, section 4.2)."""

    draws = 3

    def __init__(self, size: int, flip: bool, padding: int, bicubic: bool = False) -> None:
        super().__init__(size, flip, bicubic)
        self.padding = padding

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        """Of square images; of others, a cut would also show what `fit` leaves out."""
        cuts = centered_cuts(heights, widths, self.size, self.size)
        cuts[:, 2] *= heights == widths
        cuts[:, 6:] = self._corners(draws[:, 1:]) - self.padding
        return cuts

    def _cut(self, image: Image.Image, draws: Draws) -> Pixels:
        pixels = fit(image, self.size, self.size, self.bicubic)
        return self._shift(pixels[None], draws[None])[0]

    def crops_batches(self, height: int, width: int) -> bool:
        return height == width == self.size

    def batch(self, images: Pixels, draws: Draws) -> Pixels:
        return self._flipped(self._shift(images, draws[:, 1:]), draws)

    def _shift(self, pixels: Pixels, draws: Draws) -> Pixels:
        p = self.padding
        padded = np.pad(pixels, ((0, 0), (p, p), (p, p), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.size, self.size), axis=(1, 2))
        top, left = self._corners(draws).T
        return np.ascontiguousarray(windows[np.arange(len(pixels)), top, left].transpose(0, 2, 3, 1))

    def _corners(self, draws: Draws) -> NDArray[np.int64]:
        """Top and left of the crops in the padded images, (n, 2)."""
        return np.floor(draws * (2 * self.padding + 1)).astype(np.int64)


class CenterCrop(Crop):
    """Resize the shorter side, then crop the center: the standard crop for evaluation."""

    def __init__(self, size: int, flip: bool, resize: int, bicubic: bool = False) -> None:
        super().__init__(size, flip, bicubic)
        self.resize = resize

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        return centered_cuts(heights, widths, self.resize, self.size)

    def _cut(self, image: Image.Image, draws: Draws) -> Pixels:
        return fit(image, self.resize, self.size, self.bicubic)

    def crops_batches(self, height: int, width: int) -> bool:
        return height == width == self.resize == self.size

    def batch(self, images: Pixels, draws: Draws) -> Pixels:
        return self._flipped(images.copy(), draws)


class CornerCrop(CenterCrop):
    """Resize the shorter side, then crop a corner: ``bottom`` or top, ``right`` or left."""

    def __init__(self, size: int, resize: int, bottom: bool, right: bool, bicubic: bool = False) -> None:
        super().__init__(size, flip=False, resize=resize, bicubic=bicubic)
        self._bottom, self._right = bottom, right

    def cuts(self, heights: Sides, widths: Sides, draws: Draws) -> Cuts:
        cuts = super().cuts(heights, widths, draws)
        rows, columns = cuts[:, 4], cuts[:, 5]
        cuts[:, 6], cuts[:, 7] = self._bottom * (rows - self.size), self._right * (columns - self.size)
        return cuts

    def _cut(self, image: Image.Image, draws: Draws) -> Pixels:
        image = _middle(image, self.resize)
        return cut(image, self.cuts(*_sides(image), draws)[0], self.size, self.bicubic)


def fit(image: Image.Image, resize: int, size: int, bicubic: bool = False) -> Pixels:
    """Resize the shorter side to ``resize`` (antialiased), then crop the center ``size`` x ``size``.

    The pixels are those of torchvision; of an image that is too long to resize, those of its `middle`.

    Raises:
        BrokenImage: the resized image would be too large.
    """
    image = _middle(image, resize)
    return cut(image, centered_cuts(*_sides(image), resize, size)[0], size, bicubic)


def middle(height: int, width: int, resize: int) -> tuple[int, int, int, int]:
    """The part of an image to resize so that its shorter side is ``resize``: the image, or its middle if it is too long.

    Images up to the longest that decode can so be resized to any size that a square can.

    Returns:
        Top, left, height and width.
    """
    short, long = min(height, width), max(height, width)
    longest = _limit() // resize * short // resize
    if long <= longest or longest < short or long > LONGEST * short:
        return 0, 0, height, width
    part = min(longest, _MIDDLE * short)
    rows, columns = min(height, part), min(width, part)
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _middle(image: Image.Image, resize: int) -> Image.Image:
    top, left, rows, columns = middle(image.height, image.width, resize)
    return image if (columns, rows) == image.size else image.crop((left, top, left + columns, top + rows))


def _limit() -> int:
    """Maximum number of pixels of a resized image."""
    limit = Image.MAX_IMAGE_PIXELS  # None if the program turned it off
    return _MAX_PIXELS if limit is None else 2 * limit


def centered_cuts(heights: Sides, widths: Sides, resize: int, size: int) -> Cuts:
    """The cuts of `fit` for images of these sizes, shape (n,)."""
    short = np.minimum(heights, widths)
    rows, columns = (np.maximum(1, resize * sides // short) for sides in (heights, widths))
    y, x = (np.rint((grid - size) / 2).astype(np.int64) for grid in (rows, columns))
    possible = rows * columns <= _limit()
    zero = np.zeros_like(short)
    return np.stack([zero, zero, heights * possible, widths, rows, columns, y, x], axis=1).astype(np.int32)


def cut(image: Image.Image, where: NDArray[np.int32], size: int, bicubic: bool = False) -> Pixels:
    """Apply one row of `Cuts` to an RGB image with Pillow. Returns uint8 (size, size, 3)."""
    top, left, height, width, rows, columns, y, x = (int(v) for v in where)
    if height == 0:
        raise BrokenImage(f"too large after resizing: {image.width} x {image.height} would become {columns} x {rows} pixels")
    part = image.crop((left, top, left + width, top + height))
    resized = part.resize((columns, rows), Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((x, y, x + size, y + size)))


def _sides(image: Image.Image) -> tuple[Sides, Sides]:
    return np.array([image.height]), np.array([image.width])


def crop_size(data: Data, epoch: int) -> int:
    """The side of the training images in ``epoch`` (0-based), pixels.

    With progressive resizing, it is linear between the given epochs and rounded to a multiple, as ffcv-imagenet does.
    """
    if not data.train_crop_sizes:
        return data.train_crop_size
    size = float(np.interp(epoch, data.train_crop_epochs, data.train_crop_sizes))
    return max(1, round(size / data.train_crop_step)) * data.train_crop_step


def crop_sizes(data: Data, epochs: int) -> set[int]:
    """The sides of the training images that occur in a run of ``epochs`` epochs, pixels."""
    return {crop_size(data, epoch) for epoch in range(epochs if data.train_crop_sizes else 1)}


def training_crop(data: Data, size: int) -> Crop:
    """The recipe's crop for training, to ``size`` x ``size`` pixels."""
    bicubic = data.interpolation == "bicubic"
    crop: Crop
    match data.train_crop:
        case "random_resized":
            crop = RandomResizedCrop(size, data.flip, data.crop_area, data.crop_ratio, bicubic)
        case "pad":
            crop = PadCrop(size, data.flip, data.padding, bicubic)
        case "none":
            crop = CenterCrop(size, data.flip, size, bicubic)
    crop.alternates = data.alternate_flips
    return crop


def evaluation_crop(data: Data) -> Crop:
    """The recipe's crop for evaluation, which is deterministic."""
    return CenterCrop(data.val_crop_size, False, data.val_resize_size, data.interpolation == "bicubic")


def five_crops(data: Data) -> tuple[Crop, ...]:
    """The four corners and the center, in torchvision's order; empty without ``val_ten_crop``.

    The other five are their mirror images. torchvision's ten_crop mirrors the image first, which moves the center by one
    pixel where it cannot be in the middle.
    """
    if not data.val_ten_crop:
        return ()
    size, resize, bicubic = data.val_crop_size, data.val_resize_size, data.interpolation == "bicubic"
    corners = (CornerCrop(size, resize, bottom, right, bicubic) for bottom in (False, True) for right in (False, True))
    return (*corners, evaluation_crop(data))
