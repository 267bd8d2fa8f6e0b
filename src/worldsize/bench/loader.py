"""How fast pictures come from a data set here: this loader and others, in rounds in which each takes its turn.

Tells what the limit is, and how many cores a device needs that uses so many pictures a second.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.arguments import BenchLoader
from worldsize.batch import BatchPlan
from worldsize.bench import peers
from worldsize.bench.peers import Peer
from worldsize.data import open_layout, shards
from worldsize.data.crops import RandomResizedCrop
from worldsize.data.decode import BrokenPicture
from worldsize.data.loader import Loader
from worldsize.data.samples import EncodedSamples, Read, Stored
from worldsize.environment import decoder, device_name
from worldsize.errors import UserError
from worldsize.place import cores
from worldsize.run import RunFolder, create

OURS = "worldsize"
_CPU_IS_FULL = 0.85  # of the threads' time
_NEAR = 1.25  # times the loader's speed: then reading holds it up
_REMOTE = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "fuse", "9p", "beegfs")


@dataclass(frozen=True)
class Measured:
    """One pass: pictures a second; of our own also the CPU time of this process, all threads, in seconds a picture."""

    loader: str
    round: int
    images_per_s: float
    cpu_s: float | None = None


class Some(EncodedSamples):
    """At most ``most`` of a split's pictures, evenly over all classes."""

    def __init__(self, samples: EncodedSamples, most: int) -> None:
        self._samples = samples
        self._chosen = np.linspace(0, len(samples) - 1, min(most, len(samples))).astype(np.int64)
        self.labels, self.classes, self.fingerprint = samples.labels[self._chosen], samples.classes, samples.fingerprint

    def name(self, index: int) -> str:
        return self._samples.name(int(self._chosen[index]))

    def path(self, index: int) -> str:
        return self._samples.path(int(self._chosen[index]))

    def length(self, index: int) -> int:
        return self._samples.length(int(self._chosen[index]))

    def encoded(self, index: int) -> bytes | memoryview:
        return self._samples.encoded(int(self._chosen[index]))

    def stored(self, index: int) -> Stored:
        return self._samples.stored(int(self._chosen[index]))

    @property
    def together(self) -> bool:
        return self._samples.together

    def several(self, indices: NDArray[np.int64]) -> list[Read]:
        return self._samples.several(self._chosen[indices])


class Ours:
    """Our loader as it trains."""

    def __init__(self, samples: EncodedSamples, asked: BenchLoader) -> None:
        self._crop = RandomResizedCrop(asked.size, True, (0.08, 1.0), (3 / 4, 4 / 3))
        self._plan = BatchPlan(asked.batch, asked.batch, 1)
        self._loader = Loader(
            samples, self._crop, seed=0, workers=workers(asked), readers=asked.readers, prefetch=asked.prefetch, pin=False
        )
        self._epoch = 0

    def batches(self) -> Iterator[int]:
        """One pass: how many pictures each batch has."""
        self._epoch += 1
        for batch in self._loader.training(self._plan, 0, self._epoch):
            yield len(batch.labels)

    def close(self) -> None:
        self._loader.close()


def workers(asked: BenchLoader) -> int:
    """Decoding threads."""
    return asked.workers or cores()


def run(asked: BenchLoader, tell: Callable[[str], None]) -> RunFolder:
    """Measure, telling of each pass; leaves ``results.jsonl`` and ``table.md`` in a new folder.

    Raises:
        UserError: numbers out of range, no data set, fewer pictures than a batch, pictures that are in memory, or a peer of
            an unknown name.
    """
    _check(asked)
    begun = time.perf_counter()
    samples, *more = [_samples(root, asked) for root in asked.root]
    chosen = [name for name in asked.against.split(",") if name]
    if unknown := set(chosen) - set(peers.PEERS):
        raise UserError(f"--against {sorted(unknown)[0]!r} is none of {', '.join(peers.PEERS)}")
    with ExitStack() as stack:
        first, *others = [stack.enter_context(closing(Ours(one, asked))) for one in (samples, *more)]
        next(first.batches())
        first_s = time.perf_counter() - begun
        loaders: dict[str, Peer] = {OURS: first}
        loaders |= {f"{OURS}, {root}": one for root, one in zip(asked.root[1:], others, strict=True)}
        loaders |= _others(chosen, samples, asked, tell)
        folder = create(asked.out, None, "bench-loader")
        results = _rounds(loaders, asked, folder.path, tell)
        text = "\n".join([table(results), "", *_findings(samples, results, first_s, asked)])
    (folder.path / "table.md").write_text(text + "\n", "utf-8")
    return folder


def _check(asked: BenchLoader) -> None:
    for name in ("size", "batch", "readers", "prefetch", "pictures", "rounds", "workers"):
        number = getattr(asked, name)
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    if not asked.feed > 0:
        raise UserError(f"--feed {asked.feed:g} must be more than 0")
    if asked.pictures < asked.batch:
        raise UserError(f"--pictures {asked.pictures} must be at least --batch {asked.batch}")


def _samples(root: Path, asked: BenchLoader) -> Some:
    with tempfile.TemporaryDirectory() as cache:
        train = open_layout(root, asked.data, Path(cache)).train
    if not isinstance(train, EncodedSamples):
        raise UserError(f"{root}: its pictures are in memory, so there is nothing to read or decode")
    if len(train) < asked.batch:
        raise UserError(f"--batch {asked.batch}: {root} has only {len(train)} training pictures")
    return Some(train, asked.pictures)


def _others(names: list[str], samples: EncodedSamples, asked: BenchLoader, tell: Callable[[str], None]) -> dict[str, Peer]:
    """Each peer with several numbers of worker processes; the best of them counts."""
    found: dict[str, Peer] = {}
    for name in names:
        for count in sorted({max(1, workers(asked) // 2), workers(asked), 2 * workers(asked)}):
            try:
                found[f"{name}, {count} workers"] = peers.PEERS[name](samples, asked.size, asked.batch, count)
            except peers.NotHere as reason:
                tell(f"left out: {name}: {reason}")
                break
    return found


def _rounds(loaders: dict[str, Peer], asked: BenchLoader, folder: Path, tell: Callable[[str], None]) -> list[Measured]:
    results = []
    for turn in range(asked.rounds + 1):  # round 0 warms up: files into memory, workers started
        for name in loaders if turn % 2 else reversed(loaders):
            one = _pass(name, turn, loaders[name])
            tell(f"round {turn}/{asked.rounds}  {name:<28} {one.images_per_s:9,.0f} images/s")
            if turn:
                results.append(one)
                with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    return results


def _pass(name: str, turn: int, loader: Peer) -> Measured:
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(loader.batches())
    cpu_s = (time.process_time() - cpu) / count if name == OURS else None
    return Measured(name, turn, count / (time.perf_counter() - wall), cpu_s)


def table(results: list[Measured]) -> str:
    """Medians over the rounds, as Markdown; the ratio is the median of each round's own."""
    ours = {r.round: r.images_per_s for r in results if r.loader == OURS}
    lines = ["| loader | images/s | worldsize is so many times as fast |", "| --- | ---: | ---: |"]
    for name in dict.fromkeys(r.loader for r in sorted(results, key=lambda r: r.loader != OURS)):
        own = [r for r in results if r.loader == name]
        ratio = statistics.median(ours[r.round] / r.images_per_s if r.images_per_s else math.inf for r in own)
        faster = "" if name == OURS else f"{ratio:.2f}"
        lines.append(f"| {name} | {statistics.median(r.images_per_s for r in own):,.0f} | {faster} |")
    return "\n".join(lines)


def _findings(samples: EncodedSamples, results: list[Measured], first_s: float, asked: BenchLoader) -> list[str]:
    own = [r for r in results if r.loader == OURS]
    speed = statistics.median(r.images_per_s for r in own)
    cpu_s = statistics.median(r.cpu_s or 0 for r in own)
    reading = _reading(samples, asked)
    return [
        f"{asked.size} pixels, batches of {asked.batch}, {workers(asked)} threads on {device_name('cpu')}, {cores()} cores; "
        f"decoder: {decoder()}",
        f"the first batch came {first_s:.2f} s after the data set was asked for",
        f"the limit is {limit(speed, cpu_s * speed / min(workers(asked), cores()), reading, asked)}",
        f"{cpu_s * 1e3:.2f} ms of one core a picture: a device that uses {asked.feed:,.0f} images/s needs "
        f"{asked.feed * cpu_s:.1f} cores for them",
    ]


def limit(speed: float, busy: float, reading: float, asked: BenchLoader) -> str:
    """What holds the loader up, in words.

    Args:
        speed: the loader's, images/s.
        busy: share of its threads' time on the CPU (0 to 1).
        reading: images/s where pictures are read and not decoded.
    """
    if speed > asked.feed:
        return f"the consumer: {speed:,.0f} images/s are more than the {asked.feed:,.0f} that it uses"
    if busy >= _CPU_IS_FULL:
        return f"the CPU: the threads are busy {min(busy, 1):.0%} of the time; reading alone gives {reading:,.0f} images/s"
    if reading < _NEAR * speed:
        return f"the {_storage(asked.root[0])}: reading alone gives {reading:,.0f} images/s; more --readers may help"
    here = f"threads are busy {busy:.0%} of the time, and reading alone gives {reading:,.0f} images/s"
    return f"not in this process: its {here}; either other programs have the cores, or --workers is too low"


def _reading(samples: EncodedSamples, asked: BenchLoader) -> float:
    """Images per second where nothing is decoded; those that cannot be read do not count."""

    def read(some: NDArray[np.int64]) -> int:
        return sum(not isinstance(one, BrokenPicture) for one in samples.several(some))

    begun = time.perf_counter()
    with ThreadPoolExecutor(asked.readers) as pool:
        count = sum(pool.map(read, np.array_split(np.arange(len(samples)), max(1, len(samples) // 16))))
    return count / (time.perf_counter() - begun)


def _storage(root: Path) -> str:
    """Disk or network, by the URL or the kind of file system that ``root`` is on."""
    if (url := shards.url_of(root)) is not None:
        if not url.startswith("file://"):
            return "network"
        root = Path(url.removeprefix("file://"))
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return "storage"
    path = str(root.resolve())
    kinds = {point: kind for point, kind in mounts if os.path.commonpath([point, path]) == point}
    return "network" if kinds[max(kinds, key=len)].startswith(_REMOTE) else "disk"
