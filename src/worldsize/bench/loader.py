"""``worldsize bench loader``: measures how fast this loader and others read a dataset, interleaved in rounds.

Names the bottleneck and the number of cores that a device of a given speed needs.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.bench import other_loaders
from worldsize.bench.options import BenchLoader
from worldsize.bench.other_loaders import Peer
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data import open_layout, shards
from worldsize.data.augmentation import policies
from worldsize.data.datasets.subset import Chosen
from worldsize.data.images.crops import RandomResizedCrop, training_crop
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.loading.loader import Loader, Treatment
from worldsize.data.samples import EncodedSamples
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError
from worldsize.runs.run_folder import RunFolder, create
from worldsize.training.environment import decoder, device_name

OURS = "worldsize"
_CPU_BOUND = 0.85  # share of the threads' time on the CPU
_READ_BOUND = 1.25  # reading alone, relative to the loader's speed
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "fuse", "9p", "beegfs")


@dataclass(frozen=True)
class Measured:
    """One pass over the images: images/s, and for our own loader CPU seconds per image (all threads of this process)."""

    loader: str
    round: int
    images_per_s: float
    cpu_s: float | None = None


class Subset(Chosen):
    """At most ``most`` of a split's images, evenly spaced over all classes."""

    def __init__(self, samples: EncodedSamples, most: int) -> None:
        chosen = np.linspace(0, len(samples) - 1, min(most, len(samples))).astype(np.int64)
        labels = samples.labels[chosen]  # of several labels the first, because other loaders read one
        super().__init__(samples, chosen, labels.argmax(1).astype(np.int32) if samples.multilabel else labels)


class Ours:
    """Our loader, configured as in training."""

    def __init__(self, samples: EncodedSamples, recipe: Recipe, options: BenchLoader) -> None:
        data, size = recipe.data, recipe.data.train_crop_size
        crop = training_crop(data, size)
        treatment = Treatment(crop, policies.build(recipe.augment, data.mean, size))
        self._plan = BatchPlan(options.batch, options.batch, 1)
        self._loader = Loader(
            samples,
            crop,
            seed=0,
            workers=workers(options),
            readers=options.readers,
            prefetch=options.prefetch,
            pin=False,
            scaling=data.dct_scaling and isinstance(crop, RandomResizedCrop),
            repeats=recipe.augment.repeats,
            treatment=lambda _: treatment,
            fill=policies.fill_color(recipe.augment, data.mean),
        )
        self._epoch = 0

    def batches(self) -> Iterator[int]:
        """One pass: yields the number of images of each batch."""
        self._epoch += 1
        for batch in self._loader.training(self._plan, 0, self._epoch):
            yield len(batch.labels)

    def close(self) -> None:
        self._loader.close()


def workers(options: BenchLoader) -> int:
    """Decoding threads."""
    return options.workers or cores()


def recipe_of(options: BenchLoader) -> Recipe:
    """The recipe whose crop and augmentation are measured, with the size of the crops.

    Raises:
        UserError: there is no such recipe, or other loaders do not crop as it does.
    """
    recipe = recipe_files.load(options.recipe) if options.recipe else Recipe()
    if options.against and recipe.data.train_crop != "random_resized":
        raise UserError(f"--recipe {options.recipe}: other loaders are compared with random resized crops only")
    size = options.size or recipe.data.train_crop_size
    data = recipe.data.model_copy(update={"train_crop_size": size, "train_crop_sizes": (), "train_crop_epochs": ()})
    return recipe.model_copy(update={"data": data})


def run(options: BenchLoader, log: Callable[[str], None]) -> RunFolder:
    """Measure and log each pass; writes ``results.jsonl`` and ``table.md`` to a new folder.

    Raises:
        UserError: an option is out of range, there is no dataset, it has fewer images than a batch, its images are in
            memory, or a peer is unknown.
    """
    _check(options)
    recipe = recipe_of(options)
    start = time.perf_counter()
    samples, *others = [_samples(root, options) for root in options.root]
    chosen = [name for name in options.against.split(",") if name]
    if unknown := set(chosen) - set(other_loaders.PEERS):
        raise UserError(f"--against {sorted(unknown)[0]!r} is unknown; known loaders: {', '.join(other_loaders.PEERS)}")
    with ExitStack() as stack:
        first, *rest = [stack.enter_context(closing(Ours(one, recipe, options))) for one in (samples, *others)]
        next(first.batches())
        first_s = time.perf_counter() - start
        loaders: dict[str, Peer] = {OURS: first}
        loaders |= {f"{OURS}, {root}": one for root, one in zip(options.root[1:], rest, strict=True)}
        loaders |= _peers(chosen, samples, recipe, options, log)
        folder = create(options.out, None, "bench-loader")
        results = _run_rounds(loaders, options, folder.path, log)
        text = "\n".join([table(results), "", *_summary(samples, results, first_s, options)])
    (folder.path / "table.md").write_text(text + "\n", "utf-8")
    return folder


def _check(options: BenchLoader) -> None:
    for name in ("size", "batch", "readers", "prefetch", "images", "rounds", "workers"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    if not options.feed > 0:
        raise UserError(f"--feed {options.feed:g} must be greater than 0")
    if options.images < options.batch:
        raise UserError(f"--images {options.images} must be at least --batch {options.batch}")


def _samples(root: Path, options: BenchLoader) -> Subset:
    with temporary_folder() as cache:
        train = open_layout(root, options.data, cache).train
    if not isinstance(train, EncodedSamples):
        raise UserError(
            f"{root}: its images are in memory, so there is nothing to read or decode; pass a dataset of files or shards"
        )
    if len(train) < options.batch:
        raise UserError(f"--batch {options.batch} is too large: {root} has only {len(train)} training images")
    return Subset(train, options.images)


def _peers(
    names: list[str], samples: EncodedSamples, recipe: Recipe, options: BenchLoader, log: Callable[[str], None]
) -> dict[str, Peer]:
    """Each peer with half, one and two worker processes per decoding thread."""
    loaders: dict[str, Peer] = {}
    for name in names:
        for count in sorted({max(1, workers(options) // 2), workers(options), 2 * workers(options)}):
            try:
                loaders[f"{name}, {count} workers"] = other_loaders.PEERS[name](samples, recipe, options.batch, count)
            except other_loaders.Unavailable as reason:
                log(f"skipped {name}: {reason}")
                break
    return loaders


def _run_rounds(loaders: dict[str, Peer], options: BenchLoader, folder: Path, log: Callable[[str], None]) -> list[Measured]:
    results = []
    for turn in range(options.rounds + 1):  # round 0 is the warmup: fills the page cache, starts workers
        for name in loaders if turn % 2 else reversed(loaders):
            result = _run_pass(name, turn, loaders[name])
            log(f"round {turn}/{options.rounds}  {name:<28} {result.images_per_s:9,.0f} images/s")
            if turn:
                results.append(result)
                with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    return results


def _run_pass(name: str, turn: int, loader: Peer) -> Measured:
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(loader.batches())
    cpu_s = (time.process_time() - cpu) / count if name == OURS else None
    return Measured(name, turn, count / (time.perf_counter() - wall), cpu_s)


def table(results: list[Measured]) -> str:
    """Medians over the rounds, as Markdown. The speedup is the median of the ratios within each round."""
    ours = {r.round: r.images_per_s for r in results if r.loader == OURS}
    lines = ["| loader | images/s | speedup of worldsize |", "| --- | ---: | ---: |"]
    for name in dict.fromkeys(r.loader for r in sorted(results, key=lambda r: r.loader != OURS)):
        own = [r for r in results if r.loader == name]
        ratio = statistics.median(ours[r.round] / r.images_per_s if r.images_per_s else math.inf for r in own)
        faster = "" if name == OURS else f"{ratio:.2f}"
        lines.append(f"| {name} | {statistics.median(r.images_per_s for r in own):,.0f} | {faster} |")
    return "\n".join(lines)


def _summary(samples: EncodedSamples, results: list[Measured], first_s: float, options: BenchLoader) -> list[str]:
    own = [r for r in results if r.loader == OURS]
    speed = statistics.median(r.images_per_s for r in own)
    cpu_s = statistics.median(r.cpu_s or 0 for r in own)
    reading, size = _reading(samples, options), recipe_of(options).data.train_crop_size
    return [
        f"{options.recipe or 'mirror and crop'}, {size} pixels, batches of {options.batch}, {workers(options)} threads on "
        f"{device_name('cpu')}, {cores()} cores; decoder: {decoder()}",
        f"first batch: {first_s:.2f} s after opening the dataset",
        f"bottleneck: {bottleneck(speed, cpu_s * speed / min(workers(options), cores()), reading, options)}",
        f"{cpu_s * 1e3:.2f} ms of CPU time per image: a device that consumes {options.feed:,.0f} images/s needs "
        f"{options.feed * cpu_s:.1f} cores",
    ]


def bottleneck(speed: float, busy: float, reading: float, options: BenchLoader) -> str:
    """What limits the loader's speed, as text.

    Args:
        speed: of the loader, images/s.
        busy: share of its threads' time on the CPU (0 to 1).
        reading: images/s of reading without decoding.
    """
    if speed > options.feed:
        return f"the device: the loader gives {speed:,.0f} images/s, and the device consumes {options.feed:,.0f} (--feed)"
    if busy >= _CPU_BOUND:
        return f"the CPU: threads are busy {min(busy, 1):.0%} of the time; reading alone gives {reading:,.0f} images/s"
    if reading < _READ_BOUND * speed:
        return f"the {_storage(options.root[0])}: reading alone gives {reading:,.0f} images/s; a larger --readers may help"
    evidence = f"threads are busy {busy:.0%} of the time, and reading alone gives {reading:,.0f} images/s"
    return f"outside this process: its {evidence}; other programs use the cores, or --workers is too low"


def _reading(samples: EncodedSamples, options: BenchLoader) -> float:
    """Images/s of reading without decoding; unreadable images are not counted."""

    def read(indices: NDArray[np.int64]) -> int:
        return sum(not isinstance(one, BrokenImage) for one in samples.several(indices))

    start = time.perf_counter()
    with ThreadPoolExecutor(options.readers) as pool:
        count = sum(pool.map(read, np.array_split(np.arange(len(samples)), max(1, len(samples) // 16))))
    return count / (time.perf_counter() - start)


def _storage(root: Path) -> str:
    """ "disk" or "network", according to the URL or the file system type of ``root``; "storage" if that is not known."""
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
    if not kinds:  # in a chroot
        return "storage"
    return "network" if kinds[max(kinds, key=len)].startswith(_NETWORK_FILE_SYSTEMS) else "disk"
