"""Checkpoints that several ranks write together: real processes, connected through gloo."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

import interruptions
from processes import identical, losses, momentum, newest, ranks_own, weights
from worldsize import checkpoint
from worldsize.checkpoint import Snapshot, writer
from worldsize.config.recipe import Checkpoint
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError, UserError
from worldsize.training import resume

RANKS = 3


def join(rank: int, folder: str) -> World:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    rank_info = RankInfo("torchrun", rank, RANKS, rank, RANKS, ("127.0.0.1", 1))
    return World(rank_info, torch.device("cpu"), "gloo", 1, control)


def snapshot(rank: int, step: int) -> Snapshot:
    own = {rank: {"norm/0.mean": torch.full((2,), float(100 * step + rank))}}
    if rank:
        return Snapshot({}, {}, own, {"step": step}, "")
    return Snapshot({"w": torch.ones(3) * step}, {"m/w": torch.ones(3)}, own, {"step": step, "evaluation": None}, "")


def start(scenario, tmp_path: Path) -> Path:
    """Run ``scenario(world, checkpoints)`` on all ranks. Returns the checkpoints' folder."""
    mp.start_processes(_rank, (scenario, str(tmp_path)), nprocs=RANKS, start_method="forkserver")
    assert len(list(tmp_path.glob("done-*"))) == RANKS
    return tmp_path / "checkpoints"


def _rank(rank: int, scenario, folder: str) -> None:
    world = join(rank, folder)
    scenario(world, Path(folder) / "checkpoints")
    (Path(folder) / f"done-{rank}").touch()
    dist.destroy_process_group()


def saving(world: World, folder: Path) -> None:
    written: list[str] = []
    save_file = writer.save_file

    def recorded(tensors, path):
        written.append(path.name)
        save_file(tensors, path)

    writer.save_file = recorded
    writing = writer.Writer(folder, Checkpoint(keep=2), writer.team(world, folder))
    for step in (1, 2, 3):
        writing.save(snapshot(world.rank, step))
        # The reports do not disturb messages in the same group.
        assert world.gather((world.rank, step)) == [(rank, step) for rank in range(RANKS)]
    writing.wait()
    assert writing.failed is None
    common = ["model.safetensors", "optimizer.safetensors"] if world.is_main else []
    assert written == [*common, f"rank-0000{world.rank}.safetensors"] * 3


def test_each_rank_writes_its_own_file_into_one_checkpoint(tmp_path):
    folder = start(saving, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    newest = folder / "step-00000003"
    checkpoint.check(newest)
    files = json.loads((newest / "manifest.json").read_text())["files"]
    assert sorted(files) == sorted(path.name for path in newest.iterdir() if path.name != "manifest.json")
    for rank in range(RANKS):
        own = {"norm/0.mean": torch.full((2,), 300.0 + rank)}
        assert load_file(newest / f"rank-0000{rank}.safetensors")["norm/0.mean"].equal(own["norm/0.mean"])
        assert checkpoint.read(newest, rank).ranks.keys() == {rank}


def failing(world: World, folder: Path) -> None:
    writing = writer.Writer(folder, Checkpoint(keep=2), writer.team(world, folder))
    save_file = writer.save_file
    for step, full in ((1, None), (2, 2), (3, 0), (4, None)):

        def save(tensors, path, full=full):
            if world.rank == full:
                raise OSError(28, "No space left on device", "\N{GRINNING FACE}" * 500)  # up to 12 bytes each
            save_file(tensors, path)

        writer.save_file = save
        writing.save(snapshot(world.rank, step))
        writing.wait()
        if world.is_main:
            reason = {2: "rank 2: [Errno 28] No space left on device", 3: "No space left"}.get(step)
            assert (reason in writing.failed) if reason else writing.failed is None
        world.barrier()
        expected = [f"step-0000000{s}" for s in ((1, 4) if step == 4 else (1,))]
        assert sorted(path.name for path in folder.iterdir()) == expected
        world.barrier()


def test_a_rank_that_cannot_write_costs_this_checkpoint_only(tmp_path):
    start(failing, tmp_path)


def test_a_folder_that_cannot_be_listed_costs_no_checkpoint(tmp_path, monkeypatch, caplog):
    writing = writer.Writer(tmp_path, Checkpoint(keep=1))
    writing.save(snapshot(0, 1))
    writing.wait()

    def stale(folder, step, settings):
        raise OSError(116, "Stale file handle", str(folder))

    with monkeypatch.context() as broken:
        broken.setattr(writer.retention, "prune", stale)
        writing.save(snapshot(0, 2))
        assert writing.wait() == tmp_path / "step-00000002"
    assert writing.failed is None
    assert "older checkpoints were not deleted ([Errno 116] Stale file handle" in caplog.text
    writing.save(snapshot(0, 3))
    writing.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def losing(world: World, folder: Path) -> None:
    writing = writer.Writer(folder, Checkpoint(keep=2), writer.team(world, folder))
    writing.save(snapshot(world.rank, 1))
    writing.wait()
    world.barrier()
    if world.rank == 1:
        (folder.parent / "done-1").touch()
        os._exit(0)
    writing.save(snapshot(world.rank, 2))
    writing.wait()
    if world.is_main:
        assert "onnection" in writing.failed
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_a_lost_rank_costs_this_checkpoint_only(tmp_path):
    start(losing, tmp_path)


def separate(world: World, folder: Path) -> None:
    assert writer.team(world, folder.with_name(f"disk-of-{world.rank}")) is None
    assert writer.team(world, folder) is not None
    world.barrier()
    assert not list(folder.iterdir())


def test_ranks_with_disks_of_their_own_do_not_write_together(tmp_path):
    start(separate, tmp_path)


def reading(world: World, folder: Path) -> None:
    """Rank 2's state of step 3 is damaged, and model.safetensors of step 2."""
    if world.is_main:
        for step in (1, 2, 3):
            whole = snapshot(0, step)
            whole.ranks.update(snapshot(1, step).ranks | snapshot(2, step).ranks)
            writer.write(folder, whole)
        (folder / "step-00000003" / "rank-00002.safetensors").write_bytes(b"damaged")
        (folder / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    world.barrier()
    found = resume._newest(folder, world.rank, world)
    assert found.step == 1
    assert found.ranks[world.rank]["norm/0.mean"].tolist() == [100 + world.rank] * 2
    assert resume._newest(folder.with_name("nothing"), world.rank, world) is None
    world.barrier()
    if world.rank == 1:
        is_dir = Path.is_dir
        Path.is_dir = lambda path: is_dir(path) and not path.name.startswith("step-")
    with pytest.raises(UserError, match=r"step-00000003 does not exist on .*storage that all .*\n\(on rank 1\)"):
        resume._newest(folder, world.rank, world)
    if world.rank == 1:
        Path.is_dir = is_dir
    world.barrier()
    if world.is_main:
        (folder / "step-00000001" / "manifest.json").unlink()
    world.barrier()
    with pytest.raises(CheckpointError, match="all 3 checkpoints"):
        resume._newest(folder, world.rank, world)


def test_all_ranks_resume_from_the_newest_checkpoint_that_each_can_read(tmp_path):
    start(reading, tmp_path)


SETTINGS = ("--global-batch", "48", "--micro-batch", "12", "--parallel.strategy", "adasum")


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(name, steps, rule): trains with two processes after this function of sabotage.py; returns the run folder."""

    def run(name: str, steps: int, rule: str | None = None) -> Path:
        arguments = ("train", "digits", *interruptions.SETTINGS, *SETTINGS, "--name", name, "--max-steps", str(steps))
        ranks(2, rule).run(*arguments)
        return ranks.cwd / "runs" / name

    return run


@pytest.mark.slow
def test_without_shared_storage_rank_0_writes_the_same_checkpoint(runs):
    together, alone = runs("together", 3), runs("alone", 3, "separate_disks")
    assert ranks_own(together).keys() == ranks_own(alone).keys()
    for read in (ranks_own, weights, momentum):
        assert identical(read(together), read(alone))


@pytest.mark.slow
def test_a_run_saved_in_format_1_resumes_bit_for_bit(runs, ranks):
    expected, run = runs("expected", 6), runs("old", 3)
    old = newest(run)
    save_file(ranks_own(run), old / "ranks.safetensors")
    state = json.loads((old / "state.json").read_text())
    del state["identity"]["schedule"]["power"]  # a setting that is newer than the run
    (old / "state.json").write_text(json.dumps(state))
    for path in (old / "manifest.json", *old.glob("rank-*.safetensors")):
        path.unlink()
    files = {p.name: {"bytes": p.stat().st_size, "sha256": checkpoint.sha256(p)} for p in old.iterdir()}
    (old / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    ranks(2).run("train", "--resume", run, "--max-steps", "6")
    for read in (ranks_own, weights, momentum):
        assert identical(read(run), read(expected))
    assert losses(run) == losses(expected)


def test_a_thread_that_cannot_start_is_reported_once(tmp_path: Path):
    """The error of the start, and not one of waiting for its end."""
    writing = writer.Writer(tmp_path, Checkpoint(keep=1))
    before = threading.stack_size(2**62)  # no address space has room for it
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            writing.save(snapshot(0, 1))
    finally:
        threading.stack_size(before)
    assert writing.wait() is None
