"""int8: weights and activations of an ONNX model as 8-bit numbers, with ranges measured on training images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from worldsize.distributed.stop_signals import temporary_folder
from worldsize.inference.export import onnx_packages

_BATCH = 16


def int8(model: Any, name: str, images: torch.Tensor) -> Any:
    """The quantized ModelProto, in the QDQ form, with scales of weights per output channel.

    Args:
        name: of the model's input.
        images: normalized float32 (n, 3, size, size), with which the ranges of activations are measured.
    """
    tools, onnx = onnx_packages.quantization(), onnx_packages.onnx()
    batches = iter([{name: part.contiguous().numpy()} for part in images.split(_BATCH)])
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # it advises steps that are done here
    try:
        with temporary_folder() as folder:
            given, made = folder / "given.onnx", folder / "int8.onnx"
            onnx.save(model, str(given))
            tools.quantize_static(
                str(given),
                str(made),
                _reader(tools, batches),
                quant_format=tools.QuantFormat.QDQ,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                per_channel=True,
                # Without VNNI instructions, sums of full 8-bit products overflow 16 bits.
                reduce_range=True,
            )
            return onnx.load(str(made))
    finally:
        root.setLevel(before)


def _reader(tools: Any, batches: Iterator[dict[str, Any]]) -> Any:
    class Reader(tools.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    return Reader()
