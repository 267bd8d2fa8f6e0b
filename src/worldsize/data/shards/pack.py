"""``worldsize data pack``: write a dataset as shards.

The plan assigns images to shards before any image is read, so every shard is an independent task. A rerun skips complete
shards: the command can be killed at any time, and the same command resumes.
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

from worldsize.config.wording import printable
from worldsize.data.broken_images import require_few
from worldsize.data.images.crops import fit
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.progress_bar import ByteProgress, say, size
from worldsize.data.samples import ArraySamples, Dataset, EncodedSamples, NotAFile, Samples
from worldsize.data.shards import metadata, open_dataset, write
from worldsize.data.shards.format import INDEX, SPLITS, Encoding, Packed, Records, Shard, Split, steps
from worldsize.data.shards.images import How, ppm
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local
from worldsize.data.shards.write import Task, plan, put, written
from worldsize.errors import DataError, UserError

_WORK = ".packing"  # folder in OUT; an interrupted pack leaves it for the next one
_PARALLEL_STATS = 16
_MAX_LISTED = 20
_MAX_LENGTH = 2**32 - 1


@dataclass(frozen=True)
class Plan:
    """What a pack will write.

    Attributes:
        tasks: one per shard.
        changes: how this pack converts the images, for display; empty if it keeps them unchanged.
        made: ``changes``, plus earlier conversions if the images come from shards.
        digest: of everything that determines the shards' bytes, except the content of the images.
        missing: by split and index, why an image is not a regular file. It is packed as a broken image without bytes.
    """

    tasks: tuple[Task, ...]
    changes: Mapping[str, Any]
    made: Mapping[str, Any]
    digest: str
    missing: Mapping[str, Mapping[int, str]]

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in self.tasks)


def pack(dataset: Dataset, out: Path, how: How, shard_bytes: int, workers: int, max_broken: float) -> None:
    """Write all images of ``dataset``, in order, to shards in ``out``.

    Args:
        out: a new folder, or that of an interrupted pack of the same images with the same options.
        shard_bytes: maximum size of a shard (as long as converted images are not larger than estimated).
        workers: threads.
        max_broken: maximum share of broken images of a split, 0 to 1.

    Raises:
        UserError: ``out`` has other content, there is not enough disk space, or an image cannot be read.
        DataError: too many images of a split are broken.
    """
    splits = {"train": dataset.train, "val": dataset.val}
    planned = _plan(splits, how, shard_bytes)
    with _claimed(out, planned) as parts:
        if parts is None:
            print(f"{out} is already packed from the same images with the same options")
            return
        missing = [task for task in planned.tasks if written(task, out, parts) is None]
        _require_space(out, sum(task.bytes for task in missing))
        with ByteProgress("packing", planned.bytes) as meter:
            meter.start_at(planned.bytes - sum(task.bytes for task in missing))
            _write(missing, planned, splits, how, out, parts, workers, meter)
        broken = _finish(planned, splits, out, parts, max_broken)
    print(_summary(out, open_dataset(out), broken, planned.missing), end="")


# The steps -----------------------------------------------------------------------------------------------------------


def _plan(splits: Mapping[str, Samples], how: How, shard_bytes: int) -> Plan:
    changes = how.made()
    digest = hashlib.sha256(json.dumps(changes).encode())
    tasks: list[Task] = []
    missing: dict[str, dict[int, str]] = {}
    for name, samples in splits.items():
        lengths, heads, missing[name] = _lengths(samples)
        digest.update(samples.fingerprint.encode() + lengths.tobytes())
        lengths = lengths.clip(min=0)
        expected = np.fromiter((how.expected(int(length)) for length in lengths), np.int64, len(lengths))
        tasks += plan(name, expected, heads, shard_bytes)
    before = splits["train"].made if isinstance(splits["train"], ShardSamples) else {}
    digest.update(json.dumps([astuple(task) for task in tasks]).encode())
    made = {**changes, "before": before} if before and changes else before or changes
    return Plan(tuple(tasks), changes, made, digest.hexdigest(), missing)


def _lengths(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """Per image, without reading it: its bytes (-1 if it is not a regular file) and those of its tar headers.

    The third value gives, by index, why an image is not a regular file.
    """
    n = len(samples)
    missing: dict[int, str] = {}

    def some(start: int) -> list[tuple[int, int]]:
        indices = range(start, min(start + 256, n))
        return [(_length(samples, index, missing), write.heads(samples, index)) for index in indices]

    with ThreadPoolExecutor(_PARALLEL_STATS) as pool:
        pairs = [np.array(pairs, np.int64) for pairs in pool.map(some, range(0, n, 256))]
    both = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    return both[:, 0], both[:, 1], missing


def _length(samples: Samples, index: int, missing: dict[int, str]) -> int:
    if isinstance(samples, ArraySamples):
        return len(ppm(samples.stored(index)))
    assert isinstance(samples, EncodedSamples)
    try:
        length = samples.length(index)
    except NotAFile as error:
        missing[index] = str(error)
        return -1
    except BrokenImage as error:
        raise UserError(f"{samples.name(index)} {error}: fix or remove it") from None
    if length > _MAX_LENGTH:
        raise UserError(f"{samples.name(index)} has {size(length)}: images of 4 GB and more cannot be packed")
    return length


@contextmanager
def _claimed(out: Path, planned: Plan) -> Iterator[Path | None]:
    """Lock ``out`` and give its work folder, which holds the parts of the index; None if the pack is already complete."""
    out.mkdir(parents=True, exist_ok=True)
    parts = out / _WORK
    if (out / INDEX).exists() and not parts.is_dir():
        _require_same(out, metadata(Local(out)).plan, planned, metadata(Local(out)).made)
        yield None
        return
    # Check the work folder first: a pack that completes in the meantime removes it last.
    names = [] if parts.is_dir() else sorted(os.listdir(out))
    if names and INDEX not in names and _WORK not in names:
        raise UserError(f"{out} is not empty (it contains {names[0]}): pass a new folder with --out")
    parts.mkdir(exist_ok=True)
    with _lock(out, parts / "lock") as locked:
        # Check again under the lock: the pack that held it may have completed.
        if (out / INDEX).exists():
            shutil.rmtree(parts, ignore_errors=True)
            _require_same(out, metadata(Local(out)).plan, planned, metadata(Local(out)).made)
            yield None
            return
        if locked:
            for stale in parts.glob("*.tmp"):
                stale.unlink()
        _resume_or_begin(out, parts, planned)
        yield parts


@contextmanager
def _lock(out: Path, path: Path) -> Iterator[bool]:
    """Exclude other packs; False if the file system of ``out`` does not support locks."""
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another pack is already running in {out}: wait until it ends") from None
        except OSError as error:
            say(f"{out} cannot be locked ({error.strerror}): make sure that no other pack is running in it")
            yield False
            return
        yield True


def _resume_or_begin(out: Path, parts: Path, planned: Plan) -> None:
    """Resume the plan saved in ``parts``, which must equal this one, or save this one there."""
    saved = parts / "plan.json"
    try:
        content = json.loads(saved.read_bytes())
        digest, made = str(content["plan"]), dict(content["made"])
    except FileNotFoundError:
        put(saved, json.dumps({"plan": planned.digest, "made": planned.made}).encode(), parts)
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{saved} is damaged: remove {out}, or pass another folder with --out") from None
    else:
        _require_same(out, digest, planned, made)


def _require_same(out: Path, digest: str, planned: Plan, made: Mapping[str, Any]) -> None:
    if digest != planned.digest:
        raise UserError(
            f"{out} holds a packed or partly packed dataset of other images, with other options or by another version "
            f"({_options(made)}; now {_options(planned.made)}): pass another folder with --out, or remove this one"
        )


def _options(made: Mapping[str, Any]) -> str:
    conversions = [", ".join(f"{name} {value}" for name, value in step.items()) for step in steps(made)]
    return ", then ".join(conversions) or "images unchanged"


def _require_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed:
        raise UserError(
            f"{out} has {size(free)} free, but {size(needed)} are needed: free disk space, or pass another --out"
        )


def _write(
    tasks: list[Task],
    planned: Plan,
    splits: Mapping[str, Samples],
    how: How,
    out: Path,
    parts: Path,
    workers: int,
    meter: ByteProgress,
) -> None:
    # Threads suffice: 90 % of the time is decoding, encoding, checksums and file access, which release the GIL.
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        running = [
            pool.submit(write.write, task, splits[task.split], how, out, parts, meter.add, planned.missing[task.split])
            for task in tasks
        ]
        try:
            for ended in as_completed(running):
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finish(planned: Plan, splits: Mapping[str, Samples], out: Path, parts: Path, max_broken: float) -> int:
    """Write the indexes and then index.json, which completes the dataset. Returns the number of broken images."""
    pieces = {name: _pieces(planned, name, out, parts) for name in SPLITS}
    broken = {
        name: sum(int((records["kind"] == Encoding.BROKEN).sum()) for _, records in split) for name, split in pieces.items()
    }
    require_few(
        {name: (number, len(splits[name])) for name, number in broken.items()},
        max_broken,
        "`worldsize data verify` lists them; remove or fix them, or pass a larger --max-broken",
    )
    for name, split in pieces.items():
        put(out / f"{name}.index", b"".join(records.tobytes() for _, records in split), parts)
    shards = {name: tuple(shard for shard, _ in split) for name, split in pieces.items()}
    fingerprints = {name: _fingerprint(samples, planned.changes) for name, samples in splits.items()}
    described = {name: Split(fingerprints[name], shards[name]) for name in SPLITS}
    put(out / INDEX, Packed(splits["train"].classes, described, planned.made, planned.digest).to_json().encode(), parts)
    # ignore_errors: another pack that finds this one complete may remove the folder at the same time.
    shutil.rmtree(parts, ignore_errors=True)
    return sum(broken.values())


def _pieces(planned: Plan, split: str, out: Path, parts: Path) -> list[tuple[Shard, Records]]:
    pieces = []
    for task in planned.tasks:
        if task.split != split:
            continue
        piece = written(task, out, parts)
        if piece is None:
            raise DataError(f"{out / task.name} was removed or changed during the pack: rerun the same command")
        pieces.append(piece)
    return pieces


def _fingerprint(samples: Samples, changes: Mapping[str, Any]) -> str:
    """The original fingerprint if images are unchanged, so that a run can switch from the original files to shards."""
    if not changes:
        return samples.fingerprint
    return hashlib.sha256(f"{samples.fingerprint}\n{json.dumps(changes)}".encode()).hexdigest()


def _summary(out: Path, dataset: Dataset, broken: int, missing: Mapping[str, Mapping[int, str]]) -> str:
    lines = [f"{out} is packed: train with --data.root {out}\n"]
    for name, samples in (("training", dataset.train), ("validation", dataset.val)):
        assert isinstance(samples, ShardSamples)
        count = len(samples.shards)
        lines.append(f"  {name:<11} {len(samples):,} images in {count:,} shard{'s' * (count != 1)}\n")
    files = list(out.iterdir())
    lines.append(f"  {'on disk':<11} {len(files):,} files, {size(sum(file.stat().st_size for file in files))}\n")
    if broken:
        lines.append(f"  {'broken':<11} {broken}, stored unchanged:\n")
        lines += [f"    {printable(line)}\n" for line in _broken(dataset, missing)]
    return "".join(lines)


def _broken(dataset: Dataset, missing: Mapping[str, Mapping[int, str]]) -> Iterator[str]:
    remaining = _MAX_LISTED
    for split, samples in (("train", dataset.train), ("val", dataset.val)):
        assert isinstance(samples, ShardSamples)
        for index in np.flatnonzero(samples.records["kind"] == Encoding.BROKEN)[:remaining].tolist():
            remaining -= 1
            try:
                image = samples.image(index)
                if side := samples.made.get("raw"):
                    fit(image, side, side)  # some images cannot be resized to it
            except BrokenImage as error:
                yield f"{samples.name(index)}: {missing[split].get(index, error)}"
