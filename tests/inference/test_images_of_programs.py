"""What programs pass to `worldsize.load` and its models: each mistake is one of the documented errors."""

from __future__ import annotations

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
