"""Exported files against the run they are from: ``python benchmarks/export.py RUN [RUN ...]``, some minutes per run.

Writes each run in every format, and prints a Markdown table of what `worldsize export` finds when it runs the file in its
own runtime on the validation images. Then compares two ways to resize inside an ONNX file with Pillow on
the validation images of each run: our graph, and ONNX's operator Resize with antialias. Last, the memory of our graph.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from worldsize import checkpoint
from worldsize.config import recipe_files
from worldsize.config.recipe import Data
from worldsize.data import open_dataset
from worldsize.data.images.crops import evaluation_crop
from worldsize.data.images.native import PILLOW_13
from worldsize.inference.export import preprocess

VARIANTS = (
    ("timm",),
    ("safetensors",),
    ("pt2",),
    ("pt2", "--fold"),
    ("pt2", "--aoti"),
    ("onnx",),
    ("onnx", "--preprocess"),
    ("onnx", "--preprocess", "--fold"),
    ("onnx", "--preprocess", "--int8"),
)
OPSET, IR = 20, 10
_MEMORY = "--memory"
Picture = NDArray[np.uint8]


def main(runs: list[Path]) -> None:
    print("| run | --to | MB | images | same class | probability, at most | pixel, levels, at most | top-1 |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in runs:
        for words in VARIANTS:
            print(row(run, words), flush=True)
    print("\n| resizing in an ONNX file | values | equal to Pillow's | largest difference, levels |")
    print("| --- | ---: | ---: | ---: |")
    for run in runs:
        for line in resizing(run):
            print(line, flush=True)
    # In a process of its own, whose largest memory so far is small.
    subprocess.run([sys.executable, __file__, _MEMORY], check=True)


def row(run: Path, words: tuple[str, ...]) -> str:
    """Export ``run`` in one way."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "worldsize", "export", str(run), "--to", *words, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            return f"| {run.name} | {' '.join(words)} | {done.stderr.strip().splitlines()[-1]} |"
        parity = json.loads((out / "parity.json").read_text())
        megabytes = sum(path.stat().st_size for path in out.glob("model.*")) / 1e6
    levels = parity["largest_pixel_difference_levels"]
    cells = [
        *(run.name, " ".join(words), f"{megabytes:.1f}", f"{parity['images']:,}", f"{parity['top1_agreement']:.2%}"),
        *(f"{parity['largest_probability_difference']:.1e}", "" if levels is None else f"{levels:g}"),
        f"{parity['top1_run']:.2%} → {parity['top1_export']:.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def resizing(run: Path) -> list[str]:
    """Rows of both ways to resize."""
    path = checkpoint.find(run)
    data = recipe_files.load(str(path / "recipe.yaml")).data
    samples = open_dataset(data, path.parents[2] / ".cache").val
    plain = data.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)})
    graph = onnx.parser.parse_model(preprocess.text(plain, OPSET, IR, PILLOW_13))
    ours = onnxruntime.InferenceSession(graph.SerializeToString())
    ways = {"our graph": lambda image: ours.run(None, {"images": image[None]})[0][0]}
    ways["Resize, antialias"] = Operator(data)
    crop, lines = evaluation_crop(data), []
    for name, way in ways.items():
        equal = total = largest = 0
        for i in range(len(samples)):
            image = samples.image(i)
            expected = crop.one(image, np.ones(crop.draws)).astype(int).transpose(2, 0, 1)
            difference = np.abs(np.rint(way(np.asarray(image))).astype(int) - expected)
            equal, total = equal + int((difference == 0).sum()), total + difference.size
            largest = max(largest, int(difference.max()))
        lines.append(f"| {run.name}, {data.interpolation}, {name} | {total:,} | {equal / total:.4%} | {largest} |")
    return lines


def memory(side: int = 6000) -> None:
    """Print the memory that preprocessing one large image in an ONNX file uses at most."""
    graph = onnx.parser.parse_model(preprocess.text(Data(), OPSET, IR, PILLOW_13))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    session.run(None, {"images": np.zeros((1, 300, 300, 3), np.uint8)})
    image = np.ones((1, side, side, 3), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    session.run(None, {"images": image})
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(f"\nAn image of {side} x {side} pixels uses {more / side**2:.1f} bytes of memory per pixel in the file.")


class Operator:
    """Resizing with ONNX's operator, then the center crop: uint8 (height, width, 3) to float (3, size, size), 0 to 255."""

    def __init__(self, data: Data) -> None:
        self._data = data
        mode, nothing = {"bilinear": "linear", "bicubic": "cubic"}[data.interpolation], ""
        node = helper.make_node(
            "Resize", ["image", nothing, nothing, "sides"], ["resized"], mode=mode, antialias=1, cubic_coeff_a=-0.5
        )
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, None, None])
        sides = helper.make_tensor_value_info("sides", TensorProto.INT64, [4])
        resized = helper.make_tensor_value_info("resized", TensorProto.FLOAT, [1, 3, None, None])
        graph = helper.make_graph([node], "resize", [image, sides], [resized])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        self._session = onnxruntime.InferenceSession(model.SerializeToString())

    def __call__(self, image: Picture) -> NDArray[np.float32]:
        short, size = min(image.shape[:2]), self._data.val_crop_size
        rows, columns = (self._data.val_resize_size * side // short for side in image.shape[:2])
        planes = image.astype(np.float32).transpose(2, 0, 1)[None]
        [[resized]] = self._session.run(None, {"image": planes, "sides": np.array([1, 3, rows, columns])})
        top, left = (round((grid - size) / 2) for grid in (rows, columns))
        found: NDArray[np.float32] = resized[:, top : top + size, left : left + size].clip(0, 255)
        return found


if __name__ == "__main__":
    if sys.argv[1:] == [_MEMORY]:
        memory()
    else:
        main([Path(name) for name in sys.argv[1:]])
