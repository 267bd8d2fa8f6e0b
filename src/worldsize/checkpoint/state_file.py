"""state.json of a checkpoint: a manifest only says that it is as it was written, not that its values are those of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any

from worldsize.errors import CheckpointError

_NUMBER = (int, float)
# Of the keys that a resumed run, an evaluation, an export or an audit reads. Older versions did not write all of them.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "epoch", "epoch_step", "evaluated_step", "best_epoch", "world_size", "global_batch"), (int,)),
    **dict.fromkeys(("epoch_loss", "epoch_top1", "epoch_s", "train_s", "best_top1"), _NUMBER),
    **dict.fromkeys(("identity", "data", "scaler", "versions"), (dict,)),
    **dict.fromkeys(("chain", "optimizer", "precision"), (str,)),
    **dict.fromkeys(("classes", "missing"), (list,)),
    "best_map": (*_NUMBER, NoneType),
    "evaluation": (dict, NoneType),
}
_LEAST = {
    **dict.fromkeys(("step", "epoch", "epoch_step", "best_epoch"), 0),
    **dict.fromkeys(("world_size", "global_batch"), 1),
    **dict.fromkeys(("evaluated_step", "best_top1", "best_map"), -1),
}
_LARGEST = 2**53  # whole numbers up to it are exact as floats
_NAME = re.compile(r"step-(\d+)")


class _State(dict[str, Any]):
    """An object of state.json; who reads a key that it lacks learns where that is missing."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        super().__init__(values)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self._where}{key} is missing")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint.

    Raises:
        CheckpointError: it is no JSON object, or a value is of another type or none of a run; later, if a key that is read
            is missing.
    """
    path = checkpoint / "state.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is no JSON object")
    if problem := _wrong_type(values) or _wrong_number(values) or _wrong_position(values, checkpoint.name):
        raise CheckpointError(f"{path}: {problem}")
    for name in ("data", "scaler"):
        if name in values:
            values[name] = _State(values[name], f"{path}: {name}.")
    return _State(values, f"{path}: ")


def _wrong_type(values: dict[str, Any]) -> str | None:
    for key, kinds in _KINDS.items():
        if key in values and (not isinstance(values[key], kinds) or isinstance(values[key], bool)):
            expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            return f"{key} must be {expected}, not {_shown(values[key])}"
    if any(not isinstance(name, str) for name in values.get("classes", [])):
        return "classes must be names"
    return None


def _wrong_number(values: dict[str, Any]) -> str | None:
    """A number that no run has, such as a negative step, NaN, or one that does not fit into 64 bits."""
    for key in _KINDS:
        value = values.get(key)
        if isinstance(value, _NUMBER) and not _LEAST.get(key, -_largest(value)) <= value <= _largest(value):
            return f"{key} is {_shown(value)}, which is not possible"
    for step in values.get("missing", []):
        if type(step) is not int or not 0 <= step <= _LARGEST:
            return f"missing has {_shown(step)}, which is no step"
    for section in ("evaluation", "scaler"):
        for key, value in (values.get(section) or {}).items():
            if value is None and section == "evaluation":
                continue
            if not isinstance(value, _NUMBER) or not abs(value) <= _largest(value):
                return f"{section}.{key[:60]} is {_shown(value)}, which is not possible"
    return None


def _largest(value: float) -> float:
    return _LARGEST if isinstance(value, int) else 1e300


def _wrong_position(values: dict[str, Any], name: str) -> str | None:
    """Steps and epochs that contradict each other, or the ``name`` of the checkpoint's folder."""
    step, epoch, epoch_step = (values.get(key) for key in ("step", "epoch", "epoch_step"))
    if step is None:
        return None
    if (named := _NAME.fullmatch(name)) and int(named[1]) != step:
        return f"step is {step}, in a folder that is called {name}"
    if values.get("evaluated_step", -1) > step:
        return f"evaluated_step is {values['evaluated_step']}, after step {step}"
    if epoch is None or epoch_step is None:
        return None
    # Each earlier epoch had steps; how many, is not known here: other data may have followed (--allow-changes).
    if (step != epoch_step) if epoch == 0 else (step < epoch + epoch_step):
        return f"step {step} is not step {epoch_step} (epoch_step) of epoch {epoch} (epoch, counted from 0)"
    return None


def _shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # Python prints no integers of thousands of digits
        return "a number of thousands of digits"
