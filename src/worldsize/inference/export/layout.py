"""The folders that inference servers expect around an ONNX file (pure, but for `arrange`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from worldsize.inference.export import preprocess
from worldsize.inference.export.served import LOGITS

_MAX_BATCH = 64


def arrange(folder: Path, layout: str, run: str, classes: Sequence[str], size: int, preprocessed: bool) -> str:
    """Move model.onnx in ``folder`` to where the server expects it, and write the server's configuration.

    Args:
        layout: triton, a model repository; kserve, the same with a manifest of an InferenceService.
        size: of the normalized images, pixels.
        preprocessed: the file takes images of any size.

    Returns:
        The new path of the model, relative to ``folder``.
    """
    name, target = model_name(run), folder / model_path(run)
    target.parent.mkdir(parents=True)
    (folder / "model.onnx").rename(target)
    (folder / name / "config.pbtxt").write_text(triton_config(name, len(classes), size, preprocessed), "utf-8")
    lines = (re.sub(r"\s+", " ", one) for one in classes)
    # Clients decode the names as UTF-8: bytes of others become escapes such as \udcff.
    (folder / name / "labels.txt").write_text("".join(f"{one}\n" for one in lines), "utf-8", errors="backslashreplace")
    if layout == "kserve":
        about = f"# Copy this folder as {name} to the volume claim `models`, or change storageUri to where it is.\n"
        text = about + yaml.safe_dump(inference_service(name), sort_keys=False)
        (folder / "inferenceservice.yaml").write_text(text, "utf-8")
    return model_path(run)


def model_name(run: str) -> str:
    """The run's name as a DNS label, which both servers accept: lowercase letters, digits and -."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:63].strip("-") or "model"


def model_path(run: str) -> str:
    """Where both servers expect the model of this run, relative to the folder."""
    return f"{model_name(run)}/1/model.onnx"


def triton_config(name: str, classes: int, size: int, preprocessed: bool) -> str:
    """config.pbtxt: Triton's ModelConfig as a text-format protocol buffer. Dimensions are without the batch."""
    dims = "-1, -1, 3" if preprocessed else f"3, {size}, {size}"
    kind, given = ("TYPE_UINT8", preprocess.INPUT) if preprocessed else ("TYPE_FP32", preprocess.OUTPUT)
    return f"""name: {json.dumps(name)}
backend: "onnxruntime"
max_batch_size: {_MAX_BATCH}
input [ {{ name: "{given}" data_type: {kind} dims: [ {dims} ] }} ]
output [ {{ name: "{LOGITS}" data_type: TYPE_FP32 dims: [ {classes} ] label_filename: "labels.txt" }} ]
dynamic_batching {{ }}
"""


def inference_service(name: str) -> dict[str, Any]:
    """The manifest of a KServe InferenceService that serves the repository with Triton, by the Open Inference Protocol.

    The folder at ``storageUri`` is the model repository.
    """
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "onnx"},
                    "runtime": "kserve-tritonserver",
                    "protocolVersion": "v2",
                    "storageUri": f"pvc://models/{name}",
                }
            }
        },
    }
