"""A process that waits on its GPU for one that is gone ends by itself, wherever in the run it waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from gloo_ranks import join
from paths import SMALL_NETWORK
from processes import HERE, environment, free_port
from waiting import until
from worldsize import cli
from worldsize.checkpoint import writer
from worldsize.models import factory
from worldsize.training import forward_pass, trainer
from worldsize.training.lost_peers import LostPeers
from worldsize.training.saver import Saver

FAR = 3  # a leaf of the tree: rank 2 hears of it through ranks 1 and 0


def waiting(rank: int, size: int, folder: str, leaves: bool) -> None:
    """Rank 3 ends, or fails and says so, while the others wait for their GPU, as in a collective of NCCL."""
    peers = LostPeers(replace(join(rank, size, folder), backend="nccl"), every_s=0.05, grace_s=0.2)
    if rank != FAR:
        threading.Event().wait()
    if leaves:
        peers.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_every_process_whose_gpu_waits_for_a_lost_one_ends(tmp_path, leaves):
    context = mp.get_context("forkserver")
    ranks = [context.Process(target=waiting, args=(rank, 4, str(tmp_path), leaves)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [69, 69, 69, 0]


def leaving(rank: int, size: int, folder: str) -> None:
    """Rank 0 leaves last, and each needs more time than the grace to end after it has left."""
    peers = LostPeers(replace(join(rank, size, folder), backend="nccl"), every_s=0.05, grace_s=30)
    if rank == 0:
        until(lambda: len(list(Path(folder).glob("left-*"))) == size - 1, "the others to leave")
    peers.close()
    assert peers._end is None or peers._end.finished.is_set()  # its clock does not run on
    assert not peers._thread.is_alive()
    (Path(folder) / f"left-{rank}").touch()


def test_nobody_is_ended_after_it_has_left(tmp_path):
    mp.start_processes(leaving, (3, str(tmp_path)), nprocs=3, start_method="forkserver")
    assert len(list(tmp_path.glob("left-*"))) == 3


def test_peers_are_noticed_from_the_network_to_the_last_checkpoint(tmp_path, monkeypatch):
    """What follows may take long on one rank only."""
    inside, found = [], {}
    for name, value in (("__init__", True), ("leave", False)):
        own = getattr(LostPeers, name)
        monkeypatch.setattr(LostPeers, name, lambda *a, own=own, value=value: (inside.append(value), own(*a))[1])

    def recorded(owner: object, name: str) -> None:
        work = getattr(owner, name)

        def record(*arguments, **options):
            found[name] = inside[-1]
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, record)

    places = [(factory, "build"), (forward_pass, "fitting_plan"), (trainer, "evaluate"), (Saver, "save")]
    for owner, name in [*places, (writer.Writer, "wait"), (Saver, "close")]:
        recorded(owner, name)
    monkeypatch.chdir(tmp_path)
    small = ("--model.name", SMALL_NETWORK, "--global-batch", "8", "--micro-batch", "8", "--max-steps", "1")
    assert cli.main(["train", "digits", *small]) == 0
    assert found == {name: name not in ("wait", "close") for _, name in places} | {"wait": False, "close": False}


SMALL = ("--model.name", SMALL_NETWORK, "--global-batch", "8", "--micro-batch", "4", "--max-steps", "2")


def start(rule: str, cwd: Path, **env: str) -> list[subprocess.Popen[bytes]]:
    """Two ranks as torchrun starts them on two hosts: nobody ends one because of the other."""
    command = [sys.executable, HERE / "sabotage.py", rule, "train", "digits", *SMALL, "--name", "a"]
    master = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = environment(**master, MASTER_PORT=str(free_port()), **env)
    return [subprocess.Popen(command, cwd=cwd, env=env | {"RANK": rank}) for rank in "01"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "worldsize.models.factory.build",
        "torch.nn.parallel.DistributedDataParallel",
        "worldsize.training.gradients.GradientComputer.rehearse",
        "worldsize.training.gradients.GradientComputer.gradient",
        "worldsize.training.trainer.evaluate",
        "worldsize.training.saver.Saver.snapshot",
    ],
)
def test_a_run_ends_wherever_a_peer_is_lost(tmp_path, place):
    ranks = start("lost_while_gpus_wait", tmp_path, PLACE=place)
    assert [process.wait(240) for process in ranks] == [69, -signal.SIGKILL]


@pytest.mark.slow
def test_a_run_that_loses_nobody_is_not_disturbed(tmp_path):
    assert [process.wait(240) for process in start("as_on_gpus", tmp_path)] == [0, 0]
