"""Exports that are used: by worldsize, and by a server."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from PIL import Image

import worldsize
from exporting import Exported, pictures
from paths import ROOT
from processes import environment, free_port
from processes import worldsize as command
from waiting import until
from worldsize import checkpoint
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.pillow import BrokenImage
from worldsize.errors import UserError
from worldsize.inference import trained
from worldsize.inference.export import command as export_command
from worldsize.inference.export import (
    layout,
    onnx_packages,
    opened,
)
from worldsize.inference.predict.model import Model

# Exports in worldsize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("timm",), ("onnx",), ("onnx", "--preprocess"), ("pt2", "--fold"), ("safetensors",)], ids="-".join
)
def test_worldsize_loads_exports(request: pytest.FixtureRequest, arguments: tuple[str, ...]):
    small = "small_" if arguments[0] in ("onnx", "pt2") else ""
    exported, model = (request.getfixturevalue(f"{small}{name}") for name in ("exported", "model"))
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


def test_running_an_onnx_file_needs_only_its_runtime(
    small_exported: Exported, small_model: Model, monkeypatch: pytest.MonkeyPatch
):
    folders = [small_exported("onnx"), small_exported("onnx", "--preprocess")]
    monkeypatch.setattr(onnx_packages, "onnx", None)
    for out in folders:
        assert torch.allclose(worldsize.load(out).logits(pictures(1)), small_model.logits(pictures(1)), atol=1e-5)


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


def test_a_temperature_that_is_doubted_is_refused(run: Path, tmp_path: Path):
    details = {"temperature": 0.16, "temperature_warning": "The temperature cannot be fitted: no prediction is wrong."}
    (tmp_path / "details.json").write_text(json.dumps(details))
    with pytest.raises(UserError, match=r"no prediction is wrong\. Evaluate more images, or pass a number"):
        export_command._temperature(str(tmp_path), checkpoint.find(run), raw=False)


def test_temperature(small_exported: Exported, small_model: Model, tmp_path: Path):
    (tmp_path / "details.json").write_text('{"temperature": 1.7}')
    images = pictures(3)
    for arguments in (("onnx", "--preprocess"), ("safetensors",)):
        out = small_exported(*arguments, "--temperature", str(tmp_path))
        assert json.loads((out / "export.json").read_text())["temperature"] == 1.7
        assert torch.allclose(worldsize.load(out, "cpu").logits(images), small_model.logits(images) / 1.7, atol=1e-5)
    out = small_exported("onnx", "--preprocess", "--temperature", str(tmp_path))
    [logits] = onnxruntime.InferenceSession(out / "model.onnx").run(None, {"images": images[0][None]})
    assert np.allclose(logits, small_model.logits(images[:1]) / 1.7, atol=1e-5)


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


@pytest.mark.parametrize("checkpoint_itself", [False, True])
def test_an_export_names_its_run_from_any_folder(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_itself: bool
):
    path = checkpoint.find(small_run)
    monkeypatch.chdir(path if checkpoint_itself else small_run)
    assert main(["export", ".", "--to", "safetensors", "--parity", "1", "--out", str(tmp_path / "out")]) == 0
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["run"], about["checkpoint"]) == (small_run.name, path.name)


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


def test_the_lines_of_the_card_compute_the_logits(small_exported: Exported, small_model: Model, monkeypatch):
    out = small_exported("onnx", "--preprocess")
    [lines] = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    [image] = pictures(1)
    names: dict[str, Any] = {"image": image}
    monkeypatch.chdir(out)
    exec(lines, names)
    assert np.allclose(names["logits"], small_model.logits([image]), atol=1e-4)


def test_labels_of_a_layout_that_are_not_utf_8(tmp_path: Path):
    (tmp_path / "model.onnx").touch()
    layout.arrange(tmp_path, "triton", "a", [os.fsdecode(b"\xff"), "b"], 16, preprocessed=False)
    assert (tmp_path / "a" / "labels.txt").read_text().splitlines() == ["\\udcff", "b"]


def test_the_server_of_the_docs_answers_as_predict(small_exported: Exported, small_model: Model, tmp_path: Path):
    guide = (ROOT / "docs" / "using.md").read_text()
    (script,) = re.findall(r"```python\n(# serve\.py\n.*?)```", guide, re.DOTALL)
    port, out = free_port(), small_exported("onnx", "--preprocess")
    script = script.replace("digits-onnx", str(out)).replace("8000", str(port))
    (tmp_path / "serve.py").write_text(script)
    server = subprocess.Popen([sys.executable, str(tmp_path / "serve.py")], env=environment())
    try:
        for number, image in enumerate(pictures(6)):
            path = tmp_path / f"{number}.png"
            Image.fromarray(image).save(path)
            answer = _ask(server, port, path.read_bytes())
            expected = small_model.predict(path, topk=10)
            assert max(answer, key=answer.__getitem__) == expected.label
            for name, value in zip(expected.labels, expected.probabilities, strict=True):
                assert answer[name] == pytest.approx(value, abs=1e-5)
        deep = io.BytesIO()
        Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(deep, "PNG")
        with pytest.raises(urllib.error.HTTPError, match="415"):
            _ask(server, port, deep.getvalue())
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
