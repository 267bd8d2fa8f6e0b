"""Augmentation: operations equal Pillow's, policies equal torchvision's and timm's for the same draws."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms import ColorJitter as TorchvisionJitter
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms import RandomErasing as TorchvisionErasing
from torchvision.transforms import functional as F

from augmented import FILL, KINDS, applied, image
from worldsize.config.recipe import Augment
from worldsize.data.augmentation import apply, operations
from worldsize.data.augmentation.operations import Op
from worldsize.data.augmentation.policies import build
from worldsize.data.augmentation.policies.base import Chain
from worldsize.data.augmentation.policies.simple import ColorJitter, Cutout, Lighting, RandomErasing
from worldsize.data.augmentation.policies.symmetries import QuarterTurns, VerticalFlip
from worldsize.data.augmentation.policies.three_augment import ThreeAugment
from worldsize.data.augmentation.policies.timm import TimmRandAugment
from worldsize.data.augmentation.policies.torchvision import AutoAugment, RandAugment, TrivialAugmentWide
from worldsize.data.images import native

needs_native = pytest.mark.skipif(native.load() is None, reason="the native library was not built")
INTERPOLATIONS = ["nearest", "bilinear", "bicubic"]
rng = np.random.default_rng(1)


def rows_of_every_operation(size: int) -> list[operations.Row]:
    found = []
    for mode in INTERPOLATIONS:
        found += [operations.rotate(degrees, size, mode) for degrees in (0, 90, 180, 270, -30, 17.3, 134.9)]
        found += [operations.shear_x(f, mode) for f in (-0.99, 0.3)] + [operations.shear_y(f, mode) for f in (-0.3, 0.99)]
        found += [operations.translate(dx, dy, mode) for dx, dy in ((3, 0), (0, -5), (1.37, 0), (0, -100.1), (1e3, 0))]
    for op in (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS):
        found += [operations.row(op, factor) for factor in (0, 0.01, 0.1, 0.5, 0.999, 1, 1.3, 1.99, 7.5)]
    found += [operations.row(Op.POSTERIZE, bits) for bits in range(9)]
    found += [operations.row(Op.SOLARIZE, threshold) for threshold in (0, 0.5, 77, 128.2, 255, 256)]
    found += [operations.row(Op.SOLARIZE_ADD, added, 128) for added in (0, 55, 110, 128, 255)]
    found += [operations.row(Op.HUE, shift) for shift in (0, 1, 12, 128, 255)]
    found += [operations.row(Op.BLUR, sigma) for sigma in (0, 0.01, 0.1, 0.7, 1.4142, 1.5, 1.999, 2)]
    found += [operations.row(Op.SHIFT, *color) for color in ((0, 0, 0), (10, -20, 3), (-255, 255, 128))]
    found += [operations.row(Op.ERASE, 1, 2, 3, 4, 9, 8, 7), operations.row(Op.ERASE, 0, 0, size, size, 1, 2, 3)]
    return [*found, operations.row(Op.AUTOCONTRAST), operations.row(Op.EQUALIZE), operations.IDENTITY]


@needs_native
@pytest.mark.parametrize("size", [6, 32, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_has_pillows_pixels(kind, size):
    pixels = image(kind, size)
    for row in rows_of_every_operation(size):
        expected = applied(pixels, [row], way=operations.with_pillow)
        assert np.array_equal(applied(pixels, [row], way=native.load().augment), expected), row


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_is_pillows(bits):
    pixels = image("noise", 16)
    expected = np.asarray(ImageOps.posterize(Image.fromarray(pixels), bits))
    assert np.array_equal(applied(pixels, [operations.row(Op.POSTERIZE, bits)]), expected)


@needs_native
def test_all_colors_have_pillows_hue_and_gray():
    colors = np.stack(np.meshgrid(*[np.arange(0, 256, 3)] * 3, indexing="ij"), -1).reshape(-1, 3).astype(np.uint8)
    side = int(len(colors) ** 0.5)
    pixels = colors[: side * side].reshape(side, side, 3)
    for row in (operations.row(Op.HUE, 40), operations.row(Op.COLOR, 0.3), operations.row(Op.COLOR, 1.7)):
        expected = applied(pixels, [row], way=operations.with_pillow)
        assert np.array_equal(applied(pixels, [row], way=native.load().augment), expected)


@needs_native
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(INTERPOLATIONS), st.lists(st.floats(-3, 3), min_size=6, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 40),
)
def test_any_affine_map_has_pillows_pixels(maps, size):
    pixels = image("noise", size)
    rows = [operations.row(Op[f"AFFINE_{mode.upper()}"], *values) for mode, values in maps]
    expected = applied(pixels, rows, way=operations.with_pillow)
    assert np.array_equal(applied(pixels, rows, way=native.load().augment), expected)


@needs_native
@settings(max_examples=300, deadline=None)
@given(st.floats(0, 2), st.integers(1, 40), st.sampled_from(KINDS))
def test_any_blur_has_pillows_pixels(sigma, size, kind):
    pixels, row = image(kind, size), operations.row(Op.BLUR, sigma)
    expected = applied(pixels, [row], way=operations.with_pillow)
    assert np.array_equal(applied(pixels, [row], way=native.load().augment), expected)


@needs_native
@pytest.mark.parametrize(
    "row",
    [
        operations.row(Op.ERASE, 0, 0, 9, 1, 0, 0, 0),
        operations.row(Op.ERASE, -1, 0, 1, 1, 0, 0, 0),
        operations.row(Op.ERASE, 0, 0, 1, 1, 0, 0, 256),
        operations.row(Op.POSTERIZE, 9),
        operations.row(Op.HUE, -1),
        operations.row(Op.BRIGHTNESS, float("nan")),
        operations.row(Op.AFFINE_NEAREST, 1e9, 0, 0, 0, 1, 0),
        operations.row(Op.AFFINE_BILINEAR, float("inf"), 0, 0, 0, 1, 0),
        operations.row(Op.SHIFT, 0, 256, 0),
        operations.row(Op.SHIFT, 0.5, 0, 0),
        operations.row(Op.BLUR, -0.1),
        operations.row(Op.BLUR, 2.01),
        operations.row(Op.BLUR, float("nan")),
        (20.0, *[0.0] * 7),
        (0.5, *[0.0] * 7),
    ],
)
def test_an_invalid_row_is_an_error_and_changes_nothing(row):
    pixels = image("noise", 8)[None]
    before = pixels.copy()
    with pytest.raises(ValueError, match="invalid"):
        native.load().augment(pixels, np.array([[operations.INVERT, row]]), FILL)
    assert np.array_equal(pixels, before)


def chosen(*pairs: tuple[int, int]) -> list[float]:
    """Draws that choose item i of n, for pairs (i, n)."""
    return [(i + 0.5) / n for i, n in pairs]


def torchvision_draws(*values: int):
    """`torch.randint` returns these values in turn."""
    return mock.patch.object(torch, "randint", side_effect=[torch.tensor(value) for value in values])


MODES = {"nearest": InterpolationMode.NEAREST, "bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
UNSIGNED = {0, 10, 11, 12, 13}  # Identity, Posterize, Solarize, AutoContrast, Equalize


@pytest.mark.parametrize("mode", INTERPOLATIONS)
@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
def test_randaugment_is_torchvisions(magnitude, mode):
    size, pixels = 40, image("noise", 40)
    ours = RandAugment(size, 2, magnitude, mode)
    theirs = autoaugment.RandAugment(2, magnitude, interpolation=MODES[mode])
    for first in range(14):
        second, sign = (first * 5 + 3) % 14, first % 2
        values = [v for op in (first, second) for v in ([op] if op in UNSIGNED else [op, 1 - sign])]
        with torchvision_draws(*values):
            expected = np.asarray(theirs(Image.fromarray(pixels)))
        program = ours.program(np.array([chosen((first, 14), (sign, 2), (second, 14), (sign, 2))]))
        assert np.array_equal(applied(pixels, program[0], (0, 0, 0)), expected), (first, second)


@pytest.mark.parametrize("mode", INTERPOLATIONS)
def test_trivialaugment_is_torchvisions(mode):
    pixels = image("noise", 40)
    ours, theirs = TrivialAugmentWide(40, mode), autoaugment.TrivialAugmentWide(interpolation=MODES[mode])
    for op in range(14):
        for magnitude in (0, 1, 10, 23, 30):
            for sign in (0, 1):
                values = [op] + [magnitude] * (op not in {0, 12, 13}) + [1 - sign] * (op not in UNSIGNED)
                with torchvision_draws(*values):
                    expected = np.asarray(theirs(Image.fromarray(pixels)))
                program = ours.program(np.array([chosen((op, 14), (magnitude, 31), (sign, 2))]))
                assert np.array_equal(applied(pixels, program[0], (0, 0, 0)), expected), (op, magnitude, sign)


@pytest.mark.parametrize("dataset", ["imagenet", "cifar10"])
def test_autoaugment_is_torchvisions(dataset):
    pixels = image("noise", 33)
    ours, theirs = AutoAugment(33, dataset, "nearest"), autoaugment.AutoAugment(autoaugment.AutoAugmentPolicy(dataset))
    for pair in range(25):
        for probs, signs in (([0.05, 0.05], [0, 1]), ([0.35, 0.65], [1, 0]), ([0.95, 0.15], [1, 1])):
            params = pair, torch.tensor(probs), torch.tensor(signs)
            with mock.patch.object(theirs, "get_params", return_value=params):
                expected = np.asarray(theirs(Image.fromarray(pixels)))
            draws = np.array([chosen((pair, 25)) + probs + chosen(*[(sign, 2) for sign in signs])])
            assert np.array_equal(applied(pixels, ours.program(draws)[0], (0, 0, 0)), expected), pair


@pytest.mark.parametrize("mode", INTERPOLATIONS)
@pytest.mark.parametrize("level", [0, 0.3, 4.99, 9, 9.99])  # at 10, timm asks Pillow 13 for 0 bits, an error there
def test_timm_randaugment_is_timms(level, mode):
    theirs = pytest.importorskip("timm.data.auto_augment", reason="timm is not installed")
    pixels = image("noise", 40)
    hparams = {"translate_const": 18, "img_mean": FILL, "interpolation": Image.Resampling[mode.upper()]}
    ours = TimmRandAugment(40, 1, level, 0.0, mode)
    names = theirs._RAND_INCREASING_TRANSFORMS
    assert len(names) == 15
    for index, name in enumerate(names):
        op = theirs.AugmentOp(name, prob=0.5, magnitude=level, hparams=hparams)
        for sign in (0, 1):
            for chance in (0.2, 0.8):
                with mock.patch.object(theirs.random, "random", side_effect=[chance, 0.75 if sign == 0 else 0.25]):
                    expected = np.asarray(op(Image.fromarray(pixels)))
                draws = np.array([[(index + 0.5) / 15, chance, 0.5, 0.5, (sign + 0.5) / 2]])
                assert np.array_equal(applied(pixels, ours.program(draws)[0]), expected), (name, sign, chance)


def test_timm_levels_are_normally_distributed():
    policy = TimmRandAugment(40, 1, 5, 0.5, "nearest")
    draws = rng.random((20_000, 5))
    draws[:, 0], draws[:, 1], draws[:, 4] = chosen((9, 15))[0], 0, 0.9  # brightness, upwards
    levels = (policy.program(draws)[:, 0, 1] - 1) / 0.9 * 10
    assert abs(levels.mean() - 5) < 0.02
    assert abs(levels.std() - 0.5) < 0.02


def test_3_augment_is_timms():
    theirs = pytest.importorskip("timm.data.auto_augment", reason="timm is not installed")
    pixels = image("noise", 40)
    choices = [ops for (ops,) in theirs.auto_augment_policy_3a({})]  # solarize, gray, blur
    for index, op in enumerate([choices[1], choices[0], choices[2]]):
        for u in (0.0, 0.3, 0.99):
            with mock.patch.object(theirs.random, "uniform", lambda low, high, u=u: low + (high - low) * u):
                expected = np.asarray(op(Image.fromarray(pixels)))
            draws = np.array([[(index + 0.5) / 3, u]])
            assert np.array_equal(applied(pixels, ThreeAugment().program(draws)[0]), expected), (op.name, u)


def test_color_jitter_is_torchvisions():
    pixels, strengths = image("noise", 40), (0.4, 0.3, 0.2, 0.1)
    ours, theirs = ColorJitter(strengths), TorchvisionJitter(*strengths)
    for _ in range(20):
        draws = rng.random((1, 8))
        ranges = [theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue]
        factors = [low + (high - low) * u for (low, high), u in zip(ranges, draws[0, 4:], strict=True)]
        expected = Image.fromarray(pixels)
        for which in np.argsort(draws[0, :4]):
            change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)[which]
            expected = change(expected, factors[which])
        assert np.array_equal(applied(pixels, ours.program(draws)[0]), np.asarray(expected))


def test_color_jitter_leaves_out_what_has_no_strength():
    program = ColorJitter((0.0, 0.0, 0.3, 0.0)).program(rng.random((50, 8)))
    assert set(np.unique(program[:, :, 0])) == {Op.IDENTITY, Op.COLOR}


def test_lighting_is_alexnets():
    """Krizhevsky et al. 2012: [p1, p2, p3] [a1 l1, a2 l2, a3 l3] is added to every pixel; a is normal."""
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    values, pixels = np.array([0.2175, 0.0188, 0.0045]), image("noise", 24)
    assert np.allclose(vectors.T @ vectors, np.eye(3), atol=1e-3)
    for _ in range(50):
        draws = rng.random((1, 6))
        normal = np.sqrt(-2 * np.log(1 - draws[0, :3])) * np.cos(2 * np.pi * draws[0, 3:])
        color = sum(vectors[:, i] * 0.3 * normal[i] * values[i] for i in range(3))
        expected = np.clip(pixels + np.rint(color * 255), 0, 255).astype(np.uint8)
        assert np.array_equal(applied(pixels, Lighting(0.3).program(draws)[0]), expected)
    colors = Lighting(0.1).program(rng.random((20_000, 6)))[:, 0, 1:4]
    # The covariance of the colors has these eigenvectors, and the rounding adds 1/12.
    expected = vectors @ np.diag((0.1 * values * 255) ** 2) @ vectors.T + np.eye(3) / 12
    assert np.allclose(np.cov(colors.T), expected, atol=0.6)


@pytest.mark.parametrize("area", [(0.02, 0.33), (0.9, 0.99)])
def test_erasing_is_torchvisions(area):
    """With the same draws; large boxes often fit at a later attempt, or at none of ten."""
    size, chance, ratio, color = 32, 0.6, (0.3, 3.3), (9, 8, 7)
    ours, theirs = RandomErasing(size, chance, area, ratio, color), TorchvisionErasing(chance, area, ratio, list(color))
    own, changed = np.random.default_rng(7), 0
    for _ in range(200):
        pixels, draws = image("noise", size), own.random((1, ours.draws))
        attempts = iter(draws[0, 1:].reshape(-1, 4))
        box: list[float] = []

        def uniform(tensor, low, high, attempts=attempts, box=box):
            if len(box) <= 2:  # an attempt draws the area and the ratio; only one that fits draws its place too
                box[:] = next(attempts)
            return tensor.fill_(low + (high - low) * box.pop(0))

        def integer(low, high, size, box=box):
            return torch.tensor([low + int((high - low) * box.pop(0))])

        with (
            mock.patch("torch.rand", lambda n, u=draws[0, 0]: torch.tensor([u])),
            mock.patch("torch.Tensor.uniform_", uniform),
            mock.patch("torch.randint", integer),
        ):
            expected = theirs(torch.from_numpy(pixels.copy()).permute(2, 0, 1)).permute(1, 2, 0).numpy()
        assert np.array_equal(applied(pixels, ours.program(draws)[0]), expected)
        changed += not np.array_equal(pixels, expected)
    assert 10 < changed < 160


def test_erasing_has_torchvisions_boxes():
    size, n = 64, 4000
    policy = RandomErasing(size, 0.25, (0.02, 0.33), (0.3, 3.3), (1, 2, 3))
    rows = policy.program(rng.random((n, policy.draws)))[:, 0]
    boxes = rows[rows[:, 0] == Op.ERASE, 1:5]
    assert abs(len(boxes) / n - 0.25) < 0.03
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= size).all()
    torch.manual_seed(0)
    blank = torch.zeros(3, size, size)
    theirs = np.array([TorchvisionErasing.get_params(blank, (0.02, 0.33), (0.3, 3.3))[:4] for _ in range(2000)])
    for ours, other in (
        (boxes[:, 2] * boxes[:, 3], theirs[:, 2] * theirs[:, 3]),
        (boxes[:, 2], theirs[:, 2]),
        (boxes[:, 0], theirs[:, 0]),
    ):
        assert abs(ours.mean() - other.mean()) < 5 * (ours.std() / len(ours) ** 0.5 + other.std() / 2000**0.5)


def test_cutout_is_centered_on_a_pixel_and_cut_off_at_the_border():
    corner, middle = Cutout(32, 8, (0, 0, 0)).program(np.array([[0.0, 0.999], [0.5, 0.5]]))[:, 0]
    assert corner[1:5].tolist() == [0, 27, 4, 5]
    assert middle[1:5].tolist() == [12, 12, 8, 8]


@pytest.mark.parametrize("side", [2, 8, 16, 40])
def test_cutout_is_that_of_its_authors(side):
    """cutout.py of uoguelph-mlrg/Cutout, restated: a mask of zeros, here with a color in their place."""
    for _ in range(50):
        pixels, draws = image("noise", 32), rng.random((1, 2))
        y, x = (int(u * 32) for u in draws[0])
        top, bottom, left, right = (int(np.clip(v + d * (side // 2), 0, 32)) for v in (y, x) for d in (-1, 1))
        expected = pixels.copy()
        expected[top:bottom, left:right] = FILL
        assert np.array_equal(applied(pixels, Cutout(32, side, FILL).program(draws)[0]), expected)


@pytest.mark.parametrize("way", [apply.apply, operations.with_pillow])
@pytest.mark.parametrize("size", [1, 2, 7, 32, 225])
def test_vertical_flips_and_quarter_turns_only_move_pixels(size, way):
    pixels = image("noise", size)
    for draw, expected in ((0.29, pixels[::-1]), (0.3, pixels)):
        [rows] = VerticalFlip(size, 0.3).program(np.array([[draw]]))
        assert np.array_equal(applied(pixels, rows, way=way), expected)
    for turns in range(4):
        turned, kept = QuarterTurns(size, 0.3).program(np.array([[0.29, turns / 4], [0.3, turns / 4]]))
        assert np.array_equal(applied(pixels, turned, way=way), np.rot90(pixels, turns))
        assert np.array_equal(applied(pixels, kept, way=way), pixels)


def test_policies_follow_each_other():
    first = {"vflip": 0.5, "rotate90": 1.0, "policy": "trivialaugment"}
    later = {"color_jitter": (0.4, 0.4, 0.4, 0.0), "lighting": 0.1, "erasing": 1.0, "cutout": 4}
    policy = build(Augment.model_validate(first | later), (0.485, 0.456, 0.406), 32)
    assert isinstance(policy, Chain)
    draws = rng.random((6, policy.draws))
    program = policy.program(draws)
    assert program.shape == (6, policy.slots, 8)
    assert np.array_equal(program[:, :1], VerticalFlip(32, 0.5).program(draws[:, :1]))
    assert np.array_equal(program[:, 1:2], QuarterTurns(32, 1.0).program(draws[:, 1:3]))
    assert np.array_equal(program[:, 2:3], TrivialAugmentWide(32, "nearest").program(draws[:, 3:6]))
    assert program[:, -1, 5:].tolist() == [list(FILL)] * 6
    assert build(Augment(), (0.5, 0.5, 0.5), 32) is None
