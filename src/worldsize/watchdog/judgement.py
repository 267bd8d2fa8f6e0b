"""Who makes no progress, from what the watchers of all processes saw. Pure functions.

A run is healthy however slow it is, so nothing here depends on how long things usually take elsewhere: a process is stuck
if it has not beaten for longer than a limit that its own steps set, and does not compute either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worldsize.watchdog.heartbeat import STAGES, Stage

TIMES_P99 = 3.0
# What depends on disks, networks or compilers is reported at the limit, and ends the run after this many limits.
PATIENCE = 10
_UNREACHABLE = ": its host is frozen, or the network between the hosts fails"
_MEASURED = 3  # steps before their time means something: the first ones compile, allocate and fill caches


def limit_s(step_s: Sequence[float], least_s: float) -> float:
    """Seconds without a beat that are too many: three times the 99th percentile of the steps, at least ``least_s``."""
    if not step_s:
        return least_s
    ordered = sorted(step_s)
    return max(least_s, TIMES_P99 * ordered[math.ceil(0.99 * len(ordered)) - 1])


@dataclass(frozen=True)
class Seen:
    """What the watcher of a rank saw.

    ``place`` is that of the newest beat, ``stage`` its number; ``idle_s`` how long ago it was, ``limit_s`` how long is too
    long and ``steps`` how many steps were measured. ``stopped``: the process is stopped by a signal or a debugger.
    ``busy``: it uses a CPU. ``reading`` names what it has been reading for ``reading_s``. ``silent_s``: how long ago the
    watcher was heard of.
    """

    rank: int
    host: str
    pid: int
    place: tuple[int, int, int]
    stage: int
    idle_s: float
    limit_s: float
    steps: int
    stopped: bool = False
    busy: bool = False
    reading: str = ""
    reading_s: float = 0.0
    silent_s: float = 0.0

    @property
    def at(self) -> Stage:
        return STAGES[self.stage]

    @property
    def late(self) -> bool:
        return self.idle_s >= (self.end_s if self.at.long else self.limit_s)

    @property
    def end_s(self) -> float:
        """Seconds without a beat after which the run ends."""
        slow = self.at.outside or self.busy or self.steps < _MEASURED
        return self.limit_s * (PATIENCE if slow and not self.stopped else 1)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def doing(self) -> str:
        """What it does, for a message."""
        step = f"in step {self.place[0] + 1}, " if self.place[0] or self.steps else ""
        what = f"{step}{self.at.name}"
        return f"{what}; it has been reading {self.reading} for {self.reading_s:.0f} s" if self.reading else what


@dataclass(frozen=True)
class Finding:
    """``rank`` is stuck, or not heard of; ``ends``: the run must end, otherwise it is only reported."""

    rank: int
    message: str
    ends: bool


def judge(ranks: Sequence[Seen], unheard_of: Sequence[int] = ()) -> Finding | None:
    """The process that holds up the others; None if all make progress or may still.

    Args:
        ranks: what was last heard of each rank.
        unheard_of: the other ranks, whose watchers may not have started yet, or cannot reach rank 0's.
    """
    ranks = sorted(ranks, key=lambda seen: seen.rank)
    for one in ranks:
        if one.stopped and one.late:
            return Finding(one.rank, _no_progress(one, "; the process is stopped (SIGSTOP or a debugger)"), True)
    for one in ranks:
        if one.silent_s >= 2 * one.limit_s:
            return Finding(one.rank, unheard(str(one), one.silent_s), True)
    alone = [one for one in ranks if one.late and not one.at.peers]
    if alone:
        one = min(alone, key=lambda seen: seen.place)
        return Finding(one.rank, _no_progress(one), one.idle_s >= one.end_s)
    if ranks and all(one.late for one in ranks):
        return _all_wait(ranks, unheard_of)
    return None


def _all_wait(ranks: Sequence[Seen], unheard_of: Sequence[int]) -> Finding:
    """No process makes progress, and each may wait for another one: that which is furthest behind holds up the rest."""
    behind = min(ranks, key=lambda seen: seen.place)
    # Those that wait for a message may have a beat later than its sender, so nobody is blamed too early.
    ends = all(one.idle_s >= 2 * one.end_s for one in ranks)
    if unheard_of:
        # Only the watchers' datagrams may be lost, and that rank may be slow.
        ends = all(one.idle_s >= 2 * PATIENCE * one.limit_s for one in ranks)
        who = f"rank {unheard_of[0]} has never been heard of{_UNREACHABLE}"
        return Finding(unheard_of[0], f"{who}; {_no_progress(behind)}", ends)
    if len(ranks) == 1 or any(one.place != behind.place for one in ranks):
        return Finding(behind.rank, _no_progress(behind), ends)
    waited = min(one.idle_s for one in ranks)
    message = f"all {len(ranks)} processes have waited for each other for {waited:.0f} s, {behind.doing()}"
    return Finding(behind.rank, message, ends)


def unheard(who: str, silent_s: float) -> str:
    """The message for a process whose watcher has fallen silent."""
    return f"{who} has not been heard of for {silent_s:.0f} s{_UNREACHABLE}"


def _no_progress(one: Seen, why: str = "") -> str:
    return f"{one} has made no progress for {one.idle_s:.0f} s, {one.doing()}{why}"
