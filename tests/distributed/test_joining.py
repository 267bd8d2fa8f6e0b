"""How processes find each other: late ones, missing ones, unknown hosts and taken ports are named."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from processes import free_port, worldsize
from worldsize.distributed import joining
from worldsize.distributed.rank import RankInfo
from worldsize.errors import PeersUnreachable, UserError

TORCHRUN = {"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}


def test_a_missing_process_is_reported_after_the_timeout(tmp_path):
    env = {**TORCHRUN, "RANK": "0", "MASTER_PORT": str(free_port())}
    done = worldsize("train", "digits", "--global-batch", "256", "--parallel.timeout-s", "3", cwd=tmp_path, **env)
    assert done.returncode == 69
    assert "not all 8 processes joined" in done.stderr and "ranks 1, 2, 3, 4, 5, 6, 7 did not come" in done.stderr


def test_a_missing_rank_0_is_reported_in_one_line(tmp_path):
    """Without the stacks of torch's C++ code."""
    env = {**TORCHRUN, "RANK": "4", "MASTER_PORT": str(free_port())}
    done = worldsize("train", "digits", "--global-batch", "256", "--parallel.timeout-s", "3", cwd=tmp_path, **env)
    assert done.returncode == 69
    assert done.stderr.startswith("worldsize: rank 4 cannot reach rank 0 at 127.0.0.1:") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("launcher", "error"), [("torchrun", UserError), ("worldsize --procs", PeersUnreachable)])
def test_a_port_that_is_taken_can_be_retried_unless_the_user_chose_it(launcher, error):
    """Between the agent's choice of a free port and its use, another process may take it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = RankInfo(launcher, 0, 2, 0, 2, ("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(error, match=r"port \d+ on 127.0.0.1 is in use"):
            joining.init_process_group(place, "gloo", timedelta(seconds=5), None)


class Store:
    """A store with these ranks, to which rank 2 comes after it was asked a few times."""

    def __init__(self, ranks: set[int]) -> None:
        self.ranks, self.asked = ranks, 0

    def add(self, key: str, value: int) -> int:
        self.asked += 1
        self.ranks |= {2} if self.asked == 3 else set()
        return len(self.ranks)

    def check(self, keys: list[str]) -> bool:
        return {int(key.rpartition("/")[2]) for key in keys} <= self.ranks


def test_a_late_process_is_named_once_and_waited_for(monkeypatch, capfd):
    monkeypatch.setattr(joining, "_LATE_S", 0.0)
    monkeypatch.setattr(joining, "_POLL_S", 0.001)
    place = RankInfo("torchrun", 0, 4, 0, 4, ("node0", 29400))
    joining._wait_for_others(Store({0, 1, 3}), place, timedelta(hours=1), 2)
    assert capfd.readouterr().err == "worldsize: rank 0: waiting for rank 2, 0 s so far\n"
    with pytest.raises(PeersUnreachable, match=r"not all 12 .* ranks 2, 4, 5, 6, 7, 8, 9, 10 and 1 more did not come"):
        joining._wait_for_others(Store({0, 1, 3}), RankInfo("torchrun", 0, 12, 0, 4, ("node0", 29400)), timedelta(0), 2)


def test_ranks_that_came_say_so_when_another_one_did_not():
    """Not an internal error of the library that would connect them."""
    port, errors = free_port(), {}

    def join(rank: int) -> None:
        place, timeout = RankInfo("torchrun", rank, 3, rank, 3, ("127.0.0.1", port)), timedelta(seconds=2)
        try:
            joining._store(place, timeout, 2)
        except PeersUnreachable as error:
            errors[rank] = error
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            errors[rank] = joining._not_connected(place, error, timeout)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "not all 3 processes joined" in str(errors[0]) and "rank 2 did not come" in str(errors[0])
    assert isinstance(errors[1], PeersUnreachable)


def test_the_name_of_rank_0_may_become_known_late(monkeypatch, capfd):
    answers = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")] * 3 + [None])

    def ask(*_, **__):
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(joining, "_POLL_S", 0.001)
    place = RankInfo("torchrun", 1, 2, 0, 1, ("node0", 29400))
    joining._wait_for_name(place, timedelta(hours=1))
    assert capfd.readouterr().err == (
        "worldsize: rank 1: waiting for node0, the host of rank 0, to become known (Temporary failure in name resolution)\n"
    )


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b"])
def test_a_host_that_stays_unknown_is_named_with_the_remedy(name):
    place = RankInfo("torchrun", 1, 2, 0, 1, (name, 29400))
    with pytest.raises(PeersUnreachable, match=rf"{name}, the host of rank 0, is unknown .*: check MASTER_ADDR"):
        joining._wait_for_name(place, timedelta(0))
