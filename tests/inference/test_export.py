"""`worldsize export`: the files of every format, in their own runtime, give the answers of the run."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import struct
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import resnet18

import worldsize
from paths import ROOT
from processes import average_of, environment, free_port, start, weights
from processes import worldsize as command
from waiting import until
from worldsize import checkpoint
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.crops import evaluation_crop
from worldsize.data.images.native import PILLOW_13
from worldsize.data.images.normalize import Normalise
from worldsize.data.images.pillow import BrokenImage
from worldsize.errors import CheckpointError, DataError, UserError
from worldsize.inference import trained
from worldsize.inference.export import command as export_command
from worldsize.inference.export import (
    fold,
    layout,
    onnx_packages,
    opened,
    parity,
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

QUICK = (
    *("--model.name", "resnet18", "--data.train-crop-size", "16", "--data.val-crop-size", "16", "--precision", "fp32"),
    *("--data.val-resize-size", "20", "--epochs", "1", "--schedule.warmup-epochs", "0", "--checkpoint.keep", "1"),
    *("--average.name", "ema", "--average.decay", "0.7", "--device", "cpu"),
)
SIZES = ((60, 48), (31, 97), (97, 31), (200, 41), (16, 16), (20, 20), (5, 3), (133, 260))  # height, width
Exported = Callable[..., Path]


def picture(seed: int, size: tuple[int, int]) -> np.ndarray:
    """Noise with structure, uint8 (height, width, 3)."""
    small = np.random.default_rng(seed).integers(0, 256, (size[0] // 3 + 2, size[1] // 3 + 2, 3), np.uint8)
    return np.ascontiguousarray(small.repeat(3, 0).repeat(3, 1)[: size[0], : size[1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    done = command("train", "digits", *QUICK, "--out", folder / "runs", "--name", "Digits_1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "Digits_1"


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return worldsize.load(run, device="cpu")


@pytest.fixture(scope="module")
def exported(run: Path, folder: Path) -> Exported:
    """exported(*arguments): the folder of such an export, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def export(*arguments: str) -> Path:
        if arguments not in made:
            out = folder / f"out-{len(made)}"
            before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
            assert main(["export", str(run), "--to", *arguments, "--parity", "60", "--out", str(out)]) == 0
            assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
            made[arguments] = out
        return made[arguments]

    return export


def normalized(model: Model, images: list[np.ndarray]) -> torch.Tensor:
    """As the run's evaluation does it, float32 (n, 3, size, size)."""
    pixels = torch.from_numpy(np.stack([model.preprocess(image) for image in images])).permute(0, 3, 1, 2).double()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (model.recipe.data.mean, model.recipe.data.std))
    return ((pixels / 255 - mean) / std).float().contiguous()  # compiled programs ignore strides


def pictures(count: int) -> list[np.ndarray]:
    return [picture(i, SIZES[i % len(SIZES)]) for i in range(count)]


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
def test_onnx_takes_any_batch(exported: Exported, model: Model, batch: int):
    out = exported("onnx")
    assert sorted(path.name for path in out.glob("model*")) == ["model.onnx"]
    graph = onnx.load(out / "model.onnx")
    assert [(one.domain, one.version) for one in graph.opset_import] == [("", 20)]
    images = normalized(model, pictures(batch))
    session = onnxruntime.InferenceSession(out / "model.onnx")
    [logits] = session.run(["logits"], {"normalized": images.numpy()})
    assert np.allclose(logits, model.logits(images), atol=1e-5)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16] and session.get_outputs()[0].shape == ["batch", 10]


def test_onnx_takes_images_of_any_size(exported: Exported, model: Model):
    out = exported("onnx", "--preprocess")
    session = onnxruntime.InferenceSession(out / "model.onnx")
    for number, size in enumerate(SIZES):
        images = np.stack([picture(number, size), picture(number + 50, size)])
        [logits] = session.run(None, {"images": images})
        assert np.allclose(logits, model.logits(list(images)), atol=1e-5)
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


def test_pt2_is_a_program_of_torch(exported: Exported, model: Model):
    program = torch.export.load(exported("pt2", "--fold") / "model.pt2").module()
    for batch in (1, 5):
        images = normalized(model, pictures(batch))
        assert torch.allclose(program(images), model.logits(images), atol=1e-5)


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
    "settings", [{"stem": "cifar"}, {"blurpool": True}, {"name": "timm:vit_tiny_patch16_224"}, {}], ids=str
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
def test_int8_reports_what_it_costs(exported: Exported):
    out = exported("onnx", "--int8", "--preprocess")
    told = json.loads((out / "parity.json").read_text())
    assert told["passed"] and told["largest_probability_difference"] > 1e-4
    kinds = {tensor.data_type for tensor in onnx.load(out / "model.onnx").graph.initializer if len(tensor.dims) == 4}
    assert onnx.TensorProto.INT8 in kinds
    whole = exported("onnx", "--preprocess")
    assert (out / "model.onnx").stat().st_size < 0.3 * (whole / "model.onnx").stat().st_size


# Exports in worldsize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("timm",), ("onnx",), ("onnx", "--preprocess"), ("pt2", "--fold"), ("safetensors",)], ids="-".join
)
def test_worldsize_loads_exports(exported: Exported, model: Model, arguments: tuple[str, ...]):
    found = worldsize.load(exported(*arguments), device="cpu")
    images = pictures(8)
    assert torch.allclose(found.logits(images), model.logits(images), atol=1e-5)
    assert found.classes == model.classes
    stacked = torch.from_numpy(np.stack(images[:1])).permute(0, 3, 1, 2)
    assert torch.allclose(found.logits(stacked), model.logits(stacked), atol=1e-5)


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def test_running_an_onnx_file_needs_only_its_runtime(exported: Exported, model: Model, monkeypatch: pytest.MonkeyPatch):
    folders = [exported("onnx"), exported("onnx", "--preprocess")]
    monkeypatch.setattr(onnx_packages, "onnx", None)
    for out in folders:
        assert torch.allclose(worldsize.load(out).logits(pictures(1)), model.logits(pictures(1)), atol=1e-5)


@pytest.mark.slow
def test_predict_takes_exports(exported: Exported, run: Path, tmp_path: Path):
    for number, image in enumerate(pictures(5)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    (tmp_path / "huge.png").write_bytes(png_header(30_000, 30_000))
    Image.new("RGB", (3, 30_000)).save(tmp_path / "tall.png")
    Image.new("RGB", (1, 60_000)).save(tmp_path / "thread.png")
    words = (str(tmp_path), "--format", "json", "--output", "logit")

    def rows(source: Path, procs: int = 1) -> list[dict]:
        done = command("predict", source, *words, "--procs", str(procs), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    expected = rows(run)
    assert "error" in expected[5] and "prob" not in expected[5]
    for found in (rows(exported("onnx", "--preprocess"), procs=2), rows(exported("timm"))):
        for row, other in zip(expected, found, strict=True):
            assert row["filename"] == other["filename"] and ("error" in row) == ("error" in other)
            if "error" not in row:
                assert row["label"] == other["label"]
                assert row["logit"] == pytest.approx(other["logit"], abs=1e-4)


def test_images_that_become_too_large_are_broken_for_exports_too():
    with pytest.raises(BrokenImage, match="too large after resizing: 1 x 2731"):
        opened.check_size(np.zeros((2731, 1, 3), np.uint8), Recipe())
    opened.check_size(np.zeros((2730, 1, 3), np.uint8), Recipe())  # 256 x 256 x 2730 is just below twice Pillow's limit


def test_an_export_has_no_paths_of_the_dataset(exported: Exported):
    recipe = Recipe(data=Data(root=Path("/home/me"), val_list=Path("/home/me/list")))
    assert "/home" not in recipe_files.to_yaml(export_command._portable(recipe))
    assert recipe_files.load(str(exported("timm") / "recipe.yaml")).data.root is None


def test_a_temperature_of_other_weights_is_refused(run: Path, tmp_path: Path):
    """By the hash of the weights: the run's average and its weights themselves differ."""
    path = checkpoint.find(run)
    details = {"temperature": 1.7, "network": trained.identity(path, raw=False)}
    (tmp_path / "details.json").write_text(json.dumps(details))
    assert export_command._temperature(str(tmp_path), path, raw=False) == 1.7
    with pytest.raises(UserError, match=r"other weights: average.safetensors of step-\d+ of the run Digits_1"):
        export_command._temperature(str(tmp_path), path, raw=True)


def test_temperature(exported: Exported, model: Model, tmp_path: Path):
    (tmp_path / "details.json").write_text('{"temperature": 1.7}')
    images = pictures(3)
    for arguments in (("onnx", "--preprocess"), ("safetensors",)):
        out = exported(*arguments, "--temperature", str(tmp_path))
        assert json.loads((out / "export.json").read_text())["temperature"] == 1.7
        assert torch.allclose(worldsize.load(out, "cpu").logits(images), model.logits(images) / 1.7, atol=1e-5)
    out = exported("onnx", "--preprocess", "--temperature", str(tmp_path))
    [logits] = onnxruntime.InferenceSession(out / "model.onnx").run(None, {"images": images[0][None]})
    assert np.allclose(logits, model.logits(images[:1]) / 1.7, atol=1e-5)


# Parity -------------------------------------------------------------------------------------------------------------------


def _other_network(monkeypatch: pytest.MonkeyPatch):
    original = to_safetensors.save

    def save(path: Path, network: torch.nn.Module) -> None:
        original(path, network)
        stored = load_file(path)
        stored["fc.weight"] = stored["fc.weight"].roll(1, 0)
        to_safetensors.save_file(stored, path, metadata={"format": "pt"})

    monkeypatch.setattr(to_safetensors, "save", save)


def _other_crop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(to_timm, "crop_pct", lambda size, resize: 0.4)


def _other_mean(monkeypatch: pytest.MonkeyPatch):
    original = preprocess.text

    def text(data: Data, *more: object) -> str:
        return original(data.model_copy(update={"mean": (0.9, 0.1, 0.3)}), *more)

    monkeypatch.setattr(preprocess, "text", text)


@pytest.mark.parametrize(
    ("change", "arguments", "cause"),
    [
        (_other_network, ("timm",), "the network differs"),
        (_other_network, ("safetensors",), "the network differs"),
        (_other_crop, ("timm",), "the preprocessing differs"),
        (_other_mean, ("onnx", "--preprocess"), "the preprocessing differs"),
    ],
)
def test_an_export_that_answers_differently_is_reported(run, tmp_path, monkeypatch, capsys, change, arguments, cause):
    change(monkeypatch)
    out = tmp_path / "out"
    assert main(["export", str(run), "--to", *arguments, "--out", str(out), "--parity", "90"]) == 1
    assert cause in capsys.readouterr().out
    told = json.loads((out / "parity.json").read_text())
    assert told["passed"] is False and f"{told['differs']} differs" == cause and told["top1_agreement"] < 1
    assert set(told["first_disagreements"]) <= {f"digits test #{i}" for i in np.linspace(0, 359, 90).round().astype(int)}
    assert len(told["first_disagreements"]) == min(10, told["disagreements"])
    assert "**not passed**" in (out / "README.md").read_text()


def test_one_image_in_ten_thousand_may_disagree():
    assert parity.Parity(images=10_000, disagreements=1).passed(int8=False)
    assert not parity.Parity(images=9_999, disagreements=1).passed(int8=False)
    assert not parity.Parity(images=10_000, disagreements=2).passed(int8=False)
    assert parity.Parity(images=100, disagreements=9, right=89, right_before=90).passed(int8=True)
    assert not parity.Parity(images=100, disagreements=9, right=88, right_before=90).passed(int8=True)


def test_agreement_of_several_labels_is_of_all_classes():
    expected = torch.tensor([[2.0, 1.0, -1.0], [2.0, -1.0, -1.0], [1.0, 2.0, 3.0]])
    answers = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.1, -1.0], [float("nan"), 2.0, 3.0]])
    assert parity._agree(expected, answers, multilabel=True).tolist() == [True, False, False]
    assert parity._agree(expected, answers, multilabel=False).tolist() == [False, True, False]


# Errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--to", "timm", "--model.stem", "cifar"), 64, "CIFAR stem of this resnet18; --to onnx, pt2 and safetensors can"),
        (("--to", "timm", "--model.blurpool"), 64, "timm cannot express BlurPool"),
        (("--to", "timm", "--data.val-mirror"), 64, "--data.no-val-mirror"),
        (("--to", "timm", "--preprocess"), 64, "--preprocess is for onnx, not for timm"),
        (("--to", "timm", "--fold"), 64, "--fold is for onnx, pt2, not for timm"),
        (("--to", "onnx", "--data.val-ten-crop"), 64, "--data.no-val-ten-crop"),
        (("--to", "onnx", "--opset", "9"), 64, "--opset 9: must be 18 to 23"),
        (("--to", "onnx", "--temperature", "0"), 64, "--temperature 0: must be above 0"),
        (("--to", "onnx", "--temperature", "nothing.json"), 64, "neither a number nor a file"),
        (("--to", "onnx", "--parity", "0"), 64, "--parity 0: must be at least 1"),
        (("--to", "onnx", "--out", "full"), 64, "--out full already exists"),
        (("--to", "onnx", "--out", "no/where"), 64, "the folder no does not exist"),
        (("--to", "safetensors", "--model.name", "resnet34"), 66, "does not fit resnet34"),
        (("--to", "safetensors", "--data.name", "synthetic"), 64, "trained on other classes than those of this dataset"),
    ],
)
def test_what_cannot_be_exported_is_one_message(run, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    out = () if "--out" in arguments else ("--out", "out")
    assert main(["export", str(run), *arguments, *out]) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_changed_files_are_refused(exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = shutil.copytree(exported("onnx"), tmp_path / "copy")
    content = bytearray((out / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (out / "model.onnx").write_bytes(content)
    assert main(["predict", str(out), str(tmp_path)]) == 66
    assert "model.onnx was changed after the export" in capsys.readouterr().err
    (out / "model.onnx").unlink()
    with pytest.raises(CheckpointError, match=r"model\.onnx is missing"):
        worldsize.load(out)
    (out / "export.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        worldsize.load(out)


def _swap_classes(about: dict[str, Any]) -> None:
    about["classes"][:2] = about["classes"][1::-1]


def _lose_classes(about: dict[str, Any]) -> None:
    """Of the first version, which had no hash of export.json."""
    del about["classes"], about["sha256"]
    about["version"] = 1


@pytest.mark.parametrize(
    ("change", "message"), [(_swap_classes, "was changed after"), (_lose_classes, "KeyError: 'classes'")]
)
def test_a_changed_description_is_refused(exported: Exported, tmp_path: Path, change: Callable, message: str):
    out = shutil.copytree(exported("safetensors"), tmp_path / "copy")
    about = json.loads((out / "export.json").read_text())
    change(about)
    (out / "export.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=message):
        worldsize.load(out)


def test_the_model_card_may_change_and_first_exports_are_read(exported: Exported, tmp_path: Path):
    out = shutil.copytree(exported("safetensors"), tmp_path / "copy")
    about = json.loads((out / "export.json").read_text())
    assert "README.md" not in about["files"]
    (out / "README.md").write_text("---\nlicense: mit\n---\n")
    (out / "export.json").write_text(json.dumps(about))  # only its spaces change
    assert worldsize.load(out).classes == worldsize.load(exported("safetensors")).classes
    del about["sha256"]
    about["files"]["README.md"] = {"bytes": 1, "sha256": "0"}
    (out / "export.json").write_text(json.dumps(about | {"version": 1}))
    worldsize.load(out)


@pytest.mark.parametrize("content", [None, "model: ["])
def test_a_missing_or_damaged_recipe_is_a_damaged_export(exported: Exported, tmp_path: Path, content: str | None):
    out = shutil.copytree(exported("safetensors"), tmp_path / "copy")
    (out / "recipe.yaml").unlink()
    if content is not None:
        (out / "recipe.yaml").write_text(content)
    with pytest.raises(CheckpointError, match=r"(?s)recipe\.yaml.*; export again"):
        worldsize.load(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "fp64"), "computes in fp32: leave out --precision fp64"),
        (("--model.name", "resnet34"), "has one network: leave out the --model settings"),
        (("--data.val-ten-crop",), "exported with another preprocessing"),
    ],
)
def test_settings_that_an_export_cannot_have(exported: Exported, capsys: pytest.CaptureFixture, words, message: str):
    assert main(["predict", str(exported("onnx", "--preprocess")), *words]) == 64
    assert message in capsys.readouterr().err


def test_exports_have_one_preprocessing_and_one_set_of_weights(exported: Exported, capsys: pytest.CaptureFixture):
    out = exported("onnx", "--preprocess")
    assert main(["predict", str(out), "--data.val-crop-size", "8"]) == 64
    assert "exported with another preprocessing" in capsys.readouterr().err
    with pytest.raises(UserError, match="only one set of weights"):
        worldsize.load(out, raw=True)
    with pytest.raises(UserError, match="pass images, not normalized tensors"):
        worldsize.load(out).logits(torch.zeros(1, 3, 16, 16))
    with pytest.raises(DataError, match="image 0: UnidentifiedImageError"):
        worldsize.load(out).logits([b"nothing"])


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(run: Path, tmp_path: Path):
    process = start("export", run, "--to", "onnx", "--out", tmp_path / "out", cwd=tmp_path)
    until(lambda: list(tmp_path.glob(".out.tmp-*")), "the export has begun", running=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75 and "nothing was exported" in output
    assert list(tmp_path.iterdir()) == []


# Serving ------------------------------------------------------------------------------------------------------------------


def triton_schema() -> Any:
    """An empty ModelConfig, with the fields that we use: names, numbers and types of Triton's model_config.proto."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    types = file.enum_type.add(name="DataType")
    for name, number in (("TYPE_INVALID", 0), ("TYPE_UINT8", 2), ("TYPE_FP32", 11)):
        types.value.add(name=name, number=number)
    messages: dict[str, tuple[tuple[str, int, int, str, bool], ...]] = {
        "ModelInput": (
            ("name", 1, kinds.TYPE_STRING, "", False),
            ("data_type", 2, kinds.TYPE_ENUM, "DataType", False),
            ("dims", 4, kinds.TYPE_INT64, "", True),
        ),
        "ModelOutput": (
            ("name", 1, kinds.TYPE_STRING, "", False),
            ("data_type", 2, kinds.TYPE_ENUM, "DataType", False),
            ("dims", 3, kinds.TYPE_INT64, "", True),
            ("label_filename", 4, kinds.TYPE_STRING, "", False),
        ),
        "ModelDynamicBatching": (),
        "ModelConfig": (
            ("name", 1, kinds.TYPE_STRING, "", False),
            ("max_batch_size", 4, kinds.TYPE_INT32, "", False),
            ("input", 5, kinds.TYPE_MESSAGE, "ModelInput", True),
            ("output", 6, kinds.TYPE_MESSAGE, "ModelOutput", True),
            ("dynamic_batching", 11, kinds.TYPE_MESSAGE, "ModelDynamicBatching", False),
            ("backend", 17, kinds.TYPE_STRING, "", False),
        ),
    }
    for title, fields in messages.items():
        message = file.message_type.add(name=title)
        for name, number, kind, of, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            field = message.field.add(name=name, number=number, type=kind, label=label)
            if of:
                field.type_name = f".inference.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()


@pytest.mark.slow
def test_layouts(exported: Exported, model: Model):
    out = exported("onnx", "--preprocess", "--layout", "kserve")
    images = pictures(2)
    assert torch.allclose(worldsize.load(out).logits(images), model.logits(images), atol=1e-5)
    assert (out / "digits-1" / "labels.txt").read_text().splitlines() == list(model.classes)
    session = onnxruntime.InferenceSession(out / "digits-1" / "1" / "model.onnx")
    config = triton_schema()
    text_format.Parse((out / "digits-1" / "config.pbtxt").read_text(), config)
    assert (config.name, config.backend, config.HasField("dynamic_batching")) == ("digits-1", "onnxruntime", True)
    # Without the batch, the configuration has the names, types and sizes of the file.
    types = {"tensor(uint8)": 2, "tensor(float)": 11}  # TYPE_UINT8, TYPE_FP32
    for one, value in ((config.input[0], session.get_inputs()[0]), (config.output[0], session.get_outputs()[0])):
        assert (one.name, one.data_type) == (value.name, types[value.type])
        assert list(one.dims) == [side if isinstance(side, int) else -1 for side in value.shape[1:]]
    assert config.output[0].label_filename == "labels.txt"
    parsed = triton_schema()
    text_format.Parse(layout.triton_config("a", 7, 16, preprocessed=False), parsed)
    assert list(parsed.input[0].dims) == [3, 16, 16] and parsed.input[0].data_type == 11
    assert 'InferenceSession("digits-1/1/model.onnx")' in (out / "README.md").read_text()
    assert (out / "inferenceservice.yaml").read_text().startswith("# Copy this folder as digits-1 to the volume claim")
    service = yaml.safe_load((out / "inferenceservice.yaml").read_text())
    assert service["kind"] == "InferenceService" and service["metadata"]["name"] == "digits-1"
    assert service["spec"]["predictor"]["model"]["storageUri"] == "pvc://models/digits-1"
    assert layout.model_name("My run_2.0") == "my-run-2-0" and layout.model_name("...") == "model"


def test_the_server_of_the_docs_answers_as_predict(exported: Exported, model: Model, tmp_path: Path):
    guide = (ROOT / "docs" / "using.md").read_text()
    (script,) = re.findall(r"```python\n(# serve\.py\n.*?)```", guide, re.DOTALL)
    port, out = free_port(), exported("onnx", "--preprocess")
    script = script.replace("digits-onnx", str(out)).replace("8000", str(port))
    (tmp_path / "serve.py").write_text(script)
    server = subprocess.Popen([sys.executable, str(tmp_path / "serve.py")], env=environment())
    try:
        for number, image in enumerate(pictures(6)):
            path = tmp_path / f"{number}.png"
            Image.fromarray(image).save(path)
            answer = _ask(server, port, path.read_bytes())
            expected = model.predict(path, topk=10)
            assert max(answer, key=answer.__getitem__) == expected.label
            for name, value in zip(expected.labels, expected.probabilities, strict=True):
                assert answer[name] == pytest.approx(value, abs=1e-5)
    finally:
        server.kill()
        server.wait()


def _ask(server: subprocess.Popen[bytes], port: int, image: bytes) -> dict[str, float]:
    def answer() -> dict[str, float] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", image, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.HTTPError:
            raise
        except OSError:  # it is not there yet
            return None

    return until(answer, "the server answers", running=server)
