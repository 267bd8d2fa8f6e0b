"""A compiled network computes what the network does."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import ghost_batchnorm
from worldsize.training import compilation
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision

NO_COMPILER = {"condition": shutil.which("g++") is None, "reason": "needs g++"}


@pytest.mark.slow
@pytest.mark.skipif(**NO_COMPILER)
def test_a_compiled_network_draws_the_same_random_numbers():
    """model.compile may change a run by rounding only, also that of a network with dropout."""
    recipe, cpu = Recipe(), torch.device("cpu")
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 8 * 8, 10))
    objective = Objective(network, Normalise(recipe.data, cpu, torch.float32), Precision("fp32", cpu), recipe)
    pixels, labels = torch.randint(0, 256, (32, 8, 8, 3), dtype=torch.uint8), torch.arange(32) % 10
    losses = []
    for module in (objective, compilation.compiled(objective, recipe)):
        torch.manual_seed(3)
        losses.append(module(pixels, labels)[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.skipif(**NO_COMPILER)])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_compiled_network_has_the_gradients_of_the_network(backend, dtype, groups):
    """Its BatchNorm has a gradient of its own, and is followed by operations in place."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    network = nn.Sequential(*layers, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    ghost_batchnorm.split_norms(network, 32 // groups, groups)
    found = {}
    compiled = torch.compile(network, fullgraph=True, dynamic=False, backend=backend)
    for name, module in (("plain", network), ("compiled", compiled)):
        network.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = module(torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(1)))
        logits.float().logsumexp(1).sum().backward()
        found[name] = torch.cat([p.grad.flatten() for p in network.parameters()])
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype] * torch.linalg.vector_norm(found["plain"])
    assert 0 < torch.linalg.vector_norm(found["compiled"] - found["plain"]) < limit


# Whether to compile


def world(*lacking: str | None, device: str = "cuda") -> World:
    """Ranks on whose machines these things are missing; rank 0 asks."""
    one = World(RankInfo("none", 0, 1, 0, 1), torch.device(device), None, 1)
    object.__setattr__(one, "gather", lambda own: [own, *lacking])
    return one


def recipe(compiled: object, **settings: object) -> Recipe:
    return Recipe.model_validate({"model": {"compile": compiled}, **settings})


@pytest.fixture
def complete(monkeypatch):
    """This machine has everything that a compiler needs."""
    monkeypatch.setattr(compilation, "missing", lambda device: None)


PLAN = BatchPlan(64, 32, 1)


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        (recipe("auto"), "cuda", True),
        (recipe("auto"), "cpu", False),
        (recipe(True), "cpu", True),
        (recipe(False), "cuda", False),
        (recipe("auto", deterministic=True), "cuda", False),
        (recipe(True, deterministic=True), "cuda", True),
        (recipe("auto", parallel={"strategy": "bitwise"}), "cuda", False),
        (recipe("auto", parallel={"strategy": "async"}), "cuda", False),
        (recipe("auto", parallel={"sync_batchnorm": True}), "cuda", False),
        (recipe("auto", parallel={"bucket_mb": 0.5}), "cuda", False),
    ],
)
def test_auto_compiles_on_gpus_where_no_bits_are_promised(complete, asked, device, expected):
    assert compilation.wanted(asked, PLAN, world(device=device)) is expected


def test_several_gpus_in_a_process_are_not_compiled_for(complete):
    assert not compilation.wanted(recipe("auto"), BatchPlan(64, 32, 1, devices=2), world())


def test_all_ranks_compile_or_none_and_one_message_says_what_to_install(complete, caplog):
    assert not compilation.wanted(recipe("auto"), PLAN, world(None, "it needs Triton: pip install triton"))
    (record,) = caplog.records
    assert "not compiled, so its steps take longer: it needs Triton: pip install triton" in record.getMessage()
    with pytest.raises(UserError, match=r"--model\.compile: it needs Triton"):
        compilation.wanted(recipe(True), PLAN, world(None, "it needs Triton: pip install triton"))


def test_buckets_that_the_compiler_refuses_are_an_error_if_it_is_asked_for(complete):
    with pytest.raises(UserError, match=r"--parallel\.bucket-mb of 1 or more"):
        compilation.wanted(recipe(True, parallel={"bucket_mb": 0.5}), PLAN, world())


@pytest.mark.parametrize(("kind", "variable", "name"), [("cuda", "CC", "gcc"), ("cpu", "CXX", "g++")])
def test_what_a_compiler_lacks_is_named(monkeypatch, tmp_path, kind, variable, name):
    device = torch.device(kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compilation, "_headers", lambda: tmp_path)
    monkeypatch.setenv(variable, "/no/such/compiler")
    assert f"{variable}=/no/such/compiler is no program" in str(compilation.missing(device))
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"no {name}" in str(compilation.missing(device))
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    assert f"no {tmp_path}/Python.h: apt-get install python3." in str(compilation.missing(device))
    (tmp_path / "Python.h").touch()
    assert compilation.missing(device) is None


@pytest.mark.parametrize(
    ("capability", "found", "message"), [((6, 1), True, "Volta"), ((8, 0), False, "pip install triton")]
)
def test_gpus_and_installations_without_triton(monkeypatch, capability, found, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: found or None)
    assert message in str(compilation.missing(torch.device("cuda", 0)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "auto"),
        (["--model.compile"], True),
        (["--model.compile", "--epochs", "2"], True),
        (["--model.no-compile"], False),
        (["--model.compile", "auto"], "auto"),
        (["--model.compile=False"], False),
    ],
)
def test_the_flag_needs_no_value(arguments, expected):
    parsed = command_line.parse(command_line.Train, arguments, command_line.Train(Recipe()), "train digits")
    assert parsed.settings.model.compile is expected


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("false", False), ("auto", "auto")])
def test_recipes_with_true_and_false_mean_what_they_did(tmp_path, text, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: digits\nmodel:\n  compile: {text}\n")
    loaded = recipe_files.load(str(path))
    assert loaded.model.compile is expected
    path.write_text(recipe_files.to_yaml(loaded))
    assert recipe_files.load(str(path)).model.compile is expected
