"""``worldsize data info``: what a data set is, without reading all of it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize.data.decode import FORMATS
from worldsize.data.fetching.progress import size
from worldsize.data.order import permute
from worldsize.data.samples import Dataset, EncodedSamples, Samples
from worldsize.data.shards.format import Kind, steps
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.survey.words import overview

LOOKED_AT = 2000  # pictures whose files are read, where there is no index
_EDGES = (0, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096)
_BAR = 40  # characters
_CHANNELS = {1: "grey or palette", 2: "grey", 3: "colour"}


@dataclass(frozen=True)
class Dimensions:
    """Of the pictures that were looked at.

    Attributes:
        sizes: int (n, 2), heights and widths of those that are whole, pixels.
        kinds: how many there are of each kind.
        bytes: mean of one.
        of: how many pictures there are in all.
    """

    sizes: NDArray[np.int64]
    kinds: Counter[str]
    bytes: float
    of: int


def tell(dataset: Dataset, root: Path, seed: int) -> Iterator[str]:
    """What is to be known, in lines."""
    yield f"{root}"
    yield from overview(dataset)
    for name, samples in (("train", dataset.train), ("val", dataset.val)):
        if isinstance(samples, ShardSamples):
            total = sum(shard.bytes for shard in samples.shards)
            yield f"  {name:<5} {len(samples.shards):,} shard{'s' * (len(samples.shards) != 1)}, {size(total)}"
            if name == "train":
                yield f"  made of the originals: {_made(samples.made)}"
        yield f"  {name:<5} fingerprint {samples.fingerprint[:16]}"
    yield from _describe(dimensions(dataset.train, seed))


def dimensions(samples: Samples, seed: int) -> Dimensions:
    """From the index of shards; otherwise from at most `LOOKED_AT` pictures, not decoded, chosen by ``seed``."""
    n = len(samples)
    if isinstance(samples, ShardSamples):
        records = samples.records
        whole = records[records["kind"] != Kind.BROKEN]
        kinds = Counter(dict(zip(*_counted(_kinds(records)), strict=True)))
        sizes = np.stack([whole["height"], whole["width"]], axis=1).astype(np.int64)
        return Dimensions(sizes, kinds, float(records["length"].mean()), n)
    if samples.pixels is not None:
        height, width = samples.pixels.shape[1:3]
        return Dimensions(np.full((n, 2), (height, width)), Counter({"in memory": n}), height * width * 3, n)
    assert isinstance(samples, EncodedSamples)
    chosen = permute(seed, 0, np.arange(min(n, LOOKED_AT)), n)
    looked = [_header(samples, int(index)) for index in chosen]
    sizes = np.array([dims for dims, _, _ in looked if dims is not None], np.int64).reshape(-1, 2)
    return Dimensions(sizes, Counter(kind for _, kind, _ in looked), float(np.mean([length for *_, length in looked])), n)


def _header(samples: EncodedSamples, index: int) -> tuple[tuple[int, int] | None, str, int]:
    """Height and width (None: not readable), kind, and bytes."""
    length = 0
    try:
        data = bytes(samples.encoded(index))
        length = len(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            return (
                (height, width),
                f"{picture.format} {_channels(len(picture.getbands()), picture.format == 'JPEG')}",
                length,
            )
    except Exception:  # a damaged file can raise nearly anything
        return None, "broken", length


def _channels(components: int, jpeg: bool) -> str:
    if jpeg and components != 3:
        return "grey" if components == 1 else "CMYK"
    return _CHANNELS.get(components, "transparent")


def _kinds(records: NDArray[np.void]) -> NDArray[np.int64]:
    return records["kind"].astype(np.int64) * 256 + records["components"]


def _counted(codes: NDArray[np.int64]) -> tuple[list[str], list[int]]:
    found, numbers = np.unique(codes, return_counts=True)
    names = [
        "broken"
        if code // 256 == Kind.BROKEN
        else f"{Kind(code // 256).name} {_channels(code % 256, code // 256 == Kind.JPEG)}"
        for code in found.tolist()
    ]
    return names, numbers.tolist()


def _made(made: Mapping[str, Any]) -> str:
    return "; then ".join(_step(step) for step in steps(made)) or "as they are"


def _step(made: Mapping[str, Any]) -> str:
    if "raw" in made:
        return f"pixels, shorter side {made['raw']}, the square in the middle (Pillow {made['pillow']})"
    limit = f", longer side at most {made['max_side']}" if "max_side" in made else ""
    return f"JPEGs of quality {made['reencode']}{limit} (Pillow {made['pillow']})"


def _describe(seen: Dimensions) -> Iterator[str]:
    looked = sum(seen.kinds.values())
    source = "of train" if looked == seen.of else f"of train, from {looked:,} of its {seen.of:,} pictures"
    yield f"kinds ({source}): " + ", ".join(f"{kind} {number:,}" for kind, number in seen.kinds.most_common())
    yield f"a picture has {size(seen.bytes)} on average"
    if not len(seen.sizes):
        return
    middle = np.median(seen.sizes, axis=0).astype(int)
    yield f"median width {middle[1]:,}, height {middle[0]:,} pixels"
    yield "shorter side, pixels:"
    yield from bars(seen.sizes.min(axis=1))


def bars(values: NDArray[np.int64]) -> Iterator[str]:
    """A histogram in lines, from the first bin that is not empty to the last."""
    edges = np.array(_EDGES)
    numbers = np.bincount(np.searchsorted(edges, values, "right") - 1, minlength=len(edges))
    filled = np.flatnonzero(numbers)
    for i in range(filled[0], filled[-1] + 1):
        title = f"{edges[i]:,} to {edges[i + 1] - 1:,}" if i + 1 < len(edges) else f"{edges[i]:,} and more"
        length = round(_BAR * numbers[i] / numbers.max())
        yield f"  {title:>14}  {'█' * max(length, 1 if numbers[i] else 0):<{_BAR}} {numbers[i]:,}"
