"""What `worldsize init` finds in a folder: how it is read, which images are broken, and which are chosen to validate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.config.wording import count, printable
from worldsize.data import layouts, shards
from worldsize.data.datasets import folder, label_list, validation_split
from worldsize.data.datasets.label_list import Entry
from worldsize.data.file_samples import FileSamples
from worldsize.data.layouts import Hints, Reading
from worldsize.data.samples import Dataset
from worldsize.data.survey import info, verify
from worldsize.data.survey.verify import Found
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError

_LISTED = 5
# Checks that a file may be written, before images are decoded for minutes.
Check = Callable[[Path], None]


@dataclass(frozen=True)
class Survey:
    """What is known about the folder.

    Attributes:
        root: the folder.
        dataset: its images, in two splits.
        broken: reasons, by name.
        side: the median shorter side, pixels.
        reading: how the folder was read.
        setting: the setting of the recipe that names the list, ``val_list`` or ``label_list``; None: the folders suffice.
        listing: the path of that list.
        content: of that list.
    """

    root: Path
    dataset: Dataset
    broken: dict[str, str]
    side: int
    reading: Reading
    setting: str | None
    listing: Path
    content: bytes

    @property
    def sentences(self) -> list[str]:
        """What was read, what was left out, and why."""
        return _sentences(self)


def take(root: Path, out: Path, share: float, hints: Hints, check: Check) -> Survey:
    """Read the folder ``root``, and decode its images. ``share`` of each class is chosen to validate, if no split is there.

    Raises:
        UserError: the folder is packed, cannot be read or is unclear, or has no readable images; ``check`` refuses a file.
    """
    if shards.is_packed(root):
        raise UserError(f"{root} contains shards; worldsize init works on image files")
    reading = layouts.read(root, hints)
    with temporary_folder() as cache:
        plain = _plain(root, reading, cache)
    if plain is not None and reading.split:
        setting, listing = None, out
    else:
        setting = "val_list" if plain is not None else "label_list"
        listing = out.with_suffix(".val.txt" if plain is not None else ".labels.csv")
        check(listing)
    if isinstance(plain, Dataset):
        dataset, found = plain, verify.verify(plain, cores())
    else:
        dataset, found = _listed(root, reading, share) if plain is None else _unsplit(plain, None, share)
    content = b""
    if setting == "val_list":
        assert isinstance(dataset.val, FileSamples)
        content = "".join(f"{name}\n" for name in _paths(dataset.val)).encode("utf-8", "surrogateescape")
    elif setting == "label_list":
        content = label_list.write(_entries(dataset, reading))
    verify.require_read(found)
    survey = Survey(root, dataset, _broken(found), _side(dataset), reading, setting, listing, content)
    _report(survey, found)
    return survey


def _plain(root: Path, reading: Reading, cache: Path) -> Dataset | FileSamples | None:
    """The images as data.name folder reads them without a list, if it reads them alike; one split if there are no two."""
    if reading.several or any(row.group for row in reading.rows if not reading.split):
        return None
    try:
        validation = folder.validation_folder(root)
        if reading.split and validation is not None:
            dataset = folder.two_splits(root / "train", validation, cache)
            same = _alike(dataset.train, reading, root, "train") and _alike(dataset.val, reading, root, "val")
            return dataset if same else None
        if reading.split or (validation is not None and (root / "train").is_dir()):
            return None
        every = folder.training_split(folder.unsplit(root), cache)
    except UserError:  # no class folders
        return None
    return every if _alike(every, reading, root, None) else None


def _alike(samples: object, reading: Reading, root: Path, split_name: str | None) -> bool:
    assert isinstance(samples, FileSamples)
    listed = {Path(samples.name(i)).relative_to(root).as_posix(): samples.label_names(i) for i in range(len(samples))}
    return listed == {row.file: row.labels for row in reading.rows if row.split == split_name}


def _listed(root: Path, reading: Reading, share: float) -> tuple[Dataset, dict[str, Found]]:
    """The images of a reading, in two splits, and what decoding found."""
    classes = tuple(reading.classes)
    entries = {
        name: [Entry(row.file, row.labels, name) for row in reading.rows if (row.split or "train") == name]
        for name in label_list.SPLITS
    }
    train, val = (label_list.samples(root, entries[name], classes, reading.several) for name in label_list.SPLITS[:2])
    if not reading.split:
        return _unsplit(train, [row.group for row in reading.rows], share)
    dataset = Dataset(train, val)
    return dataset, verify.verify(dataset, cores())


def _unsplit(every: FileSamples, groups: list[str | None] | None, share: float) -> tuple[Dataset, dict[str, Found]]:
    """Choose images to validate with. Broken ones stay in the training split, where others take their places."""
    found = verify.verify(validation_split.split(every, np.zeros(len(every), bool)), cores())
    one = found["train"]
    readable = np.array([i not in one.broken for i in range(len(every))])
    validation = np.zeros(len(every), bool)
    if every.multilabel or (groups and any(groups)):
        kept = [group for group, good in zip(groups or [None] * len(every), readable, strict=True) if good]
        chosen: NDArray[np.bool_] = validation_split.apart(every.labels[readable], one.digests[readable], kept, share)
    else:
        chosen = validation_split.stratified(np.asarray(every.labels[readable], np.int32), one.digests[readable], share)
    validation[readable] = chosen
    if not validation.any():
        raise UserError(
            f"{every.root}: no class has two different images that may be in different splits, so none can be set aside for "
            "validation"
        )
    return validation_split.split(every, validation), found


def _paths(samples: FileSamples) -> list[str]:
    return [samples.path(i) for i in range(len(samples))]


def _entries(dataset: Dataset, reading: Reading) -> list[Entry]:
    """The images of the label list. Those of the test split are in it for later."""
    assert isinstance(dataset.train, FileSamples) and isinstance(dataset.val, FileSamples)
    where = dict.fromkeys(_paths(dataset.train), "train") | dict.fromkeys(_paths(dataset.val), "val")
    return [Entry(row.file, row.labels, where.get(row.file, "test")) for row in reading.rows]


def _broken(found: dict[str, Found]) -> dict[str, str]:
    return {one.samples.name(index): reason for one in found.values() for index, reason in one.broken.items()}


def _side(dataset: Dataset) -> int:
    sizes = info.dimensions(dataset.train, 0).sizes
    if not len(sizes):
        raise UserError("none of the training images can be read")
    return int(np.median(sizes.min(axis=1)))


# Reporting ----------------------------------------------------------------------------------------------------------------


def _sentences(survey: Survey) -> list[str]:
    reading, dataset = survey.reading, survey.dataset
    said = [f"labels: {reading.source}{'; an image may have several' if reading.several else ''}"]
    if survey.setting is not None and not reading.split:
        kept = f"; images with the same {reading.group_by} are on one side" if reading.group_by else ""
        said.append(
            f"no validation folder: {count(len(dataset.val))} chosen by their content and listed in {survey.listing}{kept}"
        )
    elif survey.setting is not None:
        said.append(f"the images, their labels and splits are listed in {survey.listing}")
    said += reading.notes
    if reading.unused and survey.setting == "label_list":  # otherwise the notes of the dataset name them
        said.append(f"warning: {reading.unused.note(survey.root)}")
    without = np.flatnonzero(dataset.val.class_counts() == 0)
    if len(without):
        said.append(f"classes without validation images: {_named([dataset.classes[i] for i in without])}")
    if reading.unlabelled:
        folders = Counter(str(Path(image).parent) for image in reading.unlabelled)
        verb = "image has no label and is" if len(reading.unlabelled) == 1 else "images have no label and are"
        said.append(f"{len(reading.unlabelled):,} {verb} not used, in {_named(sorted(folders))}")
    if reading.missing:
        verb = "label is of an image that is" if len(reading.missing) == 1 else "labels are of images that are"
        said.append(f"{len(reading.missing):,} {verb} not there: {_named(reading.missing)}")
    return said


def _named(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")


def _report(survey: Survey, found: dict[str, Found]) -> None:
    train, val = survey.dataset.train, survey.dataset.val
    numbers = train.class_counts()
    print(f"{len(train.classes):,} classes, {len(train):,} training and {count(len(val), 'validation image')}")
    print(f"training images per class: {numbers.min():,} to {numbers.max():,}; median shorter side {survey.side} pixels")
    if survey.dataset.validates_on:
        print(printable(f"validation images: {survey.dataset.validates_on}"))
    for note in survey.dataset.notes:
        print(printable(f"warning: {note}"))
    for sentence in survey.sentences:
        print(printable(sentence))
    if survey.broken:
        print(f"{count(len(survey.broken), 'broken image')}, not used:")
        for name, reason in list(survey.broken.items())[:_LISTED]:
            print(printable(f"  {name}: {reason}"))
    odd = sorted({kind for one in found.values() for kind in one.odd})
    if odd:
        print(f"also found, and usable: {', '.join(odd)}")
    groups = verify.duplicates(found)
    if groups:
        copies = sum(len(group) - 1 for group in groups)
        both = sum(len({name for name, _ in group}) > 1 for group in groups)
        across = f"; {both:,} are in the training and in the validation split" if both else ""
        print(f"{copies:,} {'image is a copy' if copies == 1 else 'images are copies'} of another (the same bytes){across}")
