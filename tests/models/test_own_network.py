"""Networks of the user's own: the recipe takes the code in, and a run needs the file no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import worldsize
from interruptions import SETTINGS, same_run
from processes import distance, losses, weights
from worldsize import cli
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import networks, trusted_code

CODE = '''"""A small network."""
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()  # "quotes", a # and a \\\\ in the code


def build(classes):
\treturn nn.Sequential(nn.Conv2d(3, 8, 3, 2), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my net.py"
    path.write_text(CODE)
    return path


def recipe(file: Path, function: str = "build") -> Recipe:
    return recipe_files.validate({"model": {"name": f"{file}:{function}"}}, "here")


def test_the_recipe_has_the_code_and_reads_itself_back(file, tmp_path):
    own = recipe(file)
    (tmp_path / "recipe.yaml").write_text(recipe_files.to_yaml(own))
    file.unlink()
    again = recipe_files.load(str(tmp_path / "recipe.yaml"))
    assert again == own and again.model.source == CODE
    assert again.model.name.startswith(f"{file}:build#")


def test_the_network_is_what_the_function_returns(file):
    trusted_code.trust(recipe(file))
    torch.manual_seed(3)
    network = networks.build(recipe(file), 5)
    names: dict = {}
    exec(CODE, names)
    torch.manual_seed(3)
    expected = names["build"](5)
    assert [name for name, _ in network.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert all(map(torch.equal, network.parameters(), expected.parameters()))


def test_code_of_others_runs_only_if_the_user_says_so(file, tmp_path, monkeypatch):
    """Not even its import statements."""
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{CODE}")
    foreign = recipe(file)
    with pytest.raises(UserError, match="you have not trained it on this machine") as caught:
        networks.build(foreign, 10)
    assert not (tmp_path / "ran").exists()
    variable, _, digest = str(caught.value).rpartition(" ")[2].partition("=")
    monkeypatch.setenv(variable, f"0123,{digest}")
    networks.build(foreign, 10)
    assert (tmp_path / "ran").exists()


# Found in five minutes on one core: two programs whose names end with the same 12 digits.
HARMLESS = """from torch import nn


def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))


# 18786409
"""
HARMFUL = """import os
from torch import nn

open('ran', 'w')


def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))


# 5046609
"""


def test_trust_in_code_does_not_extend_to_other_code_with_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(HARMLESS)
    harmless = recipe_files.validate({"model": {"name": "net.py:build"}}, "here")
    Path("net.py").write_text(HARMFUL)
    harmful = recipe_files.validate({"model": {"name": "net.py:build"}}, "here")
    assert harmless.model.name == harmful.model.name
    trusted_code.trust(harmless)
    with pytest.raises(UserError, match="you have not trained it on this machine"):
        networks.build(harmful, 10)
    monkeypatch.setenv(trusted_code.VARIABLE, harmless.model.name.partition("#")[2])
    with pytest.raises(UserError, match="you have not trained it on this machine"):
        networks.build(harmful, 10)
    networks.build(harmless, 10)
    assert not Path("ran").exists()


def test_another_name_leaves_the_code_behind(file):
    own = recipe(file).model_dump()
    assert Recipe.model_validate(own | {"model": own["model"] | {"name": "resnet18"}}).model.source is None


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (CODE, "net.py", "name the function that builds the network: net.py:build"),
        (CODE, "net.py:bild", "net.py has no function 'bild'; it has Block, build. Define build(classes)"),
        (CODE, "other.py:build", "other.py: No such file or directory"),
        ("def build(classes) return 1", "net.py:build", "net.py, line 1: expected ':'"),
        ("def build(classes):\n    return 1", "net.py:build", "returned int, not a torch.nn.Module"),
        ("def build(classes):\n    x = 1\n    return layer", "net.py:build", "net.py, line 3: NameError: name 'layer'"),
        ("import nothing_here\ndef build(n): pass", "net.py:build", "net.py, line 1: ModuleNotFoundError"),
        ("x = '\\0'\n\0", "net.py:build", "net.py: source code string cannot contain null bytes"),
        ("def build(): pass", "net.py:build", "TypeError: build() takes 0 positional arguments but 1 was given"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, monkeypatch, code, name, message):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(code)

    def build() -> None:
        named = recipe_files.validate({"model": {"name": name}}, "here")
        trusted_code.trust(named)
        networks.build(named, 10)

    with pytest.raises(UserError) as caught:
        build()
    assert message in str(caught.value)


def test_code_that_is_not_that_of_the_name_is_refused(file):
    own = recipe(file).model_dump()
    own["model"]["source"] += "\n"
    with pytest.raises(ValueError, match=r"model\.source is other code than this name stands for"):
        Recipe.model_validate(own)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model.stem", "cifar"), "--model.stem cifar works with torchvision's ResNets"),
        (("--model.drop-path", "0.1"), "--model.drop-path works with known networks"),
        (("--model.dropout", "0.1"), "--model.dropout works with known networks"),
    ],
)
def test_settings_of_known_networks_are_refused(ranks, file, more, message):
    output = ranks(1).run("train", "digits", *SETTINGS, "--model.name", f"{file}:build", "--name", "no", *more, code=64)
    assert message in output


def test_a_network_that_returns_no_logits_is_refused(ranks, tmp_path):
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef build(n): return nn.Conv2d(3, n, 3)\n")
    more = ("--model.name", f"{tmp_path}/net.py:build", "--name", "no")
    output = ranks(1).run("train", "digits", *SETTINGS, *more, code=64)
    assert "(1, 10, 30, 30) for one image: it must return the logits of 10 classes, (n, 10)" in output


UNUSED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.used, self.spare = nn.Linear(3, classes), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.mean((2, 3)))
"""


@pytest.mark.parametrize(("more", "code"), [((), 64), (("--model.freeze", "spare"), 0), (("--parallel.static-graph",), 0)])
def test_ddp_names_parameters_without_a_gradient_and_ways_to_train_without_them(ranks, tmp_path, more, code):
    (tmp_path / "net.py").write_text(UNUSED)
    train = ("train", "digits", *SETTINGS, "--model.name", f"{tmp_path}/net.py:Net", "--max-steps", "2")
    output = ranks(2).run(*train, *more, "--name", f"unused{len(more)}", code=code)
    assert ("the loss does not depend on spare.weight, spare.bias, and strategy ddp waits" in output) == (code == 64)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_trains_the_same_at_any_world_size_and_resumes_without_the_file(ranks, file, size):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:build", "--parallel.strategy", "bitwise")
    ranks(1).run(*train, "--name", f"one{size}")
    ranks(size).run(*train, "--name", f"some{size}", "--stop-after", "11", code=75)
    moved = file.rename(file.with_name("moved.py"))
    ranks(size).run("train", "--resume", f"runs/some{size}")
    one, some = ranks.cwd / "runs" / f"one{size}", ranks.cwd / "runs" / f"some{size}"
    assert losses(one) == losses(some) and distance(weights(one), weights(some)) == 0
    same_run(one, some)
    assert worldsize.load(some).logits([torch.zeros(3, 32, 32, dtype=torch.uint8).permute(1, 2, 0).numpy()]).shape == (1, 10)
    moved.write_text(CODE + "\n")
    changed = ("--resume", f"runs/some{size}", "--model.name", f"{moved}:build", "--max-steps", "30")
    assert "model.name: was" in ranks(size).run("train", *changed, code=64)


def test_a_comparison_of_recipes_shows_the_names_and_not_the_code(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        Path("net.py").write_text(f"{CODE}\n# {name}\n")
        Path(f"{name}.yaml").write_text(recipe_files.to_yaml(recipe(Path("net.py"))))
    assert cli.main(["recipes", "first.yaml", "--against", "second.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "model.name" in printed and printed.count("net.py:build#") == 2
    assert "model.source" not in printed and "import" not in printed
