"""`Preparation`: the native decoder and Pillow give the same pixels and report the same images as broken."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from worldsize.config.recipe import Data, Recipe
from worldsize.data.images import native
from worldsize.data.images.crops import CenterCrop, PadCrop, RandomResizedCrop
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.loading import build
from worldsize.data.loading.loader import Loader
from worldsize.data.loading.prepare import Preparation
from worldsize.data.samples import EncodedSamples
from worldsize.data.sampling.random_numbers import Use, uniforms
from worldsize.distributed.batch_plan import BatchPlan, plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World

CROPS = [
    RandomResizedCrop(48, True, (0.08, 1.0), (3 / 4, 4 / 3)),
    CenterCrop(48, False, 64),
    CenterCrop(96, True, 32),  # larger than the image: black border
    PadCrop(32, True, 4),
]

needs_native = pytest.mark.skipif(native.load() is None, reason=f"no native decoder: {native.reason_missing()}")


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth image with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return Image.fromarray(np.clip(np.asarray(coarse) + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8))


def sample_images() -> dict[str, bytes | BrokenImage | np.ndarray]:
    jpeg = encoded(photo(120, 90), quality=85)
    return {
        "plain": jpeg,
        "4:2:0": encoded(photo(121, 77), quality=90, subsampling=2),
        "progressive": encoded(photo(97, 130), progressive=True),
        "grey": encoded(photo(64, 50).convert("L")),
        "CMYK": encoded(photo(64, 50).convert("CMYK")),
        "a PNG": encoded(photo(50, 64), "PNG"),
        "one pixel": encoded(photo(1, 1)),
        "wide": encoded(photo(400, 9)),
        "truncated": jpeg[: len(jpeg) // 2],
        "without its last bytes": jpeg[:-2],
        "flipped bits": jpeg[:500] + bytes(b ^ 0x55 for b in jpeg[500:520]) + jpeg[520:],
        "text": b"this is no image",
        "empty": b"",
        "unreadable": BrokenImage("cannot be read: No such file or directory"),
        "pixels": np.asarray(photo(70, 60)),
    }


def fill(crop, images: list | np.ndarray, way: str, monkeypatch) -> tuple[np.ndarray, list[str | None]]:
    preparation = Preparation()
    if way == "Pillow":
        monkeypatch.setattr(preparation, "_native", None)
    out = np.full((len(images), crop.size, crop.size, 3), 7, np.uint8)
    faults = preparation.fill(crop, images, uniforms(3, Use.AUGMENT, 0, np.arange(len(images)), crop.draws), out)
    return out, faults


@needs_native
@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: f"{type(crop).__name__}-{crop.size}")
def test_both_give_the_same_pixels_and_the_same_faults(crop, monkeypatch):
    images = sample_images()
    by_native, reasons = fill(crop, [*images.values()], "native", monkeypatch)
    by_pillow, expected = fill(crop, [*images.values()], "Pillow", monkeypatch)
    assert reasons == expected
    broken = {name for name, reason in zip(images, reasons, strict=True) if reason is not None}
    assert broken >= {"truncated", "text", "empty", "unreadable"} and "plain" not in broken
    for name, ours, theirs in zip(images, by_native, by_pillow, strict=True):
        if name not in broken:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@needs_native
def test_a_center_crop_of_too_many_pixels_is_broken_by_both(monkeypatch):
    crop, images = CenterCrop(48, False, 33000), [encoded(photo(65500, 1))]
    faults = fill(crop, images, "native", monkeypatch)[1]
    assert faults[0] is not None and "65500 x 1 would become" in faults[0]
    assert faults == fill(crop, images, "Pillow", monkeypatch)[1]


@needs_native
def test_images_that_are_all_pixels_are_cut_natively(monkeypatch):
    images = [np.asarray(photo(64, 64, seed)) for seed in range(3)]
    by_native, faults = fill(CROPS[0], images, "native", monkeypatch)
    np.testing.assert_array_equal(by_native, fill(CROPS[0], images, "Pillow", monkeypatch)[0])
    assert faults == [None] * 3


@needs_native
@pytest.mark.parametrize("crop", [*CROPS, CenterCrop(32, True, 32)], ids=lambda crop: f"{type(crop).__name__}-{crop.size}")
def test_images_of_one_size_have_the_same_pixels_in_an_array(crop, monkeypatch):
    images = [np.asarray(photo(32, 32, seed)) for seed in range(9)]
    one_by_one, faults = fill(crop, images, "Pillow", monkeypatch)
    assert faults == [None] * 9
    for way in ("native", "Pillow"):
        together, faults = fill(crop, np.array(images), way, monkeypatch)
        np.testing.assert_array_equal(together, one_by_one, err_msg=way)
        assert faults == [None] * 9


class Encoded(EncodedSamples):
    """Images in a list."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images
        self.labels = np.arange(len(images), dtype=np.int32)
        self.classes = tuple(map(str, range(len(images))))
        self.fingerprint = ""

    def name(self, index: int) -> str:
        return f"#{index}"

    path = name

    def length(self, index: int) -> int:
        return len(self.images[index])

    def encoded(self, index: int) -> bytes:
        return self.images[index]


@needs_native
@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: f"{type(crop).__name__}-{crop.size}")
def test_an_epoch_is_the_same_by_both_and_with_any_threads(crop, monkeypatch):
    broken = [p for p in sample_images().values() if isinstance(p, bytes)]
    samples = Encoded([encoded(photo(60 + i, 70 - i, i), quality=70 + i) for i in range(20)] + broken)

    def epoch(workers: int) -> list:
        loader = Loader(samples, crop, seed=5, workers=workers, prefetch=3, pin=False)
        batches = list(loader.training(BatchPlan(11, 11, 1), 0, 2)) + list(loader.evaluation(0, 1, 7))
        loader.close()
        return batches

    reference = epoch(1)
    for other in (epoch(4), without_native(monkeypatch, lambda: epoch(2))):
        for a, b in zip(other, reference, strict=True):
            assert torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels)


def without_native(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        return function()


@pytest.mark.parametrize("way", ["native", "Pillow"])
def test_twenty_epochs_take_no_more_memory_than_five(monkeypatch, way):
    if way == "Pillow":
        monkeypatch.setattr(native, "load", lambda: None)
    samples = Encoded([encoded(photo(200, 150, i % 5)) for i in range(96)])
    loader = Loader(
        samples, RandomResizedCrop(64, True, (0.08, 1.0), (3 / 4, 4 / 3)), seed=0, workers=2, prefetch=2, pin=False
    )
    resident = []
    for epoch in range(20):
        for _ in loader.training(BatchPlan(32, 32, 1), 0, epoch):
            pass
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    loader.close()
    # The decoded images of one epoch have 8.6 MB; the allocator's own caches were seen to grow by 4.2 MB.
    assert max(resident[10:]) - max(resident[:5]) < 8e6


@pytest.mark.parametrize("crop", [CROPS[0], CROPS[1]], ids=["training", "evaluation"])
@pytest.mark.parametrize("rank", [0, 1])
def test_scaling_without_the_native_decoder_is_logged_once(monkeypatch, caplog, crop, rank):
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "reason_missing", lambda: "it was not built")
    recipe = Recipe(data=Data(dct_scaling=True, workers=1), global_batch=64)
    world = World(RankInfo("none", rank, 2, rank, 2), torch.device("cpu"), None, 1)
    samples = Encoded([encoded(photo(9, 9))])
    if crop is CROPS[0]:
        build.train_loader(recipe, samples, plan(recipe, 2), world).close()
    else:
        build.val_loader(recipe, samples, world).close()
    message = "data.dct_scaling has no effect without the native decoder: it was not built"
    assert caplog.messages == ([message] if crop is CROPS[0] and rank == 0 else [])


@needs_native
def test_scaling_changes_only_large_images_and_only_slightly(monkeypatch):
    crop = RandomResizedCrop(48, False, (0.9, 1.0), (1.0, 1.0))
    draws = uniforms(0, Use.AUGMENT, 0, np.arange(2), crop.draws)
    images = [encoded(photo(90, 90)), encoded(photo(800, 800))]
    exact, scaled = (np.zeros((2, 48, 48, 3), np.uint8) for _ in range(2))
    Preparation().fill(crop, images, draws, exact)
    Preparation(scaling=True).fill(crop, images, draws, scaled)
    np.testing.assert_array_equal(scaled[0], exact[0])
    difference = np.abs(scaled[1].astype(int) - exact[1]).mean()
    assert 0 < difference < 1
