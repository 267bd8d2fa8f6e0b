"""Counter-based random numbers: every draw is a pure function of its purpose and position.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), vectorized over
counters. The key is the recipe's seed; the counter identifies the draw. So the number of workers or ranks,
the prefetch depth and the point of resume do not change any number.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_WORD = 0xFFFFFFFF


class Use(IntEnum):
    """The purpose of a draw. Separates the streams of one seed."""

    ORDER = 0
    AUGMENT = 1
    TORCH = 2
    SYNTHETIC = 3
    POLICY = 4
    MIX = 5
    SAMPLING = 6


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 of broadcastable counters.

    Args:
        counter: four 32-bit words, integers or integer arrays that broadcast together to shape S.
        key: two 32-bit words.

    Returns:
        uint64 array of shape (4, *S), each value below 2**32.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) & _LOW for c in counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return np.stack([c0, c1, c2, c3])


def key_of(seed: int) -> tuple[int, int]:
    """Split a 64-bit seed into a Philox key."""
    return seed & _WORD, seed >> 32 & _WORD


def uniforms(seed: int, use: Use, epoch: int, samples: ArrayLike, count: int, repeats: ArrayLike = 0) -> NDArray[np.float64]:
    """Make ``count`` uniform draws for each sample.

    Args:
        samples: integer array of shape (n,), each below 2**32.
        repeats: which repetition of the sample within the epoch each is, shape (n,), below 2**24.

    Returns:
        float64 array of shape (n, count), in [0, 1), multiples of 2**-32.
    """
    blocks = -(-count // 4)
    index = np.asarray(samples, dtype=np.uint64)[:, None]
    purpose = np.asarray(repeats, dtype=np.uint64).reshape(-1, 1) << np.uint64(8) | np.uint64(use)
    words = philox((index, epoch, np.arange(blocks, dtype=np.uint64)[None, :], purpose), key_of(seed))
    flat = words.transpose(1, 2, 0).reshape(len(index), blocks * 4)[:, :count]
    return cast(NDArray[np.float64], flat * 2.0**-32)


def seed_of(seed: int, use: Use, *position: int) -> int:
    """Derive a 63-bit seed for another generator from ``position`` (any number of integers).

    Uses a hash, not Philox: callers need one number at a time, for which vectorized Philox costs 100 times as much.
    """
    digest = hashlib.blake2b(",".join(map(str, (seed, int(use), *position))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
