"""Evaluation preprocessing as an ONNX graph, so that a service needs nothing but an ONNX runtime (pure).

Resizing is two matrix products, one for each axis. They compute what Pillow computes (``src/libImaging/Resample.c``):
antialiased filters whose weights are whole multiples of 2**-22, and sums that are rounded to whole gray levels after each
axis, in Pillow's order of the axes. In float64 these sums are exact, so the pixels are bit-identical to those of our
decoder. ONNX's own operator, Resize with antialias, is not used: in onnxruntime 1.32 the pixels at the borders differ from
Pillow's by up to 15 gray levels (benchmarks/results/export.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from worldsize.config.recipe import Data

INPUT, OUTPUT = "images", "normalized"
_CUBIC = -0.5
_UNIT = 1 << 22  # PRECISION_BITS of Resample.c

_GRAPH = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
preprocess (uint8[batch, height, width, 3] images) => (float[batch, 3, {size}, {size}] normalized)
<double zero = {{0.0}}, double half = {{0.5}}, double one = {{1.0}}, double two = {{2.0}}, double most = {{255.0}},
 double unit = {{{unit}.0}}, double resize = {{{resize}.0}}, double size = {{{size}.0}},
 double[{size}] steps = {{{steps}}}, int64 first = {{0}}, int64 next = {{1}}, int64 second = {{2}},
 int64[1] front = {{0}}, int64[1] back = {{1}}, {constants}
 float[1, 3, 1, 1] mean = {{{mean}}}, float[1, 3, 1, 1] scale = {{{scale}}}>
{{
  shape = Shape (images)
  rows_count = Gather (shape, next)
  columns_count = Gather (shape, second)
  rows_side = Cast <to = 11> (rows_count)
  columns_side = Cast <to = 11> (columns_count)
  short = Min (rows_side, columns_side)
{rows}
{columns}
  across = Transpose (columns_weights)
  planes = Transpose <perm = [0, 3, 1, 2]> (images)
  pixels = Cast <to = 11> (planes)
{passes}
  levels = Cast <to = 1> (resized)
  centered = Sub (levels, mean)
  normalized = Mul (centered, scale)
}}
"""

# What each pixel of the crop takes from each pixel of an axis: float64 (size, side).
_AXIS = """
  {a}_product = Mul (resize, {a}_side)
  {a}_quotient = Div ({a}_product, short)
  {a}_resized = Floor ({a}_quotient)
  {a}_spare = Sub ({a}_resized, size)
  {a}_margin = Div ({a}_spare, two)
  {a}_first = Round ({a}_margin)
  {a}_scale = Div ({a}_side, {a}_resized)
  {a}_numbers = Range (first, {a}_count, next)
  {a}_places = Cast <to = 11> ({a}_numbers)
  {a}_centers = Add ({a}_places, half)
  {a}_shifted = Add (steps, {a}_first)
  {a}_wanted = Mul ({a}_shifted, {a}_scale)
  {a}_row = Unsqueeze ({a}_centers, front)
  {a}_column = Unsqueeze ({a}_wanted, back)
  {a}_signed = Sub ({a}_row, {a}_column)
  {a}_support = Max ({a}_scale, one)
  {a}_inverse = Div (one, {a}_support)
  {a}_far = Mul ({a}_signed, {a}_inverse)
  {a}_d = Abs ({a}_far)
{kernel}
  {a}_total = ReduceSum <keepdims = 1> ({a}_kernel, back)
  {a}_share = Div ({a}_kernel, {a}_total)
  {a}_sign = Sign ({a}_share)
  {a}_amount = Abs ({a}_share)
  {a}_units = Mul ({a}_amount, unit)
  {a}_rounded = Add ({a}_units, half)
  {a}_whole = Floor ({a}_rounded)
  {a}_fixed = Mul ({a}_whole, {a}_sign)
  {a}_weights = Div ({a}_fixed, unit)
"""

_BILINEAR = """
  {a}_slope = Sub (one, {a}_d)
  {a}_kernel = Max ({a}_slope, zero)
"""

# (k1 d - k2) d d + 1 up to 1, (((d - 5) d + 8) d - 4) k3 up to 2, then 0.
_BICUBIC = """
  {a}_a1 = Mul ({a}_d, k1)
  {a}_a2 = Sub ({a}_a1, k2)
  {a}_a3 = Mul ({a}_a2, {a}_d)
  {a}_a4 = Mul ({a}_a3, {a}_d)
  {a}_near = Add ({a}_a4, one)
  {a}_b1 = Sub ({a}_d, k5)
  {a}_b2 = Mul ({a}_b1, {a}_d)
  {a}_b3 = Add ({a}_b2, k8)
  {a}_b4 = Mul ({a}_b3, {a}_d)
  {a}_b5 = Sub ({a}_b4, k4)
  {a}_distant = Mul ({a}_b5, k3)
  {a}_is_near = Less ({a}_d, one)
  {a}_is_inside = Less ({a}_d, two)
  {a}_outer = Where ({a}_is_inside, {a}_distant, zero)
  {a}_kernel = Where ({a}_is_near, {a}_near, {a}_outer)
"""

_CUBIC_NUMBERS = {"k1": _CUBIC + 2, "k2": _CUBIC + 3, "k3": _CUBIC, "k4": 4.0, "k5": 5.0, "k8": 8.0}
# The kernel of each interpolation, and the constants that it needs.
_KERNELS = {
    "bilinear": (_BILINEAR, ""),
    "bicubic": (_BICUBIC, "".join(f"double {name} = {{{value}}}, " for name, value in _CUBIC_NUMBERS.items())),
}

# Pillow 13 resizes the rows first where that saves most: as in native/src/resize.c.
_CHOICE = """
  fewer_rows = Sub (rows_side, rows_resized)
  fewer_columns = Sub (columns_side, columns_resized)
  twice = Mul (fewer_columns, two)
  is_smaller = Greater (fewer_rows, zero)
  is_taller = Greater (fewer_rows, twice)
  is_down_first = And (is_smaller, is_taller)
  resized = If (is_down_first) <
    then_branch = down_first () => (double[batch, 3, {size}, {size}] d_result) {{{down}}},
    else_branch = across_first () => (double[batch, 3, {size}, {size}] a_result) {{{across}}}
  >
"""


def text(data: Data, opset: int, ir: int, choose_order: bool) -> str:
    """The graph in ONNX's text form: ``images`` uint8 (batch, height, width, 3), RGB, of any size, to ``normalized`` float32
    (batch, 3, size, size).

    Args:
        opset, ir: the version of the operators, at least 18, and of the file format.
        choose_order: resize the rows first where Pillow 13 does so; False: columns first, as Pillow did until 12.
    """
    size = data.val_crop_size
    kernel, constants = _KERNELS[data.interpolation]
    across = _passes("a", "pixels", ("{x}, across", "rows_weights, {x}"))
    down = _passes("d", "pixels", ("rows_weights, {x}", "{x}, across"))
    choice = _CHOICE.format(size=size, down=down, across=across)
    # As in `worldsize.data.images.normalize.Normalise`.
    mean, scale = [value * 255 for value in data.mean], [1 / (value * 255) for value in data.std]
    return _GRAPH.format(
        **{"ir": ir, "opset": opset, "size": size, "resize": data.val_resize_size, "unit": _UNIT},
        **{"constants": constants, "mean": _numbers(mean), "scale": _numbers(scale)},
        steps=_numbers([place + 0.5 for place in range(size)]),
        rows=_AXIS.format(a="rows", kernel=kernel.format(a="rows")),
        columns=_AXIS.format(a="columns", kernel=kernel.format(a="columns")),
        passes=choice if choose_order else across + "\n  resized = Identity (a_result)",
    )


def _passes(name: str, source: str, products: Sequence[str]) -> str:
    """Matrix products, each followed by rounding to whole gray levels; the last result is called NAME_result."""
    lines = []
    for number, factors in enumerate(products):
        result = f"{name}_result" if number == len(products) - 1 else f"{name}{number}_levels"
        lines += [
            f"{name}{number}_sum = MatMul ({factors.format(x=source)})",
            f"{name}{number}_half = Add ({name}{number}_sum, half)",
            f"{name}{number}_floor = Floor ({name}{number}_half)",
            f"{result} = Clip ({name}{number}_floor, zero, most)",
        ]
        source = result
    return "\n    ".join(["", *lines])


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(repr(float(value)) for value in values)
