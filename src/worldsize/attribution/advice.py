"""Says in words what a run lost time to, and what would help (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worldsize import parallel
from worldsize.attribution.causes import OF_STEP, Loss
from worldsize.attribution.evidence import Evidence
from worldsize.config import recipe_files
from worldsize.errors import UserError

WORTH = 0.01  # of the run's time: smaller losses need no advice
_EVALUATION = 0.02  # of the run's time: an acceptable share
_LESS_OFTEN = 10  # times
_COLLECT_S = 5.0
_MOST_CORES = 0.85  # of the cores: then no other program can have had them
_RAISE_LIMIT = "raise the limit (on a cluster: --cpu)"


@dataclass(frozen=True)
class Advice:
    """``why``: what happened, one clause. ``remedy``: flags or an action. ``saved``: the share of the run's time that the
    remedy saves, 0 to 1."""

    loss: Loss
    why: str
    remedy: str
    saved: float

    @property
    def gain(self) -> float:
        """How much faster the run would be, as a fraction."""
        return self.saved / (1 - self.saved)


def on(loss: Loss, evidence: Evidence) -> Advice:
    """The advice on one loss."""
    why, remedy, saved = _ADVICE[loss.cause](loss, evidence)
    return Advice(loss, why, remedy, min(saved, loss.lost))


def first(losses: list[Loss], evidence: Evidence) -> Advice | None:
    """The advice that saves most; None if no loss is worth it."""
    advice = [on(loss, evidence) for loss in losses if loss.lost >= WORTH]
    return max((a for a in advice if a.saved >= WORTH), key=lambda a: a.saved, default=None)


_Found = tuple[str, str, float]


def _reading(loss: Loss, evidence: Evidence) -> _Found:
    readers = evidence.recipe["data"].get("readers", 16)
    more = f"raise --data.readers (now {readers})"
    remedy = f"{more}, pack the images into shards (worldsize data pack), or copy them to a local disk"
    return "the processes wait for images that are still being read", remedy, loss.lost


def _decoding(loss: Loss, evidence: Evidence) -> _Found:
    cores, processes = evidence.environment.get("cores", 1), evidence.processes_here
    workers = evidence.recipe["data"].get("workers")
    known = processes is not None and "launcher" in evidence.environment
    if workers is not None and known and workers * processes < cores:
        used = f"{workers * processes} of {cores} cores{_each(evidence)} available"
        remedy = f"raise --data.workers (now {workers} per process, {used})"
    else:
        remedy = "give each process more cores, or make the images smaller (worldsize data pack --max-side)"
    return "the processes wait for images that are still being decoded", remedy, loss.lost


def _copying(loss: Loss, evidence: Evidence) -> _Found:
    why = "the GPU waits for images that are still being copied to it"
    return why, "use smaller images (--data.train-crop-size), or a machine that copies faster", loss.lost


def _transfer(loss: Loss, evidence: Evidence) -> _Found:
    recipe = evidence.recipe
    settings = recipe["parallel"]
    ways = []
    if settings.get("compression", "none") == "none":
        ways += [f"--parallel.compression {kind}" for kind in ("bf16", "fp16") if _accepts(recipe, compression=kind)][:1]
    ways.append("a larger --global-batch" if recipe.get("per_process_batch") is None else "a larger --per-process-batch")
    if settings.get("strategy") == "localsgd":
        ways.append(f"more --parallel.local-steps (now {settings['local_steps']})")
    elif _accepts(recipe, strategy="localsgd"):
        ways.append("--parallel.strategy localsgd")
    remedy = f"{', '.join(ways)}, or a faster network"
    return "the processes wait for gradients that are still being sent", remedy, loss.lost


def _accepts(recipe: Mapping[str, Any], **changes: str) -> bool:
    """Whether ``train`` accepts the recipe with these settings of `recipe.Parallel`."""
    try:
        changed = {**recipe, "parallel": {**recipe["parallel"], **changes}}
        parallel.validate(recipe_files.validate(changed, "recipe.yaml"))
    except UserError:
        return False
    return True


def _uneven(loss: Loss, evidence: Evidence) -> _Found:
    why = "the processes wait for each other, now for one, now for another"
    return why, "other programs on these machines are the usual reason: end them", loss.lost


def _slow(loss: Loss, evidence: Evidence) -> _Found:
    part = _SLOW_BY.get(loss.part, "takes longer to compute")
    why = f"all processes wait for rank {loss.rank}, which {part}"
    return why, f"look at the machine of rank {loss.rank}, or replace it", loss.lost


_SLOW_BY = {
    "read_ms": "reads more slowly",
    "decode_ms": "decodes more slowly",
    "copy_ms": "waits longer for copies to its GPU",
    "checkpoint_ms": "spends time on checkpoints",
    "metrics_ms": "spends time on metrics",
    "throttled": "has used up its CPU quota",
    "no_cpu": "does not always have a processor: other programs use it",
    "paused": "was stopped now and then (SIGSTOP, or a frozen container)",
    "paging": "waits for pages from disk: it has too little memory",
}


def _quota(loss: Loss, evidence: Evidence) -> _Found:
    why = "the processes had used up the CPU quota of their cgroup (container limit)"
    return why, f"{_RAISE_LIMIT}, or lower --data.workers", loss.lost


def _busy(loss: Loss, evidence: Evidence) -> _Found:
    why = "the training threads were ready but had no processor"
    processes, quota = evidence.processes_here, evidence.environment.get("cpu_quota")
    if processes is None:
        return why, "use fewer processes per machine or machines with more cores, or end other programs there", loss.lost
    cores = min(evidence.environment.get("cores", 1), quota or math.inf)
    # The mean of all processes: where machines have different numbers of them, those of one may seem to use more.
    used = min(evidence.mean.get("cpu_ms", 0.0) * processes / evidence.mean["step_ms"], cores)
    of = f"{used:.1f} of {cores:.3g} core{'s' * (cores != 1)}{_each(evidence)}"
    if used >= _MOST_CORES * cores:
        fewer = "use fewer --procs, or " if processes > 1 else "use "
        remedy = f"{fewer}machines with more cores" if quota is None else _RAISE_LIMIT
        return f"{why}; this run's own threads keep {of} busy", remedy, loss.lost
    remedy = "end the other programs on this machine" if evidence.world_size == processes else "end the other programs there"
    if quota is not None:
        remedy += ", or give the container more of it (on a cluster: --cpu)"
    return f"{why}; this run uses {of}, so others use the rest", remedy, loss.lost


def _each(evidence: Evidence) -> str:
    """Distinguishes the cores of one of several machines from those of all."""
    return " of each machine" if evidence.processes_here != evidence.world_size else ""


def _paused(loss: Loss, evidence: Evidence) -> _Found:
    return "the processes were stopped (SIGSTOP, or a frozen container or machine)", "find out what stops them", loss.lost


def _paging(loss: Loss, evidence: Evidence) -> _Found:
    why = "the processes wait for memory pages from disk"
    return why, "give them more memory, or use a smaller --micro-batch and fewer --data.workers", loss.lost


def _checkpoints(loss: Loss, evidence: Evidence) -> _Found:
    settings = evidence.recipe["checkpoint"]
    why = "training waits while checkpoints are taken"
    if evidence.saves <= 1:
        return f"{why}; this one only at the end", "a longer run loses less to it", 0.0
    by_time = settings["every_steps"] is None and settings["every_epochs"] is None
    # Before the first interval is over, only the best epochs and the end are saved: a longer one would save none less.
    if by_time and evidence.seconds < (settings["every_seconds"] or 0):
        return f"{why}; these after the best epochs and at the end", "a longer run loses less to it", 0.0
    for name in ("every_steps", "every_epochs", "every_seconds"):
        if settings.get(name) is not None:
            flag = f"--checkpoint.{name.replace('_', '-')} {settings[name] * _LESS_OFTEN:g}"
            return why, f"save less often: {flag}", loss.lost * (1 - 1 / _LESS_OFTEN)
    return why, "do not save the best one: --checkpoint.no-best", loss.lost


def _evaluation(loss: Loss, evidence: Evidence) -> _Found:
    count = f"{evidence.evaluations} evaluations take" if evidence.evaluations != 1 else "one evaluation takes"
    why = f"{count} {loss.lost:.0%} of the time"
    every, epochs = evidence.recipe["evaluate_every"], evidence.recipe["epochs"]
    rarer = min(math.ceil(every * loss.lost / _EVALUATION), epochs)
    fewer = max(math.ceil(evidence.evaluations * every / rarer), 1)
    if fewer >= evidence.evaluations:
        return why, "evaluate with more processes, or on fewer images", 0.0
    return why, f"--evaluate-every {rarer}", loss.lost * (1 - fewer / evidence.evaluations)


def _metrics(loss: Loss, evidence: Evidence) -> _Found:
    why = "training waits while metrics are collected and written"
    settings = evidence.recipe["track"]
    if settings["every_seconds"] < _COLLECT_S:
        saved = loss.lost * (1 - settings["every_seconds"] / _COLLECT_S)
        return why, f"--track.every-seconds {_COLLECT_S:g}", saved
    trackers: list[Any] = settings.get("trackers") or []
    return why, f"use fewer trackers (now {', '.join(trackers) or 'none'}), or a faster disk for --out", loss.lost


def _compiling(loss: Loss, evidence: Evidence) -> _Found:
    why = f"compiling the network takes {loss.lost:.0%} of the time"
    return why, "a longer run gains from it, and the compiler's results are kept on disk; else pass --model.no-compile", 0.0


def _nothing(loss: Loss, evidence: Evidence) -> _Found:
    return "it is spent between steps or epochs, on nothing that is measured", "no remedy is known", 0.0


def forward_batch(fastest: int, current: int, gain: float, share: float) -> Advice:
    """Of measured forward batches: ``gain`` is that of computing alone, ``share`` the part of the time spent computing."""
    lost = share * gain / (1 + gain)
    why = f"{current} images per forward pass are too few for this device"
    return Advice(Loss("small forward passes", lost), why, f"--forward-batch {fastest}", lost)


_ADVICE: dict[str, Callable[[Loss, Evidence], _Found]] = {
    OF_STEP["read_ms"]: _reading,
    OF_STEP["decode_ms"]: _decoding,
    OF_STEP["copy_ms"]: _copying,
    OF_STEP["transfer_ms"]: _transfer,
    OF_STEP["waiting_ms"]: _uneven,
    OF_STEP["checkpoint_ms"]: _checkpoints,
    OF_STEP["metrics_ms"]: _metrics,
    OF_STEP["loop_ms"]: _nothing,
    OF_STEP["throttled"]: _quota,
    OF_STEP["no_cpu"]: _busy,
    OF_STEP["paused"]: _paused,
    OF_STEP["paging"]: _paging,
    "slow rank": _slow,
    "evaluation": _evaluation,
    "compiling": _compiling,
    "between epochs": _nothing,
}
