"""What programs pass to `worldsize.load` and its models: each mistake is one of the documented errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import worldsize
from worldsize.errors import DataError, UserError
from worldsize.inference.predict.model import Model

NO_PIXELS = r"must have at least one row and one column of pixels, not {}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.bmp")
    return tmp_path / "a.bmp"


def test_a_file_that_ends_too_soon_is_named_although_it_could_be_opened(small_model: Model, file: Path):
    file.write_bytes(file.read_bytes()[:500])
    for use in (small_model.predict, small_model.preprocess):
        with pytest.raises(DataError, match=rf"^image 0 \({re.escape(str(file))}\): OSError: .*truncated"):
            use(Image.open(file))


def test_an_image_that_was_closed_is_named(small_model: Model, file: Path):
    good, closed = Image.new("RGB", (20, 20)), Image.new("RGB", (20, 20))
    opened = Image.open(file)
    for image in (closed, opened):
        image.close()
    with pytest.raises(DataError, match=r"^image 1: ValueError: .*closed image"):
        small_model.predict_all([good, closed])
    with pytest.raises(DataError, match=rf"^image 1 \({re.escape(str(file))}\): "):
        small_model.predict_all([good, opened])


@pytest.mark.parametrize(
    ("image", "sides"),
    [
        (np.zeros((0, 5, 3), np.uint8), "0 x 5"),
        (np.zeros((5, 0, 3), np.uint8), "5 x 0"),
        (Image.new("RGB", (5, 0)), "0 x 5"),
    ],
)
def test_an_image_without_pixels_is_refused(small_model: Model, image: object, sides: str):
    with pytest.raises(UserError, match=NO_PIXELS.format(sides)):
        small_model.predict(image)


def test_a_tensor_of_images_without_pixels_is_refused(small_model: Model):
    with pytest.raises(UserError, match=NO_PIXELS.format("0 x 5")):
        small_model.logits(torch.zeros(2, 3, 0, 5, dtype=torch.uint8))


@pytest.mark.parametrize("device", [None, 0, torch.device("cpu")])
def test_a_device_must_be_text(small_run: Path, device: object):
    for load in (worldsize.load, lambda path, device: worldsize.Run(path).load(device)):
        with pytest.raises(UserError, match=re.escape(f"device={device!r}: must be text, such as 'cpu'")):
            load(small_run, device=device)


@pytest.mark.parametrize("images", [5, None, np.array(3)])
def test_what_holds_no_images_is_refused(small_model: Model, images: object):
    for use in (small_model.predict_all, small_model.logits):
        with pytest.raises(UserError, match=rf"a list or a tensor, not {type(images).__name__}$"):
            use(images)


def test_an_error_of_the_programs_own_images_stays_its_own(small_model: Model):
    with pytest.raises(TypeError, match="theirs"):
        small_model.logits(failing())


def failing():
    raise TypeError("theirs")
    yield


class OfBytes(os.PathLike):
    def __fspath__(self) -> bytes:
        return b"a.png"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", r"^'a\\x00b' cannot be the path of an image: embedded null"),
        ("\ud800", r"^'\\ud800' cannot be the path of an image: .*surrogates"),
        (OfBytes(), r"OfBytes object at .*> cannot be the path of an image: "),
        ("", "^an image's path is empty$"),
    ],
)
def test_what_cannot_be_a_path_is_refused(small_model: Model, path: object, message: str):
    for use in (small_model.predict, small_model.preprocess):
        with pytest.raises(UserError, match=message):
            use(path)
