"""A compiler that fails or loses gradients in the first passes, which is noticed before training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.training import build, compilation
from worldsize.training.compilation import Compiler
from worldsize.training.gradients import GradientComputer
from worldsize.training.precision import Precision

CPU = torch.device("cpu")
SIZE = 8  # pixels


class Forgetful(nn.Module):
    """Without a compiler it learns all its weights, with one only the last."""

    def __init__(self, loses: bool) -> None:
        super().__init__()
        self.loses = loses
        self.first, self.norm, self.unused = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(1, 1)
        self.last = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu().mean((2, 3))
        return self.last(x.detach() if self.loses and torch.compiler.is_compiling() else x)


class Skipping(nn.Module):
    """It leaves out its first layer by chance, after draws for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.1), nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        return self.last((self.first(x) if torch.rand(()) < 0.5 else x).mean((2, 3)))


@pytest.fixture(autouse=True)
def as_before(monkeypatch) -> Iterator[None]:
    """What the compiler keeps for the whole process. aot_eager makes graphs of gradients as the default does, in seconds."""
    suppresses = torch._dynamo.config.suppress_errors
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(compilation, "missing", lambda device: None)
    yield
    torch._dynamo.config.suppress_errors = suppresses
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("worldsize")]


def compute(network: nn.Module, seed: int = 0) -> GradientComputer:
    values = {"model": {"compile": True}, "global_batch": 8, "micro_batch": 4, "precision": "fp32", "device": "cpu"}
    settings = Recipe.model_validate(values | {"seed": seed})
    plan, world = batch_plan.plan(settings, 1), World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
    state = build.build_state(settings, network.train(), plan, world, Precision("fp32", CPU), 10)
    assert state.compiled
    return GradientComputer(settings, plan, 0, CPU, state)


@pytest.mark.parametrize("passes", ["compile", "rehearse"])
@pytest.mark.parametrize("setting", ["auto", True])
def test_gradients_that_a_compiler_loses_are_noticed(passes, setting, caplog):
    """With torch 2.11 that is what happened to BatchNorm in fp32."""
    one = compute(Forgetful(loses=True))
    before = {name: tensor.clone() for name, tensor in one.state.model.state_dict().items()}
    compiler = Compiler(Recipe.model_validate({"model": {"compile": setting}}), speaks=True)
    if setting != "auto":
        with pytest.raises(UserError, match=r"the compiler of torch .* loses the gradient of first\.weight, .*: leave"):
            compiler.first_passes(lambda: getattr(one, passes)(SIZE), SIZE)
        return
    compiler.first_passes(lambda: getattr(one, passes)(SIZE), SIZE)
    (said,) = warned(caplog)
    assert "loses the gradient of first.weight, first.bias, norm.weight and 1 more" in said
    # From now on without the compiler, in other sizes too.
    compiler.first_passes(lambda: one.rehearse(2 * SIZE), 2 * SIZE)
    assert warned(caplog) == [said]
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state.model.state_dict().items())
    one._forward_backward(torch.randint(0, 256, (4, SIZE, SIZE, 3), dtype=torch.uint8), torch.arange(4))
    assert one.state.model.first.weight.grad.any()


@pytest.mark.parametrize("passes", ["compile", "rehearse"])
def test_a_parameter_without_any_gradient_is_none_of_the_compilers(passes, capsys):
    one = compute(Forgetful(loses=False))
    Compiler(one.recipe, speaks=True).first_passes(lambda: getattr(one, passes)(SIZE), SIZE)
    assert f"compiled the network for images of {SIZE} pixels" in capsys.readouterr().out


@pytest.mark.parametrize("passes", ["compile", "rehearse"])
def test_what_a_network_leaves_out_by_chance_is_not_lost(passes, monkeypatch):
    """The passes with and without the compiler leave out the same."""
    compiled = torch.compile  # which takes no options
    monkeypatch.setattr(torch, "compile", lambda module, dynamic, options: compiled(module, dynamic=dynamic))
    left_out = set()
    for seed in range(6):
        one = compute(Skipping(), seed)
        getattr(one, passes)(SIZE)
        one._seed(0, 0)
        with torch.no_grad():
            one.state.model.dropout(torch.ones(4, 3, SIZE, SIZE))
        left_out.add(torch.rand(()).item() >= 0.5)
    assert left_out == {False, True}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend=fails))


@pytest.mark.usefixtures("failing")
def test_a_compiler_that_fails_is_an_error_if_it_is_asked_for():
    one = compute(Forgetful(loses=False))
    with pytest.raises(UserError, match=r"compile: the compiler failed: no such instruction; repair it, or leave"):
        Compiler(one.recipe, speaks=True).first_passes(lambda: one.compile(SIZE), SIZE)


@pytest.mark.usefixtures("failing")
def test_a_compiler_that_fails_is_not_said_to_have_compiled(capsys, caplog):
    one = compute(Forgetful(loses=False))
    torch._dynamo.config.suppress_errors = True  # as with auto
    Compiler(one.recipe, speaks=True).first_passes(lambda: one.compile(SIZE), SIZE)
    assert "compiled the network" not in capsys.readouterr().out
    (said,) = warned(caplog)
    assert "the compiler failed, so steps with images of 8 pixels take longer" in said
