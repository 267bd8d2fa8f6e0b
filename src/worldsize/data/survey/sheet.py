"""A contact sheet: some images of a split with their class names, as one PNG file or one HTML page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from worldsize import pages
from worldsize.config import wording
from worldsize.data.images.crops import fit
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import Samples
from worldsize.data.sampling.order import permute

_SIDE = 128  # side of an image on the sheet, pixels
_LINE = 18  # height of the text below it
_GAP = 8
_BACKGROUND, _TEXT, _BROKEN = (255, 255, 255), (30, 30, 30), (210, 210, 210)


@dataclass(frozen=True)
class _Cell:
    """An image of the sheet; None if it is broken."""

    name: str
    file: str
    image: Image.Image | None

    @property
    def broken(self) -> bool:
        return self.image is None

    @property
    def source(self) -> str:
        return data_uri(self.image)


def choose(labels: NDArray[np.int32], classes: int, count: int, seed: int) -> list[int]:
    """Choose at most ``count`` images, balanced over the classes. Returns indices, ordered by class.

    A pure function of its arguments. ``seed`` decides which images of a class are chosen, and which classes if there are
    more classes than images.
    """
    by_class = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    starts = np.concatenate([[0], ends[:-1]])
    # In each round, every class contributes its next image.
    order = permute(seed, 0, np.arange(classes), classes)
    chosen: list[int] = []
    for round_ in range(int((ends - starts).max(initial=0))):
        for label in order:
            n = int(ends[label] - starts[label])
            if round_ < n and len(chosen) < count:
                place = permute(seed, 1 + int(label), np.array([round_]), n)[0]
                chosen.append(int(by_class[starts[label] + place]))
        if len(chosen) == count:
            break
    return sorted(chosen, key=lambda index: (int(labels[index]), index))


def write(samples: Samples, path: Path, title: str, count: int, seed: int) -> int:
    """Write the sheet to ``path``, which ends in .png or .html. Returns the number of images on it."""
    # With several labels per image, the first one decides.
    labels = samples.labels.argmax(1).astype(np.int32) if samples.multilabel else np.asarray(samples.labels, np.int32)
    chosen = choose(labels, len(samples.classes), count, seed)
    cells = [
        _Cell(", ".join(samples.label_names(index)) or "(none)", samples.key(index), thumbnail(samples, index))
        for index in chosen
    ]
    if path.suffix.lower() == ".png":
        _png(cells).save(path)
    else:
        classes = wording.count(len(samples.classes), "class", "classes")
        about = f"{len(cells):,} of {wording.count(len(samples), 'training image')}; {classes}"
        path.write_text(pages.render("contact_sheet.html", title=title, about=about, cells=cells), "utf-8")
    return len(cells)


def thumbnail(samples: Samples, index: int) -> Image.Image | None:
    """The center of the image, small; None if it is broken."""
    try:
        return Image.fromarray(fit(samples.image(index), _SIDE, _SIDE))
    except BrokenImage:
        return None


def _png(cells: list[_Cell]) -> Image.Image:
    columns = math.ceil(math.sqrt(len(cells)))
    step = (_SIDE + _GAP, _SIDE + _LINE + _GAP)
    sheet = Image.new("RGB", (_GAP + columns * step[0], _GAP + math.ceil(len(cells) / columns) * step[1]), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    for i, cell in enumerate(cells):
        left, top = _GAP + i % columns * step[0], _GAP + i // columns * step[1]
        if cell.image is not None:
            sheet.paste(cell.image, (left, top))
        else:
            draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), _BROKEN)
            draw.text((left + 4, top + 4), "broken", _TEXT, font)
        # PIL does not measure several lines, or bytes outside UTF-8.
        draw.text((left, top + _SIDE + 2), _shortened(wording.printable(cell.name), draw, font), _TEXT, font)
    return sheet


def _shortened(name: str, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    if draw.textlength(name, font) <= _SIDE:
        return name
    while name and draw.textlength(name + "...", font) > _SIDE:
        name = name[:-1]
    return name + "..."


def data_uri(image: Image.Image | None) -> str:
    """A thumbnail as the source of an <img>; gray for a broken image."""
    return pages.data_uri(image or Image.new("RGB", (_SIDE, _SIDE), _BROKEN), "JPEG", quality=90)
