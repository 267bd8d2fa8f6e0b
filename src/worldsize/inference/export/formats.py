"""The formats by name."""

from __future__ import annotations

import importlib
from typing import Literal, get_args

from worldsize.inference.export.base import Format

FormatName = Literal["timm", "onnx", "pt2", "safetensors"]
NAMES: tuple[str, ...] = get_args(FormatName)


def load(name: str) -> Format:
    """The format of this name, one of `NAMES`: the class `Form` of the module ``to_NAME``."""
    form: Format = importlib.import_module(f"worldsize.inference.export.to_{name}").Form()
    return form
