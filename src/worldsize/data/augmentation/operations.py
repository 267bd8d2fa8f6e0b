"""Operations of augmentation policies on uint8 RGB images, with Pillow's pixels.

An operation is a row of eight float64: its code and its values. native/src/augment.c applies rows outside the GIL;
`with_pillow` applies them with Pillow, to the same pixels.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Pixels = NDArray[np.uint8]
Program = NDArray[np.float64]  # (n, slots, 8): the rows of n images, in order
Row = tuple[float, ...]
Color = tuple[int, int, int]
Interpolation = Literal["nearest", "bilinear", "bicubic"]

WIDTH = 8


class Op(IntEnum):
    """Codes of native/src/worldsize.h, which documents the values."""

    IDENTITY = 0
    AFFINE_NEAREST = 1
    AFFINE_BILINEAR = 2
    AFFINE_BICUBIC = 3
    BRIGHTNESS = 4
    COLOR = 5
    CONTRAST = 6
    SHARPNESS = 7
    POSTERIZE = 8
    SOLARIZE = 9
    SOLARIZE_ADD = 10
    AUTOCONTRAST = 11
    EQUALIZE = 12
    HUE = 13
    ERASE = 14
    SHIFT = 15
    BLUR = 16
    MIX_BEGIN = 17
    MIX_ADD = 18
    MIX_END = 19


_AFFINE = {"nearest": Op.AFFINE_NEAREST, "bilinear": Op.AFFINE_BILINEAR, "bicubic": Op.AFFINE_BICUBIC}
_RESAMPLING = {
    Op.AFFINE_NEAREST: Image.Resampling.NEAREST,
    Op.AFFINE_BILINEAR: Image.Resampling.BILINEAR,
    Op.AFFINE_BICUBIC: Image.Resampling.BICUBIC,
}
_ENHANCERS = {
    Op.BRIGHTNESS: ImageEnhance.Brightness,
    Op.COLOR: ImageEnhance.Color,
    Op.CONTRAST: ImageEnhance.Contrast,
    Op.SHARPNESS: ImageEnhance.Sharpness,
}


def row(op: Op, *values: float) -> Row:
    """One operation."""
    return (float(op), *values, *[0.0] * (WIDTH - 1 - len(values)))


IDENTITY = row(Op.IDENTITY)
INVERT = row(Op.SOLARIZE, 0.0)


def place(*matrix: float) -> Row:
    """Pixel (x, y) of the result is the nearest of the image to the place (a x + b y + c, d x + e y + f).

    Args:
        matrix: a, b, c, d, e, f, for x and y at the pixels' centers: 0.5, 1.5 and so on.
    """
    return row(Op.AFFINE_NEAREST, *matrix)


def shear_x(factor: float, interpolation: Interpolation) -> Row:
    """Shift row y by ``factor * y`` pixels to the left."""
    return row(_AFFINE[interpolation], 1, factor, 0, 0, 1, 0)


def shear_y(factor: float, interpolation: Interpolation) -> Row:
    """Shift column x by ``factor * x`` pixels up."""
    return row(_AFFINE[interpolation], 1, 0, 0, factor, 1, 0)


def translate(dx: float, dy: float, interpolation: Interpolation) -> Row:
    """Move the image by ``dx`` pixels to the right and ``dy`` down."""
    return row(_AFFINE[interpolation], 1, 0, -dx, 0, 1, -dy)


def rotate(degrees: float, size: int, interpolation: Interpolation) -> Row:
    """Rotate counterclockwise around the center, with the matrix of `PIL.Image.Image.rotate`."""
    angle = -math.radians(degrees % 360.0)
    cos, sin, center = round(math.cos(angle), 15), round(math.sin(angle), 15), size / 2
    minus = round(-math.sin(angle), 15)
    return row(
        _AFFINE[interpolation],
        cos,
        sin,
        cos * -center + sin * -center + 0.0 + center,
        minus,
        cos,
        minus * -center + cos * -center + 0.0 + center,
    )


def with_pillow(pixels: Pixels, program: Program, fill: Color) -> None:
    """Apply to each image its rows, in place.

    Args:
        pixels: (n, size, size, 3).
        program: (n, slots, 8).
        fill: color of what an affine map brings in.
    """
    for image, rows in zip(pixels, program, strict=True):
        image[:] = np.asarray(_all_applied(Image.fromarray(image), rows, fill))


def _all_applied(image: Image.Image, rows: NDArray[np.float64], fill: Color) -> Image.Image:
    """The image after its rows, which begin, add to and end weighted sums of it in this order."""
    kept, total = image, np.zeros(0, np.float32)
    for values in rows:
        op, weight = Op(int(values[0])), np.float32(values[1])
        match op:
            case Op.MIX_BEGIN:
                kept, total = image, weight * np.asarray(image, np.float32)
            case Op.MIX_ADD:
                image, total = kept, total + weight * np.asarray(image, np.float32)
            case Op.MIX_END:
                image = Image.fromarray(total.astype(np.uint8))
            case _:
                image = _apply(image, values, fill)
    return image


def _apply(image: Image.Image, values: NDArray[np.float64], fill: Color) -> Image.Image:
    op, first = Op(int(values[0])), float(values[1])
    if op in _RESAMPLING:
        return image.transform(image.size, Image.Transform.AFFINE, values[1:7].tolist(), _RESAMPLING[op], fillcolor=fill)
    if op in _ENHANCERS:
        return _ENHANCERS[op](image).enhance(first)
    match op:
        case Op.POSTERIZE:
            # Not ImageOps.posterize: since Pillow 13 it refuses 0 bits, which timm's RandAugment asks for at level 10.
            return image.point([v & 0xFF << 8 - int(first) & 0xFF for v in range(256)] * 3)
        case Op.SOLARIZE:
            return ImageOps.solarize(image, first)  # type: ignore[arg-type]
        case Op.SOLARIZE_ADD:
            added, threshold = int(first), float(values[2])
            return image.point([v if v >= threshold else min(v + added, 255) for v in range(256)] * 3)
        case Op.AUTOCONTRAST:
            return ImageOps.autocontrast(image)
        case Op.EQUALIZE:
            return ImageOps.equalize(image)
        case Op.HUE:
            hue, saturation, value = image.convert("HSV").split()
            shifted = hue.point([(v + int(first)) % 256 for v in range(256)])
            return Image.merge("HSV", (shifted, saturation, value)).convert("RGB")
        case Op.ERASE:
            top, left, height, width, *color = (int(v) for v in values[1:])
            image = image.copy()
            image.paste(tuple(color), (left, top, left + width, top + height))
            return image
        case Op.BLUR:
            return image.filter(ImageFilter.GaussianBlur(first))
        case Op.SHIFT:
            return image.point([min(max(v + int(added), 0), 255) for added in values[1:4] for v in range(256)])
        case _:
            return image
