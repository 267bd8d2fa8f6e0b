"""Crops: compared with torchvision, and batches compared with single images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import InterpolationMode
from torchvision.transforms import RandomResizedCrop as Reference
from torchvision.transforms import functional as F

from packing import encode
from worldsize.config.recipe import Data
from worldsize.data.images import native
from worldsize.data.images.crops import (
    CenterCrop,
    CornerCrop,
    PadCrop,
    RandomResizedCrop,
    centered_cuts,
    crop_size,
    crop_sizes,
    evaluation_crop,
    fit,
    middle,
    random_boxes,
    training_crop,
)
from worldsize.data.images.pillow import LONGEST, BrokenImage, decode
from worldsize.data.loading.prepare import Preparation
from worldsize.data.sampling.random_numbers import Use, uniforms

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SIDE = st.integers(1, 600)
SIZES = [(1, 1), (7, 3), (31, 33), (64, 48), (101, 100), (224, 224), (255, 257), (500, 375), (375, 501)]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def boxes_of(sizes: list[tuple[int, int]], draws: np.ndarray, area=AREA, ratio=RATIO) -> np.ndarray:
    widths, heights = np.array(sizes).T
    return random_boxes(heights, widths, draws, area, ratio)


def first_that_fits(width, height, draws, area, ratio):
    for u_area, u_ratio, u_top, u_left in draws.reshape(10, 4).tolist():
        target = width * height * (area[0] + (area[1] - area[0]) * u_area)
        aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u_ratio)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(u_top * (height - h + 1)), math.floor(u_left * (width - w + 1)), h, w
    return None


@given(
    SIDE, SIDE, st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), st.floats(0.2, 1), st.floats(1, 5), st.integers(0, 2**32)
)
def test_a_box_lies_inside_and_keeps_to_the_area_and_ratio(width, height, areas, low, high, seed):
    area, ratio = (min(areas), max(areas)), (low, high)
    draws = np.random.default_rng(seed).random((1, 40))
    top, left, h, w = boxes_of([(width, height)], draws, area, ratio)[0].tolist()
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h >= 1
    assert w >= 1
    expected = first_that_fits(width, height, draws, area, ratio)
    if expected is None:
        return
    assert (top, left, h, w) == expected
    pixels, slack = width * height, 1 + 1e-9
    assert (w - 0.5) * (h - 0.5) <= area[1] * pixels * slack
    assert (w + 0.5) * (h + 0.5) * slack >= area[0] * pixels
    assert (w - 0.5) / (h + 0.5) <= ratio[1] * slack
    assert (w + 0.5) / (h - 0.5) * slack >= ratio[0]


@given(st.integers(1, 40), st.integers(10, 60), st.booleans(), st.integers(0, 2**32))
def test_if_no_attempt_fits_the_box_is_torchvisions_fallback(short, factor, tall, seed):
    width, height = (short, short * factor) if tall else (short * factor, short)
    draws = np.random.default_rng(seed).random((1, 40))
    ours = boxes_of([(width, height)], draws, area=(0.9, 1.0))[0]
    assert ours.tolist() == list(Reference.get_params(Image.new("RGB", (width, height)), [0.9, 1.0], list(RATIO)))


def test_a_batch_of_boxes_equals_one_at_a_time():
    sizes = [*SIZES, (10, 900), (900, 10)]
    draws = uniforms(0, Use.AUGMENT, 0, np.arange(len(sizes)), 40)
    together = boxes_of(sizes, draws)
    for i, size in enumerate(sizes):
        np.testing.assert_array_equal(together[i], boxes_of([size], draws[i : i + 1])[0])


def test_draws_at_both_ends_stay_inside():
    for value in (0.0, 1 - 2.0**-32):
        for size in SIZES:
            top, left, h, w = boxes_of([size], np.full((1, 40), value))[0].tolist()
            assert top >= 0
            assert left >= 0
            assert top + h <= size[1]
            assert left + w <= size[0]


def test_boxes_are_distributed_as_torchvisions():
    n, width, height = 4000, 500, 375
    ours = boxes_of([(width, height)] * n, uniforms(0, Use.AUGMENT, 0, np.arange(n), 41)[:, 1:])
    image = Image.new("RGB", (width, height))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = np.array([Reference.get_params(image, list(AREA), list(RATIO)) for _ in range(n)])
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        assert stats.ks_2samp(measure(ours), measure(theirs)).pvalue > 0.01


MODES = [(False, InterpolationMode.BILINEAR), (True, InterpolationMode.BICUBIC)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [8, 33, 224])
def test_random_resized_pixels_equal_torchvisions(size, side):
    image = noise(*size)
    for bicubic, mode in MODES:
        crop = RandomResizedCrop(side, False, AREA, RATIO, bicubic)
        for draws in uniforms(0, Use.AUGMENT, 0, np.arange(5), crop.draws):
            top, left, h, w = boxes_of([size], draws[None, 1:])[0].tolist()
            theirs = F.resized_crop(image, top, left, h, w, [side, side], mode, antialias=True)
            np.testing.assert_array_equal(crop.one(image, draws), np.asarray(theirs))


@given(st.integers(1, 90), st.integers(1, 90), st.integers(8, 70), st.integers(0, 30))
def test_center_pixels_equal_torchvisions(width, height, side, margin):
    assume(max(width, height) <= 40 * min(width, height))
    image = noise(width, height)
    for bicubic, mode in MODES:
        ours = CenterCrop(side, False, side + margin, bicubic).one(image, np.zeros(1))
        resized = F.resize(image, side + margin, mode, antialias=True)
        np.testing.assert_array_equal(ours, np.asarray(F.center_crop(resized, [side, side])))


@pytest.mark.parametrize("size", SIZES)
def test_imagenet_evaluation_pixels_equal_torchvisions(size):
    image = noise(*size)
    theirs = F.center_crop(F.resize(image, 256, InterpolationMode.BILINEAR, antialias=True), [224, 224])
    np.testing.assert_array_equal(evaluation_crop(Data()).one(image, np.zeros(1)), np.asarray(theirs))


@pytest.mark.parametrize("size", [(5, 9), (6, 9), (8, 3), (7, 7)])
@pytest.mark.parametrize("side", [9, 10, 11, 12])
def test_an_image_smaller_than_the_crop_is_centered_on_black(size, side):
    width, height = size
    cut = fit(Image.new("RGB", size, "white"), min(size), side)
    assert cut.shape == (side, side, 3)
    rows, columns = (np.flatnonzero(cut[..., 0].any(axis=axis)) for axis in (1, 0))
    assert (len(rows), len(columns)) == (height, width)
    assert abs(rows[0] - (side - 1 - rows[-1])) <= 1
    assert abs(columns[0] - (side - 1 - columns[-1])) <= 1
    assert cut.sum() == width * height * 3 * 255


@pytest.mark.parametrize("crop", [PadCrop(16, True, 4), CenterCrop(16, True, 16), RandomResizedCrop(16, True, AREA, RATIO)])
def test_the_first_draw_only_flips(crop):
    image = noise(16, 16)
    draws = uniforms(0, Use.AUGMENT, 0, [0], crop.draws)[0]
    draws[0] = 0.5
    straight = crop.one(image, draws)
    draws[0] = np.nextafter(0.5, 0)
    np.testing.assert_array_equal(crop.one(image, draws), straight[:, ::-1])
    crop.flip = False
    np.testing.assert_array_equal(crop.one(image, draws), straight)


def test_without_pillows_limit_a_center_crop_has_its_own(monkeypatch):
    crop, image = CenterCrop(32, False, 64), noise(50, 40)
    expected = crop.one(image, np.zeros(1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    np.testing.assert_array_equal(crop.one(image, np.zeros(1)), expected)
    with pytest.raises(BrokenImage, match="would become"):
        crop.one(Image.new("RGB", (60000, 1)), np.zeros(1))


@pytest.mark.parametrize("turned", [False, True])
def test_of_an_image_too_long_to_resize_the_middle_is_used(turned):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 10_000, 3), dtype=np.uint8)

    def cropped(strip: np.ndarray, crop) -> np.ndarray:
        image = Image.fromarray(np.ascontiguousarray(strip.transpose(1, 0, 2) if turned else strip))
        return crop.one(image, np.zeros(crop.draws))

    for crop in (CenterCrop(300, False, 400), PadCrop(400, False, 4), CornerCrop(300, 400, True, True)):
        np.testing.assert_array_equal(cropped(pixels, crop), cropped(pixels[:, 4992:5008], crop))


@given(st.integers(1, 70_000), st.integers(1, 70_000), st.integers(1, 13_377))
def test_every_image_that_decodes_has_a_part_that_can_be_resized(height, width, resize):
    height, width = min(height, LONGEST * width), min(width, LONGEST * height)
    top, left, rows, columns = middle(height, width, resize)
    assert 0 <= top <= height - rows and 0 <= left <= width - columns
    assert abs(2 * top - (height - rows)) <= 1 and abs(2 * left - (width - columns)) <= 1
    assert centered_cuts(np.array([rows]), np.array([columns]), resize, 1)[0, 2] == rows
    assert min(rows, columns) == min(height, width)
    if resize <= 256:
        assert (rows, columns) == (height, width)


@given(st.integers(8, 20), st.integers(0, 5), st.booleans(), st.integers(1, 12), st.integers(0, 2**32))
def test_padding_a_batch_equals_one_at_a_time(side, padding, flip, n, seed):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
    crop = PadCrop(side, flip, padding)
    draws = random.random((n, crop.draws))
    together = crop.batch(images, draws)
    for i in range(n):
        np.testing.assert_array_equal(together[i], crop.one(Image.fromarray(images[i]), draws[i]))


@pytest.mark.parametrize("flip", [False, True])
def test_center_crop_of_a_batch_equals_one_at_a_time_and_keeps_its_input(flip):
    images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    before = images.copy()
    crop = CenterCrop(16, flip, 16)
    draws = uniforms(0, Use.AUGMENT, 0, np.arange(20), crop.draws)
    together = crop.batch(images, draws)
    for i in range(20):
        np.testing.assert_array_equal(together[i], crop.one(Image.fromarray(images[i]), draws[i]))
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("crop", [PadCrop(16, True, 4), CenterCrop(16, True, 16), RandomResizedCrop(16, True, AREA, RATIO)])
def test_images_of_another_size_are_left_to_one_at_a_time(crop):
    assert not crop.crops_batches(17, 16)


def test_pad_crop_uses_every_offset_equally_often():
    image = noise(8, 8)
    padded = np.pad(np.asarray(image), ((2, 2), (2, 2), (0, 0)))
    crop = PadCrop(8, False, 2)
    draws = uniforms(0, Use.AUGMENT, 0, np.arange(5000), crop.draws)
    cut = crop.batch(np.repeat(np.asarray(image)[None], len(draws), axis=0), draws)
    windows = [padded[top : top + 8, left : left + 8].tobytes() for top in range(5) for left in range(5)]
    counts = [0] * 25
    for pixels in cut:
        counts[windows.index(pixels.tobytes())] += 1
    assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("crop", [PadCrop(8, True, 0), CenterCrop(8, True, 8)])
def test_about_half_of_the_images_are_flipped(crop):
    image = np.asarray(noise(8, 8))
    n = 4000
    cut = crop.batch(np.repeat(image[None], n, axis=0), uniforms(0, Use.AUGMENT, 0, np.arange(n), crop.draws))
    straight = (cut == image).all(axis=(1, 2, 3)).sum()
    flipped = (cut == image[:, ::-1]).all(axis=(1, 2, 3)).sum()
    assert straight + flipped == n
    assert stats.binomtest(int(flipped), n).pvalue > 0.001


def test_the_recipe_chooses_the_crop():
    data = Data(train_crop_size=32, val_resize_size=40, val_crop_size=36, padding=3, crop_area=(0.2, 0.9), flip=False)
    random = training_crop(data, data.train_crop_size)
    assert isinstance(random, RandomResizedCrop)
    assert (random.size, random.flip, random.area) == (32, False, (0.2, 0.9))
    pad = training_crop(data.model_copy(update={"train_crop": "pad", "flip": True}), data.train_crop_size)
    assert isinstance(pad, PadCrop)
    assert (pad.size, pad.flip, pad.padding) == (32, True, 3)
    none = training_crop(data.model_copy(update={"train_crop": "none"}), data.train_crop_size)
    assert isinstance(none, CenterCrop)
    assert (none.size, none.resize) == (32, 32)
    assert not random.bicubic and training_crop(data.model_copy(update={"interpolation": "bicubic"}), 32).bicubic
    evaluation = evaluation_crop(data.model_copy(update={"flip": True}))
    assert isinstance(evaluation, CenterCrop)
    assert (evaluation.size, evaluation.resize, evaluation.flip) == (36, 40, False)


def ffcv(epoch: int, low: int, high: int, start: int, end: int) -> int:
    """get_resolution of ffcv-imagenet's train_imagenet.py, restated."""
    if epoch <= start:
        return low
    if epoch >= end:
        return high
    return int(np.round(np.interp([epoch], [start, end], [low, high])[0] / 32)) * 32


@pytest.mark.parametrize(("start", "end"), [(11, 13), (17, 20), (23, 27), (29, 34), (41, 48), (65, 76)])
def test_progressive_resizing_has_ffcvs_sizes(start, end):
    data = Data(train_crop_size=192, train_crop_sizes=(160, 192), train_crop_epochs=(start, end))
    sizes = [crop_size(data, epoch) for epoch in range(90)]
    assert sizes == [ffcv(epoch, 160, 192, start, end) for epoch in range(90)]
    assert set(sizes) == {160, 192}


def test_progressive_resizing_rounds_to_the_step():
    data = Data(train_crop_size=224, train_crop_sizes=(112, 112, 224), train_crop_epochs=(0, 10, 20), train_crop_step=4)
    assert [crop_size(data, epoch) for epoch in (0, 10, 11, 15, 20, 30)] == [112, 112, 124, 168, 224, 224]
    assert crop_size(Data(), 7) == 224
    assert crop_sizes(data, 13) == {112, 124, 136}
    assert crop_sizes(Data(), 13) == {224}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_crop_sizes": (160, 192)}, "must have as many"),
        ({"train_crop_sizes": (160, 192), "train_crop_epochs": (5, 5), "train_crop_size": 192}, "increasing"),
        ({"train_crop_sizes": (160, 192), "train_crop_epochs": (5, 6)}, "set it to 192"),
    ],
)
def test_sizes_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Data(**settings)


@pytest.mark.skipif(native.load() is None, reason="needs the native decoder")
def test_the_native_decoder_pads_and_crops_square_images():
    """Of others, it would also show what is outside of the square."""
    crop, preparation = PadCrop(32, True, 4), Preparation()
    images = [encode(noise(side, 32), "JPEG") for side in (32, 40)] * 20
    images += [encode(noise(48, 48), "JPEG")] * 20
    draws = np.random.default_rng(1).random((len(images), crop.draws))
    out = np.zeros((len(images), 32, 32, 3), np.uint8)
    done = preparation._with_native(crop, images, draws, out)
    assert done.tolist() == [True, False] * 20 + [True] * 20
    assert preparation.fill(crop, images, draws, out) == [None] * len(images)
    assert np.array_equal(out, [crop.one(decode(image), own) for image, own in zip(images, draws, strict=True)])
    assert (out[:, 0] == 0).all((1, 2)).any() and (out[:, :, -1] == 0).all((1, 2)).any()
