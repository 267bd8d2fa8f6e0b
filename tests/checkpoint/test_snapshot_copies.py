"""Snapshots are copies: in the tensors' own layout, in memory that is used again, and in few operations."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize import checkpoint

SHAPES = st.lists(st.integers(0, 3), max_size=4)


def test_a_snapshot_is_a_copy():
    live = torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)
    copied = checkpoint.copy({"w": live})
    live.zero_()
    assert copied["w"].is_contiguous()
    assert copied["w"].sum() == 48


def test_copies_in_memory_of_earlier_ones_are_the_tensors_of_now():
    live = {"w": torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last), "n": torch.tensor(1)}
    memory: checkpoint.Tensors = {}
    first = checkpoint.Copying(memory).copy(live, "model")
    for tensor in live.values():
        tensor.mul_(5)
    assert first["w"].sum() == 48
    second = checkpoint.Copying(memory).copy(live, "model")
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == {n: t.data_ptr() for n, t in first.items()}
    assert second["w"].equal(live["w"]) and second["n"] == 5
    assert second["w"].is_contiguous(memory_format=torch.channels_last)  # a copy to another layout takes longer
    other = checkpoint.Copying(memory).copy({"w": live["w"][:2], "n": torch.ones(2)}, "optimizer")
    assert other["w"].shape == (2, 3, 2, 2) and other["n"].tolist() == [1, 1] and second["w"].equal(live["w"])


@given(st.lists(st.tuples(SHAPES, st.randoms(use_true_random=False), st.booleans()), min_size=1, max_size=4))
def test_tensors_of_any_shape_and_layout_keep_their_values(kinds):
    live = {}
    for number, (shape, random, gaps) in enumerate(kinds):
        tensor = torch.arange(1 + 2 * torch.Size(shape).numel())[1:].view(*shape, 2).permute(*_axes(len(shape) + 1, random))
        live[str(number)] = tensor[..., ::2] if gaps else tensor
    copied = checkpoint.Copying().copy(live)
    assert list(copied) == list(live)
    for name, tensor in live.items():
        assert torch.equal(copied[name], tensor)
        assert copied[name].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def _axes(count: int, random: Any) -> list[int]:
    axes = list(range(count))
    random.shuffle(axes)
    return axes


def test_tensors_of_a_type_are_one_copy():
    """The state of a ResNet-50 and its optimizer has hundreds of tensors, and each copy from a GPU costs as much as MBs."""
    live = {str(i): torch.zeros(i, 2, dtype=torch.int64 if i % 3 == 0 else torch.float32) for i in range(9)}
    copied = checkpoint.Copying().copy(live)
    assert len({tensor.untyped_storage().data_ptr() for tensor in copied.values()}) == 2


def test_copies_that_are_put_off_are_made_by_whoever_asks_first():
    live = {"w": torch.ones(4, 3), "n": torch.tensor(1)}
    copying = checkpoint.Copying()
    copied = copying.copy(live, later=True)
    assert copied == {}  # so the caller did not wait for a copy
    live["w"].fill_(2)
    copying.settle()
    for tensor in live.values():
        tensor.fill_(5)
    copying.wait()
    assert copied["w"].unique().tolist() == [2] and copied["n"] == 1


def test_the_thread_that_waits_for_a_copy_uses_the_gpu_of_the_copy(monkeypatch):
    """A new thread's current device is GPU 0: each process of a node would create a context there."""
    used: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: used.append("waits"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    copying, device = checkpoint.Copying(), torch.device("cuda", 3)
    values = SimpleNamespace(device=device, record_stream=lambda stream: None)
    copying._to_host(SimpleNamespace(copy_=lambda values, non_blocking: None), values)
    copying.wait()
    assert used == [device, "waits"]
