"""The order of an epoch: the k-th sample is a pure function of (seed, epoch, k).

In `FullShuffle`, every order is equally likely. `worldsize.data.sampling.block_shuffle` has an order for slow storage,
`worldsize.data.sampling.weighted` one for unequal classes.

A keyed permutation in constant memory: a generalized Feistel network over a*b >= n cells, with
cycle walking for the few cells beyond n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worldsize.data.sampling.random_numbers import Use, key_of, philox

_ROUNDS = 24
_PART_STRIDE = np.uint64(32)  # counters per part, at least _ROUNDS
_LOW = np.uint64(0xFFFFFFFF)

Indices = NDArray[np.int64]


class Order(ABC):
    """Which sample comes when."""

    @abstractmethod
    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of the epoch, shapes (n,)."""

    def appearances(self, epoch: int, positions: Indices) -> Indices:
        """Number the appearances of each sample in the epoch, from 0: the numbers of those at these positions, (n,)."""
        return np.zeros_like(positions)


@dataclass(frozen=True)
class FullShuffle(Order):
    """Every order of ``samples`` samples is equally likely."""

    seed: int
    samples: int

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        return permute(self.seed, epoch, positions, self.samples)


def repeated(positions: Indices, global_batch: int, repeats: int) -> tuple[Indices, Indices]:
    """Repeated augmentation (Hoffer et al. 2019, arXiv 1901.09335): each image of a step appears in it ``repeats`` times.

    The copies of an image are as far apart as possible, so they are in different micro-batches. An epoch keeps its number of
    steps and contains 1 / ``repeats`` of the images, as in the trainers of DeiT, timm and torchvision.

    Args:
        positions: in the epoch without repetition, shape (n,).

    Returns:
        The positions of the images to use instead, and the repetition of each (0 to ``repeats`` - 1), shape (n,).
    """
    distinct = -(-global_batch // repeats)
    step, offset = positions // global_batch, positions % global_batch
    return step * distinct + offset % distinct, offset // distinct


def permute(seed: int, epoch: ArrayLike, k: ArrayLike, n: int, part: ArrayLike = 0) -> Indices:
    """Return the sample at position ``k`` of an epoch over ``n`` samples.

    Args:
        seed: 64-bit seed.
        epoch: integer or integer array.
        k: positions, 0 <= k < n; broadcasts with ``epoch``.
        n: number of samples, 1 <= n < 2**32.
        part: selects one of several orders of the same epoch, 0 <= part < 2**27; broadcasts with ``epoch``.

    Returns:
        int64 array of the broadcast shape. For a fixed epoch and part, a bijection of 0..n-1.
    """
    if not 0 < n < 2**32:
        raise ValueError(f"n must be between 1 and 2**32 - 1, not {n}")
    epochs, parts = np.broadcast_arrays(np.asarray(epoch, np.uint64), np.asarray(part, np.uint64))
    position = np.asarray(k, np.uint64)
    shape = np.broadcast_shapes(epochs.shape, position.shape)
    # Round keys depend only on epoch and part: compute them once, then broadcast to all positions.
    rounds = np.arange(_ROUNDS, dtype=np.uint64).reshape(-1, *[1] * epochs.ndim)
    words = philox((rounds + parts * _PART_STRIDE, epochs, n, Use.ORDER), key_of(seed))[0]
    words = words.reshape(_ROUNDS, *[1] * (len(shape) - epochs.ndim), *epochs.shape)
    keys = np.broadcast_to(words, (_ROUNDS, *shape)).reshape(_ROUNDS, -1)
    out = _network(np.broadcast_to(position, shape).reshape(-1), keys, n)
    while (outside := out >= n).any():
        out[outside] = _network(out[outside], keys[:, outside], n)
    return out.astype(np.int64).reshape(shape)


def _network(position: NDArray[np.uint64], keys: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Alternating rounds on the digits (left, right) of ``position`` in the mixed base (a, b).

    b is even: with two odd bases, every round is an even permutation, and half of all orders is unreachable.
    """
    a = math.isqrt(n - 1) + 1
    b = 2 * -(-n // (2 * a))
    base_a, base_b = np.uint64(a), np.uint64(b)
    left, right = position // base_b, position % base_b
    for i, key in enumerate(keys):
        if i % 2:
            right = (right + _mix(left, key)) % base_b
        else:
            left = (left + _mix(right, key)) % base_a
    return left * base_b + right


def _mix(value: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A keyed 32-bit hash: the finalizer of MurmurHash3 on value xor key, with the key added a second time."""
    x = (value * np.uint64(0x9E3779B1) ^ key) & _LOW
    x = ((x ^ x >> np.uint64(16)) * np.uint64(0x85EBCA6B)) & _LOW
    x = ((x ^ x >> np.uint64(13)) * np.uint64(0xC2B2AE35) + key) & _LOW
    return x ^ x >> np.uint64(16)
