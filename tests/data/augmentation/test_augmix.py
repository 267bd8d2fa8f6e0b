"""AugMix: weighted sums of augmented copies, with and without the native library, and torchvision's for the same draws."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms import functional as F

from augmented import FILL, KINDS, applied, image
from worldsize.data.augmentation import operations
from worldsize.data.augmentation.operations import IDENTITY, INVERT, Op, Row, row
from worldsize.data.augmentation.policies.torchvision import AugMix
from worldsize.data.images import native

needs_native = pytest.mark.skipif(native.load() is None, reason="the native library was not built")
END = row(Op.MIX_END)
rng = np.random.default_rng(1)
# Of the 13 operations, in their order: which have no sign, and which have no magnitude either.
UNSIGNED, WITHOUT_MAGNITUDE = {9, 10, 11, 12}, {11, 12}


def begin(weight: float) -> Row:
    return row(Op.MIX_BEGIN, weight)


def add(weight: float) -> Row:
    return row(Op.MIX_ADD, weight)


CHANGES = [
    IDENTITY,
    INVERT,
    row(Op.BRIGHTNESS, 1.7),
    row(Op.ERASE, 1, 1, 2, 3, 9, 8, 7),
    row(Op.BLUR, 1.5),
    row(Op.EQUALIZE),
]


@needs_native
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.lists(st.sampled_from(CHANGES), max_size=3)), max_size=4),
    st.floats(0, 1),
    st.integers(4, 40),
    st.sampled_from(KINDS),
)
def test_any_sum_is_the_same_without_the_native_library(copies, own, size, kind):
    pixels, scale = image(kind, size), 1 / max(1, own + sum(weight for weight, _ in copies))
    rows = [
        INVERT,
        begin(own * scale),
        *(r for weight, changes in copies for r in (*changes, add(weight * scale))),
        END,
        INVERT,
    ]
    expected = applied(pixels, rows, way=operations.with_pillow)
    assert np.array_equal(applied(pixels, rows, way=native.load().augment), expected)


def test_a_sum_is_of_copies_of_the_image_it_began_with():
    pixels = image("noise", 24)
    rows = [INVERT, begin(0.125), INVERT, add(0.5), IDENTITY, add(0.25), row(Op.POSTERIZE, 0), add(0.125), END]
    begun = 255.0 - pixels
    assert np.array_equal(applied(pixels, rows), np.floor(0.375 * begun + 0.5 * pixels).astype(np.uint8))


@needs_native
@pytest.mark.parametrize(
    "rows",
    [
        [add(0.5), IDENTITY, IDENTITY],
        [END, IDENTITY, IDENTITY],
        [begin(0.5), add(0.5), IDENTITY],
        [begin(0.5), begin(0.5), END],
        [begin(0.5), END, END],
        [begin(0.6), add(0.5), END],
        [begin(-0.1), add(0.5), END],
        [begin(0.5), add(float("nan")), END],
    ],
)
def test_a_sum_without_an_end_or_with_too_much_weight_is_an_error(rows):
    pixels = image("noise", 8)[None]
    before = pixels.copy()
    with pytest.raises(ValueError, match="invalid"):
        native.load().augment(pixels, np.array([rows]), FILL)
    assert np.array_equal(pixels, before)


def through_pillow(tensor, name, magnitude, interpolation, fill, original=autoaugment._apply_op):
    """torchvision applies AugMix's operations to tensors, and those of its other policies to images of Pillow."""
    changed = original(F.to_pil_image(tensor[0]), name, magnitude, interpolation, fill)
    return F.pil_to_tensor(changed)[None]


# From 9 on, torchvision asks Pillow 13 for 0 bits, an error there.
@pytest.mark.parametrize(("mode", "severity"), [("nearest", 3), ("bilinear", 8), ("bicubic", 1)])
def test_augmix_is_torchvisions(mode, severity):
    size, ours = 40, AugMix(40, severity, mode)
    theirs = autoaugment.AugMix(severity, interpolation=InterpolationMode(mode))
    for _ in range(30):
        pixels, draws = image("noise", size), rng.random((1, ours.draws))
        own, copies = draws[0, 0], draws[0, 1:].reshape(3, 11)
        exponential = -np.log(1 - copies[:, 1])
        weights = [np.array([own, 1 - own]), exponential / exponential.sum()]
        values = []
        for copy in copies:
            depth = 1 + int(copy[0] * 3)
            values.append(depth)
            for name, magnitude, sign in copy[2:].reshape(3, 3)[:depth]:
                op = int(name * 13)
                # torchvision's order has the four operations on colors last.
                values.append((op - 5) + 9 if 5 <= op < 9 else op if op < 5 else op - 4)
                values += [int(magnitude * severity)] * (op not in WITHOUT_MAGNITUDE)
                values += [1 - int(sign * 2)] * (op not in UNSIGNED)
        with (
            mock.patch.object(theirs, "_sample_dirichlet", side_effect=[torch.tensor(w[None]).float() for w in weights]),
            mock.patch.object(torch, "randint", side_effect=[torch.tensor(value) for value in values]),
            mock.patch.object(autoaugment, "_apply_op", through_pillow),
        ):
            expected = np.asarray(theirs(Image.fromarray(pixels)))
        assert np.array_equal(applied(pixels, list(ours.program(draws)[0]), (0, 0, 0)), expected)


def test_the_weights_of_augmix_are_uniform():
    """Dirichlet(1, 1, 1) and Beta(1, 1) have means 1/3 and 1/2, and variances 1/18 and 1/12."""
    policy = AugMix(32, 3, "nearest")
    program = policy.program(rng.random((20_000, policy.draws)))
    own, copies = program[:, 0, 1], program[:, [4, 8, 12], 1]
    assert set(program[:, [4, 8, 12], 0].ravel()) == {Op.MIX_ADD} and set(program[:, -1, 0]) == {Op.MIX_END}
    assert np.allclose(own + copies.sum(1), 1, atol=1e-6)
    share = copies / (1 - own)[:, None]
    assert abs(own.mean() - 1 / 2) < 0.01 and abs(own.var() - 1 / 12) < 0.003
    assert np.allclose(share.mean(0), 1 / 3, atol=0.01) and np.allclose(share.var(0), 1 / 18, atol=0.003)
    depth = (program[:, 1:4, 0] != Op.IDENTITY).sum(1)
    assert np.allclose(np.bincount(depth, minlength=4)[1:] / len(depth), 1 / 3, atol=0.015)
