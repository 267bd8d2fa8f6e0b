"""Other images or labels to evaluate a trained network with: a folder of test images, ImageNet-V2, ImageNet-ReaL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from worldsize.data.datasets import file_index
from worldsize.data.datasets.subset import Chosen
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import EncodedSamples, Samples
from worldsize.errors import UserError, of_system

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


def open_folder(root: Path, classes: tuple[str, ...], cache: Path) -> FileSamples:
    """The images ROOT/CLASS/IMAGE. Each CLASS is one of ``classes`` or, as in ImageNet-V2, its number, counted from 0.

    Not every class needs a folder.

    Raises:
        UserError: a folder is neither, or has no image.
    """
    folders = file_index.class_folders(root)
    places = {name: number for number, name in enumerate(classes)}
    if not places.keys() & set(folders):
        places = {str(number): number for number in range(len(classes))}
    if unknown := [name for name in folders if name not in places]:
        raise UserError(
            f"--images {root}: the run has no class {unknown[0]!r}. Folders must have the names of its classes, such as "
            f"{classes[0]!r}, or all their numbers from 0 to {len(classes) - 1}"
        )
    listed = file_index.list_classes(root, folders, cache)
    of_class = [""] * len(classes)
    for name in folders:
        of_class[places[name]] = name
    labels = np.array([places[name] for name in folders], np.int32)[listed.labels]
    samples = FileSamples(root, tuple(of_class), listed.files, listed.ends, labels, classes)
    samples.unused = listed.unused
    return samples


def reassessed(samples: Samples, path: Path) -> Chosen:
    """The images of ImageNet's validation set that have a label in ``path``, real.json of ImageNet-ReaL, with these labels.

    Beyer et al. 2020, "Are we done with ImageNet?" (arXiv 2006.07159): the file has a list of classes, by number, for each
    image in the order of its name, ILSVRC2012_val_00000001 and following. Images with an empty list do not count.

    Returns:
        Images with labels uint8 (n, classes).

    Raises:
        UserError: the file is not such a list, has no entry for an image, or an image has another name.
    """
    found = _lists(path, len(samples.classes))
    if not isinstance(samples, EncodedSamples):
        raise UserError("--real-labels requires the images of ImageNet's validation set")
    chosen, rows = [], []
    for sample in range(len(samples)):
        match = _NUMBER.search(samples.path(sample))
        if match is None or not 1 <= int(match[1]) <= len(found):
            reason = "is not named ILSVRC2012_val_NNNNNNNN" if match is None else f"has no entry among {len(found):,}"
            raise UserError(f"--real-labels {path}: {samples.name(sample)} {reason}")
        if labels := found[int(match[1]) - 1]:
            chosen.append(sample)
            rows.append(labels)
    hot = np.zeros((len(rows), len(samples.classes)), np.uint8)
    for row, labels in enumerate(rows):
        hot[row, labels] = 1
    return Chosen(samples, np.array(chosen, np.int64), hot)


def _lists(path: Path, classes: int) -> list[list[int]]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise of_system(f"--real-labels {path}: {error.strerror}", error) from None
    except ValueError:
        raise UserError(f"--real-labels {path} is not JSON: pass real.json of ImageNet-ReaL") from None
    if not isinstance(found, list) or not all(
        isinstance(labels, list) and all(isinstance(n, int) and 0 <= n < classes for n in labels) for labels in found
    ):
        raise UserError(f"--real-labels {path} must be a list of lists of class numbers from 0 to {classes - 1}")
    return found
