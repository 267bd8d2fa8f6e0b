"""``worldsize data pack``: a data set into shards.

Which picture goes into which shard is decided before the first is read, so every shard is a task of its own, and what is
there already need not be made again: the command can be killed at any time, and the same command goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldsize.data.crops import fit
from worldsize.data.decode import BrokenPicture
from worldsize.data.fetching.progress import Meter, say, size
from worldsize.data.samples import Dataset, EncodedSamples, Samples
from worldsize.data.shards import open_dataset, page, write
from worldsize.data.shards.format import INDEX, SPLITS, Kind, Packed, Records, Shard, Split, steps
from worldsize.data.shards.pictures import How, ppm
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local
from worldsize.data.shards.write import Task, plan, put, written
from worldsize.errors import DataError, UserError

_OURS = ".packing"  # the folder in OUT that an interrupted pack leaves for the next one
_STATS_AT_ONCE = 16
_LISTED = 20
_LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Plan:
    """What is to be done, and what identifies it.

    Attributes:
        tasks: one for each shard.
        changes: what is done to the pictures, for people; empty: nothing.
        made: the same, and what had been done before to pictures that come from shards.
        digest: of everything that decides the shards' bytes but for what is in the pictures.
    """

    tasks: tuple[Task, ...]
    changes: Mapping[str, Any]
    made: Mapping[str, Any]
    digest: str

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in self.tasks)


def pack(dataset: Dataset, out: Path, how: How, shard_bytes: int, workers: int, max_broken: float) -> None:
    """Put all pictures of ``dataset`` into shards in ``out``, in their order.

    Args:
        out: a new folder, or one that an earlier call with the same pictures and options has begun.
        shard_bytes: of each shard, at most (as long as pictures become no larger than expected).
        workers: threads.
        max_broken: the share of pictures that may be broken, 0 to 1.

    Raises:
        UserError: ``out`` is in other use, there is no room, or a picture cannot be read.
        DataError: too many pictures are broken.
    """
    splits = {"train": dataset.train, "val": dataset.val}
    planned = _plan(splits, how, shard_bytes)
    with _claimed(out, planned) as parts:
        if parts is None:
            print(f"{out} is packed already, from the same pictures with the same options")
            return
        missing = [task for task in planned.tasks if written(task, out, parts) is None]
        _require(out, sum(task.bytes for task in missing))
        with Meter("packing", planned.bytes) as meter:
            meter.start_at(planned.bytes - sum(task.bytes for task in missing))
            _write(missing, splits, how, out, parts, workers, meter)
        broken = _finish(planned, splits, out, parts, max_broken)
    print(_summary(out, open_dataset(out), broken), end="")


# The steps -----------------------------------------------------------------------------------------------------------


def _plan(splits: Mapping[str, Samples], how: How, shard_bytes: int) -> Plan:
    changes = how.made()
    digest = hashlib.sha256(json.dumps(changes).encode())
    tasks: list[Task] = []
    for name, samples in splits.items():
        lengths, heads = _lengths(samples)
        digest.update(samples.fingerprint.encode() + lengths.tobytes())
        expected = np.fromiter((how.expected(int(length)) for length in lengths), np.int64, len(lengths))
        tasks += plan(name, expected, heads, shard_bytes)
    before = splits["train"].made if isinstance(splits["train"], ShardSamples) else {}
    digest.update(json.dumps([astuple(task) for task in tasks]).encode())
    made = {**changes, "before": before} if before and changes else before or changes
    return Plan(tuple(tasks), changes, made, digest.hexdigest())


def _lengths(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes of every picture, unread, and of its tar headers."""
    n = len(samples)

    def some(start: int) -> list[tuple[int, int]]:
        return [(_length(samples, index), write.heads(samples, index)) for index in range(start, min(start + 256, n))]

    with ThreadPoolExecutor(_STATS_AT_ONCE) as pool:
        pairs = [np.array(pairs, np.int64) for pairs in pool.map(some, range(0, n, 256))]
    both = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    return both[:, 0], both[:, 1]


def _length(samples: Samples, index: int) -> int:
    if samples.pixels is not None:
        return len(ppm(samples.pixels[index]))
    assert isinstance(samples, EncodedSamples)
    try:
        length = samples.length(index)
    except BrokenPicture as error:
        raise UserError(f"{samples.name(index)} {error}: mend or remove it") from None
    if length > _LARGEST:
        raise UserError(f"{samples.name(index)} has {size(length)}: pictures of 4 GB and more cannot be packed")
    return length


@contextmanager
def _claimed(out: Path, planned: Plan) -> Iterator[Path | None]:
    """The folder for parts of the index, which nobody else uses; None: all is done already."""
    out.mkdir(parents=True, exist_ok=True)
    parts = out / _OURS
    if (out / INDEX).exists() and not parts.is_dir():
        _same(out, page(Local(out)).plan, planned, page(Local(out)).made)
        yield None
        return
    # In this order: a pack that ends meanwhile removes its parts last.
    names = [] if parts.is_dir() else sorted(os.listdir(out))
    if names and INDEX not in names and _OURS not in names:
        raise UserError(f"{out} is not empty ({names[0]} is in it): name a new folder with --out")
    parts.mkdir(exist_ok=True)
    with _lock(out, parts / "lock") as locked:
        # Not before: the pack that had the lock may have finished.
        if (out / INDEX).exists():
            shutil.rmtree(parts, ignore_errors=True)
            _same(out, page(Local(out)).plan, planned, page(Local(out)).made)
            yield None
            return
        if locked:
            for left in parts.glob("*.tmp"):
                left.unlink()
        _begin(out, parts, planned)
        yield parts


@contextmanager
def _lock(out: Path, path: Path) -> Iterator[bool]:
    """Keep other packs out; False: the file system of ``out`` cannot."""
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another pack is at work in {out}: wait until it has ended") from None
        except OSError as error:
            say(f"{out} cannot be locked ({error.strerror}): see to it that no other pack is at work in it")
            yield False
            return
        yield True


def _begin(out: Path, parts: Path, planned: Plan) -> None:
    """Go on with the plan that ``parts`` holds, which must be this one, or note this one there."""
    noted = parts / "plan.json"
    try:
        begun = json.loads(noted.read_bytes())
        digest, made = str(begun["plan"]), dict(begun["made"])
    except FileNotFoundError:
        put(noted, json.dumps({"plan": planned.digest, "made": planned.made}).encode(), parts)
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{noted} is damaged: remove {out}, or name another folder with --out") from None
    else:
        _same(out, digest, planned, made)


def _same(out: Path, digest: str, planned: Plan, made: Mapping[str, Any]) -> None:
    if digest != planned.digest:
        raise UserError(
            f"{out} holds a pack, whole or in part, of other pictures, with other options or by another version "
            f"({_options(made)}; now {_options(planned.made)}): name another folder with --out, or remove this one"
        )


def _options(made: Mapping[str, Any]) -> str:
    told = [", ".join(f"{name} {value}" for name, value in step.items()) for step in steps(made)]
    return ", then ".join(told) or "pictures as they are"


def _require(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed:
        raise UserError(f"{out} has {size(free)} free, but {size(needed)} are needed: free some, or name another --out")


def _write(
    tasks: list[Task], splits: Mapping[str, Samples], how: How, out: Path, parts: Path, workers: int, meter: Meter
) -> None:
    # Threads: nine tenths of the time is decoding, encoding, checksums and files, which all release the interpreter.
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        running = [pool.submit(write.write, task, splits[task.split], how, out, parts, meter.add) for task in tasks]
        try:
            for ended in as_completed(running):
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finish(planned: Plan, splits: Mapping[str, Samples], out: Path, parts: Path, max_broken: float) -> int:
    """Put the index together, and last of all the page that makes ``out`` a data set. Returns how many are broken."""
    pieces = {name: _pieces(planned, name, out, parts) for name in SPLITS}
    broken = sum(int((records["kind"] == Kind.BROKEN).sum()) for split in pieces.values() for _, records in split)
    total = sum(len(samples) for samples in splits.values())
    if broken > max_broken * total:
        raise DataError(
            f"{broken} of {total:,} pictures are broken, which is more than --max-broken {max_broken:g} allows: "
            "`worldsize data verify` lists them; remove or mend them, or say --max-broken with a larger share"
        )
    for name, split in pieces.items():
        put(out / f"{name}.index", b"".join(records.tobytes() for _, records in split), parts)
    shards = {name: tuple(shard for shard, _ in split) for name, split in pieces.items()}
    fingerprints = {name: _fingerprint(samples, planned.changes) for name, samples in splits.items()}
    described = {name: Split(fingerprints[name], shards[name]) for name in SPLITS}
    put(out / INDEX, Packed(splits["train"].classes, described, planned.made, planned.digest).to_json().encode(), parts)
    # Another pack may remove them, too: it sees that all is done.
    shutil.rmtree(parts, ignore_errors=True)
    return broken


def _pieces(planned: Plan, split: str, out: Path, parts: Path) -> list[tuple[Shard, Records]]:
    pieces = []
    for task in planned.tasks:
        if task.split != split:
            continue
        piece = written(task, out, parts)
        if piece is None:
            raise DataError(f"{out / task.name} was removed or changed during the pack: run the same command again")
        pieces.append(piece)
    return pieces


def _fingerprint(samples: Samples, changes: Mapping[str, Any]) -> str:
    """That of the originals while the pictures are theirs, so that a run may go on from originals to shards."""
    if not changes:
        return samples.fingerprint
    return hashlib.sha256(f"{samples.fingerprint}\n{json.dumps(changes)}".encode()).hexdigest()


def _summary(out: Path, dataset: Dataset, broken: int) -> str:
    lines = [f"{out} is packed: train with --data.root {out}\n"]
    for name, samples in (("training", dataset.train), ("validation", dataset.val)):
        assert isinstance(samples, ShardSamples)
        count = len(samples.shards)
        lines.append(f"  {name:<11} {len(samples):,} pictures in {count:,} shard{'s' * (count != 1)}\n")
    files = list(out.iterdir())
    lines.append(f"  {'on disk':<11} {len(files):,} files, {size(sum(file.stat().st_size for file in files))}\n")
    if broken:
        lines.append(f"  {'broken':<11} {broken}, kept as they are:\n")
        lines += [f"    {line}\n" for line in _broken(dataset)]
    return "".join(lines)


def _broken(dataset: Dataset) -> Iterator[str]:
    left = _LISTED
    for samples in (dataset.train, dataset.val):
        assert isinstance(samples, ShardSamples)
        for index in np.flatnonzero(samples.records["kind"] == Kind.BROKEN)[:left]:
            left -= 1
            try:
                picture = samples.picture(int(index))
                if side := samples.made.get("raw"):
                    fit(picture, side, side)  # which some cannot be resized to
            except BrokenPicture as error:
                yield f"{samples.name(int(index))}: {error}"
