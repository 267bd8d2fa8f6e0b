"""`worldsize export`: the files of every format, in their own runtime, give the answers of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import resnet18

import worldsize
from exporting import SIZES, Exported, picture, pictures
from processes import average_of, weights
from worldsize.cli import main
from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.crops import evaluation_crop
from worldsize.data.images.native import PILLOW_13
from worldsize.data.images.normalize import Normalise
from worldsize.errors import UserError
from worldsize.inference.export import (
    fold,
    preprocess,
    to_onnx,
    to_pt2,
    to_safetensors,
    to_timm,
)
from worldsize.inference.export.base import Options, Source
from worldsize.inference.predict.model import Model
from worldsize.inference.trained import Trained
from worldsize.models.factory import build
from worldsize.training.precision import Precision


def normalized(model: Model, images: list[np.ndarray]) -> torch.Tensor:
    """As the run's evaluation does it, float32 (n, 3, size, size)."""
    pixels = torch.from_numpy(np.stack([model.preprocess(image) for image in images])).permute(0, 3, 1, 2).double()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (model.recipe.data.mean, model.recipe.data.std))
    return ((pixels / 255 - mean) / std).float().contiguous()  # compiled programs ignore strides


# Formats ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_timm_loads_the_folder(exported: Exported, model: Model):
    out = exported("timm")
    network = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config)
    images = pictures(8)
    seen = torch.stack([transform(Image.fromarray(image)) for image in images])
    assert torch.allclose(seen, normalized(model, images), atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(network(seen), model.logits(images), atol=1e-5)
    assert config["input_size"] == [3, 16, 16] and math.floor(16 / config["crop_pct"]) == 20
    assert network.pretrained_cfg["label_names"] == list(model.classes)
    card = (out / "README.md").read_text()
    assert card.startswith("---\ntags:\n- image-classification\n- timm\n") and "best class agrees: 100.0000%" in card


@given(st.integers(1, 2000), st.integers(0, 2000))
def test_timm_resizes_as_we_do(size: int, more: int):
    found = to_timm.crop_pct(size, size + more)
    assert math.floor(size / found) == size + more and 0 < found <= 1
    # What timm computes, and what is in the file.
    assert math.floor(size / json.loads(json.dumps(found))) == size + more


def test_the_usual_crop_pct_is_short():
    assert to_timm.crop_pct(224, 256) == 0.875 and to_timm.crop_pct(16, 20) == 0.8 and to_timm.crop_pct(32, 32) == 1.0
    assert math.floor(224 / round(224 / 232, 3)) == 231 and len(str(to_timm.crop_pct(224, 232))) < 8


@pytest.mark.parametrize("batch", [1, 3])
def test_onnx_takes_any_batch(small_exported: Exported, small_model: Model, batch: int):
    out = small_exported("onnx")
    assert sorted(path.name for path in out.glob("model*")) == ["model.onnx"]
    graph = onnx.load(out / "model.onnx")
    assert [(one.domain, one.version) for one in graph.opset_import] == [("", 20)]
    images = normalized(small_model, pictures(batch))
    session = onnxruntime.InferenceSession(out / "model.onnx")
    [logits] = session.run(["logits"], {"normalized": images.numpy()})
    assert np.allclose(logits, small_model.logits(images), atol=1e-5)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16] and session.get_outputs()[0].shape == ["batch", 10]


def test_onnx_takes_images_of_any_size(small_exported: Exported, small_model: Model):
    out = small_exported("onnx", "--preprocess")
    session = onnxruntime.InferenceSession(out / "model.onnx")
    for number, size in enumerate(SIZES):
        images = np.stack([picture(number, size), picture(number + 50, size)])
        [logits] = session.run(None, {"images": images})
        assert np.allclose(logits, small_model.logits(list(images)), atol=1e-5)
    assert json.loads((out / "parity.json").read_text())["largest_pixel_difference_levels"] == 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "size"), [(256, 224), (40, 32), (17, 16)])
def test_preprocessing_in_onnx_has_our_bits(interpolation: str, resize: int, size: int):
    """Our decoder's, and those of the installed Pillow."""
    data = Data(val_resize_size=resize, val_crop_size=size, interpolation=interpolation, mean=(0.1, 0.2, 0.3))
    graph = onnx.parser.parse_model(preprocess.text(data, 20, 10, PILLOW_13))
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    mean, std = (np.array(values).reshape(3, 1, 1) * 255 for values in (data.mean, data.std))
    for number, sides in enumerate((*SIZES, (375, 500), (500, 333), (900, 400), (64, 64), (1, 1))):
        image = picture(number, sides)
        expected = evaluation_crop(data).one(Image.fromarray(image), np.ones(1))
        [[found]] = session.run(None, {"images": image[None]})
        assert np.array_equal((found * std + mean).round(2), expected.transpose(2, 0, 1)), sides


def test_pt2_is_a_program_of_torch(small_exported: Exported, small_model: Model):
    program = torch.export.load(small_exported("pt2", "--fold") / "model.pt2").module()
    for batch in (1, 5):
        images = normalized(small_model, pictures(batch))
        assert torch.allclose(program(images), small_model.logits(images), atol=1e-5)


@pytest.mark.slow
def test_pt2_compiled_by_aotinductor(exported: Exported, model: Model):
    out = exported("pt2", "--aoti")
    images = normalized(model, pictures(3))
    assert torch.allclose(torch._inductor.aoti_load_package(str(out / "model.pt2"))(images), model.logits(images), atol=1e-5)
    assert torch.allclose(worldsize.load(out).logits(images), model.logits(images), atol=1e-5)


def test_safetensors_fit_torchvision(exported: Exported, run: Path, model: Model):
    stored = load_file(exported("safetensors") / "model.safetensors")
    assert stored.keys() == average_of(run).keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in average_of(run).items())
    network = resnet18(num_classes=10)
    network.load_state_dict(stored)
    images = normalized(model, pictures(4))
    with torch.inference_mode():
        assert torch.allclose(network.eval()(images), model.logits(images), atol=1e-5)
    raw = load_file(exported("safetensors", "--raw") / "model.safetensors")
    assert all(torch.equal(raw[name], tensor) for name, tensor in weights(run).items())
    assert not torch.equal(raw["fc.weight"], stored["fc.weight"])


def test_folding_removes_batch_norm():
    torch.manual_seed(0)
    network = resnet18(num_classes=4)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    network.eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    folded, count = fold.folded(network, "resnet18")
    assert count == 20 and not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(folded(images), network(images), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    with pytest.raises(UserError, match="no BatchNorm directly after a convolution"):
        fold.folded(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1)), "x")


class Repeated(torch.nn.Module):
    """One convolution before two norms: called twice, or called once with its weight used elsewhere."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls, self.conv, self.alone = calls, torch.nn.Conv2d(3, 3, 1, bias=False), torch.nn.Conv2d(3, 3, 1)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.conv(x) if self.calls else torch.nn.functional.conv2d(x, self.conv.weight)
        return self.norms[0](self.conv(x)) + self.norms[1](second) + self.norms[2](self.alone(x))


@pytest.mark.parametrize("calls", [True, False])
def test_a_convolution_that_is_used_twice_is_not_folded(calls: bool):
    torch.manual_seed(0)
    network, images = Repeated(calls), torch.randn(8, 3, 4, 4)
    network(images)
    folded, count = fold.folded(network.eval(), "repeated")
    assert count == 1
    assert torch.allclose(folded(images), network(images), atol=1e-5)


def source_of(tmp_path: Path, **settings: Any) -> Source:
    """A network with random weights and used BatchNorms."""
    torch.manual_seed(0)
    data = Data(train_crop_size=32, val_crop_size=32, val_resize_size=40, **settings.pop("data", {}))
    recipe = Recipe(model={"name": "resnet18", **settings}, data=data, precision="fp32")
    cpu = Precision("fp32", torch.device("cpu"))
    network = build(recipe, 3, cpu.device, torch.float32).to(memory_format=torch.contiguous_format)
    for _ in range(3):
        network.train()(torch.randn(4, 3, 32, 32))
    found = Trained(recipe, ("a", "b", "c"), network.eval(), Normalise(data, cpu.device, cpu.weights), cpu)
    return Source(found, "Run_1", "step-00000001", {}, lambda count: torch.zeros(count, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"data": {"val_mirror": True}},
        {"stem": "cifar"},
        {"blurpool": True},
        {"name": "worldsize:cifarnet", "data": {"val_mirror": True}},
        {"data": {"val_mirror": True, "interpolation": "bicubic"}, "stem": "cifar", "blurpool": True},
    ],
    ids=str,
)
def test_formats_express_every_setting(tmp_path: Path, settings: dict):
    """Mirror images, stems and BlurPool in ONNX with preprocessing, ONNX, pt2 and in the lines of the model card."""
    source = source_of(tmp_path, **settings)
    one = Model(source.found)
    images = pictures(4)
    expected, tensor = one.logits(images), normalized(one, images)
    to_onnx.Form().write(tmp_path / "complete", source, Options(preprocess=True))
    session = onnxruntime.InferenceSession(tmp_path / "complete" / "model.onnx")
    found = np.concatenate([session.run(None, {"images": image[None]})[0] for image in images])
    assert np.allclose(found, expected, atol=1e-4)
    to_onnx.Form().write(tmp_path / "network", source, Options(fold=True))
    session = onnxruntime.InferenceSession(tmp_path / "network" / "model.onnx")
    assert np.allclose(session.run(None, {"normalized": tensor.numpy()})[0], expected, atol=1e-4)
    to_pt2.Form().write(tmp_path, source, Options())
    assert torch.allclose(torch.export.load(tmp_path / "model.pt2").module()(tensor), expected, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"stem": "cifar"}, {"blurpool": True}, {"name": "timm:vit_tiny_patch16_224"}, {"name": "worldsize:cifarnet"}, {}],
    ids=str,
)
def test_the_card_of_safetensors_builds_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict):
    source = source_of(tmp_path, **settings)
    lines = to_safetensors.Form().write(tmp_path, source, Options())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(["import torch, torchvision, timm, safetensors.torch, worldsize.models.blurpool", *lines]), names)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(names["network"].eval()(images), source.found.network(images))


@pytest.mark.slow
def test_int8_reports_what_it_costs(exported: Exported, run: Path, tmp_path: Path):
    out = tmp_path / "int8"
    code = main(["export", str(run), "--to", "onnx", "--int8", "--preprocess", "--parity", "60", "--out", str(out)])
    told = json.loads((out / "parity.json").read_text())
    # Processors round differently, and one of 60 images is more than a percentage point.
    assert told["passed"] == (told["top1_run"] - told["top1_export"] <= 0.01) == (code == 0)
    assert told["top1_export"] > told["top1_run"] - 0.1 and told["largest_probability_difference"] > 1e-4
    kinds = {tensor.data_type for tensor in onnx.load(out / "model.onnx").graph.initializer if len(tensor.dims) == 4}
    assert onnx.TensorProto.INT8 in kinds
    whole = exported("onnx", "--preprocess")
    assert (out / "model.onnx").stat().st_size < 0.3 * (whole / "model.onnx").stat().st_size
