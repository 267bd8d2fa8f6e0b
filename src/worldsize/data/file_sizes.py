"""The sizes of a dataset's files: what a checkpoint stores, next to the names and labels, to detect that files changed."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import Dataset, EncodedSamples, Samples

LOOKED_AT = 20_000  # images of a split; network storage looks at a few thousand a second
_THREADS = 16


def digest(dataset: Dataset) -> dict[str, str]:
    """Hex, by split: changes with the size of a file. Of large splits, `LOOKED_AT` images that are spread evenly count.

    Images in memory have none: their fingerprint covers their pixels. Shards of unchanged bytes equal the originals.

    Raises:
        ReadFailed, Forbidden: the disk does not answer, or permissions are missing.
    """
    splits = {"train": dataset.train, "val": dataset.val}
    return {name: _of(samples) for name, samples in splits.items() if isinstance(samples, EncodedSamples)}


def _of(samples: Samples) -> str:
    n = len(samples)
    chosen = np.arange(n) if n <= LOOKED_AT else np.linspace(0, n - 1, LOOKED_AT).astype(np.int64)
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = pool.map(lambda part: [_length(samples, int(i)) for i in part], np.array_split(chosen, 8 * _THREADS))
        lengths = [length for part in parts for length in part]
    return hashlib.sha256(np.array(lengths, "<i8").tobytes()).hexdigest()


def _length(samples: Samples, index: int) -> int:
    assert isinstance(samples, EncodedSamples)
    try:
        return samples.length(index)
    except BrokenImage:
        return 0  # as in shards
