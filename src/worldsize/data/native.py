"""The native batch decoder: encoded pictures, boxes and flips in, a batch of pixels out, without the GIL.

What it does is in native/src/worldsize.h. Its pixels equal those of `worldsize.data.decode` and Pillow's BILINEAR bit for
bit (given libjpeg-turbo on both sides); what it does not handle it leaves to them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

from worldsize.errors import UserError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]
Pixels = NDArray[np.uint8]
Sizes = NDArray[np.int32]
Mask = NDArray[np.bool_]

DECODER = "WORLDSIZE_DECODER"  # "pillow" turns the library off, reading included
_SIMD = "WORLDSIZE_SIMD"  # "scalar" asks for plain C; native/src/kernels.c reads it

MAX_SIZE = 16384

_INTERFACE = 2  # WS_INTERFACE of native/src/worldsize.h

# The options of native/src/worldsize.h. Pillow 13 changed the order of the two passes of some resizes.
_SCALING = 1
_ORDER = 2 if int(PIL.__version__.split(".")[0]) >= 13 else 0


class OtherSources(Exception):
    """A library with another interface than this module's."""


class Native:
    """The loaded library. All methods may be called by many threads at once, and the GIL is free while they work.

    Raises:
        OSError: it cannot be loaded.
        OtherSources: it was built from the sources of another version.

    Attributes:
        version: what it is made of and runs on, for example "libjpeg-turbo 2.1.5, avx2".
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        if not hasattr(self._library, "ws_interface") or self._library.ws_interface() != _INTERFACE:
            raise OtherSources
        self._library.ws_version.restype = ctypes.c_char_p
        self.version: str = self._library.ws_version().decode()

    def headers(self, buffers: Sequence[Buffer]) -> tuple[Sizes, Sizes, Mask]:
        """Sizes of JPEGs from their headers, without decoding.

        Returns:
            heights and widths, int32 (n,), pixels; bool (n,), whether `cut` can try this picture. Where it cannot,
            the sizes are 0: another decoder must look at it.
        """
        n = len(buffers)
        heights, widths, status = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.uint8)
        pointers = _Pointers(buffers)
        self._library.ws_headers(n, *pointers.arguments, _at(heights), _at(widths), _at(status))
        return heights, widths, status == 0

    def cut(
        self, buffers: Sequence[Buffer], cuts: NDArray[np.int32], flips: Mask, size: int, out: Pixels, scaling: bool = False
    ) -> Mask:
        """Decode JPEGs, and cut each to ``size`` x ``size``.

        Args:
            buffers: n encoded pictures; none of them is copied.
            cuts: int32 (n, 8): top, left, height, width of the box in the picture; rows and columns of the grid that it
                is resized to; y and x of the output in that grid, black where it reaches beyond.
            flips: bool (n,): mirrored left to right.
            size: side of the result, 1 to 16384 pixels.
            out: uint8 (n, size, size, 3), C-contiguous; written in place.
            scaling: decode at 1/2 or 1/4 where the box stays at least as large as the grid. Faster for large
                pictures; the pixels are then not those of the whole decode.

        Returns:
            bool (n,): done. Where it is False the pixels are black, and another decoder must try.

        Raises:
            ValueError: arrays of other shapes or types.
        """
        n, options = len(buffers), _ORDER | scaling * _SCALING
        _check(n, cuts, flips, size, out)
        status = np.zeros(n, np.uint8)
        pointers = _Pointers(buffers)
        self._library.ws_decode(n, *pointers.arguments, _at(cuts), _at(flips), size, options, _at(out), _at(status))
        return status == 0

    def raw(self, pictures: Sequence[Pixels], cuts: NDArray[np.int32], flips: Mask, size: int, out: Pixels) -> Mask:
        """As `cut`, from decoded pictures: uint8 (height, width, 3), C-contiguous, of any sizes.

        Raises:
            ValueError: arrays of other shapes or types.
        """
        _check(len(pictures), cuts, flips, size, out)
        if not all(p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 and p.flags.c_contiguous for p in pictures):
            raise ValueError("raw pictures must be uint8 (height, width, 3), C-contiguous")
        heights = np.array([p.shape[0] for p in pictures], np.int32)
        widths = np.array([p.shape[1] for p in pictures], np.int32)
        status = np.zeros(len(pictures), np.uint8)
        data = np.array([p.ctypes.data for p in pictures], np.uintp)
        self._library.ws_raw(
            len(pictures), _at(data), _at(heights), _at(widths), _at(cuts), _at(flips), size, _ORDER, _at(out), _at(status)
        )
        return status == 0

    def read(
        self, files: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[memoryview, int] | OSError]:
        """Pieces of open files: of each so many bytes from an offset on, fewer where the file ends before.

        Args:
            files: n file descriptors; one may be there several times.

        Returns:
            For each, the bytes and their CRC-32C, or why they could not be read.
        """
        n = len(files)
        got, checksums, room = np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(sum(sizes), np.uint8)
        arguments = np.array(files, np.int32), np.array(offsets, np.int64), np.array(sizes, np.uintp)
        self._library.ws_read(n, *(_at(array) for array in (*arguments, room, got, checksums)))
        data, begins = memoryview(room.data).toreadonly(), [0, *accumulate(sizes)][:n]
        return [
            (data[begin : begin + many], checksum) if many >= 0 else OSError(-many, os.strerror(-many))
            for begin, many, checksum in zip(begins, got.tolist(), checksums.tolist(), strict=True)
        ]


class _Pointers:
    """Addresses and lengths of buffers, which stay alive as long as this."""

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
    for name, array, shape, dtype in (
        ("cuts", cuts, (n, 8), np.int32),
        ("flips", flips, (n,), np.bool_),
        ("out", out, (n, size, size, 3), np.uint8),
    ):
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, C-contiguous; it is {array.dtype} {array.shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")


def load() -> Native | None:
    """The library, loaded once per process; None where there is none: `why_not` tells.

    Raises:
        UserError: one of the environment's variables for it has an unknown value.
    """
    return _loaded()[0]


def why_not() -> str | None:
    """Why `load` gives None, as part of a sentence; None where it gives the library.

    Raises:
        UserError: as of `load`.
    """
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Native | None, str | None]:
    for variable, known in ((DECODER, "pillow"), (_SIMD, "scalar")):
        if (value := os.environ.get(variable, "")) not in ("", known):
            raise UserError(f"{variable}={value} in the environment: it can be {known}, or not be set")
    if os.environ.get(DECODER) == "pillow":
        return None, f"{DECODER}=pillow turns it off"
    library = _library()
    if library is None:
        needed = "a C compiler and the headers of libjpeg-turbo 2.1 or later (libjpeg-dev)"
        return None, f"it was not built: that needs {needed} at installation"
    try:
        return Native(library), None
    except OtherSources:
        return None, f"{library} was built from other sources: install worldsize again"
    except OSError as error:
        return None, f"{library} cannot be loaded: {error}"


def _library() -> Path | None:
    """Where setuptools puts it: beside this module, named like an extension of this Python."""
    paths = (Path(__file__).with_name("_native" + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)
