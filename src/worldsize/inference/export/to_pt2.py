"""``torch.export``: the network as a graph that torch runs without the code of the network."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.inference.export import fold
from worldsize.inference.export.base import Format, Options, Runner, Source
from worldsize.inference.export.served import Served
from worldsize.training import compilation

FILE = "model.pt2"


class Form(Format):
    """model.pt2; with ``aoti`` compiled to machine code of this CPU."""

    options = ("fold", "aoti", "temperature")
    cpu = True
    mirrors = True

    def check(self, recipe: Recipe, options: Options) -> None:
        lack = compilation.missing(torch.device("cpu")) if options.aoti else None
        if lack is not None:
            raise UserError(f"--aoti compiles the network: {lack}")

    def write(self, folder: Path, source: Source, options: Options) -> list[str]:
        program = exported(source, options)
        if options.aoti:
            with quiet():
                torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))
            return [f"network = torch._inductor.aoti_load_package({FILE!r})  # compiled for this kind of CPU"]
        in_memory = io.BytesIO()  # on a full disk, torch's own writer ends the process
        torch.export.save(program, in_memory)
        (folder / FILE).write_bytes(in_memory.getbuffer())
        return [f"network = torch.export.load({FILE!r}).module()"]

    def open(self, folder: Path, about: dict[str, Any], recipe: Recipe, classes: int) -> Runner:
        path = str(folder / FILE)
        if about["aoti"]:
            return _Program(torch._inductor.aoti_load_package(path))
        with quiet():
            return _Program(torch.export.load(path).module())


class _Program(Runner):
    def __init__(self, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._program = _Contiguous(program)

    def network(self) -> nn.Module:
        return self._program


class _Contiguous(nn.Module):
    """The program on contiguous memory, for which it was exported."""

    def __init__(self, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._program = [program]  # not a submodule: programs cannot change between training and evaluation

    def forward(self, normalized: torch.Tensor) -> torch.Tensor:
        return self._program[0](normalized.contiguous())


def exported(source: Source, options: Options) -> torch.export.ExportedProgram:
    """The program for normalized float32 (batch, 3, size, size) with any batch.

    Raises:
        UserError: torch cannot export the network.
    """
    network: nn.Module = source.found.network
    if options.fold:
        network, _ = fold.folded(network, source.recipe.model.name)
    data = source.recipe.data
    served = Served(network, options.temperature, data.val_mirror).eval()
    example = torch.zeros(2, 3, data.val_crop_size, data.val_crop_size)
    batch = torch.export.Dim("batch", min=1)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(served, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # networks fail to export in many ways
        raise UserError(
            f"torch.export cannot export {source.recipe.model.name}: {type(error).__name__}; --to safetensors can"
        ) from None


def first_cause(error: BaseException) -> BaseException:
    """What led to an exception, in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context, torch's exporters print no warnings, which are about their own code."""
    names = ("torch.onnx", "torch.export", "torch._inductor", "onnxscript", "onnx_ir", "root")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
