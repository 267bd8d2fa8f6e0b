"""The native decoder gives the same pixels as Pillow."""

from __future__ import annotations

import ctypes.util
import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jpegs import NATIVE, cut_natively, cut_with_pillow, cuts_of, encode, images, needs_native, scene, whole
from paths import ROOT
from worldsize.data.images import native
from worldsize.data.images.crops import CenterCrop, RandomResizedCrop, random_boxes
from worldsize.data.images.pillow import decode
from worldsize.errors import UserError


@needs_native
@given(st.data())
def test_pixels_equal_pillows(data):
    encoded, height, width = data.draw(images())
    for _ in range(4):
        cut, size = data.draw(cuts_of(height, width))
        flip, bicubic = data.draw(st.booleans()), data.draw(st.booleans())
        done, out = cut_natively([encoded], [cut], [flip], size, bicubic=bicubic)
        assert done.all()
        np.testing.assert_array_equal(out[0], cut_with_pillow(encoded, cut, flip, size, bicubic))


@needs_native
@given(st.data())
def test_raw_pixels_equal_pillows(data):
    height, width = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    pixels = scene(height, width, data.draw(st.integers(0, 99)))
    cut, size = data.draw(cuts_of(height, width))
    flip, bicubic = data.draw(st.booleans()), data.draw(st.booleans())
    out = np.full((1, size, size, 3), 77, np.uint8)
    assert NATIVE.raw([pixels], np.array([cut], np.int32), np.array([flip]), size, out, bicubic).all()
    top, left, h, w, rows, columns, y, x = cut
    resampling = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    part = Image.fromarray(pixels).crop((left, top, left + w, top + h)).resize((columns, rows), resampling)
    expected = np.asarray(part.crop((x, y, x + size, y + size)))
    np.testing.assert_array_equal(out[0], expected[:, ::-1] if flip else expected)


@needs_native
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=8))
def test_pieces_of_a_file_are_its_bytes_with_their_checksums(tmp_path_factory, pieces):
    data = np.random.default_rng(0).bytes(300)
    path = tmp_path_factory.mktemp("read") / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        offsets, sizes = zip(*pieces, strict=True)
        read = NATIVE.read([file.fileno()] * len(pieces), offsets, sizes)
    expected = [data[offset : offset + size] for offset, size in pieces]
    assert [bytes(piece) for piece, _ in read] == expected
    assert [checksum for _, checksum in read] == [crc32c.crc32c(piece) for piece in expected]


@needs_native
def test_an_unreadable_file_does_not_affect_the_others(tmp_path):
    (tmp_path / "file").write_bytes(b"pixels")
    with (tmp_path / "file").open("rb") as file, (tmp_path / "other").open("wb") as only_written:
        files = [file.fileno(), only_written.fileno(), file.fileno()]
        first, failed, last = NATIVE.read(files, [0, 0, 3], [3, 3, 3])
    assert bytes(first[0]) == b"pix" and bytes(last[0]) == b"els"
    assert isinstance(failed, OSError) and failed.errno == errno.EBADF


def has_compiler_and_headers() -> bool:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    source = "#include <stdio.h>\n#include <jpeglib.h>\n#if LIBJPEG_TURBO_VERSION_NUMBER < 2001000\n#error\n#endif\n"
    arguments = [compiler or "", "-fsyntax-only", "-x", "c", "-"]
    return compiler is not None and subprocess.run(arguments, input=source.encode(), capture_output=True).returncode == 0


needs_checkout = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a checkout")


@needs_checkout
def test_it_is_built_if_possible():
    if os.environ.get(native.DECODER) == "pillow":
        pytest.skip(f"{native.DECODER}=pillow disables it")
    if not has_compiler_and_headers() or not ctypes.util.find_library("jpeg"):
        pytest.skip("requires a C compiler and the headers of libjpeg-turbo (libjpeg-dev)")
    assert NATIVE is not None, native.reason_missing()
    assert native.reason_missing() is None


@needs_checkout
def test_the_interface_versions_agree():
    header = (ROOT / "native" / "src" / "worldsize.h").read_text()
    assert f"WS_INTERFACE = {native._INTERFACE} }}" in header


@pytest.mark.parametrize("source", ["int ws_interface(void) { return -1; }", "int ws_headers(void) { return 0; }"])
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, source):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "_native.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=source.encode(), check=True)
    monkeypatch.delenv(native.DECODER, raising=False)
    monkeypatch.setattr(native, "_library", lambda: library)
    assert native._loaded.__wrapped__() == (
        None,
        f"{library} was built from another version of the sources: reinstall worldsize",
    )


def run_python(program: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("WORLDSIZE_SIMD", native.DECODER)}
    paths = os.pathsep.join([str(ROOT / "tests" / "helpers"), *(p for p in sys.path if p)])
    command = [sys.executable, "-c", program]
    environment = {**inherited, "PYTHONPATH": paths, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_the_environment_turns_it_off():
    program = "from worldsize.data.images import native; print(native.load(), native.reason_missing())"
    assert run_python(program, WORLDSIZE_DECODER="pillow") == "None WORLDSIZE_DECODER=pillow disables it"


@pytest.mark.parametrize(("variable", "known"), [("WORLDSIZE_DECODER", "pillow"), ("WORLDSIZE_SIMD", "scalar")])
def test_an_unknown_value_in_the_environment_is_refused(monkeypatch, variable, known):
    monkeypatch.setenv(variable, "Scalars")
    with pytest.raises(UserError, match=f"{variable}=Scalars: .* {known}"):
        native._loaded.__wrapped__()


def imagenet(shared: Path, count: int) -> list[bytes]:
    folder = shared / "imagenet-mini" / "ILSVRC" / "Data" / "CLS-LOC" / "train"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    files = sorted(folder.glob("*/*"))
    return [file.read_bytes() for file in files[:: len(files) // count][:count]]


@needs_native
def test_real_images_get_the_pixels_of_both_crops(shared):
    data = imagenet(shared, 200)
    heights, widths, plain = NATIVE.headers(data)
    assert plain.all()
    random, center = RandomResizedCrop(160, True, (0.08, 1.0), (3 / 4, 4 / 3)), CenterCrop(224, False, 256)
    draws = np.random.default_rng(0).random((len(data), random.draws))
    cuts = np.zeros((len(data), 8), np.int32)
    cuts[:, :4] = random_boxes(heights.astype(np.int64), widths.astype(np.int64), draws[:, 1:], (0.08, 1.0), (3 / 4, 4 / 3))
    cuts[:, 4:6] = 160
    done, out = cut_natively(data, cuts, draws[:, 0] < 0.5, 160)
    assert done.all()
    for i, (one, height, width) in enumerate(zip(data, heights.tolist(), widths.tolist(), strict=True)):
        image = decode(one)
        assert image.size == (width, height)
        np.testing.assert_array_equal(out[i], random.one(image, draws[i]))
        short = min(height, width)
        grid = (height, width) if short == 256 else (int(256 * height / short), int(256 * width / short))
        cut = (0, 0, height, width, *grid, round((grid[0] - 224) / 2), round((grid[1] - 224) / 2))
        np.testing.assert_array_equal(cut_natively([one], [cut], size=224)[1][0], center.one(image, np.zeros(1)))


def reference_resize(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A triangle filter in float64, implemented from its definition."""

    def weights(source: int, target: int) -> np.ndarray:
        scale = source / target
        centers = (np.arange(target)[:, None] + 0.5) * scale
        distance = np.abs(np.arange(source)[None] + 0.5 - centers) / max(scale, 1.0)
        weight = np.clip(1.0 - distance, 0.0, None)
        return weight / weight.sum(axis=1, keepdims=True)

    across = np.tensordot(weights(pixels.shape[1], columns), pixels.astype(float), axes=(1, 1))  # (columns, y, 3)
    return np.tensordot(weights(pixels.shape[0], rows), across, axes=(1, 1))  # (rows, columns, 3)


@needs_native
@pytest.mark.parametrize(("height", "width"), [(500, 375), (333, 500), (97, 211), (40, 31)])
@pytest.mark.parametrize("kind", ["gradient", "checkerboard"])
def test_nothing_is_shifted(height, width, kind):
    y, x = np.mgrid[0:height, 0:width]
    gray = (255 * (2 * x + y) / (2 * width + height)) if kind == "gradient" else ((x // 5 + y // 7) % 2 * 255)
    pixels = np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    out = np.empty((1, 224, 224, 3), np.uint8)
    assert NATIVE.raw([pixels], np.array([whole(height, width, 224)], np.int32), np.zeros(1, bool), 224, out).all()
    error = out[0].astype(float) - reference_resize(pixels, 224, 224)
    assert np.abs(error).mean() < 0.5
    assert np.abs(error).max() <= 1.01
    assert abs(error.mean()) < 0.05


SIMD_PROGRAM = """
import hashlib
import numpy as np
import jpegs as t
digest = hashlib.sha256()
for seed in range(40):
    height, width, size = np.random.default_rng(seed).integers(1, 260, 3)
    data = t.encode(t.scene(height, width, seed), subsampling=t.SAMPLING[seed % 3])
    done, out = t.cut_natively([data], [t.whole(height, width, size)], [seed % 2], int(size))
    assert done.all()
    digest.update(out)
print(digest.hexdigest(), t.NATIVE.version)
"""


@needs_native
def test_plain_c_gives_the_same_bytes_as_simd():
    fast, simd = run_python(SIMD_PROGRAM).split(maxsplit=1)
    slow, plain = run_python(SIMD_PROGRAM, WORLDSIZE_SIMD="scalar").split(maxsplit=1)
    assert fast == slow
    assert plain.endswith("scalar")
    assert simd.startswith("libjpeg-turbo ")


@needs_native
def test_eight_threads_get_the_same_results_as_one():
    data = [encode(scene(120 + 7 * i, 200 - 5 * i, i), progressive=i % 2 == 0) for i in range(16)]
    data[5] = data[5][:500] + b"\xff\xd9"
    heights, widths, _ = NATIVE.headers(data)
    cuts = [whole(int(h), int(w), 64) for h, w in zip(heights, widths, strict=True)]
    done, alone = cut_natively(data, cuts, size=64)
    assert done.sum() == 15
    with ThreadPoolExecutor(8) as pool:
        for done_again, out in pool.map(lambda _: cut_natively(data, cuts, size=64), range(64)):
            np.testing.assert_array_equal(done_again, done)
            np.testing.assert_array_equal(out, alone)


@needs_native
def test_buffers_of_every_kind_are_accepted():
    data = encode(scene(40, 50, 0))
    expected = cut_natively([data], [whole(40, 50, 32)])[1]
    array = np.frombuffer(b"before" + data + b"after", np.uint8)[6:-5]
    assert not array.flags.writeable
    kinds = [bytearray(data), memoryview(data), array, memoryview(array)]
    done, out = cut_natively(kinds, [whole(40, 50, 32)] * len(kinds))
    assert done.all()
    np.testing.assert_array_equal(out, np.repeat(expected, len(kinds), axis=0))
    assert cut_natively([], [])[0].shape == (0,)


@needs_native
def test_arrays_of_other_shapes_are_refused():
    data = [encode(scene(40, 50, 0))]
    cuts, flips, out = np.array([whole(40, 50, 32)], np.int32), np.zeros(1, bool), np.zeros((1, 32, 32, 3), np.uint8)
    wrong = [
        (cuts.astype(np.int64), flips, 32, out),
        (cuts[:, :7], flips, 32, out),
        (cuts, flips.astype(np.uint8), 32, out),
        (cuts, np.zeros(2, bool), 32, out),
        (cuts, flips, 33, out),
        (cuts, flips, 0, out[:, :0, :0]),
        (cuts, flips, 16385, out),
        (cuts, flips, 32, out.transpose(0, 2, 1, 3)),
        (cuts, flips, 32, out.astype(np.float32)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            NATIVE.cut(data, *arguments)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        NATIVE.cut(data, cuts, flips, 32, out)
    out = np.zeros((1, 32, 32, 3), np.uint8)
    for image in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((4, 8, 3), np.uint8)[:, ::2]):
        for several in ([image], image[None]):
            with pytest.raises(ValueError):
                NATIVE.raw(several, cuts, flips, 32, out)


@needs_native
def test_images_of_one_size_can_be_an_array():
    """Also with other bytes between them, as the headers of raw images in shards."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (5, 7 + 6 * 4 * 3), np.uint8)
    images = rows[:, 7:].reshape(5, 6, 4, 3)
    assert np.shares_memory(rows, images)
    cuts, flips = np.array([whole(6, 4, 8)] * 5, np.int32), rng.random(5) < 0.5
    found = np.empty((2, 5, 8, 8, 3), np.uint8)
    assert NATIVE.raw(images, cuts, flips, 8, found[0]).all()
    assert NATIVE.raw([np.ascontiguousarray(image) for image in images], cuts, flips, 8, found[1]).all()
    np.testing.assert_array_equal(found[0], found[1])


@needs_native
@pytest.mark.parametrize("kind", ["smooth", "rough"])
def test_scaling_changes_pixels_little(kind):
    """The mean error of the option: below 3 levels on a smooth image, below 6 on a noisy one."""
    pixels = scene(1200, 1600, 3, rough=0.0 if kind == "smooth" else 0.3)
    data = encode(pixels, quality=92, subsampling="4:4:4")
    cuts = [(101, 203, 1000, 1301, 224, 224, 0, 0), (0, 0, 1200, 1600, 448, 500, 60, 90)]
    exact = cut_natively([data] * 2, cuts, size=224)[1].astype(float)
    scaled = cut_natively([data] * 2, cuts, size=224, scaling=True)[1].astype(float)
    error = np.abs(scaled - exact).mean(axis=(1, 2, 3))
    assert error.min() > 0
    assert error.max() < (3 if kind == "smooth" else 6)
    assert np.abs((scaled - exact).mean(axis=(1, 2, 3))).max() < 0.5


@needs_native
@pytest.mark.parametrize(("top", "left"), [(0, 0), (101, 203), (2, 3)])
@pytest.mark.parametrize("size", [224, 448])
def test_scaling_shifts_nothing(top, left, size):
    y, x = np.mgrid[0:1200, 0:1600]
    pixels = np.repeat((255 * (x + y) / 2800).astype(np.uint8)[..., None], 3, axis=2)
    cut = (top, left, 999, 1301, size, size, 0, 0)
    scaled = cut_natively([encode(pixels, quality=100)], [cut], size=size, scaling=True)[1][0]
    error = scaled[4:-4, 4:-4] - reference_resize(pixels[top : top + 999, left : left + 1301], size, size)[4:-4, 4:-4]
    assert abs(error.mean()) < 0.05  # half a pixel in each direction would be 0.09


@needs_native
def test_scaling_does_nothing_if_the_scaled_box_would_be_too_small():
    data = encode(scene(300, 447, 0))
    cuts = [(0, 0, 300, 447, 224, 224, 0, 0), (0, 0, 300, 447, 100, 224, 0, 0)]
    exact = cut_natively([data] * 2, cuts, size=224)[1]
    np.testing.assert_array_equal(cut_natively([data] * 2, cuts, size=224, scaling=True)[1], exact)
