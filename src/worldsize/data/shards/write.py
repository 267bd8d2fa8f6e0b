"""Writing one shard and its part of the index, so that either is there whole or not at all."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import crc32c
import numpy as np
from numpy.typing import NDArray

from worldsize.data.decode import BrokenPicture
from worldsize.data.samples import EncodedSamples, Samples
from worldsize.data.shards import tar
from worldsize.data.shards.format import RECORD, Records, Shard, identity, shard_name
from worldsize.data.shards.pictures import LONGEST_EXTENSION, How, Stored, ppm, store
from worldsize.data.shards.samples import ShardSamples
from worldsize.errors import UserError


@dataclass(frozen=True)
class Task:
    """One shard: samples ``start`` to ``stop`` (exclusive) of ``split``; about so many bytes of tar."""

    split: str
    number: int
    start: int
    stop: int
    bytes: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def plan(split: str, lengths: NDArray[np.int64], heads: NDArray[np.int64], limit: int) -> list[Task]:
    """Cut a split into shards of at most ``limit`` bytes of tar (or one sample).

    Args:
        lengths: bytes that each picture will have, or about.
        heads: bytes of the headers of each picture, and of its label.
    """
    # The last block is the label.
    ends = np.cumsum(2 * heads + -(-lengths // tar.BLOCK) * tar.BLOCK + tar.BLOCK)
    around = tar.BEGINNING + len(tar.END)
    tasks: list[Task] = []
    start = before = 0
    while start < len(lengths):
        stop = max(int(np.searchsorted(ends, before + limit - around, "right")), start + 1)
        tasks.append(Task(split, len(tasks), start, stop, int(ends[stop - 1]) - before + around))
        start, before = stop, int(ends[stop - 1])
    return tasks


def heads(samples: Samples, index: int) -> int:
    """Bytes of the headers of a picture, and of its label, at most; known without reading it."""
    if isinstance(samples, ShardSamples):
        return int(samples.records["head"][index])
    return tar.head(f"{_key(samples, index)}.{LONGEST_EXTENSION}")


def write(task: Task, samples: Samples, how: How, out: Path, parts: Path, done: Callable[[int], None]) -> None:
    """Make the shard in ``out`` and its part of the index in ``parts``.

    Args:
        done: told after each picture which share of the task's bytes that was.

    Raises:
        UserError: an original cannot be read.
    """
    records = np.zeros(task.stop - task.start, RECORD)
    temporary = _temporary(parts, task.name)
    with open(temporary, "wb") as file:
        file.write(tar.beginning("0" * 64))
        for record, index in zip(records, range(task.start, task.stop), strict=True):
            picture, key = _picture(samples, index, how)
            _append(file, record, task.number, int(samples.labels[index]), picture, key)
            done(task.bytes // len(records))
        file.write(tar.END)
        file.seek(0)
        file.write(tar.beginning(identity(task.split, records.tobytes())))
        _to_disk(file)
    part = parts / f"{task.name}.index"
    put(part, records.tobytes(), parts)
    # In this order: where there is a shard, there is its part of the index.
    os.replace(temporary, out / task.name)
    sync_folder(out)


def written(task: Task, out: Path, parts: Path) -> tuple[Shard, Records] | None:
    """What an earlier call has left of this task; None: nothing whole."""
    try:
        data = (parts / f"{task.name}.index").read_bytes()
        if len(data) != (task.stop - task.start) * RECORD.itemsize:
            return None
        records = np.frombuffer(data, RECORD)
        with open(out / task.name, "rb") as file:
            shard = Shard(len(records), os.fstat(file.fileno()).st_size, identity(task.split, data))
            right = file.read(tar.BEGINNING) == tar.beginning(shard.identity) and shard.bytes == _ends(file, records[-1])
    except FileNotFoundError:
        return None
    return (shard, records) if right else None


def _ends(file: io.BufferedReader, last: np.void) -> int:
    """Where a shard ends that has this sample last, bytes."""
    offset, length, head = int(last["offset"]), int(last["length"]), int(last["head"])
    file.seek(offset - head)
    key = tar.member_name(file.read(head)).split(".", 1)[0]
    return offset + length + len(tar.padding(length) + tar.label(key, int(last["label"])) + tar.END)


def put(path: Path, data: bytes, parts: Path) -> None:
    """Write a file of which, whatever happens, all or nothing is there; until it is whole it lies in ``parts``."""
    temporary = _temporary(parts, path.name)
    with open(temporary, "wb") as file:
        file.write(data)
        _to_disk(file)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let the disk know what was renamed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(parts: Path, name: str) -> Path:
    """Of this process alone: two packs share ``parts`` where nothing can be locked."""
    return parts / f"{name}.{socket.gethostname()}.{os.getpid()}.tmp"


def _to_disk(file: io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def _picture(samples: Samples, index: int, how: How) -> tuple[Stored, str]:
    """What is to be stored, and its KEY."""
    if samples.pixels is not None:
        return store(ppm(samples.pixels[index]), how), _key(samples, index)
    assert isinstance(samples, EncodedSamples)
    try:
        return store(bytes(samples.encoded(index)), how), _key(samples, index)
    except BrokenPicture as error:
        # Without the picture, or with another one, it would be another data set.
        raise UserError(
            f"{samples.name(index)} {error}: make it readable and run the same command again; "
            "if you remove or replace it, name another --out"
        ) from None
    except OSError as error:  # of Pillow's encoders
        raise UserError(
            f"{samples.name(index)} cannot be encoded ({error}): remove or replace it, and name another --out"
        ) from None


def _key(samples: Samples, index: int) -> str:
    if isinstance(samples, EncodedSamples):
        return tar.key(samples.path(index))
    return tar.key(f"{samples.classes[samples.labels[index]]}/{index:07d}")


def _append(file: io.BufferedWriter, record: np.void, shard: int, label: int, picture: Stored, key: str) -> None:
    """The two members of a sample, and what the index says of it."""
    data = picture.data
    head = tar.header(f"{key}.{picture.extension}", len(data))
    record["offset"], record["length"], record["head"] = file.tell() + len(head), len(data), len(head)
    record["shard"], record["label"], record["crc"] = shard, label, crc32c.crc32c(data)
    record["kind"], record["components"] = picture.kind, picture.components
    record["width"], record["height"] = picture.width, picture.height
    file.write(b"".join((head, data, tar.padding(len(data)), tar.label(key, label))))
