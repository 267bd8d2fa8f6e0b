"""Policies of one operation: color jitter, lighting, random erasing, cutout."""

from __future__ import annotations

import math

import numpy as np

from worldsize.data.augmentation import operations as ops
from worldsize.data.augmentation.operations import Color, Op, Program
from worldsize.data.augmentation.policies.base import Draws, Policy, pick

_ATTEMPTS = 10
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


class ColorJitter(Policy):
    """Random brightness, contrast, saturation and hue in random order, as torchvision's ColorJitter.

    Args:
        strengths: of the four, as torchvision's arguments; the last is at most 0.5.
    """

    draws = 8
    slots = 4

    def __init__(self, strengths: tuple[float, float, float, float]) -> None:
        self._strengths = np.array(strengths)
        self._low = np.maximum(1 - self._strengths, [0, 0, 0, -np.inf]) - [0, 0, 0, 1]
        self._high = 1 + self._strengths - [0, 0, 0, 1]

    def program(self, draws: Draws) -> Program:
        values = self._low + (self._high - self._low) * draws[:, 4:]
        rows = np.zeros((len(draws), 4, ops.WIDTH))
        rows[:, :, 0] = np.where(self._strengths > 0, [Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE], Op.IDENTITY)
        rows[:, :3, 1] = values[:, :3]
        rows[:, 3, 1] = np.trunc(values[:, 3] * 255) % 256
        return np.take_along_axis(rows, np.argsort(draws[:, :4], axis=1, kind="stable")[:, :, None], axis=1)


class Lighting(Policy):
    """Add one random color to all pixels, along the principal components of ImageNet's colors.

    Krizhevsky et al. 2012, "ImageNet classification with deep convolutional neural networks", section 4.1, with the
    eigenvalues and eigenvectors of fb.resnet.torch (datasets/imagenet.lua) for colors from 0 to 1. The color is rounded to
    whole levels of 255, and the result is clipped.

    Args:
        std: standard deviation of the components' factors.
    """

    draws = 6
    slots = 1

    def __init__(self, std: float) -> None:
        # (3, 3): column i is the eigenvector of eigenvalue i, times it; a row for each of red, green and blue.
        self._components = 255 * std * _EIGENVECTORS * _EIGENVALUES

    def program(self, draws: Draws) -> Program:
        # The Box-Muller transform.
        normal = np.sqrt(-2 * np.log(1 - draws[:, :3])) * np.cos(2 * math.pi * draws[:, 3:])
        rows = np.zeros((len(draws), 1, ops.WIDTH))
        rows[:, 0, 0] = Op.SHIFT
        rows[:, 0, 1:4] = np.clip(np.rint(normal @ self._components.T), -255, 255)
        return rows


class RandomErasing(Policy):
    """Fill a random box (Zhong et al. 2017, arXiv 1708.04896), as torchvision's RandomErasing.

    Args:
        chance: probability.
        area, ratio: ranges of the box's part of the image and of height/width.
    """

    draws = 1 + 4 * _ATTEMPTS
    slots = 1

    def __init__(
        self, size: int, chance: float, area: tuple[float, float], ratio: tuple[float, float], color: Color
    ) -> None:
        self._size, self._chance, self._area, self._color = size, chance, area, color
        self._log_ratio = math.log(ratio[0]), math.log(ratio[1])

    def program(self, draws: Draws) -> Program:
        u = draws[:, 1:].reshape(-1, _ATTEMPTS, 4)
        area = self._size**2 * (self._area[0] + (self._area[1] - self._area[0]) * u[..., 0])
        ratio = np.exp(self._log_ratio[0] + (self._log_ratio[1] - self._log_ratio[0]) * u[..., 1])
        heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (heights < self._size) & (widths < self._size)
        image, first = np.arange(len(draws)), fits.argmax(axis=1)
        h, w = heights[image, first], widths[image, first]
        top = np.floor(u[image, first, 2] * (self._size - h + 1))
        left = np.floor(u[image, first, 3] * (self._size - w + 1))
        rows = np.zeros((len(draws), 1, ops.WIDTH))
        rows[:, 0, :5] = np.stack([np.full(len(draws), float(Op.ERASE)), top, left, h, w], axis=1)
        rows[:, 0, 5:] = self._color
        rows[(draws[:, 0] >= self._chance) | ~fits.any(axis=1)] = ops.IDENTITY
        return rows


class Cutout(Policy):
    """Fill a square around a random pixel, cut off at the border (DeVries and Taylor 2017, arXiv 1708.04552)."""

    draws = 2
    slots = 1

    def __init__(self, size: int, side: int, color: Color) -> None:
        self._size, self._side, self._color = size, side, color

    def program(self, draws: Draws) -> Program:
        first = pick(draws, self._size) - self._side // 2
        start, end = np.clip(first, 0, self._size), np.clip(first + self._side, 0, self._size)
        rows = np.zeros((len(draws), 1, ops.WIDTH))
        rows[:, 0, 0] = Op.ERASE
        rows[:, 0, 1:3], rows[:, 0, 3:5], rows[:, 0, 5:] = start, end - start, self._color
        return rows
