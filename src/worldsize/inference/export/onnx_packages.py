"""onnx and onnxruntime (extra ``onnx``): the only module that imports them."""

from __future__ import annotations

from typing import Any

from worldsize.errors import UserError


def onnx() -> Any:
    """The module onnx, with its submodules checker, parser and utils.

    Raises:
        UserError: it, or what torch needs to write ONNX files, is missing.
    """
    try:
        import onnx
        import onnx.checker
        import onnx.parser
        import onnx.utils
        import onnxscript  # noqa: F401 (torch.onnx.export needs it)
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return onnx


def runtime() -> Any:
    """The module onnxruntime.

    Raises:
        UserError: it is missing.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return onnxruntime


def quantization() -> Any:
    """The module onnxruntime.quantization. Raises as `runtime`."""
    runtime()
    import onnxruntime.quantization

    return onnxruntime.quantization


def _missing(error: ModuleNotFoundError) -> UserError:
    return UserError(f"ONNX needs {error.name}: pip install 'worldsize[onnx]'")
