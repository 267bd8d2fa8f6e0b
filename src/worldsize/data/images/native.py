"""Bindings of the native library: reads, decodes, crops and augments batches of images without the GIL.

native/src/worldsize.h documents the interface. The pixels are bit-identical to those of `worldsize.data.images.pillow` and
Pillow's BILINEAR or BICUBIC (if Pillow uses libjpeg-turbo, too). Images that the library does not support are left to
Pillow.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from worldsize.errors import UserError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]
Pixels = NDArray[np.uint8]
Sizes = NDArray[np.int32]
Mask = NDArray[np.bool_]
Numbers = Sequence[int] | NDArray[np.integer[Any]]

DECODER = "WORLDSIZE_DECODER"  # "pillow" disables the library, including its reads
_SIMD = "WORLDSIZE_SIMD"  # "scalar" selects plain C; read by native/src/kernels.c

MAX_SIZE = 16384

_INTERFACE = 8  # WS_INTERFACE of native/src/worldsize.h

# The options in native/src/worldsize.h. Pillow 13 changed the order of the two passes of some resizes.
_SCALING = 1
_NO_MEMORY = 5
_BICUBIC = 4
PILLOW_13 = int(PIL.__version__.split(".")[0]) >= 13
_ORDER = 2 if PILLOW_13 else 0

_ROOM = 1 << 20  # bytes of files to read in one call: about nine images of ImageNet


class WrongInterface(Exception):
    """The library has another interface version than this module."""


class Native:
    """The loaded library. All methods are thread-safe and release the GIL.

    Raises:
        OSError: it cannot be loaded.
        WrongInterface: it was built from another version of the sources.

    Attributes:
        version: its libjpeg-turbo and instruction set, for example "libjpeg-turbo 2.1.5, avx2".
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        if not hasattr(self._library, "ws_interface") or self._library.ws_interface() != _INTERFACE:
            raise WrongInterface
        self._library.ws_version.restype = ctypes.c_char_p
        self.version: str = self._library.ws_version().decode()

    def headers(self, buffers: Sequence[Buffer]) -> tuple[Sizes, Sizes, Mask]:
        """Read the sizes of JPEGs from their headers, without decoding.

        Returns:
            Heights and widths, int32 (n,), pixels; bool (n,), whether `cut` can try this image. If it is False, the
            sizes are 0, and another decoder must try.
        """
        n = len(buffers)
        heights, widths, status = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.uint8)
        pointers = _Pointers(buffers)
        self._library.ws_headers(n, *pointers.arguments, _at(heights), _at(widths), _at(status))
        return heights, widths, status == 0

    def cut(
        self,
        buffers: Sequence[Buffer],
        cuts: NDArray[np.int32],
        flips: Mask,
        size: int,
        out: Pixels,
        bicubic: bool = False,
        scaling: bool = False,
    ) -> Mask:
        """Decode JPEGs, and crop each to ``size`` x ``size``.

        Args:
            buffers: n encoded images; not copied.
            cuts: int32 (n, 8): top, left, height, width of the box in the image; rows and columns of the grid that it
                is resized to; y and x of the output in that grid. The output is black outside the grid.
            flips: bool (n,): flip horizontally.
            size: side of the result, 1 to 16384 pixels.
            out: uint8 (n, size, size, 3), C-contiguous; written in place.
            bicubic: resize with bicubic instead of bilinear interpolation.
            scaling: decode at 1/2 or 1/4 of the size if the box stays at least as large as the grid. Faster for large
                images, but the pixels differ from those of a full-size decode.

        Returns:
            bool (n,): done. If it is False, the pixels are black, and another decoder must try.

        Raises:
            ValueError: an array has the wrong shape or type.
        """
        n, options = len(buffers), _ORDER | bicubic * _BICUBIC | scaling * _SCALING
        _check(n, cuts, flips, size, out)
        status = np.zeros(n, np.uint8)
        pointers = _Pointers(buffers)
        self._library.ws_decode(n, *pointers.arguments, _at(cuts), _at(flips), size, options, _at(out), _at(status))
        return status == 0

    def raw(
        self,
        images: Sequence[Pixels] | Pixels,
        cuts: NDArray[np.int32],
        flips: Mask,
        size: int,
        out: Pixels,
        bicubic: bool = False,
    ) -> Mask:
        """Like `cut`, for decoded images: uint8 (height, width, 3), each C-contiguous, of any sizes.

        Images of one size can be an array (n, height, width, 3), which takes less time with the GIL than a list.

        Raises:
            ValueError: an array has the wrong shape or type.
        """
        n, options = len(images), _ORDER | bicubic * _BICUBIC
        _check(n, cuts, flips, size, out)
        looked_at = images[:1] if isinstance(images, np.ndarray) else images
        if not all(p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 and p.flags.c_contiguous for p in looked_at):
            raise ValueError("raw images must be uint8 (height, width, 3), C-contiguous")
        data, heights, widths = _places(images)
        status = np.zeros(n, np.uint8)
        sizes = _at(heights), _at(widths)
        self._library.ws_raw(n, _at(data), *sizes, _at(cuts), _at(flips), size, options, _at(out), _at(status))
        return status == 0

    def augment(self, images: Pixels, program: NDArray[np.float64], fill: tuple[int, int, int]) -> None:
        """Apply operations to images, in place, with Pillow's pixels.

        Args:
            images: uint8 (n, size, size, 3), C-contiguous, size 1 to 16384.
            program: float64 (n, slots, 8), C-contiguous: rows of `worldsize.data.augmentation.operations`.
            fill: color of what affine maps bring in.

        Raises:
            ValueError: an array has the wrong shape or type, or a row is invalid; then no image has changed.
            MemoryError: there is no memory for one image.
        """
        size = images.shape[1]
        _expect("images", images, (len(images), size, size, 3), np.uint8)
        _expect("program", program, (len(images), program.shape[1], 8), np.float64)
        color = np.array(fill, np.uint8)
        result = self._library.ws_augment(len(images), program.shape[1], _at(program), _at(color), size, _at(images))
        if result == _NO_MEMORY:
            raise MemoryError("no memory to augment an image")
        if result:
            raise ValueError("an operation of the program is invalid: see native/src/worldsize.h")

    def read(
        self, files: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[memoryview, int] | OSError]:
        """Read pieces of open files in one call.

        Args:
            files: n file descriptors, not necessarily distinct.
            offsets: start of each piece, bytes.
            sizes: length of each piece, bytes.

        Returns:
            For each piece, its bytes and their CRC-32C, or the error. At the end of the file, there are fewer bytes.
        """
        room, got, checksums = self.read_together(files, offsets, sizes)
        data, begins = memoryview(room.data).toreadonly(), [0, *accumulate(sizes)][: len(files)]
        return [
            (data[begin : begin + count], checksum) if count >= 0 else OSError(-count, os.strerror(-count))
            for begin, count, checksum in zip(begins, got.tolist(), checksums.tolist(), strict=True)
        ]

    def read_together(
        self, files: Numbers, offsets: Numbers, sizes: Numbers
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32]]:
        """The same as three arrays, which take less time with the GIL than a list.

        Returns:
            The bytes of all pieces, uint8 (sum of the sizes,), one piece after the other; of each the number of bytes
            read, or minus the error's number; and their CRC-32C.
        """
        n = len(files)
        arguments = np.array(files, np.int32), np.array(offsets, np.int64), np.array(sizes, np.uintp)
        got, checksums, room = np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(int(arguments[2].sum()), np.uint8)
        self._library.ws_read(n, *(_at(array) for array in (*arguments, room, got, checksums)))
        return room, got, checksums

    def files(self, paths: Sequence[bytes]) -> tuple[list[memoryview | None], NDArray[np.uint32]]:
        """Read regular files, several in one call.

        Returns:
            Of each file its bytes, or None if an ordinary read must try, or tell why it cannot be read (then also of those
            after it); and the CRC-32C of these bytes, uint32 (n,).
        """
        sizes, checksums = np.zeros(len(paths), np.int64), np.zeros(len(paths), np.uint32)
        found: list[memoryview | None] = []
        while (first := len(found)) < len(paths):
            room = np.empty(max(_ROOM, sizes[first]), np.uint8)  # the size is known if the last call had no room for it
            names = ctypes.c_char_p(b"\0".join(paths[first:]))
            places = (_at(array) for array in (room, sizes[first:], checksums[first:]))
            n = self._library.ws_read_files(len(paths) - first, names, ctypes.c_size_t(len(room)), *places)
            own = sizes[first : first + n].tolist()
            ends = list(accumulate(max(size, 0) for size in own))
            room.resize(ends[-1] if ends else 0, refcheck=False)  # frees the rest: images wait in memory to be decoded
            data = memoryview(room.data).toreadonly()
            found += [data[end - size : end] if size >= 0 else None for size, end in zip(own, ends, strict=True)]
        return found, checksums


def _places(images: Sequence[Pixels] | Pixels) -> tuple[NDArray[np.uintp], Sizes, Sizes]:
    """The images' addresses, heights and widths."""
    n = len(images)
    if isinstance(images, np.ndarray):
        data = images.ctypes.data + images.strides[0] * np.arange(n)
        return data.astype(np.uintp), np.full(n, images.shape[1], np.int32), np.full(n, images.shape[2], np.int32)
    heights, widths = (np.array([image.shape[axis] for image in images], np.int32) for axis in (0, 1))
    return np.array([image.ctypes.data for image in images], np.uintp), heights, widths


class _Pointers:
    """Addresses and lengths of buffers; keeps the buffers alive."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._owners = [np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8) for buffer in buffers]
        self._data = np.array([owner.ctypes.data for owner in self._owners], np.uintp)
        self._sizes = np.array([owner.size for owner in self._owners], np.uintp)
        self.arguments = (_at(self._data), _at(self._sizes))


def _at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _check(n: int, cuts: NDArray[np.int32], flips: Mask, size: int, out: Pixels) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size {size} is not between 1 and {MAX_SIZE}")
    _expect("cuts", cuts, (n, 8), np.int32)
    _expect("flips", flips, (n,), np.bool_)
    _expect("out", out, (n, size, size, 3), np.uint8)
    if not out.flags.writeable:
        raise ValueError("out is read-only")


def _expect(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, C-contiguous, not {array.dtype} {array.shape}")


def load() -> Native | None:
    """Load the library, once per process. Returns None if it is not available; `reason_missing` gives the reason.

    Raises:
        UserError: one of its environment variables has an unknown value.
    """
    return _loaded()[0]


def reason_missing() -> str | None:
    """Why `load` returns None, as part of a sentence; None if it returns the library.

    Raises:
        UserError: see `load`.
    """
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Native | None, str | None]:
    for variable, known in ((DECODER, "pillow"), (_SIMD, "scalar")):
        if (value := os.environ.get(variable, "")) not in ("", known):
            raise UserError(f"environment variable {variable}={value}: not valid; set it to {known}, or unset it")
    if os.environ.get(DECODER) == "pillow":
        return None, f"{DECODER}=pillow disables it"
    library = _library()
    if library is None:
        # pip would install the wheel that it cached without the decoder.
        again = "pip install --force-reinstall --no-deps --no-cache-dir"
        required = "a C compiler and the headers of libjpeg-turbo 2.1 or later (libjpeg-dev)"
        return None, f"it was not built: install {required}, then reinstall worldsize with {again}"
    try:
        return Native(library), None
    except WrongInterface:
        return None, f"{library} was built from another version of the sources: reinstall worldsize"
    except OSError as error:
        return None, f"{library} cannot be loaded: {error}"


def _library() -> Path | None:
    """Where setuptools installs it: next to this module, named like an extension module of this Python."""
    paths = (Path(__file__).with_name("_native" + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)
