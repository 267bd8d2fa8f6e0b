"""A replica that differs in a bit is named before it is saved."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from interruptions import SETTINGS, same_run, start_until
from processes import newest, weights
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training.replicas import Replicas

ALONE = World(RankInfo("none", 0, 1, 0, 1), torch.device("cpu"), None, 1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).to(dtype)
    return layers.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_flipped_bit_changes_a_sum(dtype):
    one, words = network(dtype), {2: torch.int16, 4: torch.int32, 8: torch.int64}
    before = Replicas(ALONE, one, True).sums()
    for i, parameter in enumerate(one.parameters()):
        bits = parameter.detach().view(words[parameter.element_size()])
        top = 1 << (8 * parameter.element_size() - 1)
        for place in ((0,) * bits.ndim, (-1,) * bits.ndim):
            original = bits[place].clone()
            for bit in range(8 * parameter.element_size()):
                bits[place] = ((original.item() ^ (1 << bit)) + top) % (2 * top) - top
                changed = Replicas(ALONE, one, True).sums() != before
                assert changed.nonzero().tolist() == [[i]]
            bits[place] = original


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("view", [lambda row: row, lambda row: row.view(2, 4).t(), lambda row: row[::2]])
def test_a_parameter_may_be_any_part_of_a_larger_memory(begin, view):
    """Its memory then begins in the middle of a word of 8 bytes, or has gaps."""
    holder = nn.Module()
    holder.register_parameter("p", nn.Parameter(view(torch.randn(9)[begin : begin + 8])))
    before = Replicas(ALONE, holder, True).sums()
    with torch.no_grad():
        holder.p[(-1,) * holder.p.ndim] *= -1
    assert Replicas(ALONE, holder, True).sums() != before


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[1, 2], [1, 2], [1, 2]], ""),
        ([[1, 2], [1, 2], [1, 3]], "the weights bias of rank 2 differ from those of the other 2"),
        ([[1, 2], [9, 2], [8, 2], [1, 2]], "the weights weight of ranks 1, 2 differ from those of the other 2"),
        ([[1, 2], [1, 3]], "the weights bias differ between the ranks, and no majority has the same"),
    ],
)
def test_the_rank_that_differs_is_named(ranks, message):
    assert Replicas(ALONE, nn.Linear(2, 2), True)._difference(ranks) == message


@pytest.mark.slow
def test_a_flipped_bit_is_not_saved_and_autoresume_goes_on_to_the_same_bits(tmp_path, ranks):
    ranks(2).run("train", "digits", *SETTINGS, "--name", "undisturbed")
    more = ("--autoresume", "--checkpoint.every-steps", "5")
    process = start_until(tmp_path, "a", 2, 5, *more, rule="flipped_bit")
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert "after step 9, the weights fc.weight differ between the ranks" in output
    assert output.count("worldsize: starting again") == 1
    same_run(tmp_path / "runs" / "a", ranks.cwd / "runs" / "undisturbed")


@pytest.mark.slow
def test_different_hardware_may_round_differently(tmp_path):
    os.environ["OTHER_HARDWARE"] = "1"
    try:
        process = start_until(tmp_path, "a", 2, 5, "--checkpoint.every-steps", "5", rule="flipped_bit")
        output = process.communicate(timeout=400)[0]
    finally:
        del os.environ["OTHER_HARDWARE"]
    assert process.returncode == 0, output
    assert output.count("the processes have different hardware, which may round differently") == 1
    assert weights(tmp_path / "runs" / "a") and newest(tmp_path / "runs" / "a").name == "step-00000027"


def test_the_rank_whose_loss_is_not_a_number_is_named(ranks):
    output = ranks(2, "nan_on_rank_1").run("train", "digits", *SETTINGS, "--max-steps", "5", code=76)
    assert "the loss is nan on rank 1, and finite on the others, at step 3 of 5" in output
