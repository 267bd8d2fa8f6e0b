"""What a rank does per step when there are many: messages along a tree, and metrics that rank 0 sums up."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gloo_ranks import join
from paths import ROOT
from processes import environment
from worldsize.distributed import device_errors
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import PeerLost
from worldsize.parallel.base import Exchange
from worldsize.runs import step_hashes
from worldsize.training.gradients import Computed
from worldsize.training.rank_decisions import RankDecisions
from worldsize.training.state import gather
from worldsize.training.step_metrics import StepMetrics

CPU = torch.device("cpu")


def decisions(rank: int, size: int, folder: str) -> None:
    """All ranks propose; in step s, rank s asks to stop, and rank 1 to save. Only rank 0 may ask to collect."""
    world = join(rank, size, folder)
    control = RankDecisions(world, largest_ring=0)
    found = []
    for step in range(2 * size):
        control.propose(
            stop=step == rank, collect=rank == 1 or step % 2 == 0, save=rank == 1 and step == 3, new_broken=rank + step
        )
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


def lost(rank: int, size: int, folder: str, largest_ring: int) -> None:
    world = join(rank, size, folder)
    control = RankDecisions(world, largest_ring)
    if rank == 2:
        return  # without a word
    control.propose(False, False, False, 0)
    with pytest.raises(RuntimeError) as failed:
        control.decide()
    explained = device_errors.explain(failed.value, rank, str)
    assert isinstance(explained, PeerLost) and "onnection" in str(explained)
    (Path(folder) / f"done-{rank}").touch()


@pytest.mark.parametrize("largest_ring", [0, 16])
def test_a_lost_rank_is_noticed_by_those_that_wait_for_it(tmp_path, largest_ring):
    mp.start_processes(lost, (3, str(tmp_path), largest_ring), nprocs=3, start_method="forkserver")
    assert (tmp_path / "done-0").exists()


EXITS = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from worldsize.training.rank_decisions import RankDecisions
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World

dist.init_process_group("fake", rank=1, world_size=20, store=FakeStore())
rank_info = RankInfo("torchrun", 1, 20, 1, 20, ("127.0.0.1", 1))
world = World(rank_info, torch.device("cpu"), "gloo", 1, dist.new_group(backend="fake"))
controls = [RankDecisions(world) for _ in range(100)]
for control in controls:
    control.propose(False, False, False, 0)
    control.decide()
"""


def test_a_process_exits_cleanly_while_threads_wait_for_messages():
    done = subprocess.run([sys.executable, "-c", EXITS], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Alone:
    """The strategy of a test: nothing is sent."""

    local_gradients = False
    exchange = Exchange(CPU)


def steps_of(ranks: int, every_rank: bool, monkeypatch: pytest.MonkeyPatch):
    world = World(RankInfo("torchrun", 0, ranks, 0, ranks, ("127.0.0.1", 1)), CPU, "gloo", 1, control=object())
    meter = StepMetrics(world, BatchPlan(ranks * 8, 4, ranks), Alone(), every_rank=every_rank)
    meter.restart()
    sums = torch.tensor([[2.0, 1.0], [4.0, 3.0]], dtype=torch.float64)
    meter.add(1, 0.5, 0.1, Computed(sums, [7, 9], [], []), torch.tensor(5.0))

    def gather(own, everyone, dst, group):
        for rank, tensor in enumerate(everyone):
            tensor.copy_(own)
            if tensor.is_floating_point() and tensor.dim() == 2:  # ms of the step, data, waiting, the loop, copying; bytes
                early = 2.0 if rank == 0 else 0.0  # rank 0 waits longer for the others
                tensor[:, -6:] = torch.tensor([10.0 + rank + early, 1.0, 2.0 + early, 0.5, 0.25, 100.0])

    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(World, "from_main", lambda self, value: value)
    steps, windows = meter.collect(0)
    meter.close()
    (window,) = windows
    return steps, window


@pytest.mark.parametrize(("ranks", "every_rank"), [(4, False), (512, False), (512, True)])
def test_the_metrics_of_a_step_do_not_grow_with_the_ranks(monkeypatch, ranks, every_rank):
    (step,), window = steps_of(ranks, every_rank, monkeypatch)
    assert window.ranks == (list(range(ranks)) if ranks == 4 or every_rank else [508, 509, 510, 511])
    assert step.loss == math.fsum([2.0, 4.0] * ranks) / (ranks * 8)
    assert step.top1 == 0.5 and step.grad_norm == 5 and step.sent_bytes == 100
    assert step.step_ms == pytest.approx(10 + (ranks - 1) / 2 + 2 / ranks)
    assert step.communication_ms == pytest.approx(2 + 2 / ranks) and step.straggler_ms == pytest.approx(2 / ranks)
    assert step.overhead_ms == pytest.approx(0.5) and step.compute_ms == pytest.approx(step.step_ms - 3.75 - 2 / ranks)
    assert (step.data_ms, step.copy_ms) == (1, 0.25)
    assert step.samples == step_hashes.of_samples([7, 9] * ranks)
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


def measured(what: str, ranks: int, rank: int) -> dict[str, float]:
    """What benchmarks/ranks.py measures."""
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks.py"), what, str(ranks), str(rank)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ranks_benchmark():
    """benchmarks/ranks.py as a module."""
    return runpy.run_path(str(ROOT / "benchmarks" / "ranks.py"))


def test_a_cost_that_grows_with_the_ranks_needs_a_reason():
    unexplained = ranks_benchmark()["unexplained"]
    few = {"decisions ms/step": 1.0, "metrics ms/step": 1.0, "load ddp as rank 1 ms": 1.0, "save ddp MiB": 1.0}
    assert unexplained(few, dict.fromkeys(few, 1.2), 4096, 0) == []
    grown = dict.fromkeys(few, 5.0)
    names = [line.split(",")[0] for line in unexplained(few, grown, 4096, 0)]
    assert names == ["decisions ms/step", "load ddp as rank 1 ms"]
    assert "metrics ms/step, rank 1: 1.000 among few, 5.000 among 4,096" in unexplained(few, grown, 4096, 1)


def test_the_steps_of_a_rank_are_measured():
    found = measured("--steps", 8, 0)
    assert found.keys() == {"start ms", "decisions ms/step", "metrics ms/step"} and min(found.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_steps_of_a_rank_cost_the_same_among_4096(rank):
    few, many = measured("--steps", 8, rank), measured("--steps", 4096, rank)
    # The factor is for a shared machine: what grew with each rank would be 512 times as much.
    assert ranks_benchmark()["unexplained"](few, many, 4096, rank, noise=6.0) == []


@pytest.mark.slow
def test_the_cost_of_a_rank_grows_little_with_their_number():
    """A rank's own state of ResNet-50 is 0.2 MB, so rank 0 would hold 109 MB if it gathered them."""
    main, other = measured("--measure", 512, 0), measured("--measure", 512, 1)
    # Rank 0 does the most; the factor is for a shared machine.
    assert ranks_benchmark()["unexplained"](measured("--measure", 8, 0), main, 512, 0, noise=3.0) == []
    for strategy in ("ddp", "adasum", "localsgd"):
        assert main[f"save {strategy} MiB"] < 50 and other[f"save {strategy} MiB"] < 50
    # Only sending does not depend on the number of ranks; a sum over 512 ranks costs rank 0 more.
    assert other["metrics ms/step"] < main["metrics ms/step"]
