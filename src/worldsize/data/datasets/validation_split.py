"""A validation split of images that have none: chosen by their content, kept in a list of names; no file is moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.config.wording import count
from worldsize.data.confusable_names import look_alikes
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import Dataset
from worldsize.errors import UserError, of_system


def stratified(labels: NDArray[np.int32], digests: NDArray[np.uint8], share: float) -> NDArray[np.bool_]:
    """Choose validation images: of each class, those with the smallest digests, at least one if the class has two images.

    The choice depends only on the content of the images: not on their names, their order or a seed. Images with the same
    content are all on the same side.

    Args:
        labels: int32 (n,).
        digests: uint8 (n, 16), a hash of each image's content.
        share: of the images of each class, 0 to 1.

    Returns:
        bool (n,).
    """
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        different, group = np.unique(digests[members].view(f"V{digests.shape[1]}").ravel(), return_inverse=True)
        wanted = round(share * len(different)) if len(different) > 1 else 0
        chosen[members] = group < min(max(wanted, len(different) > 1), len(different) - 1)
    return chosen


def apart(
    labels: NDArray[np.int32] | NDArray[np.uint8], digests: NDArray[np.uint8], groups: Sequence[str | None], share: float
) -> NDArray[np.bool_]:
    """Choose validation images like `stratified`, for images that belong together or have several labels.

    Images of a group, or with the same content, are all on the same side. Each class keeps an image to train on. A group is
    chosen if classes still need at least half of its images, so a class whose groups are large may have none to validate.
    If all groups are larger, the smallest one is chosen.

    Args:
        labels: int32 (n,), or uint8 (n, classes).
        digests: uint8 (n, 16), a hash of each image's content.
        groups: of each image; None: on its own.
        share: of the images of each class, 0 to 1.

    Returns:
        bool (n,).
    """
    of_image = [row.nonzero()[0].tolist() or [-1] for row in labels] if labels.ndim == 2 else [[int(i)] for i in labels]
    together = _together(digests, groups)
    contents = [Counter(label for i in members for label in of_image[i]) for members in together]
    count, parts = sum(contents, Counter[int]()), Counter(label for content in contents for label in content)
    need = {label: max(1, round(share * count[label])) if parts[label] > 1 else 0 for label in count}
    chosen, validating = np.zeros(len(labels), bool), Counter[int]()

    def choose(members: list[int], content: Counter[int]) -> None:
        if all(validating[label] + n < count[label] for label, n in content.items()):
            chosen[members] = True
            validating.update(content)

    sets = list(zip(together, contents, strict=True))
    for members, content in sets:
        useful = sum(min(n, max(0, need[label] - validating[label])) for label, n in content.items())
        if 2 * useful >= sum(content.values()):
            choose(members, content)
    for members, content in sets:  # for classes that have none yet, any group that is not too large
        lacking = any(need[label] and not validating[label] for label in content)
        if lacking and len(members) <= max(1, share * len(labels)):
            choose(members, content)
    for members, content in sorted(sets, key=lambda one: len(one[0])):
        if not chosen.any():
            choose(members, content)
    return chosen


def _together(digests: NDArray[np.uint8], groups: Sequence[str | None]) -> list[list[int]]:
    """The images that must be on one side, ordered by the smallest digest of each set."""
    parent: dict[object, object] = {}

    def root(key: object) -> object:
        while (above := parent.setdefault(key, key)) != key:
            parent[key] = parent.setdefault(above, above)
            key = parent[key]
        return key

    keys = [row.tobytes() for row in digests]
    for key, group in zip(keys, groups, strict=True):
        if group is not None:
            parent[root(key)] = root(("group", group))
    found: dict[object, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        found[root(key)].append(i)
    return sorted(found.values(), key=lambda members: min(keys[i] for i in members))


def split(samples: FileSamples, validation: NDArray[np.bool_]) -> Dataset:
    """The dataset whose validation split are the images where ``validation``, bool (n,), is True."""
    notes = (samples.unused.note(samples.root),) if samples.unused else ()
    return Dataset(_subset(samples, ~validation), _subset(samples, validation), notes=notes)


def _subset(samples: FileSamples, keep: NDArray[np.bool_]) -> FileSamples:
    begins = np.concatenate([[0], samples.ends[:-1]])
    names = [samples.files[begins[i] : samples.ends[i]] for i in np.flatnonzero(keep)]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return FileSamples(samples.root, samples.folders, b"".join(names), ends, samples.labels[keep], samples.classes)


def by_list(samples: FileSamples, listing: Path) -> Dataset:
    """Split ``samples``: the images that the file ``listing`` names, one per line, are the validation split.

    Raises:
        UserError: the file cannot be read, names an image that does not exist or names none, or leaves nothing to train on.
    """
    try:
        text = listing.expanduser().read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise of_system(f"--data.val-list {listing}: {error.strerror}", error) from None
    # Not splitlines() and strip(): a name may contain U+2028, and begin or end with a space.
    names = {line.removesuffix("\r") for line in text.split("\n")} - {""}
    indices = {samples.path(i): i for i in range(len(samples))}
    if missing := sorted(names - indices.keys()):
        raise UserError(
            f"--data.val-list {listing} names {count(len(missing))} not in {samples.root}; "
            f"the first is {missing[0]}{look_alikes(missing, indices)}"
        )
    validation = np.zeros(len(samples), bool)
    validation[[indices[name] for name in names]] = True
    if not validation.any() or validation.all():
        which = "no image" if not validation.any() else "all images"
        raise UserError(f"--data.val-list {listing} names {which} of {samples.root}: it must name some of them")
    return replace(split(samples, validation), validates_on=f"those that {listing} names")
