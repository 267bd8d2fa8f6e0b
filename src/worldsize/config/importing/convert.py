"""``worldsize recipes import``: recipes from the files of other trainers, timm's ``args.yaml`` and FFCV's YAML.

Each key is converted, ignored because its value changes nothing, or reported. A new format is one module with a table of
keys, and one line in `_FORMATS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldsize.config import recipe_files
from worldsize.config.importing import ffcv, timm
from worldsize.config.importing.base import Conversion, Convert
from worldsize.errors import UserError

# The key that identifies a format, its keys, what the trainer takes for those that a file lacks, and what it does without a
# key for it. timm's train.py writes all of its keys.
_FORMATS: tuple[tuple[str, dict[str, Convert], dict[str, Any], dict[str, Any]], ...] = (
    ("opt", timm.KEYS, {}, {"data.name": "imagenet"}),
    ("training", ffcv.KEYS, ffcv.DEFAULTS, ffcv.ALWAYS),
)
# What timm's train.py passes on to the optimizer and the network: no default is among it.
_PASSED_ON = ("opt_kwargs.", "model_kwargs.")
# YAML 1.1 takes 1e-6 for a string: its numbers have a point.
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def convert(path: Path, world_size: int | None) -> Conversion:
    """Convert a file that was used with ``world_size`` GPUs (None: the number in the file, or 1).

    Raises:
        UserError: it cannot be read, or is of neither trainer.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    given = recipe_files.parse(text, str(path))
    for mark, table, defaults, fixed in _FORMATS:
        if isinstance(given, dict) and mark in given:
            flat = defaults | _flat(given)
            conversion = Conversion(flat, world_size or flat.get("dist.world_size") or 1, dict(fixed))
            for key, value in conversion.given.items():
                try:
                    table.get(key, _unknown)(conversion, key, value)
                # a word instead of a number, for example, or a 0 to divide by
                except (TypeError, ValueError, AttributeError, ArithmeticError):
                    conversion.left[key] = "this value is not supported"
            return conversion
    marks = " or ".join(f"`{mark}`" for mark, *_ in _FORMATS)
    raise UserError(f"{path} is neither timm's args.yaml nor an FFCV configuration: it has no key {marks}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _number(value)}
    return found


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _unknown(conversion: Conversion, key: str, value: Any) -> None:
    if key.startswith(_PASSED_ON) or value not in (None, False, "", 0, [], {}):
        conversion.left[key] = "not supported"
