"""Initial weights from files, runs, torchvision and timm; frozen parts; learning rates by layer."""

from __future__ import annotations

import logging
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import timm
import timm.optim
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from paths import SMALL_NETWORK
from processes import distance, newest, weights
from worldsize.config.recipe import Optimizer, Recipe
from worldsize.distributed.rank import RankInfo
from worldsize.errors import UserError
from worldsize.models import factory, networks, pretrained
from worldsize.models.freezing import FrozenBatchNorm2d
from worldsize.optim import optimizers
from worldsize.training.request import TrainRequest, validate

CPU = torch.device("cpu")


def recipe(**settings) -> Recipe:
    data = {"train_crop_size": 32, "val_crop_size": 32, "val_resize_size": 32}
    return Recipe.model_validate({"model": {"name": "resnet18"} | settings, "data": data})


def build(**settings) -> nn.Module:
    """A network for ten classes with its initial weights loaded."""
    network = factory.build(recipe(**settings), 10, CPU, torch.float32)
    if settings.get("weights"):
        pretrained.load(network, recipe(**settings))
    return network


def plain(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_from_a_file_with_another_classifier(tmp_path, suffix):
    source = torchvision.models.resnet18(num_classes=7)
    path = tmp_path / f"w{suffix}"
    save_file(plain(source), path) if suffix == ".safetensors" else torch.save(plain(source), path)
    network = build(weights=str(path))
    assert torch.equal(network.conv1.weight, source.conv1.weight)
    assert network.fc.out_features == 10


def test_foreign_and_hostile_weights_are_refused(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "foreign.pth")
    with pytest.raises(UserError, match="belongs to another model"):
        build(weights=str(tmp_path / "foreign.pth"))
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (marker.touch, ())

    torch.save({"x": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(UserError, match="contains objects other than tensors"):
        build(weights=str(tmp_path / "hostile.pth"))
    assert not marker.exists()


@pytest.mark.filterwarnings("error:.*TorchScript archive")
def test_files_that_hold_no_tensors_are_named(tmp_path):
    (tmp_path / "empty.pth").touch()
    with pytest.raises(UserError, match=r"empty\.pth is empty or ends too early"):
        build(weights=str(tmp_path / "empty.pth"))
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:  # torch.load asks for no more
        archive.writestr("program/constants.pkl", b"")
        archive.writestr("program/version", b"3")
    with pytest.raises(UserError, match=r"program\.pt is a TorchScript program"):
        build(weights=str(tmp_path / "program.pt"))


def test_weights_that_torchvision_published(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    source = torchvision.models.resnet18()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(plain(source), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")  # as if downloaded before
    network = build(weights="torchvision:ResNet18_Weights.IMAGENET1K_V1")
    assert torch.equal(network.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    with pytest.raises(UserError, match="called like torchvision:ResNet50_Weights"):
        build(weights="torchvision:ResNet18_Weights.NONE")
    for kind in ("FasterRCNN_ResNet50_FPN_", "Raft_Small_", "FCN_ResNet50_", "R3D_18_", "ResNet18_Quantized"):
        with pytest.raises(UserError, match=f"torchvision:{kind}Weights.DEFAULT are not floating-point weights"):
            build(weights=f"torchvision:{kind}Weights.DEFAULT")


def in_the_cache_of_the_hub(folder: Path, repository: str, state: dict[str, torch.Tensor]) -> None:
    """Put weights where huggingface_hub keeps those that it has downloaded."""
    kept = folder / f"models--{repository.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(state, kept / "snapshots" / ("0" * 40) / "model.safetensors")


def test_weights_that_timm_published(tmp_path, monkeypatch, caplog):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    source = timm.create_model("resnet18")
    in_the_cache_of_the_hub(tmp_path, "timm/resnet18.a1_in1k", plain(source))
    for name in ("resnet18", "timm:resnet18"):  # both call the tensors alike
        network = build(name=name, weights="timm:resnet18.a1_in1k")
        assert torch.equal(network.get_parameter("layer4.1.conv2.weight"), source.layer4[1].conv2.weight)
    with pytest.raises(UserError, match="cannot download the weights timm:resnet34"):
        build(weights="timm:resnet34.a1_in1k")
    with pytest.raises(UserError, match="called like timm:resnet50"):
        build(weights="timm:resnet18.nobody")


def test_timms_weights_fit_networks_for_other_sizes(tmp_path, monkeypatch):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    source = timm.create_model("vit_tiny_patch16_224", num_classes=21843)
    in_the_cache_of_the_hub(tmp_path, "timm/vit_tiny_patch16_224.augreg_in21k", plain(source))
    network = build(
        name="timm:vit_tiny_patch16_224", weights="timm:vit_tiny_patch16_224.augreg_in21k"
    )  # images of 32 pixels
    assert network.get_parameter("pos_embed").shape == (1, 1 + 2 * 2, 192)
    assert torch.equal(network.get_parameter("norm.weight"), source.norm.weight)
    assert torch.equal(network.get_parameter("blocks.3.mlp.fc1.weight"), source.blocks[3].mlp.fc1.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "keras:resnet18"}, "known prefixes are timm:, worldsize: and none"),
        ({"name": "timm:resnet18"}, "--model.name timm:resnet18 needs timm: pip install"),
        ({"weights": "timm:resnet18.a1_in1k"}, "--model.weights timm:resnet18.a1_in1k needs timm: pip install"),
    ],
)
def test_a_library_that_is_missing_is_noticed_before_a_process_starts(tmp_path, monkeypatch, settings, message):
    monkeypatch.setitem(sys.modules, "timm", None)
    wanted = TrainRequest(recipe(**settings), "r", tmp_path, None, None, False)
    with pytest.raises(UserError, match=message):
        validate(wanted, RankInfo("none", 0, 1, 0, 1))


def test_another_normalization_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        pretrained._compare_normalization("timm:x", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), recipe())
    assert "pass --data.mean 0.5 0.5 0.5 --data.std 0.5 0.5 0.5" in caplog.text


@pytest.mark.parametrize(("mode", "shape"), [("squash", "squeezed into a square"), ("border", "with a border")])
def test_complete_images_at_evaluation_are_reported(tmp_path, monkeypatch, caplog, mode, shape):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    in_the_cache_of_the_hub(tmp_path, "timm/resnet18.a1_in1k", plain(timm.create_model("resnet18")))
    build(weights="timm:resnet18.a1_in1k")
    assert "crop_mode" not in caplog.text
    made = timm.create_model

    def of_mode(*arguments, **options):
        network = made(*arguments, **options)
        network.pretrained_cfg["crop_mode"] = mode
        return network

    monkeypatch.setattr(timm, "create_model", of_mode)
    build(weights="timm:resnet18.a1_in1k")
    assert f"timm:resnet18.a1_in1k with complete images, {shape}" in caplog.text and f"crop_mode {mode}" in caplog.text


def test_networks_of_timm(monkeypatch):
    network = build(name="timm:vit_tiny_patch16_224", drop_path=0.1)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert factory.uses_random_draws(network)
    assert any(parameter is network.pos_embed for parameter in factory.parameter_kinds(network).others)
    assert list(networks.classifiers(network)) == ["head"]
    with pytest.raises(UserError, match="did you mean timm:resnet18"):
        build(name="timm:resnet_18")
    with pytest.raises(UserError, match="its tags of resnet34: resnet34"):
        build(name="timm:resnet34.a9_in1k")
    with pytest.raises(UserError, match="known prefixes are timm:, worldsize: and none"):
        build(name="keras:resnet18")


def test_a_head_of_zeros(tmp_path):
    source = torchvision.models.resnet18(num_classes=10)
    save_file(plain(source), tmp_path / "w.safetensors")
    network = build(weights=str(tmp_path / "w.safetensors"), zero_head=True)
    assert not network.fc.weight.any() and not network.fc.bias.any()
    assert torch.equal(network.conv1.weight, source.conv1.weight)


def test_a_bias_of_the_head_replaces_that_of_the_weights(tmp_path):
    source = torchvision.models.resnet18(num_classes=10)
    save_file(plain(source), tmp_path / "w.safetensors")
    network = build(weights=str(tmp_path / "w.safetensors"), head_bias=-2.5)
    assert (network.fc.bias == -2.5).all() and torch.equal(network.fc.weight, source.fc.weight)


# Their logits are the mean of two classifiers'; repvit's are inside other modules.
DISTILLED = {
    "timm:deit_tiny_distilled_patch16_224": ("head", "head_dist"),
    "timm:repvit_m0_9": ("head.head.l", "head.head_dist.l"),
}


@pytest.mark.parametrize("name", DISTILLED)
def test_weights_load_except_for_all_classifiers(tmp_path, name):
    source = factory.build(recipe(name=name), 7, CPU, torch.float32)
    save_file(plain(source), tmp_path / "w.safetensors")
    network = build(name=name, weights=str(tmp_path / "w.safetensors"))
    heads = {f"{head}.{kind}" for head in DISTILLED[name] for kind in ("weight", "bias")}
    loaded, given = network.state_dict(), source.state_dict()
    assert all(torch.equal(loaded[key], given[key]) for key in given if key not in heads)
    assert all(len(loaded[key]) == 10 for key in heads)


def test_all_classifiers_are_trained_if_the_backbone_is_frozen():
    network = build(name="timm:deit_tiny_distilled_patch16_224", freeze=("backbone",))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


@pytest.mark.parametrize("name", DISTILLED)
def test_all_classifiers_start_with_the_same_bias_and_no_weights(tmp_path, name):
    save_file(plain(build(name=name)), tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.all(build(name=name, zero_head=True, head_bias=-2.0).eval()(images) == -2)
    assert not build(name=name, zero_head=True, weights=str(tmp_path / "w.safetensors")).eval()(images).any()


@pytest.mark.parametrize("name", DISTILLED)
def test_all_classifiers_have_a_learning_rate_of_their_own_and_no_update_of_muon(name):
    network = build(name=name)
    groups = optimizers.build(network, Optimizer(name="muon", lr=0.1, head_lr=10), CPU).param_groups
    names = {parameter: name for name, parameter in network.named_parameters()}
    faster = {names[p] for group in groups if group["lr_scale"] == 10 for p in group["params"]}
    assert faster == {f"{head}.{kind}" for head in DISTILLED[name] for kind in ("weight", "bias")}
    adapted = {names[p] for group in groups if group["adapt"] for p in group["params"]}
    assert adapted and not adapted & faster


def test_frozen_parts_are_not_trained_and_keep_their_statistics():
    network = build(freeze=("conv1", "bn1", "layer1")).train()
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in network.named_parameters() if name.split(".")[0] in ("conv1", "bn1", "layer1")}
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network(torch.randn(4, 3, 32, 32)).sum().backward()
    changed = {name for name, buffer in network.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed and not any(name.startswith(("bn1", "layer1")) for name in changed)
    assert len(factory.norms(network)) == 20 - 5
    assert network.state_dict().keys() == build().state_dict().keys()


@pytest.mark.parametrize(
    ("name", "frozen", "message"),
    [
        ("resnet18", "neck", "its parts are conv1, bn1"),
        ("resnet18", "backbone fc", "leaves nothing to train: leave out one"),
    ],
)
def test_what_cannot_be_frozen_is_refused(name, frozen, message):
    with pytest.raises(UserError, match=message):
        build(name=name, freeze=tuple(frozen.split()))


def test_the_head_may_learn_faster():
    network = build()
    optimizer = optimizers.build(network, Optimizer(lr=0.1, head_lr=10), CPU)
    optimizers.set_lr(optimizer, 0.1)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[network.fc.weight] == rates[network.fc.bias] == pytest.approx(1.0)
    assert {rates[p] for name, p in network.named_parameters() if not name.startswith("fc.")} == {0.1}


SMALL = (
    *("--data.name", "synthetic", "--data.samples", "48", "--epochs", "1", "--global-batch", "16", "--micro-batch", "4"),
    *("--precision", "fp64", "--model.name", SMALL_NETWORK, "--schedule.warmup-epochs", "0", "--optimizer.lr", "0.001"),
)
TUNING = (
    *("--data.classes", "4", "--model.zero-head", "--optimizer.head-lr", "4"),
    *("--model.freeze", "conv1", "bn1", "layer1"),
)


@pytest.fixture(scope="module")
def source(ranks) -> Path:
    """A run with three classes."""
    ranks(1).run("train", "digits", *SMALL, "--data.classes", "3", "--name", "source")
    return ranks.cwd / "runs" / "source"


@pytest.fixture(scope="module")
def tuned(ranks, source):
    """tuned(size) fine-tunes the source; returns the weights."""

    def train(size: int) -> dict[str, torch.Tensor]:
        run = ranks.cwd / "runs" / f"tuned{size}"
        if not run.exists():
            ranks(size).run("train", "digits", *SMALL, *TUNING, "--model.weights", "runs/source", "--name", run.name)
        return weights(run)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_fine_tuning_has_the_same_numbers_at_every_world_size(tuned, size):
    assert distance(tuned(size), tuned(1)) < 1e-9


def test_frozen_parts_stay_those_of_the_source(tuned, source):
    before, after = weights(source), tuned(1)
    kept = [name for name in before if name.startswith(("conv1", "bn1", "layer1")) and "num_batches" not in name]
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert not torch.equal(after["layer2.conv1.weight"], before["layer2.conv1.weight"])


@pytest.mark.slow
def test_a_resumed_run_does_not_need_its_initial_weights(ranks, source):
    file = ranks.cwd / "w.safetensors"
    shutil.copy(newest(source) / "model.safetensors", file)
    ranks(2).run(
        "train", "digits", *SMALL, *TUNING, "--model.weights", file, "--name", "again", "--stop-after", "2", code=75
    )
    file.unlink()
    ranks(2).run("train", "--resume", "runs/again")
    assert newest(ranks.cwd / "runs" / "again").name == "step-00000003"


def test_frozen_layers_have_a_type_of_their_own():
    assert isinstance(build(freeze=("backbone",)).bn1, FrozenBatchNorm2d)
