"""Block shuffle: an order that uses samples that are adjacent on disk close together in time.

For storage with high latency and high throughput, such as shards on an object store. Each request reads a block of
consecutive samples, and all ranks together mix a pool of blocks at a time. Like the full shuffle, the order is a pure
function of seed, epoch and position, so it is the same for any world size and training can resume at any step.

Trade-off: the samples of a block, often of one class, are mostly used within the steps that consume a pool. So steps close
together are more similar than with a full shuffle. If the pool has fewer blocks than the batch has samples, the samples
of one batch are more similar, too.

Algorithm: permute the blocks with a keyed permutation, then permute the samples within each group of ``mixed`` consecutive
blocks. The result is the stream. A global batch is not the next part of the stream, because then every rank would need
every block. Instead, it takes an equal number of samples from each of many lanes, which start at equal distances in the
stream. So a batch comes from as many blocks as there are lanes, and a rank reads only the blocks of its own lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from worldsize.data.sampling.order import Indices, Order, permute
from worldsize.data.sampling.random_numbers import Use, seed_of


@dataclass(frozen=True)
class BlockShuffle(Order):
    """An order of ``samples`` samples. Positions count complete global batches only.

    Attributes:
        seed: the recipe's.
        samples: 1 .. 2**32 - 1.
        global_batch: samples per step.
        block: consecutive samples per read, at least 1.
        pool: samples that all ranks together mix at a time, at least one block.
    """

    seed: int
    samples: int
    global_batch: int
    block: int
    pool: int

    @cached_property
    def lanes(self) -> int:
        """Number of places in the stream that each global batch takes samples from: at most the pool's number of blocks."""
        most = max(1, min(self.global_batch, self.pool // self.block))
        return next(number for number in range(most, 0, -1) if self.global_batch % number == 0)

    @property
    def mixed(self) -> int:
        """Number of blocks that one lane mixes."""
        return max(1, self.pool // (self.block * self.lanes))

    def kept(self, world_size: int, readers: int) -> int:
        """Number of blocks that a rank should cache: those that its lanes mix, and those that read-ahead has started."""
        lanes = -(-self.lanes // world_size) + 1
        return lanes * self.mixed * 5 // 4 + readers

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of the epoch.

        Args:
            positions: int64 (n,), 0 <= position < samples // global_batch * global_batch.

        Returns:
            int64 (n,); an epoch contains no sample twice.
        """
        return self._sample(epoch, self._mix(epoch, self._place(epoch, positions)))

    def _place(self, epoch: int, positions: Indices) -> Indices:
        """Map positions to the stream: a circle with a random start, so every sample is equally likely at every position."""
        each = self.global_batch // self.lanes
        step, within = np.divmod(positions, self.global_batch)
        lane, number = np.divmod(within, each)
        begin = seed_of(self.seed, Use.ORDER, epoch) % self.samples
        return (begin + lane * self.samples // self.lanes + step * each + number) % self.samples

    def _mix(self, epoch: int, places: Indices) -> Indices:
        """Map places in the stream to places in the sequence of blocks."""
        size = self.mixed * self.block
        part, within = np.divmod(places, size)
        mixed = np.empty_like(places)
        for chosen, length in ((part < self.samples // size, size), (part >= self.samples // size, self.samples % size)):
            if chosen.any():
                mixed[chosen] = permute(self.seed, epoch, within[chosen], length, part[chosen] + 1)
        return part * size + mixed

    def _sample(self, epoch: int, places: Indices) -> Indices:
        """Map places in the sequence of blocks to samples. A shorter last block stays last in the sequence."""
        block, within = np.divmod(places, self.block)
        full = self.samples // self.block
        complete = block < full
        if full:
            block[complete] = permute(self.seed, epoch, block[complete], full)
        return block * self.block + within
