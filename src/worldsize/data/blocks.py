"""Block shuffle: an order in which neighbours on the disk are wanted soon after one another.

For storage that answers slowly and sends fast, such as shards on an object store: what is read at once is a block of
consecutive samples, and all ranks together mix a pool of blocks at a time. Like the full shuffle it is a pure function of
seed, epoch and position, the same in any world and resumable at any step. What it weakens: samples of one block, which are
often of one class, mostly come within the steps that use up a pool, so steps near each other are more alike than they would
be; and so is one batch, where the pool has fewer blocks than the batch has samples.

How: the blocks are put into a keyed order, and the samples of each ``mixed`` blocks that follow one another are permuted;
call what results the stream. A global batch is not the stream's next piece, for then every rank would need every block: it
takes an equal piece from each of many lanes, which begin at equal distances in the stream. So a batch comes from as many
blocks as there are lanes, and a rank needs only the blocks of the lanes that its samples come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from worldsize.data.order import Indices, permute
from worldsize.data.rng import Use, seed_of


@dataclass(frozen=True)
class BlockShuffle:
    """An order of ``samples`` samples; positions count whole global batches only.

    Attributes:
        seed: the recipe's.
        samples: 1 .. 2**32 - 1.
        global_batch: samples per step.
        block: consecutive samples that are read at once, at least 1.
        pool: samples that are mixed at a time by all ranks together, at least one block.
    """

    seed: int
    samples: int
    global_batch: int
    block: int
    pool: int

    @cached_property
    def lanes(self) -> int:
        """Places of the stream from which each global batch is taken: as many as the pool has blocks for."""
        most = max(1, min(self.global_batch, self.pool // self.block))
        return next(number for number in range(most, 0, -1) if self.global_batch % number == 0)

    @property
    def mixed(self) -> int:
        """Blocks that one lane mixes."""
        return max(1, self.pool // (self.block * self.lanes))

    def kept(self, world_size: int, readers: int) -> int:
        """Blocks that each of so many ranks should keep: those that its lanes mix, and others that reading ahead begins."""
        lanes = -(-self.lanes // world_size) + 1
        return lanes * self.mixed * 5 // 4 + readers

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """The samples at these positions of the epoch.

        Args:
            positions: int64 (n,), 0 <= position < samples // global_batch * global_batch.

        Returns:
            int64 (n,); no sample twice in an epoch.
        """
        return self._sample(epoch, self._mix(epoch, self._place(epoch, positions)))

    def _place(self, epoch: int, positions: Indices) -> Indices:
        """Where in the stream: a circle, on which an epoch begins anywhere, so that no sample is likelier at some place."""
        each = self.global_batch // self.lanes
        step, within = np.divmod(positions, self.global_batch)
        lane, number = np.divmod(within, each)
        begin = seed_of(self.seed, Use.ORDER, epoch) % self.samples
        return (begin + lane * self.samples // self.lanes + step * each + number) % self.samples

    def _mix(self, epoch: int, places: Indices) -> Indices:
        """Places in the stream to places in the sequence of blocks."""
        size = self.mixed * self.block
        part, within = np.divmod(places, size)
        mixed = np.empty_like(places)
        for chosen, length in ((part < self.samples // size, size), (part >= self.samples // size, self.samples % size)):
            if chosen.any():
                mixed[chosen] = permute(self.seed, epoch, within[chosen], length, part[chosen] + 1)
        return part * size + mixed

    def _sample(self, epoch: int, places: Indices) -> Indices:
        """Places in the sequence of blocks to samples. A last block that is short is the sequence's last."""
        block, within = np.divmod(places, self.block)
        full = self.samples // self.block
        whole = block < full
        if full:
            block[whole] = permute(self.seed, epoch, block[whole], full)
        return block * self.block + within
