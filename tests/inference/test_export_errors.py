"""Exports that disagree with their network, cannot be made, or were changed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import worldsize
from exporting import QUICK, Exported
from processes import start
from processes import worldsize as command
from waiting import until
from worldsize.cli import main
from worldsize.config.recipe import Data
from worldsize.errors import CheckpointError, DataError, UserError
from worldsize.inference.export import (
    parity,
    preprocess,
    to_safetensors,
    to_timm,
)

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
def test_an_export_that_answers_differently_is_reported(request, tmp_path, monkeypatch, capsys, change, arguments, cause):
    run = request.getfixturevalue("small_run" if "onnx" in arguments else "run")
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
        (("--to", "tflite"), 64, "--to tflite: must be timm, onnx, pt2 or safetensors"),
        (("--to", "onnx", "--opset", "9"), 64, "--opset 9: must be 18 to 23"),
        (("--to", "onnx", "--temperature", "0"), 64, "--temperature 0: must be above 0"),
        (("--to", "onnx", "--temperature", "nothing.json"), 64, "neither a number nor a file"),
        (("--to", "onnx", "--parity", "0"), 64, "--parity 0: must be at least 1"),
        (("--to", "onnx", "--out", "full"), 64, "--out full already exists"),
        (("--to", "onnx", "--out", "no/where"), 64, "--out no/where: no does not exist"),
        (("--to", "onnx", "--out", "full/file/there"), 64, "full/file is a file, not a folder"),
        (("--to", "safetensors", "--out", "/proc/there"), 64, "--out /proc/there: cannot create it"),
        (("--to", "safetensors", "--model.name", "resnet34"), 66, "does not fit resnet34"),
        (
            ("--to", "safetensors", "--data.name", "synthetic"),
            64,
            "of this dataset: new: '10', '100', '101', '102', '103' and",
        ),
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


def test_a_timm_that_cannot_load_the_folder_is_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timm, "__version__", "1.0.25")
    assert main(["export", str(run), "--to", "timm", "--out", str(tmp_path / "out")]) == 64
    assert "--to timm needs timm 1.0.26 or later; this is 1.0.25: pip install -U timm" in capsys.readouterr().err


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = torch.nn.Linear(3, classes)

    def forward(self, x):
        return self.fc(torch.special.bessel_j0(x.mean((2, 3))))
"""


def test_an_operator_without_an_equivalent_in_onnx_is_one_message(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    done = command(
        "train", "digits", "--model.name", "own.py:Net", *QUICK, "--max-steps", "1", "--name", "own", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "own"
    assert main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "out")]) == 64
    err = capsys.readouterr().err
    assert "cannot convert own.py:Net" in err and "bessel_j0" in err and "--to pt2 can" in err and "Traceback" not in err
    assert main(["export", str(run), "--to", "pt2", "--out", str(tmp_path / "out")]) == 0


def test_compiled_exports_need_a_compiler(small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["export", str(small_run), "--to", "pt2", "--aoti", "--out", str(tmp_path / "out")]) == 64
    err = capsys.readouterr().err
    assert "--aoti compiles the network: it needs a C++ compiler, and CXX=no-such-compiler is no program" in err
    assert not list(tmp_path.iterdir())


def test_evaluation_refuses_other_classes_in_the_words_of_resuming(run, tmp_path, capsys):
    for split in ("train", "val"):
        for name in ("ship", "boat"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(tmp_path / split / name / "a.png")
    assert main(["eval", str(run), "--data.name", "folder", "--data.root", str(tmp_path)]) == 64
    expected = "gone: '0', '1', '2', '3', '4' and 5 more; new: 'boat', 'ship'; label 0 was '0', is 'boat'\n"
    assert capsys.readouterr().err.endswith(expected)


def test_changed_files_are_refused(small_exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = shutil.copytree(small_exported("onnx"), tmp_path / "copy")
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
def test_settings_that_an_export_cannot_have(small_exported: Exported, capsys: pytest.CaptureFixture, words, message: str):
    assert main(["predict", str(small_exported("onnx", "--preprocess")), *words]) == 64
    assert message in capsys.readouterr().err


def test_exports_have_one_preprocessing_and_one_set_of_weights(small_exported: Exported, capsys: pytest.CaptureFixture):
    out = small_exported("onnx", "--preprocess")
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
    assert process.returncode == 130 and "nothing was exported" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt2", "safetensors"])
def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, form: str):
    process = start("export", run, "--to", form, "--out", tmp_path / "out", cwd=tmp_path, rule="no_room_for_a_megabyte")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == UserError.exit_code
    assert f"cannot write {tmp_path / 'out'}: " in output and "File too large" in output
    assert list(tmp_path.iterdir()) == []
