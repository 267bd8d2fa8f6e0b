"""ONNX: one file, any batch, optionally with the preprocessing inside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.data.images.crops import Pixels
from worldsize.data.images.native import PILLOW_13
from worldsize.errors import UserError, first_line
from worldsize.inference.export import layout as layouts
from worldsize.inference.export import onnx_packages, preprocess, quantize, to_pt2
from worldsize.inference.export.base import Format, Options, Runner, Source
from worldsize.inference.export.served import LOGITS

_IR = 10
_PREFIX = "preprocess/"  # of all values inside the preprocessing
_LARGEST = 2_000_000_000  # bytes; a protobuf file ends at 2 GiB


class Form(Format):
    """model.onnx, from ``normalized`` float32 (batch, 3, size, size), or with preprocessing from ``images`` uint8 (batch,
    height, width, 3), to ``logits`` float32 (batch, classes)."""

    options = ("preprocess", "fold", "int8", "temperature", "opset", "layout")
    cpu = True
    mirrors = True

    def check(self, recipe: Recipe, options: Options) -> None:
        onnx_packages.onnx()
        onnx_packages.runtime()
        if not 18 <= options.opset <= 23:
            raise UserError(f"--opset {options.opset}: must be 18 to 23")

    def write(self, folder: Path, source: Source, options: Options) -> list[str]:
        if sum(t.nbytes for t in source.found.network.state_dict().values()) > _LARGEST:
            raise UserError(f"{source.recipe.model.name} is too large for one ONNX file (2 GB); --to pt2 has no limit")
        model = _network(source, options)
        if options.int8:
            model = quantize.int8(model, preprocess.OUTPUT, source.calibration(options.calibration))
        if options.preprocess:
            model = _joined(_preprocessing(source.recipe, options), model)
        onnx_packages.onnx().checker.check_model(model)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        image, about = (
            ("image[None]", "  # image: uint8 (height, width, 3), RGB") if options.preprocess else ("normalized", "")
        )
        path = "model.onnx" if options.layout is None else layouts.model_path(source.run)
        return [
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{path}")',
            f"[logits] = session.run(None, {{{_input(options.preprocess)!r}: {image}}}){about}",
        ]

    def open(self, folder: Path, about: dict[str, Any], recipe: Recipe, classes: int) -> Runner:
        path = folder / about["model"]
        return _Complete(path, recipe) if about["preprocess"] else _Network(path)


def _input(preprocessed: bool) -> str:
    return preprocess.INPUT if preprocessed else preprocess.OUTPUT


def _network(source: Source, options: Options) -> Any:
    """The ModelProto from normalized images to logits.

    Raises:
        UserError: torch cannot export the network, or not as ONNX.
    """
    program = to_pt2.exported(source, options)
    try:
        with to_pt2.quiet():
            written = torch.onnx.export(
                program,
                input_names=[preprocess.OUTPUT],
                output_names=[LOGITS],
                opset_version=options.opset,
                external_data=False,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # an operator without an equivalent, or versions of packages that do not fit together
        reason = first_line(to_pt2.first_cause(error))
        raise UserError(
            f"torch {torch.__version__} cannot convert {source.recipe.model.name} to ONNX: {reason}; --to pt2 can"
        ) from None
    assert written is not None
    model = written.model_proto
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"  # torch invents a name
    del model.graph.value_info[:]  # which use that name; runtimes infer them
    return model


def _preprocessing(recipe: Recipe, options: Options) -> Any:
    return onnx_packages.onnx().parser.parse_model(preprocess.text(recipe.data, options.opset, _IR, PILLOW_13))


def _joined(first: Any, then: Any) -> Any:
    """One model that runs ``first``, then ``then``, whose input has the name of the output of ``first``."""
    _add_prefix(first.graph, _PREFIX, {value.name for value in (*first.graph.input, *first.graph.output)})
    joined = type(then)()
    joined.CopyFrom(then)
    graph = joined.graph
    _set(graph.node, [*first.graph.node, *graph.node])
    _set(graph.input, list(first.graph.input))
    graph.initializer.extend(first.graph.initializer)
    graph.value_info.extend(first.graph.output)
    return joined


def _add_prefix(graph: Any, prefix: str, kept: set[str]) -> None:
    """Rename all values of a graph and its subgraphs but ``kept``.

    onnx.compose.add_prefix does not rename what subgraphs use from outside.
    """

    def renamed(name: str) -> str:
        return name if name in kept or not name else prefix + name

    for node in graph.node:
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _add_prefix(attribute.g, prefix, kept)
    for value in (*graph.initializer, *graph.output):
        value.name = renamed(value.name)


class _Session(nn.Module):
    """An ONNX model in onnxruntime, on the CPU."""

    def __init__(self, model: bytes, name: str, outputs: list[str]) -> None:
        super().__init__()
        runtime = onnx_packages.runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._name, self._outputs = name, outputs

    def run(self, images: Any) -> list[torch.Tensor]:
        """The outputs for one input, a numpy array."""
        return [torch.from_numpy(output) for output in self._session.run(self._outputs, {self._name: images})]

    def forward(self, normalized: torch.Tensor) -> torch.Tensor:
        return self.run(normalized.contiguous().cpu().numpy())[0]


class _Network(Runner):
    """A file without preprocessing."""

    def __init__(self, path: Path) -> None:
        self._session = _Session(path.read_bytes(), preprocess.OUTPUT, [LOGITS])

    def network(self) -> nn.Module:
        return self._session


class _Complete(Runner):
    """A file with preprocessing."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self._path, self._size = path, recipe.data.val_crop_size
        self._session = _Session(path.read_bytes(), preprocess.INPUT, [LOGITS])
        self._inside: _Session | None = None

    def complete(self, image: Pixels) -> torch.Tensor:
        return self._session.run(image[None])[0][0]

    def prepare(self, image: Pixels) -> torch.Tensor:
        """What the file itself computes before the network: the value ``normalized`` inside its graph."""
        if self._inside is None:
            model = onnx_packages.onnx().load(self._path)
            _set(model.graph.output, _normalized(model))
            self._inside = _Session(model.SerializeToString(), preprocess.INPUT, [preprocess.OUTPUT])
        return self._inside.run(image[None])[0][0]

    def network(self) -> nn.Module:
        """The part of the graph after the preprocessing."""
        model = onnx_packages.onnx().load(self._path)
        graph = model.graph
        _set(graph.input, _normalized(model))
        for values in (graph.initializer, graph.value_info):
            _set(values, [value for value in values if not _is_inside(value.name)])
        _set(graph.node, [node for node in graph.node if not _is_inside(node.output[0])])
        return _Session(model.SerializeToString(), preprocess.OUTPUT, [LOGITS])


def _normalized(model: Any) -> list[Any]:
    """The description of the value between preprocessing and network."""
    return [value for value in model.graph.value_info if value.name == preprocess.OUTPUT]


def _set(field: Any, values: list[Any]) -> None:
    """Replace a repeated field of a protocol buffer."""
    copies = [copy.deepcopy(value) for value in values]
    del field[:]
    field.extend(copies)


def _is_inside(name: str) -> bool:
    """Whether the preprocessing computes this value."""
    return name.startswith(_PREFIX) or name == preprocess.OUTPUT
