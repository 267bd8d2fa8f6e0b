"""A folder that timm, the Hugging Face hub and the TimmWrapper of transformers load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.torch_version import TorchVersion

from worldsize.config.recipe import Recipe
from worldsize.data.images.crops import Pixels
from worldsize.errors import UserError
from worldsize.inference.export import to_safetensors
from worldsize.inference.export.base import Format, Options, Runner, Source
from worldsize.inference.export.served import Served

_OLDEST = "1.0.26"  # of timm: older ones take the safetensors of a folder for a pickle
_OTHERS = "--to onnx, pt2 and safetensors can"
_SAME = 1e-4  # largest difference of logits of the same network in two libraries, relative


class Form(Format):
    """config.json and model.safetensors."""

    options = ("temperature",)

    def check(self, recipe: Recipe, options: Options) -> None:
        _timm()
        name = recipe.model.name
        if recipe.model.stem == "cifar" and ":" not in name:
            raise UserError(f"timm cannot express the CIFAR stem of this {name}; {_OTHERS}")
        if recipe.model.blurpool:
            raise UserError(f"timm cannot express BlurPool in {name}; {_OTHERS}")
        if recipe.data.val_mirror:
            raise UserError(
                "timm cannot express --data.val-mirror, the average with mirror images: "
                f"add --data.no-val-mirror to leave it out; {_OTHERS}"
            )

    def write(self, folder: Path, source: Source, options: Options) -> list[str]:
        config = _config(source)
        to_safetensors.save(folder / to_safetensors.FILE, source.found.network)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        return [
            'network = timm.create_model("local-dir:FOLDER", pretrained=True)  # or "hf-hub:USER/NAME"',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))",
            "logits = network.eval()(transform(image)[None])  # a PIL image, RGB",
        ]

    def open(self, folder: Path, about: dict[str, Any], recipe: Recipe, classes: int) -> Runner:
        return _Timm(folder, about["temperature"])


class _Timm(Runner):
    def __init__(self, folder: Path, temperature: float) -> None:
        timm = _timm()
        # Without pretrained, timm silently keeps random weights.
        network = timm.create_model(f"local-dir:{folder.absolute()}", pretrained=True).eval()
        self._transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
        self._network = Served(network, temperature).eval()

    def network(self) -> nn.Module:
        return self._network

    def prepare(self, image: Pixels) -> torch.Tensor:
        prepared: torch.Tensor = self._transform(Image.fromarray(image))
        return prepared


def crop_pct(size: int, resize: int) -> float:
    """The ``crop_pct`` of timm for an image side ``resize`` of which ``size`` is kept, both pixels, size <= resize.

    timm resizes to floor(size / crop_pct), and the quotient of the two sides often gives one pixel less.
    """
    for digits in range(3, 10):
        found = round(size / resize, digits)
        if found and math.floor(size / found) == resize:
            return found
    found = size / (resize + 0.5)
    assert math.floor(size / found) == resize
    return found


def _config(source: Source) -> dict[str, Any]:
    """config.json.

    Raises:
        UserError: timm has no network with these weights and answers.
    """
    recipe, classes = source.recipe, source.found.classes
    name, arguments, network = _theirs(source)
    known, data = network.pretrained_cfg, recipe.data
    size = [3, data.val_crop_size, data.val_crop_size]
    pct = crop_pct(data.val_crop_size, data.val_resize_size)
    config = {
        "architecture": name,
        "num_classes": len(classes),
        "num_features": network.num_features,
        "global_pool": getattr(network, "global_pool", known.get("pool", "avg")),
        "label_names": list(classes),
        "pretrained_cfg": {
            "tag": source.run,
            "custom_load": False,
            # timm reads test_* only when asked to, so the evaluation size is the size.
            "input_size": size,
            "test_input_size": size,
            "fixed_input_size": bool(known.get("fixed_input_size", False)),
            "interpolation": data.interpolation,
            "crop_pct": pct,
            "test_crop_pct": pct,
            "crop_mode": "center",
            "mean": list(data.mean),
            "std": list(data.std),
            "num_classes": len(classes),
            "pool_size": known.get("pool_size"),
            "first_conv": known.get("first_conv"),
            "classifier": known.get("classifier"),
        },
    }
    if not isinstance(config["global_pool"], str):
        config["global_pool"] = "avg"
    return config | ({"model_args": arguments} if arguments else {})


def _theirs(source: Source) -> tuple[str, dict[str, Any], Any]:
    """timm's name of the network, the arguments to build it, and one with the same weights.

    Raises:
        UserError: timm has none with the same answers.
    """
    timm, ours, recipe = _timm(), source.found.network, source.recipe
    name = recipe.model.name.rpartition(":")[2]
    refused = UserError(f"timm has no network with the weights and answers of {recipe.model.name}; {_OTHERS}")
    if not timm.is_model(name):
        raise refused
    arguments = {}
    config = timm.models.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        arguments["img_size"] = recipe.data.train_crop_size
    network = timm.create_model(name, num_classes=len(source.found.classes), **arguments).eval()
    try:
        network.load_state_dict(ours.state_dict())
    except RuntimeError:
        raise refused from None
    images = torch.randn(2, 3, *2 * (recipe.data.val_crop_size,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = ours(images), network(images)
    if not torch.allclose(expected, found, rtol=_SAME, atol=_SAME * float(expected.abs().max())):
        raise refused
    return name, arguments, network


def _timm() -> Any:
    try:
        import timm
        import timm.data
    except ImportError:
        raise UserError("--to timm needs timm: pip install 'worldsize[timm]'") from None
    if TorchVersion(timm.__version__) < _OLDEST:
        raise UserError(f"--to timm needs timm {_OLDEST} or later; this is {timm.__version__}: pip install -U timm")
    return timm
