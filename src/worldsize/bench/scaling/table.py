"""The table of a scaling benchmark and what it means (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from worldsize.bench import tables
from worldsize.bench.scaling.cases import Case
from worldsize.bench.scaling.measured import PARTS, Failure, Measured, reference

_NAMES = {
    "data_ms": "waiting for images",
    "copy_ms": "copying images to the GPU",
    "compute_ms": "computing more slowly",
    "transfer_ms": "communication that computation does not hide",
    "straggler_ms": "waiting for slower processes",
    "overhead_ms": "the training loop",
}
_HEADINGS = (
    "kind of job",
    "strategy",
    "scaling",
    "nodes x procs",
    "global batch",
    "lr",
    "images/s",
    "per process",
    "efficiency",
    "range",
)
_TIMES = ("data, ms", "copy", "compute", "transfer", "stragglers", "loop", "sent, MB", "slow rank")
_GPU = {"gpu_busy": "GPU busy", "gpu_memory_gb": "memory, GB", "gpu_watts": "power, W", "images_per_wh": "images/Wh"}
_NOTABLE = 0.01  # of a step


def table(results: Sequence[Measured]) -> str:
    """A Markdown table of medians over the rounds; the range is that of the efficiencies of the rounds."""
    gpu = [name for name in _GPU if any(getattr(one, name) is not None for one in results)]
    rows: list[Sequence[str]] = [(*_HEADINGS, *_TIMES, *(_GPU[name] for name in gpu))]
    for case in dict.fromkeys(one.case for one in results):
        rows.append(_row(case, [one for one in results if one.case == case], gpu))
    return tables.table(rows)


def _row(case: Case, own: Sequence[Measured], gpu: Sequence[str]) -> tuple[str, ...]:
    def middle(key: str) -> float:
        return statistics.median(getattr(one, key) for one in own)

    def known(key: str) -> str:
        return "-" if any(getattr(one, key) is None for one in own) else f"{middle(key):.4g}"

    ratios = [one.efficiency for one in own if one.efficiency is not None]
    slow = {one.slowest_rank for one in own}
    size = f"{case.nodes} x {case.procs}" + (", oversubscribed" if own[0].shares else "")
    return (
        *(case.on, case.strategy, case.scaling, size, str(own[0].global_batch), f"{own[0].lr:g}"),
        *(f"{middle('images_per_s'):.2f}", f"{middle('images_per_s_per_process'):.2f}"),
        f"{statistics.median(ratios):.3f}" if ratios else "-",
        f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-",
        *(f"{middle(part):.1f}" for part in PARTS),
        f"{middle('sent_mb'):.1f}",
        str(own[0].slowest_rank) if len(slow) == 1 and own[0].slowest_rank is not None else "-",
        *(known(name) for name in gpu),
    )


def failed(failures: Sequence[Failure]) -> list[str]:
    """One line for each run that failed."""
    return [f"failed: {one.case}, round {one.turn}: {one.reason}" for one in failures]


def oversubscribed(results: Sequence[Measured]) -> list[str]:
    """One sentence for each configuration with more processes than cores or GPUs."""
    sentences = []
    for case in dict.fromkeys(one.case for one in results if one.shares):
        own = [one for one in results if one.case == case]
        sentences.append(
            f"{case}: {case.procs} processes of a node share {own[0].shares}, which says nothing about scaling: "
            f"{statistics.median(one.images_per_s for one in own):.2f} images/s in total, no efficiency"
        )
    return sentences


def verdicts(results: Sequence[Measured]) -> list[str]:
    """One sentence for each strategy, scaling and larger world size: what it keeps, and where the rest goes."""
    sentences = []
    for case in dict.fromkeys(one.case for one in results):
        own = [one for one in results if one.case == case]
        ratios = [one.efficiency for one in own if one.efficiency is not None]
        base = reference(results, own[0])
        if not ratios or base is None or base.case == case:
            continue
        kind = "" if case.on == "local" else f"{case.on}, "
        kept = f"{statistics.median(ratios):.1%}"
        text = f"{kind}{case.strategy}, {case.scaling} scaling: {case.world_size} processes keep {kept}"
        text += f" of the images/s per process of {base.world_size}"
        part, share = largest_loss(own, [r for r in results if r.case == base.case])
        sentences.append(f"{text}; {_NAMES[part]} costs {share:.1%} of a step" if share > _NOTABLE else text)
    return sentences


def largest_loss(own: Sequence[Measured], base: Sequence[Measured]) -> tuple[str, float]:
    """The part of a step that grew most from ``base``, beyond what its number of images explains, as a share of the step."""

    def mean(results: Sequence[Measured], key: str) -> float:
        return statistics.fmean(getattr(one, key) for one in results)

    images = mean(own, "global_batch") / own[0].world_size / (mean(base, "global_batch") / base[0].world_size)
    growth = {part: mean(own, part) - images * mean(base, part) for part in PARTS}
    part = max(growth, key=lambda name: growth[name])
    return part, growth[part] / mean(own, "step_ms")


def what_scales(scaling: str, results: Sequence[Measured]) -> str:
    """What the measured runs keep and what they change, read from the runs."""
    own = sorted((one for one in results if one.scaling == scaling), key=lambda one: one.world_size)
    batches = {one.world_size: one.global_batch for one in own}
    rates = {one.world_size: f"{one.lr:g}" for one in own}
    shared = f"; global batch {_list(batches)}, peak learning rate {_list(rates)}{_mismatches(own)}"
    if scaling == "weak":
        return f"weak scaling: {own[0].global_batch // own[0].world_size} images per process and step{shared}"
    return f"strong scaling: {own[0].global_batch} images per step, shared by all processes{shared}"


def _mismatches(results: Sequence[Measured]) -> str:
    """The world sizes whose runs had different batches or learning rates, so that they cannot be compared."""
    found = ""
    for size in dict.fromkeys(one.world_size for one in results):
        used = {one.strategy: f"{one.global_batch} at {one.lr:g}" for one in results if one.world_size == size}
        different = {(one.global_batch, f"{one.lr:g}") for one in results if one.world_size == size}
        if len(different) > 1:
            found += f"; {size} processes differ in batch or learning rate: " + ", ".join(
                f"{k} {v}" for k, v in used.items()
            )
    return found


def _list(values: Mapping[int, object]) -> str:
    """The values by world size, or the one value that all have."""
    different = list(dict.fromkeys(values.values()))
    return str(different[0]) if len(different) == 1 else ", ".join(map(str, values.values()))
