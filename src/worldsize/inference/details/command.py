"""The part of ``worldsize eval`` that is about --details."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from worldsize.config import output_files
from worldsize.config.command_line import Evaluate
from worldsize.data.images.pillow import FORMATS, BrokenImage, opened
from worldsize.data.samples import EncodedSamples, Samples
from worldsize.errors import UserError
from worldsize.inference.details import summary
from worldsize.inference.details.collected import Answers
from worldsize.inference.details.measures import Ints
from worldsize.inference.trained import Trained


def check(asked: Evaluate) -> None:
    """Refuse what cannot be written, before any work.

    Raises:
        UserError: images have several labels, a package is missing, or --details is a file or cannot be written.
        StoreUnreachable: its disk does not answer.
    """
    if asked.details is None:
        if asked.against is not None:
            raise UserError("--against compares networks in the report of --details: pass --details FOLDER")
        return
    if asked.settings.data.multilabel or asked.real_labels is not None:
        raise UserError("--details is for one label per image")
    output_files.check_folder("--details", asked.details)
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        raise UserError("--details needs charts: pip install 'worldsize[report]'")


def write_all(
    folder: Path,
    network: dict[str, str],
    answers: Answers,
    samples: Samples,
    found: Trained,
    other: tuple[str, Answers] | None,
) -> None:
    """Write the page and the numbers into ``folder``, and report that.

    Args:
        network: see `trained.identity`.
        other: what --against names, and its answers.

    Raises:
        UserError, StoreUnreachable: they cannot be written.
    """
    from worldsize.inference.details import write

    its = summary.of(answers, len(samples.classes), _sides(samples, answers.indices))
    compared = summary.compared(other[0], answers, other[1]) if other is not None else None
    title = f"{network['run']}, {network['checkpoint']}"
    page = folder / "page.html"
    with output_files.written(page):
        folder.mkdir(parents=True, exist_ok=True)
    write.numbers(folder, its, network, answers, samples, compared)
    with output_files.written(page):
        write.write_page(page, title, its, answers, samples, found, compared)
    print(f"{page}; numbers in details.json, classes.csv, confusion.csv and images.csv")


def _sides(samples: Samples, indices: Ints) -> Ints:
    """The shorter side of each image, pixels; 0 if unknown."""
    known = samples.sizes(indices)
    if known is not None:
        return known.min(1).astype(np.int64)
    if not isinstance(samples, EncodedSamples):
        return np.zeros(len(indices), np.int64)
    return np.array([_side(samples, int(index)) for index in indices], np.int64)


def _side(samples: EncodedSamples, index: int) -> int:
    try:
        with samples.opened(index) as file, Image.open(file, formats=FORMATS) as image:  # reads the header only
            return min(image.size)
    except (BrokenImage, OSError):
        return 0
    except ValueError:  # a PNG with much text
        return opened(bytes(samples.encoded(index)), lambda image: min(image.size))
