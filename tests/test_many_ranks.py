"""What a rank does per step when there are many: messages along a tree, and metrics that rank 0 sums up."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from worldsize import fingerprint
from worldsize.batch import BatchPlan
from worldsize.compute import Computed
from worldsize.control import Control
from worldsize.meter import Meter
from worldsize.parallel.base import Exchange
from worldsize.place import Place
from worldsize.state import gather
from worldsize.world import World

CPU = torch.device("cpu")


def join(rank: int, size: int, folder: str) -> World:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    return World(Place("torchrun", rank, size, rank, size, ("127.0.0.1", 1)), CPU, "gloo", 1, control)


def decisions(rank: int, size: int, folder: str) -> None:
    """All ranks propose; in step s, rank s asks to stop, and rank 0 alone may ask for the rest."""
    world = join(rank, size, folder)
    control = Control(world, largest_ring=0)
    found = []
    for step in range(2 * size):
        control.propose(stop=step == rank, collect=step % 2 == 0, save=rank == 1 or step == 3, new_broken=rank + step)
        time.sleep(0.001 * ((rank + step) % 3))
        found.append(control.decide())
    assert [d.stop for d in found] == [step < size for step in range(2 * size)]
    assert [d.collect for d in found] == [step % 2 == 0 for step in range(2 * size)]
    assert [d.save for d in found] == [step == 3 for step in range(2 * size)]
    assert [d.new_broken for d in found] == [size * (size - 1) // 2 + size * step for step in range(2 * size)]
    assert world.from_main(("of", rank)) == ("of", 0)
    (Path(folder) / f"done-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [3, pytest.param(11, marks=pytest.mark.slow)])
def test_decisions_along_the_tree_are_those_of_all_ranks(tmp_path, size):
    mp.start_processes(decisions, (size, str(tmp_path)), nprocs=size, start_method="forkserver")
    assert len(list(tmp_path.glob("done-*"))) == size


def lost(rank: int, size: int, folder: str) -> None:
    world = join(rank, size, folder)
    control = Control(world, largest_ring=0)
    if rank == 2:
        return  # without a word
    control.propose(False, False, False, 0)
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
        control.decide()
    (Path(folder) / f"done-{rank}").touch()


def test_a_lost_rank_is_noticed_by_those_that_wait_for_it(tmp_path):
    mp.start_processes(lost, (3, str(tmp_path)), nprocs=3, start_method="forkserver")
    assert (tmp_path / "done-0").exists()


def stuck(rank: int, size: int, folder: str, between_steps: bool) -> None:
    """Rank 2 is lost while the others wait for their GPU, as in a collective of NCCL."""
    world = replace(join(rank, size, folder), device=torch.device("cuda", 0))
    control = Control(world, grace_s=0.2)
    with control.watched():
        time.sleep(0.1)
    if rank == 2:
        return
    if between_steps:
        with control.watched():
            time.sleep(100)
    control.propose(False, False, False, 0)
    time.sleep(100)


@pytest.mark.parametrize("between_steps", [False, True])
def test_a_process_whose_gpu_waits_for_a_lost_rank_ends(tmp_path, between_steps):
    context = mp.get_context("forkserver")
    ranks = [context.Process(target=stuck, args=(rank, 3, str(tmp_path), between_steps)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [69, 69, 0]


class Alone:
    """The strategy of a test: nothing is sent."""

    local_gradients = False
    exchange = Exchange(CPU)


def steps_of(ranks: int, every_rank: bool, monkeypatch: pytest.MonkeyPatch):
    world = World(Place("torchrun", 0, ranks, 0, ranks, ("127.0.0.1", 1)), CPU, "gloo", 1, control=object())
    meter = Meter(world, BatchPlan(ranks * 8, 4, ranks), Alone(), every_rank=every_rank)
    meter.restart()
    sums = torch.tensor([[2.0, 1.0], [4.0, 3.0]], dtype=torch.float64)
    meter.add(1, 0.5, 0.1, Computed(sums, [7, 9], 0.0), torch.tensor(5.0))

    def gather(own, everyone, dst, group):
        for rank, tensor in enumerate(everyone):
            tensor.copy_(own)
            if tensor.is_floating_point():  # milliseconds of the step, of data, of waiting; bytes
                tensor[:, -4:] = torch.tensor([10.0 + rank, 1.0, 2.0, 100.0])

    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(World, "from_main", lambda self, value: value)
    return meter.collect(0)


@pytest.mark.parametrize(("ranks", "every_rank"), [(4, False), (512, False), (512, True)])
def test_the_metrics_of_a_step_do_not_grow_with_the_ranks(monkeypatch, ranks, every_rank):
    (step,) = steps_of(ranks, every_rank, monkeypatch)
    assert step.loss == math.fsum([2.0, 4.0] * ranks) / (ranks * 8)
    assert step.top1 == 0.5 and step.grad_norm == 5 and step.sent_bytes == 100
    assert step.step_ms == pytest.approx(10 + (ranks - 1) / 2) and step.communication_ms == pytest.approx(2)
    assert step.samples == fingerprint.of_samples([7, 9] * ranks)
    speeds = [8 / (8 + rank) * 1000 for rank in range(ranks)]
    if ranks == 4 or every_rank:
        assert step.rank_images_per_s == pytest.approx(speeds) and not step.slowest_ranks
        return
    assert step.rank_images_per_s == [] and len(step.rank_quantiles) == 5
    assert step.rank_quantiles[0] == pytest.approx(min(speeds)) and step.rank_quantiles[-1] == pytest.approx(max(speeds))
    assert step.slowest_ranks == {rank: pytest.approx(speeds[rank]) for rank in (511, 510, 509, 508)}


def own_tensors(rank: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), float(rank)), "step": torch.tensor(rank), "b": torch.arange(4.0) + rank}


def gathering(rank: int, size: int, folder: str) -> None:
    world = join(rank, size, folder)
    everyone = gather(own_tensors(rank), world)
    assert len(everyone) == (size if rank == 0 else 0)
    for other, tensors in enumerate(everyone):
        expected = own_tensors(other)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
    different = {"a": torch.zeros(2 + (rank == 1))}
    with pytest.raises(AssertionError, match="different tensors"):
        gather(different, world)
    (Path(folder) / f"done-{rank}").touch()
    dist.destroy_process_group()


def test_each_ranks_own_tensors_arrive_at_rank_0(tmp_path):
    mp.start_processes(gathering, (3, str(tmp_path)), nprocs=3, start_method="forkserver")
    assert len(list(tmp_path.glob("done-*"))) == 3
