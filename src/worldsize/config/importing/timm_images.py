"""How timm's train.py prepares images: sizes, crops and colors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from worldsize.config.importing.base import Conversion, to

# How the sizes of the batches change: with the first three, if at all.
SIZES = (
    *("train_img_sizes", "train_batch_sizes", "train_size_probs", "train_size_schedule", "train_size_schedule_spread"),
    *("train_size_random_mix", "variable_batch_loss_scale"),
)


def prepared(conversion: Conversion, network: str) -> None:
    """How images are prepared: as the file says, else as the network's configuration in timm does."""
    given, defaults = conversion.given, _defaults(network)
    found = {
        "size": given.get("input_size") or given.get("img_size") or defaults.get("input_size"),
        "crop_pct": given.get("crop_pct") or defaults.get("crop_pct"),
        "interpolation": given.get("interpolation") or defaults.get("interpolation"),
        "mean": _of_channels(given.get("mean")) or defaults.get("mean"),
        "std": _of_channels(given.get("std")) or defaults.get("std"),
    }
    if unknown := [name for name, value in found.items() if value is None]:
        conversion.left["model"] = (
            f"its {', '.join(unknown)} are in timm: install it (pip install 'worldsize[timm]'), or set data.* by hand"
        )
    if found["interpolation"] not in ("bilinear", "bicubic", None):
        conversion.left["interpolation"] = "supported: bilinear, bicubic"
        found["interpolation"] = None
    settings = {f"data.{name}": found[name] for name in ("interpolation", "mean", "std")}
    side = _side(conversion, "input_size" if given.get("input_size") else "model", found["size"])
    if side is not None:
        settings |= dict.fromkeys(("data.train_crop_size", "data.val_crop_size"), side)
        settings["data.val_resize_size"] = int(side / (found["crop_pct"] or 0.875))
    for name, value in settings.items():
        to(name)(conversion, "model", list(value) if isinstance(value, tuple) else value)


def _of_channels(value: Any) -> Any:
    """One number is that of all channels, as in timm."""
    return value * 3 if isinstance(value, list) and len(value) == 1 else value


def _side(conversion: Conversion, key: str, size: Any) -> int | None:
    """The side of the images of this size, which is (channels, height, width); None if it is unknown or not supported."""
    if not isinstance(size, (list, tuple)):
        return size
    channels, height, width = size
    if channels == 3 and height == width:
        return int(width)
    conversion.left[key] = (
        f"images are square, and not {height} x {width}: set data.train_crop_size, data.val_crop_size and "
        "data.val_resize_size by hand"
        if channels == 3
        else "images have three channels"
    )
    return None


def _defaults(network: str) -> dict[str, Any]:
    """timm's configuration of the network; empty if timm is not installed or does not have it."""
    if find_spec("timm") is None:
        return {}
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(network)
    return {} if config is None else config.to_dict()


def interpolation(conversion: Conversion, key: str, value: str) -> None:
    evaluation = conversion.given.get("interpolation") or _defaults(conversion.given.get("model", "")).get("interpolation")
    if value not in ("", evaluation):
        conversion.left[key] = f"training images are resized like those for evaluation: {evaluation or 'bicubic'}"


def changing(conversion: Conversion, key: str, value: Any) -> None:
    """How the sizes of the batches change, if they do at all."""
    changes = any(conversion.given.get(name) for name in ("train_img_sizes", "train_batch_sizes", "train_size_probs"))
    if changes and value not in (None, [], "none"):
        conversion.left[key] = (
            "sizes do not change from batch to batch: see data.train_crop_sizes, which changes them by epoch"
        )
