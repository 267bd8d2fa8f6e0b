"""Who is stuck, judged from what the watchers saw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.watchdog import heartbeat
from worldsize.watchdog.heartbeat import STAGES, Stage
from worldsize.watchdog.judgement import PATIENCE, Seen, judge, limit_s

LIMIT = 30.0


def seen(rank: int, stage: Stage, idle_s: float = 0.0, step: int = 10, micro: int = 0, **more: object) -> Seen:
    number = STAGES.index(stage)
    one = Seen(rank, f"host{rank}", 1000 + rank, (step, micro, number), number, idle_s, LIMIT, steps=10)
    return replace(one, **more)  # type: ignore[arg-type]


def waiting(rank: int, idle_s: float, **more: object) -> Seen:
    return seen(rank, heartbeat.AGREEING, idle_s, **more)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 30.0),
        ([1.0] * 100, 30.0),
        ([20.0] * 100, 60.0),
        # One step in a hundred may be that slow; two are more than the 99th percentile leaves out.
        ([1.0] * 99 + [500.0], 30.0),
        ([1.0] * 98 + [500.0] * 2, 1500.0),
    ],
)
def test_the_limit_is_three_times_the_99th_percentile_of_the_steps_and_at_least_the_setting(steps, expected):
    assert limit_s(steps, LIMIT) == expected


@pytest.mark.parametrize(
    ("ranks", "rank", "ends", "message"),
    [
        # The stopped process is named, although all others wait as long.
        (
            [waiting(0, 31), seen(1, heartbeat.REDUCING, 31, stopped=True)],
            *(
                1,
                True,
                "rank 1 (host1, process 1001) has made no progress for 31 s, in step 11, backward and all-reduce; the",
            ),
        ),
        # A compiler takes minutes, unless its process is stopped.
        (
            [seen(0, heartbeat.COMPILING, 31, step=0), seen(1, heartbeat.COMPILING, 31, step=0, stopped=True)],
            *(1, True, "rank 1 (host1, process 1001) has made no progress for 31 s, in step 1, compiling the network; the"),
        ),
        (
            [seen(0, heartbeat.COMPILING, 301, step=0), seen(1, heartbeat.COMPILING, 301, step=0)],
            *(0, False, "all 2 processes have waited for each other for 301 s, in step 1, compiling the network"),
        ),
        # A process that waits for nobody holds up those that wait.
        ([waiting(0, 31), seen(1, heartbeat.COMPUTING, 31)], 1, True, "in step 11, forward and backward"),
        # What depends on a disk is named at once, and ends the run later.
        (
            [waiting(0, 31), seen(1, heartbeat.LOADING, 31, reading="/data/a.jpg", reading_s=30.4)],
            *(1, False, "waiting for images; it has been reading /data/a.jpg for 30 s"),
        ),
        ([waiting(0, 301), seen(1, heartbeat.LOADING, 300)], 1, True, "no progress for 300 s"),
        # A process that computes is slow, not stuck; so are the first steps, which compile.
        ([waiting(0, 31), seen(1, heartbeat.COMPUTING, 31, busy=True)], 1, False, "forward and backward"),
        ([waiting(0, 31), seen(1, heartbeat.COMPUTING, 31, steps=2)], 1, False, "forward and backward"),
        # All wait: the one that is furthest behind, or nobody in particular.
        ([waiting(0, 61), seen(1, heartbeat.REDUCING, 61), waiting(2, 61)], 1, True, "rank 1 (host1"),
        ([waiting(0, 31), seen(1, heartbeat.REDUCING, 31), waiting(2, 31)], 1, False, "rank 1 (host1"),
        (
            [waiting(0, 70), waiting(1, 61)],
            *(0, True, "all 2 processes have waited for each other for 61 s, in step 11, agreeing with the other processes"),
        ),
        # A frozen host: its watcher is frozen too.
        ([waiting(0, 60), seen(1, heartbeat.COMPUTING, 1, silent_s=60)], 1, True, "has not been heard of for 60 s"),
        ([seen(0, heartbeat.COMPUTING, 31)], 0, True, "rank 0 (host0, process 1000) has made no progress for 31 s"),
    ],
)
def test_the_process_that_holds_up_the_others_is_named(ranks, rank, ends, message):
    for order in (ranks, ranks[::-1]):
        found = judge(order)
        assert found is not None and (found.rank, found.ends) == (rank, ends)
        assert message in found.message


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        # However long the others wait for it, a process that beats is healthy: a 20-minute evaluation, an unequal share.
        [waiting(0, 1200), seen(1, heartbeat.EVALUATING, 1), waiting(2, 1200)],
        [waiting(0, 1200), seen(1, heartbeat.COMPUTING, 29)],
        # Nobody is blamed while one of those that wait may still have got its message.
        [waiting(0, 1200), seen(1, heartbeat.REDUCING, 29)],
        [seen(0, heartbeat.COMPUTING, 1, stopped=True)],
        [waiting(0, 59), seen(1, heartbeat.COMPUTING, 1, silent_s=59)],
    ],
)
def test_a_slow_run_is_healthy(ranks):
    assert judge(ranks) is None


worlds = st.lists(
    st.builds(
        seen,
        rank=st.integers(0, 100),
        stage=st.sampled_from(STAGES),
        idle_s=st.floats(0, 1000),
        step=st.integers(0, 3),
        micro=st.integers(0, 2),
        busy=st.booleans(),
        stopped=st.booleans(),
        steps=st.integers(0, 5),
        silent_s=st.floats(0, 100),
    ),
    max_size=6,
    unique_by=lambda one: one.rank,
)


@given(worlds)
def test_nobody_is_blamed_who_has_just_beaten_and_was_heard_of(ranks):
    found = judge(ranks)
    if found is not None:
        [blamed] = [one for one in ranks if one.rank == found.rank]
        assert blamed.late or blamed.silent_s >= 2 * LIMIT
        if found.ends and blamed.at.outside and not blamed.stopped and blamed.silent_s < 2 * LIMIT:
            assert blamed.idle_s >= PATIENCE * LIMIT


@given(worlds)
def test_a_run_that_stays_stuck_always_ends(ranks):
    assert not ranks or judge([replace(one, idle_s=2 * PATIENCE * LIMIT) for one in ranks]).ends
