"""Compares the full shuffle with the block shuffle on high-latency storage, with the complete loader.

    python benchmarks/slow_storage.py SHARDS [ROUNDS]

SHARDS is a folder written by `worldsize data pack`. Simulates network storage: every read has a latency, and all reads share
a bandwidth. The two shuffles are interleaved, one epoch each per round. Prints a table in Markdown.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path

from worldsize.data import shards
from worldsize.data.images.crops import RandomResizedCrop
from worldsize.data.loading.loader import Loader
from worldsize.data.sampling.block_shuffle import BlockShuffle
from worldsize.data.shards.store import Local, Store
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import cores

BATCH, BLOCK, POOL, READERS = 64, 16, 256, 16
MB_S = 500.0


class Slow(Local):
    """A folder with slow reads.

    Attributes:
        latency: of every read, s.
        requests: number of reads so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.latency, self.requests = 0.0, 0
        self._network, self._free_at = threading.Lock(), 0.0

    several, reads_many = Store.several, False  # so that every read goes through `read`

    def read(self, name: str, offset: int, length: int) -> bytes:
        self._wait(length)
        return super().read(name, offset, length)

    def _wait(self, length: int) -> None:
        with self._network:
            self.requests += 1
            sent = max(self._free_at, time.perf_counter() + self.latency) + length / (MB_S * 1e6)
            self._free_at = sent
        time.sleep(max(0.0, sent - time.perf_counter()))


def epoch(store: Slow, number: int, block: bool) -> tuple[float, float]:
    """(images/s, requests per image) of one epoch, including filling the first pool."""
    samples, order = shards.open_dataset(store).train, None
    if block:
        order = BlockShuffle(0, len(samples), BATCH, BLOCK, POOL)
        samples = samples.in_blocks(BLOCK, order.kept(1, READERS))
    crop = RandomResizedCrop(224, True, (0.08, 1.0), (3 / 4, 4 / 3))
    loader = Loader(samples, crop, seed=0, workers=cores(), readers=READERS, prefetch=4, pin=False, order=order)
    requests, start = store.requests, time.perf_counter()
    images = sum(len(batch.labels) for batch in loader.training(BatchPlan(BATCH, BATCH, 1), 0, number))
    took = time.perf_counter() - start
    loader.close()
    return images / took, (store.requests - requests) / images


def main() -> None:
    store, rounds = Slow(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"{MB_S:.0f} MB/s, {READERS} reads at once, batches of {BATCH}, block {BLOCK}, pool {POOL}\n")
    print("The ratio is the median of the ratios within each round.\n")
    print("| read latency | full shuffle, images/s | block shuffle, images/s | ratio | reads per image |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for latency in (0.0, 0.005, 0.02, 0.1):
        store.latency = latency
        measured = [(epoch(store, number, False), epoch(store, number, True)) for number in range(rounds)]
        full, block = (statistics.median(pair[i][0] for pair in measured) for i in (0, 1))
        ratio = statistics.median(pair[1][0] / pair[0][0] for pair in measured)
        reads = [statistics.median(pair[i][1] for pair in measured) for i in (0, 1)]
        print(f"| {latency * 1e3:.0f} ms | {full:,.0f} | {block:,.0f} | {ratio:.2f} | {reads[0]:.2f} and {reads[1]:.3f} |")


if __name__ == "__main__":
    main()
