"""Weights load as their own library loads them: our own files, and those of torchvision, old and wrapped ones."""

from __future__ import annotations

import copy
import functools
import re
from types import SimpleNamespace

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import regnet

from processes import newest
from worldsize import checkpoint
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.inference.export import to_safetensors
from worldsize.models import factory, networks, pretrained, state_dicts
from worldsize.models.networks import from_torchvision

CPU = torch.device("cpu")
SMALL = 4_000_000  # parameters; larger networks have tensors without numbers, in the gate


def recipe(name: str, weights: str | None = None, **data) -> Recipe:
    return Recipe.model_validate({"model": {"name": name, "weights": weights}, "data": data})


@functools.cache
def without_numbers(name: str) -> nn.Module:
    """A network of torchvision whose tensors have sizes only."""
    with pytest.MonkeyPatch.context() as patch:
        computed = regnet.BlockParams.from_init_params

        def on_the_cpu(*arguments, **options):
            with CPU:
                return computed(*arguments, **options)

        patch.setattr(regnet.BlockParams, "from_init_params", on_the_cpu)  # it computes widths with tensors
        with torch.device("meta"):
            return networks.build(recipe(name), 3)


NAMES = from_torchvision.names()
# The first network of each module of torchvision.
FAMILIES = {torchvision.models.get_model_builder(name).__module__: name for name in reversed(NAMES)}


@pytest.mark.filterwarnings("ignore:for .*meta parameter")
@pytest.mark.parametrize(
    "names", [[*FAMILIES.values()], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["one of each family", "all"]
)
def test_networks_load_what_they_save(names, tmp_path):
    small = 0
    for name in names:
        network = without_numbers(name)
        if sum(p.numel() for p in network.parameters()) > SMALL:
            networks.load_state(network, dict(network.state_dict()))
            continue
        small += 1
        one, other = filled(network, 1.5), filled(network, 7.25)
        save_file(checkpoint.copy(one.state_dict()), tmp_path / "w.safetensors")
        networks.load_state(other, load_file(tmp_path / "w.safetensors"))
        assert same(one, other), name
    assert small >= 3


def filled(network: nn.Module, value: float) -> nn.Module:
    """A copy on the CPU, with other numbers in each tensor."""
    filled = copy.deepcopy(network).to_empty(device=CPU)
    for i, tensor in enumerate(filled.state_dict().values()):
        tensor.fill_(i + value)
    return filled


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_a_network_that_requires_a_version_trains_resumes_and_evaluates(ranks):
    small = ("--data.name", "synthetic", "--data.samples", "8", "--global-batch", "8", "--micro-batch", "4", "--epochs", "3")
    small += ("--model.name", "mnasnet0_5")
    ranks(1).run("train", "digits", *small, "--name", "m", "--average.name", "ema", "--stop-after", "2", code=75)
    ranks(1).run("train", "--resume", "runs/m")
    assert newest(ranks.cwd / "runs" / "m").name == "step-00000003"
    ranks(1).run("eval", "runs/m")
    assert "100.0000%" in ranks(1).run("export", "runs/m", "--to", "safetensors", "--out", "exported")
    more = ("--model.weights", "runs/m", "--loss.teacher", "runs/m", "--max-steps", "1")
    ranks(1).run("train", "digits", *small, "--name", "n", *more)


def loaded(name: str, state: dict, path, **data) -> nn.Module:
    """The network with the weights of a file that contains ``state``."""
    torch.save(state, path / "w.pth")
    one = recipe(name, str(path / "w.pth"), **data)
    network = factory.build(one, 3, CPU, torch.float32)
    pretrained.load(network, one)
    return network


def published(network: nn.Module) -> dict[str, torch.Tensor]:
    """As torchvision's oldest files: without counters and versions, DenseNets and transformers with old key names."""
    names = {key: re.sub(r"(denselayer\d+\.(?:norm|relu|conv))([12])", r"\1.\2", key) for key in network.state_dict()}
    names = {
        key: re.sub(r"mlp\.([03])\.", lambda m: f"mlp.linear_{int(m[1]) // 3 + 1}.", name) for key, name in names.items()
    }
    return {names[key]: t for key, t in network.state_dict().items() if not key.endswith("num_batches_tracked")}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("shufflenet_v2_x0_5", "conv1.0.weight"),
        ("densenet121", "features.denseblock1.denselayer1.conv1.weight"),
        ("mnasnet0_5", "layers.0.weight"),
        ("googlenet", "conv1.conv.weight"),
    ],
)
def test_files_as_torchvision_published_them(tmp_path, name, first):
    more = {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
    source = torchvision.models.get_model(name, **more)
    network = loaded(name, published(source), tmp_path)
    assert torch.equal(network.get_parameter(first), source.get_parameter(first))


@pytest.mark.parametrize("name", ["vit_b_16", "inception_v3", "densenet161"])
def test_old_key_names_of_large_networks(name):
    with torch.device("meta"):
        source = torchvision.models.get_model(name, **({"init_weights": False} if name == "inception_v3" else {}))
    own = without_numbers(name).state_dict()
    old = published(source)
    found = state_dicts.adapted(old, own)
    assert old.keys() != found.keys() <= own.keys() and not state_dicts.missing(found, own)


def test_the_normalization_of_googlenet_is_that_of_its_published_weights(tmp_path, caplog):
    """torchvision's builder converts the images inside the network if it loads weights: ours does not."""
    source = torchvision.models.googlenet(aux_logits=True, init_weights=False)
    loaded("googlenet", published(source), tmp_path)
    assert "--data.mean 0.5 0.5 0.5 --data.std 0.5 0.5 0.5" in caplog.text
    caplog.clear()
    ours = loaded("googlenet", published(source), tmp_path, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).eval()
    assert not caplog.records
    source.transform_input = True
    ours.fc.load_state_dict(state := {key: tensor[:3] for key, tensor in source.fc.state_dict().items()})
    pixels = torch.rand(2, 3, 224, 224)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        theirs = source.eval()((pixels - mean) / std)[:, :3]
        assert state and torch.allclose(ours((pixels - 0.5) / 0.5), theirs, rtol=1e-3, atol=1e-5)


PLAIN = "shufflenet_v2_x0_5"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "net.backbone."])
def test_prefixes_of_wrappers(tmp_path, prefix):
    source = torchvision.models.get_model(PLAIN)
    state = {prefix + key: tensor for key, tensor in source.state_dict().items()}
    network = loaded(PLAIN, state, tmp_path)
    assert torch.equal(network.stage2[0].branch1[0].weight, source.stage2[0].branch1[0].weight)


@pytest.mark.parametrize("wrapper", [torch.optim.swa_utils.AveragedModel, nn.DataParallel, lambda m: nn.Sequential(m)])
def test_state_dicts_of_wrappers(tmp_path, wrapper):
    source = torchvision.models.get_model(PLAIN)
    assert torch.equal(loaded(PLAIN, wrapper(source).state_dict(), tmp_path).conv1[0].weight, source.conv1[0].weight)


def test_a_module_that_is_compiled_alone(tmp_path):
    source = torchvision.models.get_model(PLAIN)
    state = {re.sub("^stage2.", "stage2._orig_mod.", key): tensor for key, tensor in source.state_dict().items()}
    assert torch.equal(loaded(PLAIN, state, tmp_path).conv1[0].weight, source.conv1[0].weight)


@pytest.mark.parametrize("place", ["state_dict", "model", "model_state_dict"])
def test_a_state_dict_inside_a_training_scripts_file(tmp_path, place, caplog):
    source = torchvision.models.get_model(PLAIN)
    network = loaded(PLAIN, {"epoch": 3, place: source.state_dict(), "model_ema": source.state_dict()}, tmp_path)
    assert torch.equal(network.conv1[0].weight, source.conv1[0].weight)
    assert f"its {place!r} is used, and not model_ema" in caplog.text


def test_what_does_not_fit_is_explained(tmp_path):
    state = torchvision.models.get_model(PLAIN).state_dict()
    two = {f"encoder_q.{key}": t for key, t in state.items()} | {"queue": torch.zeros(4)}
    with pytest.raises(UserError, match=r"begin with 'encoder_q\.': save only those, without the prefix"):
        loaded(PLAIN, two, tmp_path)
    with pytest.raises(UserError, match=r"1 tensors differ, the first is 'conv5.0.weight', which the file lacks"):
        loaded(PLAIN, {key: t for key, t in state.items() if key != "conv5.0.weight"}, tmp_path)
    with pytest.raises(UserError, match=r"'conv1.0.weight': 24 x 3 x 1 x 1 in the file, 24 x 3 x 3 x 3 in the network"):
        loaded(PLAIN, {**state, "conv1.0.weight": torch.zeros(24, 3, 1, 1)}, tmp_path)
    first = torchvision.models.mnasnet0_5().state_dict()
    first["layers.0.weight"] = torch.zeros(32, 3, 3, 3)  # the stem of version 1
    with pytest.raises(UserError, match=r"'layers.0.weight': 32 x 3"):
        loaded("mnasnet0_5", first, tmp_path)


def test_the_model_card_of_a_mnasnet_works(tmp_path):
    one = recipe("mnasnet0_5")
    network = factory.build(one, 3, CPU, torch.float32)
    found = SimpleNamespace(network=network, classes=("a", "b", "c"))
    lines = to_safetensors.Form().write(tmp_path, SimpleNamespace(recipe=one, found=found), None)
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec("\n".join(["import torch, torchvision, safetensors.torch", *lines]), names)
    assert same(names["network"], network)
