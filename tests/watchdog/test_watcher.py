"""What the watchers of two ranks conclude that cannot reach each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worldsize.watchdog import heartbeat, messages
from worldsize.watchdog.judgement import PATIENCE, Seen
from worldsize.watchdog.watcher import Task, _Hub, _Spoke

LIMIT_S, LOOK_S = 30.0, 1.0
TASK = Task(1, 0, 2, "h1", 0, 0, LIMIT_S, "secret", True, False, "runs/a")


def seen(rank: int, idle_s: float, stage: heartbeat.Stage = heartbeat.REDUCING) -> Seen:
    return Seen(rank, f"h{rank + 1}", 7, (8, 0, 0), heartbeat.STAGES.index(stage), idle_s, LIMIT_S, 5)


@pytest.fixture
def hub():
    with messages.listen("127.0.0.1") as server:
        yield _Hub(TASK, server)


@pytest.fixture
def spoke(hub):
    port = hub._server.getsockname()[1]
    one = _Spoke(replace(TASK, rank=1, hub=("127.0.0.1", port)))
    yield one
    one._client.close()


def test_rank_0_names_a_rank_whose_watcher_it_has_never_heard_of(hub):
    assert hub.exchange(seen(0, 1), LOOK_S, None) is None
    late = hub.exchange(seen(0, LIMIT_S), LOOK_S, None)
    assert late is not None and (late.rank, late.ends) == (1, False)
    assert not hub.exchange(seen(0, 19.9 * LIMIT_S), LOOK_S, None).ends  # it may be that only datagrams do not pass
    found = hub.exchange(seen(0, 2 * PATIENCE * LIMIT_S), LOOK_S, None)
    assert found is not None and (found.rank, found.ends) == (1, True)
    assert found.message == (
        "rank 1 has never been heard of: its host is frozen, or the network between the hosts fails; "
        "rank 0 (h1, process 7) has made no progress for 600 s, in step 9, backward and all-reduce"
    )


def test_once_it_is_heard_of_only_what_it_does_counts(hub, spoke):
    spoke.exchange(seen(1, 1), LOOK_S, None)
    assert hub.exchange(seen(0, 10 * LIMIT_S), LOOK_S, None) is None


def test_a_rank_that_ends_expects_nobody(hub):
    assert hub.exchange(seen(0, LIMIT_S, heartbeat.ENDING), LOOK_S, None).rank == 0


def silent_until(spoke: _Spoke, stage: heartbeat.Stage = heartbeat.REDUCING) -> float | None:
    """The seconds after which a rank that stands still gives up rank 0's watcher, which does not answer."""
    for seconds in range(1, 1000):
        found = spoke.exchange(seen(1, seconds, stage), LOOK_S, None)
        if found is not None:
            assert (found.rank, found.ends) == (0, True)
            assert "rank 0 (127.0.0.1) has not been heard of for" in found.message
            return seconds
    return None


def test_a_rank_that_has_never_heard_rank_0_gives_up_after_a_longer_time(spoke):
    """It may be that only datagrams do not pass, and rank 0 is healthy."""
    assert silent_until(spoke) == 2 * PATIENCE * LIMIT_S


def test_a_rank_that_has_heard_rank_0_gives_up_soon(hub, spoke):
    spoke.exchange(seen(1, 0), LOOK_S, None)
    hub.exchange(seen(0, 0), LOOK_S, None)
    assert silent_until(spoke) == 2 * LIMIT_S + 1  # the answer is read at the first look


def test_a_rank_that_ends_gives_up_nobody(spoke):
    assert silent_until(spoke, heartbeat.ENDING) is None
