"""Finds what a run lost time to, from its evidence (pure).

A step's time is first split by what the training thread did, see `attribution.step_time.PARTS`. What the
operating system says then moves parts of it: time without a processor, throttled, paused, or waiting for pages is not time
of computing. Each cause is a share of the run's time; without it, the run is faster by ``lost / (1 - lost)``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from worldsize.attribution.evidence import Evidence, Times
from worldsize.attribution.step_time import PARTS

# The names of causes that are parts of a step, by the part.
OF_STEP = {
    "read_ms": "reading",
    "decode_ms": "decoding",
    "copy_ms": "copying",
    "transfer_ms": "transfer",
    "waiting_ms": "uneven ranks",
    "checkpoint_ms": "checkpoints",
    "metrics_ms": "metrics",
    "loop_ms": "the loop",
    "throttled": "CPU quota",
    "no_cpu": "busy processors",
    "paused": "paused",
    "paging": "paging",
}
_SYSTEM = ("paused", "throttled", "no_cpu", "paging")
_THROTTLED = 0.3  # of the time without a processor: then the quota is the reason
_FAULTS_PER_S = 50  # pages read from disk: more than a program reads at its start
_SLOW = 0.03  # of a step that a rank is slower than the others
_MOSTLY = 2 / 3  # of the windows' excess is the slow rank's
_LAUNCHING = 0.3  # of a step: the host waits less than this for the GPU, so the GPU waits for the host


@dataclass(frozen=True)
class Loss:
    """``lost``: the share of the run's time, 0 to 1. ``rank``: the rank that causes it; None: all. ``part``: for a slow
    rank, what it spends more time on than others."""

    cause: str
    lost: float
    rank: int | None = None
    part: str = ""


def split(times: Mapping[str, float]) -> Times:
    """Milliseconds of a step by `PARTS` and what the operating system took from them; they add up to ``step_ms``.

    ``no_cpu``: ready to run without a processor; ``throttled``: the same, because of the cgroup's quota; ``paused``;
    ``paging``: waiting for pages.
    """
    found = {name: times[name] for name in PARTS} | dict.fromkeys(_SYSTEM, 0.0)
    _move(found, "paused", times.get("paused_ms", 0.0), tuple(PARTS))
    waited = times.get("cpu_wait_ms", 0.0)
    quota = times.get("throttled_ms", 0.0) >= _THROTTLED * waited
    _move(found, "throttled" if quota else "no_cpu", waited, ("compute_ms",))
    if 1000 * times.get("faults", 0.0) > _FAULTS_PER_S * times["step_ms"]:
        # Other threads may compute or wait meanwhile. Runs of older versions know only the time of all threads.
        computed = times.get("thread_ms", times.get("cpu_ms", 0.0))
        _move(found, "paging", found["compute_ms"] - computed, ("compute_ms",))
    return found


def _move(found: Times, to: str, ms: float, sources: tuple[str, ...]) -> None:
    """Move up to ``ms`` from the sources to ``to``, from the largest source first."""
    for name in sorted(sources, key=lambda source: -found[source]):
        moved = min(max(ms, 0.0), max(found[name], 0.0))
        found[name] -= moved
        found[to] += moved
        ms -= moved


def losses(evidence: Evidence) -> list[Loss]:
    """Everything but computing that took time, the largest first."""
    seconds = evidence.seconds
    step_s = evidence.steps / 1000  # of one millisecond of each step
    slow = slow_rank(evidence)
    profile = _profile(evidence, slow)
    found = [] if slow is None else [Loss("slow rank", slow.lost * step_s / seconds, slow.rank, slow.part)]
    if slow is not None:
        profile["waiting_ms"] = max(profile["waiting_ms"] - slow.lost, 0.0)
    between = evidence.between_s
    for part, cause in OF_STEP.items():
        more = between.get(part.removesuffix("_ms"), 0.0)
        found.append(Loss(cause, (profile[part] * step_s + more) / seconds))
    found.append(Loss("evaluation", between.get("evaluation", 0.0) / seconds))
    found.append(Loss("compiling", between.get("compiling", 0.0) / seconds))
    found.append(Loss("between epochs", between.get("other", 0.0) / seconds))
    return sorted((loss for loss in found if loss.lost > 0), key=lambda loss: -loss.lost)


def _profile(evidence: Evidence, slow: Loss | None) -> Times:
    """The step of the ranks that are not slow."""
    if len(evidence.ranks) == evidence.world_size:
        return _mean([split(times) for rank, times in evidence.ranks.items() if slow is None or rank != slow.rank])
    if slow is None or slow.rank is None:
        return split(evidence.mean)
    return split(evidence.compared(slow.rank)[1])


def slow_rank(evidence: Evidence) -> Loss | None:
    """The rank that the others wait for, with milliseconds per step as ``lost``; None if there is none."""
    if evidence.world_size < 2:
        return None
    excess: dict[int, float] = {}
    listed: dict[int, float] = {}  # share of the steps
    for window in (w for w in evidence.counted if w.steps):
        own = {r: _own({name: values[i] for name, values in window.ms.items()}) for i, r in enumerate(window.ranks)}
        share = window.steps / evidence.steps
        for rank, ms in own.items():
            usual = _of_others(rank, own, _own(window.mean_ms), evidence.world_size)
            excess[rank] = excess.get(rank, 0.0) + max(ms - usual, 0.0) * share
            listed[rank] = listed.get(rank, 0.0) + share
    slowest = max(excess, key=lambda rank: excess[rank], default=None)
    if slowest is None or excess[slowest] < max(_SLOW * evidence.mean["step_ms"], _MOSTLY * sum(excess.values())):
        return None
    its, others = evidence.compared(slowest)
    parts, usual_parts = split(its), split(others)
    waits = ("transfer_ms", "waiting_ms")
    part = max((name for name in parts if name not in waits), key=lambda name: parts[name] - usual_parts[name])
    lost = min((_own(its) - _own(others)) * listed[slowest], excess[slowest])
    return Loss("slow rank", max(lost, 0.0), slowest, part)


def _of_others(rank: int, own: Mapping[int, float], mean: float, size: int) -> float:
    """What the other ranks usually take: their median, or where only the slowest are listed, their mean."""
    if len(own) == size:
        return statistics.median(ms for other, ms in own.items() if other != rank)
    return (size * mean - own[rank]) / (size - 1)


def _own(times: Mapping[str, float]) -> float:
    """Milliseconds that a rank does not wait for others."""
    return times["step_ms"] - times["transfer_ms"] - times["waiting_ms"]


def _mean(times: list[Times]) -> Times:
    return {name: statistics.fmean(one[name] for one in times) for name in times[0]}


def launch_bound(evidence: Evidence) -> bool:
    """Whether the GPU waits for the host to launch kernels: it has almost nothing left to do when metrics are collected."""
    if not evidence.environment.get("devices_here"):
        return False
    stepping = [w for w in evidence.counted if w.steps and "device_wait_ms" in w.mean_ms]
    waits = [w.mean_ms["device_wait_ms"] * w.steps / w.mean_ms["step_ms"] for w in stepping]
    return bool(waits) and statistics.median(waits) < _LAUNCHING
