"""Some of the images of a split, possibly with other labels."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from worldsize.data.samples import EncodedSamples, Read, Stored


class Chosen(EncodedSamples):
    """The images ``indices`` of ``samples``, in this order.

    Args:
        indices: int64 (n,).
        labels: int32 (n,) or uint8 (n, classes).
    """

    def __init__(
        self, samples: EncodedSamples, indices: NDArray[np.int64], labels: NDArray[np.int32] | NDArray[np.uint8]
    ) -> None:
        self._samples, self._chosen = samples, indices
        self.labels, self.classes, self.fingerprint = labels, samples.classes, samples.fingerprint

    def name(self, index: int) -> str:
        return self._samples.name(int(self._chosen[index]))

    def path(self, index: int) -> str:
        return self._samples.path(int(self._chosen[index]))

    def length(self, index: int) -> int:
        return self._samples.length(int(self._chosen[index]))

    def encoded(self, index: int) -> bytes | memoryview:
        return self._samples.encoded(int(self._chosen[index]))

    def opened(self, index: int) -> BinaryIO:
        return self._samples.opened(int(self._chosen[index]))

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int32] | None:
        return self._samples.sizes(self._chosen[indices])

    def stored(self, index: int) -> Stored:
        return self._samples.stored(int(self._chosen[index]))

    @property
    def reads_many(self) -> bool:
        return self._samples.reads_many

    def several(self, indices: NDArray[np.int64]) -> list[Read] | NDArray[np.uint8]:
        return self._samples.several(self._chosen[indices])
