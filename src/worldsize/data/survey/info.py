"""``worldsize data info``: describe a dataset without reading all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldsize.data.images.pillow import opened
from worldsize.data.progress_bar import size
from worldsize.data.samples import ArraySamples, Dataset, EncodedSamples, Samples
from worldsize.data.sampling.order import permute
from worldsize.data.shards.format import Encoding, steps
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.survey.verify_report import overview
from worldsize.errors import WorldsizeError

SAMPLED = 2000  # image files that are read if there is no index
_EDGES = (0, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096)
_BAR = 40  # characters
_CHANNELS = {1: "grayscale or palette", 2: "grayscale", 3: "color"}


@dataclass(frozen=True)
class Dimensions:
    """Sizes and formats of the sampled images.

    Attributes:
        sizes: int (n, 2), heights and widths of the readable ones, pixels.
        kinds: number of images of each format.
        bytes: mean size of an image.
        total: number of images in the split.
    """

    sizes: NDArray[np.int64]
    kinds: Counter[str]
    bytes: float
    total: int


def describe(dataset: Dataset, root: Path, seed: int) -> Iterator[str]:
    """Lines that describe the dataset. Raises DataError if the index of its shards is damaged."""
    for samples in (dataset.train, dataset.val):
        if isinstance(samples, ShardSamples):
            samples.verify_index()
    yield f"{root}"
    yield from overview(dataset)
    for name, samples in (("train", dataset.train), ("val", dataset.val)):
        if isinstance(samples, ShardSamples):
            total = sum(shard.bytes for shard in samples.shards)
            yield f"  {name:<5} {len(samples.shards):,} shard{'s' * (len(samples.shards) != 1)}, {size(total)}"
            if name == "train":
                yield f"  packing: {_made(samples.made)}"
        yield f"  {name:<5} fingerprint {samples.fingerprint[:16]}"
    yield from _distribution(dimensions(dataset.train, seed))


def dimensions(samples: Samples, seed: int) -> Dimensions:
    """Read the index of the shards, or else the headers of at most `SAMPLED` images, chosen by ``seed``."""
    n = len(samples)
    if isinstance(samples, ShardSamples):
        records = samples.records
        readable = records[records["kind"] != Encoding.BROKEN]
        kinds = Counter(dict(zip(*_counted(_kinds(records)), strict=True)))
        sizes = np.stack([readable["height"], readable["width"]], axis=1).astype(np.int64)
        return Dimensions(sizes, kinds, float(records["length"].mean()), n)
    if isinstance(samples, ArraySamples):
        height, width, _ = samples.stored(0).shape
        return Dimensions(np.full((n, 2), (height, width)), Counter({"in memory": n}), height * width * 3, n)
    assert isinstance(samples, EncodedSamples)
    chosen = permute(seed, 0, np.arange(min(n, SAMPLED)), n)
    headers = [_header(samples, int(index)) for index in chosen]
    sizes = np.array([dims for dims, _, _ in headers if dims is not None], np.int64).reshape(-1, 2)
    return Dimensions(sizes, Counter(kind for _, kind, _ in headers), float(np.mean([length for *_, length in headers])), n)


def _header(samples: EncodedSamples, index: int) -> tuple[tuple[int, int] | None, str, int]:
    """Height and width (None: not readable), format, and size in bytes."""
    length = 0
    try:
        data = bytes(samples.encoded(index))
        length = len(data)
        (width, height), kind = opened(
            data, lambda image: (image.size, f"{image.format} {_channels(len(image.getbands()), image.format == 'JPEG')}")
        )
        return (height, width), kind, length
    except WorldsizeError:  # it cannot be read
        raise
    except Exception:  # damaged files make Pillow raise exceptions of many types
        return None, "broken", length


def _channels(components: int, jpeg: bool) -> str:
    if jpeg and components != 3:
        return "grayscale" if components == 1 else "CMYK"
    return _CHANNELS.get(components, "transparent")


def _kinds(records: NDArray[np.void]) -> NDArray[np.int64]:
    return records["kind"].astype(np.int64) * 256 + records["components"]


def _counted(codes: NDArray[np.int64]) -> tuple[list[str], list[int]]:
    found, numbers = np.unique(codes, return_counts=True)
    names = [
        "broken"
        if code // 256 == Encoding.BROKEN
        else f"{Encoding(code // 256).name} {_channels(code % 256, code // 256 == Encoding.JPEG)}"
        for code in found.tolist()
    ]
    return names, numbers.tolist()


def _made(made: Mapping[str, Any]) -> str:
    return "; then ".join(_step(step) for step in steps(made)) or "original bytes"


def _step(made: Mapping[str, Any]) -> str:
    if "raw" in made:
        return f"pixels, shorter side {made['raw']}, center square (Pillow {made['pillow']})"
    limit = f", longer side at most {made['max_side']}" if "max_side" in made else ""
    return f"JPEGs of quality {made['reencode']}{limit} (Pillow {made['pillow']})"


def _distribution(sampled: Dimensions) -> Iterator[str]:
    count = sum(sampled.kinds.values())
    source = "train" if count == sampled.total else f"train, from a sample of {count:,} of {sampled.total:,} images"
    yield f"formats ({source}): " + ", ".join(f"{kind} {number:,}" for kind, number in sampled.kinds.most_common())
    yield f"mean size: {size(sampled.bytes)} per image"
    if not len(sampled.sizes):
        return
    middle = np.median(sampled.sizes, axis=0).astype(int)
    yield f"median width {middle[1]:,} pixels, median height {middle[0]:,} pixels"
    yield "shorter side, pixels:"
    yield from bars(sampled.sizes.min(axis=1))


def bars(values: NDArray[np.int64]) -> Iterator[str]:
    """Lines of a histogram, from the first to the last bin that is not empty."""
    edges = np.array(_EDGES)
    numbers = np.bincount(np.searchsorted(edges, values, "right") - 1, minlength=len(edges))
    filled = np.flatnonzero(numbers)
    for i in range(filled[0], filled[-1] + 1):
        title = f"{edges[i]:,} to {edges[i + 1] - 1:,}" if i + 1 < len(edges) else f"{edges[i]:,} and more"
        length = round(_BAR * numbers[i] / numbers.max())
        yield f"  {title:>14}  {'█' * max(length, 1 if numbers[i] else 0):<{_BAR}} {numbers[i]:,}"
