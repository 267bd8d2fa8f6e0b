"""Writing one shard and its part of the index. Every file is complete or absent."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import crc32c
import numpy as np
from numpy.typing import NDArray

from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import ArraySamples, EncodedSamples, Samples
from worldsize.data.shards import tar
from worldsize.data.shards.format import RECORD, Records, Shard, identity, shard_name
from worldsize.data.shards.images import LONGEST_EXTENSION, How, Stored, ppm, store
from worldsize.data.shards.samples import ShardSamples
from worldsize.errors import UserError
from worldsize.runs.atomic import flush, replacing


@dataclass(frozen=True)
class Task:
    """One shard to write: samples ``start`` to ``stop`` (exclusive) of ``split``; ``bytes`` is its estimated tar size."""

    split: str
    number: int
    start: int
    stop: int
    bytes: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def plan(split: str, lengths: NDArray[np.int64], heads: NDArray[np.int64], limit: int) -> list[Task]:
    """Divide a split into shards of at most ``limit`` bytes of tar (or one sample).

    Args:
        lengths: estimated bytes of each image.
        heads: bytes of the tar headers of each image; its label has as many.
    """
    # The last block holds the label.
    ends = np.cumsum(2 * heads + -(-lengths // tar.BLOCK) * tar.BLOCK + tar.BLOCK)
    overhead = tar.BEGINNING + len(tar.END)
    tasks: list[Task] = []
    start = before = 0
    while start < len(lengths):
        stop = max(int(np.searchsorted(ends, before + limit - overhead, "right")), start + 1)
        tasks.append(Task(split, len(tasks), start, stop, int(ends[stop - 1]) - before + overhead))
        start, before = stop, int(ends[stop - 1])
    return tasks


def heads(samples: Samples, index: int) -> int:
    """Maximum bytes of the tar headers of an image (its label has as many), without reading it."""
    if isinstance(samples, ShardSamples):
        return int(samples.records["head"][index])
    return tar.head(f"{_key(samples, index)}.{LONGEST_EXTENSION}")


def write(
    task: Task,
    samples: Samples,
    how: How,
    out: Path,
    parts: Path,
    done: Callable[[int], None],
    missing: Container[int] = (),
) -> None:
    """Write the shard to ``out`` and its part of the index to ``parts``.

    Args:
        done: called after each image with its share of the task's bytes.
        missing: indices of images that have no bytes.

    Raises:
        UserError: an original image cannot be read.
    """
    records = np.zeros(task.stop - task.start, RECORD)
    temporary = _temporary(parts, task.name)
    with open(temporary, "wb") as file:
        file.write(tar.beginning("0" * 64))
        for record, index in zip(records, range(task.start, task.stop), strict=True):
            if index in missing:
                image, key = store(b"", how), _key(samples, index)
            else:
                image, key = _image(samples, index, how)
            _append(file, record, task.number, int(samples.labels[index]), image, key)
            done(task.bytes // len(records))
        file.write(tar.END)
        file.seek(0)
        file.write(tar.beginning(identity(task.split, records.tobytes())))
    flush(temporary)
    part = parts / f"{task.name}.index"
    put(part, records.tobytes(), parts)
    # The shard comes last: if it exists, so does its part of the index.
    os.replace(temporary, out / task.name)
    flush(out)


def written(task: Task, out: Path, parts: Path) -> tuple[Shard, Records] | None:
    """The result of an earlier run of this task; None if it is missing or incomplete."""
    try:
        data = (parts / f"{task.name}.index").read_bytes()
        if len(data) != (task.stop - task.start) * RECORD.itemsize:
            return None
        records = np.frombuffer(data, RECORD)
        with open(out / task.name, "rb") as file:
            shard = Shard(len(records), os.fstat(file.fileno()).st_size, identity(task.split, data))
            complete = file.read(tar.BEGINNING) == tar.beginning(shard.identity) and shard.bytes == _expected_size(
                file, records[-1]
            )
    except FileNotFoundError:
        return None
    return (shard, records) if complete else None


def _expected_size(file: io.BufferedReader, last: np.void) -> int:
    """Size in bytes of a shard whose last sample this is."""
    offset, length, head = int(last["offset"]), int(last["length"]), int(last["head"])
    file.seek(offset - head)
    key = tar.member_name(file.read(head)).split(".", 1)[0]
    return offset + length + len(tar.padding(length) + tar.label(key, int(last["label"])) + tar.END)


def put(path: Path, data: bytes, parts: Path) -> None:
    """Write a file atomically; the temporary file is in ``parts``."""
    with replacing(path, _temporary(parts, path.name), durable=True) as temporary:
        temporary.write_bytes(data)


def _temporary(parts: Path, name: str) -> Path:
    """A path unique to this process: two packs share ``parts`` on file systems without locks."""
    return parts / f"{name}.{socket.gethostname()}.{os.getpid()}.tmp"


def _image(samples: Samples, index: int, how: How) -> tuple[Stored, str]:
    """The image to store and its KEY."""
    if isinstance(samples, ArraySamples):
        return store(ppm(samples.stored(index)), how), _key(samples, index)
    assert isinstance(samples, EncodedSamples)
    try:
        return store(bytes(samples.encoded(index)), how), _key(samples, index)
    except BrokenImage as error:
        # Without this image, or with a different one, it would be a different dataset.
        raise UserError(
            f"{samples.name(index)} {error}: make it readable and rerun the same command; "
            "if you remove or replace it, use another --out"
        ) from None
    except OSError as error:  # from Pillow's encoders
        raise UserError(
            f"{samples.name(index)} cannot be encoded ({error}): remove or replace it, and use another --out"
        ) from None


def _key(samples: Samples, index: int) -> str:
    if isinstance(samples, EncodedSamples):
        return tar.key(samples.path(index))
    return tar.key(f"{samples.classes[samples.labels[index]]}/{index:07d}")


def _append(file: io.BufferedWriter, record: np.void, shard: int, label: int, image: Stored, key: str) -> None:
    """Write the two members of a sample and fill in its index record."""
    data = image.data
    head = tar.header(f"{key}.{image.extension}", len(data))
    record["offset"], record["length"], record["head"] = file.tell() + len(head), len(data), len(head)
    record["shard"], record["label"], record["crc"] = shard, label, crc32c.crc32c(data)
    record["kind"], record["components"] = image.kind, image.components
    record["width"], record["height"] = image.width, image.height
    file.write(b"".join((head, data, tar.padding(len(data)), tar.label(key, label))))
