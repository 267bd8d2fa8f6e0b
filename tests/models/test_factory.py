"""Models by name, running statistics, parameter groups."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torchvision
from torch import nn

from worldsize.config.recipe import Model, Optimizer, Recipe
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.tree_sum import fold
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory, freezing
from worldsize.models.factory import RunningStatistics
from worldsize.optim import optimizers

CPU = torch.device("cpu")
SINGLE = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)


def build(**settings) -> nn.Module:
    return factory.build(Recipe(seed=settings.pop("seed", 0), model=Model(**settings)), 10, CPU, torch.float32)


def test_weights_load_into_torchvisions_model_as_they_are():
    theirs, ours = torchvision.models.resnet18(num_classes=10), build(name="resnet18")
    theirs.load_state_dict(ours.state_dict(), strict=True)
    theirs = theirs.to(memory_format=torch.channels_last)  # like ours: on some CPUs the layout changes the last bit
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs.eval()(images), ours.eval()(images))


def test_the_seed_decides_the_weights():
    a, b, c = build(name="resnet18"), build(name="resnet18"), build(name="resnet18", seed=1)
    assert torch.equal(a.fc.weight, b.fc.weight)
    assert not torch.equal(a.fc.weight, c.fc.weight)


@pytest.mark.parametrize(("name", "norm"), [("resnet18", "bn2"), ("resnet50", "bn3")])
def test_zero_init_makes_every_block_the_identity(name, norm):
    blocks = [m for m in build(name=name).modules() if hasattr(m, norm)]
    blocks = [
        b for b in blocks if isinstance(b, (torchvision.models.resnet.BasicBlock, torchvision.models.resnet.Bottleneck))
    ]
    assert blocks
    assert all(float(getattr(b, norm).weight.detach().abs().max()) == 0 for b in blocks)
    assert any(
        float(getattr(m, "weight", torch.ones(1)).detach().abs().max()) > 0
        for m in build(name=name, zero_init=False).modules()
    )


def test_the_cifar_stem_keeps_all_pixels():
    network = build(name="resnet18", stem="cifar")
    seen = {}
    network.layer1.register_forward_hook(lambda _, inputs, __: seen.update(shape=inputs[0].shape))
    network(torch.zeros(2, 3, 32, 32))
    assert seen["shape"] == (2, 64, 32, 32)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_running_statistics_are_moving_averages_of_the_mean_over_micro_batches(micro_batches):
    network = build(name="resnet18")
    layers, momentum = factory.norms(network), 0.1
    expected = {f"{i}.{kind}": start for i in range(len(layers)) for kind, start in (("mean", 0.0), ("var", 1.0))}
    statistics = RunningStatistics(network)
    for _ in range(3):
        seen = []
        for micro_batch in range(micro_batches):
            with mean_and_variance_of_inputs(layers) as inputs:
                network(torch.randn(4, 3, 32, 32))
            seen.append(inputs)
            statistics.collect(micro_batch)
        statistics.advance(fold(statistics.take(), torch.add) / micro_batches)
        for name, old in expected.items():
            expected[name] = (1 - momentum) * old + momentum * torch.stack([inputs[name] for inputs in seen]).mean(0)
    for name, tensor in statistics.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    with statistics.averaged(SINGLE, step=5):
        assert int(network.bn1.num_batches_tracked) == 5
        assert torch.equal(network.bn1.running_var, statistics.tensors()["0.var"])


@contextmanager
def mean_and_variance_of_inputs(layers):
    """Yields a dictionary that the next forward pass fills, computed from the definition of BatchNorm."""
    found = {}

    def look(i):
        def hook(layer, inputs):
            found[f"{i}.mean"], found[f"{i}.var"] = inputs[0].mean((0, 2, 3)), inputs[0].var((0, 2, 3))

        return hook

    hooks = [layer.register_forward_pre_hook(look(i)) for i, layer in enumerate(layers)]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v3_small", "convnext_tiny", "vit_b_16"])
def test_norms_and_biases_are_not_decayed_whatever_they_are_called(name):
    kinds = factory.parameter_kinds(build(name=name))
    assert sum(map(len, kinds)) == len(list(build(name=name).parameters()))
    assert all(p.ndim > 1 for p in kinds.weights)
    network = build(name="resnet50")
    kinds = factory.parameter_kinds(network)
    # A search for "bn" in the names would miss the first.
    assert any(p is network.layer1[0].downsample[1].weight for p in kinds.others)
    assert [p is network.fc.bias for p in kinds.biases] == [True]


@pytest.mark.parametrize(("given", "decay"), [(None, 0.002), (0.0, 0.0), (0.03, 0.03)])
def test_biases_have_a_weight_decay_of_their_own(given, decay):
    network = build(name="resnet18")
    settings = Optimizer(weight_decay=0.01, norm_weight_decay=0.002, bias_weight_decay=given)
    decays = {
        id(p): group["weight_decay"]
        for group in optimizers.build(network, settings, CPU).param_groups
        for p in group["params"]
    }
    assert decays[id(network.fc.weight)] == 0.01
    assert decays[id(network.fc.bias)] == decay
    assert {decays[id(p)] for layer in factory.norms(network) for p in layer.parameters()} == {0.002}


@pytest.mark.parametrize(
    ("name", "undecayed"),
    [
        ("convnext_tiny", "features.1.0.layer_scale"),  # (C, 1, 1); the paper's repository has it as a vector
        ("vit_b_16", "class_token"),
        ("vit_b_16", "encoder.pos_embedding"),
        ("swin_t", "features.1.0.attn.relative_position_bias_table"),
        ("swin_v2_t", "features.1.0.attn.logit_scale"),
        ("timm:vit_tiny_patch16_224", "pos_embed"),
        ("timm:xcit_nano_12_p16_224", "pos_embed.token_projection.weight"),
    ],
)
def test_layer_scales_and_embeddings_are_not_decayed(name, undecayed):
    network = build(name=name)
    assert any(p is network.get_parameter(undecayed) for p in factory.parameter_kinds(network).others)


def test_instance_norms_are_norm_layers():
    norm = nn.InstanceNorm2d(8, affine=True)
    kinds = factory.parameter_kinds(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm))
    assert not kinds.biases and [*map(id, kinds.others)] == [id(norm.weight), id(norm.bias)]


def test_embeddings_of_an_own_network_are_not_decayed():
    kinds = factory.parameter_kinds(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2, bias=False)))
    assert [tuple(p.shape) for p in kinds.others] == [(4, 8)] and [tuple(p.shape) for p in kinds.weights] == [(2, 8)]


def test_the_weights_of_a_classifier_with_one_output_are_decayed():
    kinds = factory.parameter_kinds(nn.Sequential(nn.Linear(8, 1), nn.Conv2d(8, 1, 1)))
    assert [p.ndim for p in kinds.weights] == [2, 4]


def tied() -> nn.Sequential:
    """Two layers with the same weights."""
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    network[2].weight = network[0].weight
    return network


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_weights_that_two_layers_share_are_updated_once(decay):
    network = tied()
    settings = Optimizer(name="sgd", lr=0.1, momentum=0, nesterov=False, weight_decay=0, layer_decay=decay)
    optimizer = optimizers.build(network, settings, CPU)
    optimizers.set_lr(optimizer, 0.1)
    network(torch.randn(3, 4)).square().sum().backward()
    [group] = [g for g in optimizer.param_groups if any(p is network[0].weight for p in g["params"])]
    expected = network[0].weight.detach() - 0.1 * group["lr_scale"] * network[0].weight.grad
    optimizer.step()
    torch.testing.assert_close(network[0].weight.detach(), expected)
    assert sum(map(len, factory.parameter_kinds(network))) == 3


@pytest.mark.parametrize("part", ["0", "2"])
def test_a_part_is_frozen_with_the_weights_that_it_shares(part):
    network = tied()
    freezing.freeze(network, (part,))
    assert not network[0].weight.requires_grad
    freezing.unfreeze(network)
    assert all(p.requires_grad for p in network.parameters())


def test_a_frozen_norm_without_running_statistics_normalizes_as_before():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(144, 2)
    )
    images = torch.randn(5, 3, 8, 8)
    before = network(images)
    freezing.freeze(network, ("1",))
    assert torch.equal(network(images), before)
    assert not network[1].weight.requires_grad and network[0].weight.requires_grad


@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
def test_momentum_may_begin_later(kind):
    """From zeros, beside the rest of the state; a parameter that has no state yet gets a fresh one."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    without = optimizers.build(network, Optimizer(name=kind, momentum=0, nesterov=False), CPU)
    network[1](torch.ones(3, 4)).sum().backward()
    without.step()
    later = optimizers.build(network, Optimizer(name=kind, momentum=0.9, nesterov=False), CPU)
    optimizers.load_state_tensors(later, network, optimizers.state_tensors(without, network))
    network(torch.ones(3, 4)).sum().backward()
    later.step()
    assert all(later.state[p]["momentum_buffer"].any() for p in network.parameters())


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop", "lars", "lamb", "nadamw", "lion"])
def test_optimizer_state_is_saved_and_loaded_by_name(kind):
    def step(network, optimizer):
        network(torch.ones(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    settings = Optimizer(name=kind, lr=0.01)
    one = build(name="resnet18").eval()
    first = optimizers.build(one, settings, CPU)
    step(one, first)
    two = build(name="resnet18").eval()
    two.load_state_dict(one.state_dict())
    second = optimizers.build(two, settings, CPU)
    optimizers.load_state_tensors(second, two, {k: v.clone() for k, v in optimizers.state_tensors(first, one).items()})
    step(one, first)
    step(two, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.RReLU(), True), (nn.FractionalMaxPool2d(2, output_ratio=0.5), True), (nn.Dropout(0.5), True), (nn.ReLU(), False)],
)
def test_layers_that_draw_random_numbers_are_known(layer, draws):
    assert factory.uses_random_draws(nn.Sequential(layer)) == draws


def test_attributes_of_an_own_network_may_have_any_name():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.prob, model.image_size = nn.Softmax(1), (8, 8)
    assert not factory.uses_random_draws(model)
    factory.check_input(model, 32, 2, "net.py:build", 2)


def test_a_network_without_parameters_is_refused():
    with pytest.raises(UserError, match=r"net\.py:build has no parameters"):
        factory.check_input(nn.Flatten(), 32, 2, "net.py:build")
