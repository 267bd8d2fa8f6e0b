"""The parts of gpu.py: which commands measure what, for how long, and how their output becomes a line of its table."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

WORLDSIZE = (sys.executable, "-m", "worldsize")
FOLDER = Path(__file__).resolve().parent
TARGET = 6350  # images/s of ResNet-50 on an H200: 80 % of MLPerf v4.0's published 7,942
# Those that compile first: they take longest.
TESTS = ("tests/gpu/test_gpu_graphs.py", "tests/gpu/test_gpu_memory.py", "tests/gpu/test_gpu.py")
FORMS = (
    *("torchvision bf16 contiguous", "bare bf16", "worldsize bf16", "worldsize bf16 micro-batch 32"),
    *("worldsize bf16 graphs", "bare fp16", "worldsize fp16"),
)
COMPILED = (
    *("torchvision bf16 contiguous", "bare bf16 compiled"),
    *("worldsize bf16 compiled", "worldsize bf16 compiled graphs"),
)
_SPLIT = "worldsize bf16 micro-batch 32 compiled"
COMPILED_SPLIT = ("bare bf16 compiled", _SPLIT, f"{_SPLIT} graphs")


@dataclass(frozen=True)
class Part:
    """A command. ``reads`` makes the part's line of the table from its output; ``limit_s`` ends it.

    A part ``on_request`` runs only if it is named.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    reads: Callable[[str], str]
    on_request: bool = False


@dataclass(frozen=True)
class Sizes:
    """What the parts work on; small ones for a test of the parts themselves."""

    tiny: bool
    steps: int
    batch: int
    size: int


SMALL, FULL = Sizes(True, 12, 8, 32), Sizes(False, 60, 256, 224)


def parts(runs: Path, root: Path, tiny: bool, cifar10: Path | None = None) -> list[Part]:
    """All parts; their runs are in ``runs``, a new folder, and they read images from ``root``."""
    sizes = SMALL if tiny else FULL
    found = [correctness(tiny), host_time(tiny), *steps(runs, tiny), loader(runs, root, tiny)]
    found += [real_and_synthetic(runs, root, sizes), snapshots(runs, sizes), ddp(tiny)]
    if cifar10 is not None:
        found.append(to_94_percent(runs, cifar10, tiny))
    # A small run is a test, on whatever machine: the limits are a GPU's.
    return [replace(part, limit_s=part.limit_s * 5) for part in found] if tiny else found


def correctness(tiny: bool) -> Part:
    """The tests that need a GPU; each starts processes, so many run at a time where pytest-xdist is installed."""
    workers = str(min(8, max(1, len(os.sched_getaffinity(0)) // 2)))
    together = ("-n", workers) if importlib.util.find_spec("xdist") and not tiny else ()
    few = ("-k", "evaluated_as_in_training or full_gpu") if tiny else ()
    command = (sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "instant_failures", *together, *few, *TESTS)
    return Part("correctness", command, 140, outcomes)


def outcomes(output: str) -> str:
    """pytest's last line, or the tests so far if it was ended before."""
    last = last_line(output).strip("= ")
    if re.search(r"\d+ (passed|failed|skipped|error)", last):
        reasons = "; ".join(dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", output, re.MULTILINE)))
        return f"{last}; {reasons}" if reasons else last
    counts = Counter(re.findall(r"\b(?:PASSED|FAILED|SKIPPED|ERROR)\b", output))
    return ", ".join(f"{count} {word.lower()}" for word, count in counts.items()) or "no test ended"


def host_time(tiny: bool) -> Part:
    command = (sys.executable, str(FOLDER / "host.py"), *(("--steps", "20") if tiny else ()))
    return Part("host time", command, 15, last_line)


def steps(runs: Path, tiny: bool) -> list[Part]:
    """``bench step``. Compiling takes a minute for each form, so few are compiled unless asked for; none if ``tiny``."""
    command = (*WORLDSIZE, "bench", "step", "--out", str(runs))
    if tiny:
        command = (*command, "--model", "shufflenet_v2_x0_5", "--precision", "fp32", "--batch", "4", "--size", "32")
        small = ("--steps", "2", "--warmup", "4", "--rounds", "1")
        eager, compiled, split = ((*command, *small, *more) for more in ((), ("--compile", "--only", "bare fp32"), ()))
    else:
        eager = (*command, "--steps", "10", "--rounds", "2", "--precision", "bf16", "fp16", "--only", *FORMS)
        compiled, split = (
            (*command, "--steps", "10", "--rounds", "3", "--precision", "bf16", "--compile", "--only", *forms)
            for forms in (COMPILED, COMPILED_SPLIT)
        )
    return [
        Part("step", eager, 55, speeds),
        Part("step, compiled", compiled, 140, speeds),
        Part("step, compiled micro-batches", split, 110, speeds, on_request=True),
    ]


def speeds(output: str) -> str:
    """Images/s of the forms of ``bench step``, medians over the rounds that were measured before it ended."""
    found: dict[str, list[float]] = {}
    for name, speed in re.findall(r"^round \d+/\d+  (.+?) +([\d,.]+) images/s$", output, re.MULTILINE):
        found.setdefault(name, []).append(float(speed.replace(",", "")))
    medians = {name: statistics.median(all_rounds) for name, all_rounds in found.items()}
    bare = {name.split()[1]: speed for name, speed in medians.items() if re.fullmatch(r"bare \w+", name)}
    bare |= {
        f"{name.split()[1]} compiled": speed for name, speed in medians.items() if re.fullmatch(r"bare \w+ compiled", name)
    }
    if not medians:
        raise ValueError("nothing was measured")
    return "; ".join(f"{name} {speed:,.0f}{_share(name, speed, bare)}" for name, speed in medians.items())


def _share(name: str, speed: float, bare: dict[str, float]) -> str:
    """The speed relative to the bare loop of the same number format, compiled if the form is."""
    number_format = name.split()[1]
    reference = bare.get(f"{number_format} compiled") if "compiled" in name else bare.get(number_format)
    return f" ({speed / reference:.3f} of bare)" if reference and not name.startswith("bare") else ""


def loader(runs: Path, root: Path, tiny: bool) -> Part:
    command = (
        *WORLDSIZE,
        "bench",
        "loader",
        "--root",
        str(root),
        "--out",
        str(runs),
        "--rounds",
        "2",
        "--feed",
        str(TARGET),
    )
    return Part("loader and device", (*command, *(("--images", "40", "--batch", "16") if tiny else ())), 20, bottleneck)


def bottleneck(output: str) -> str:
    """What ``bench loader`` says below its table."""
    return "; ".join(line.strip() for line in output.splitlines() if line.startswith("bottleneck") or " per image:" in line)


def training(runs: Path, sizes: Sizes, name: str, *settings: str) -> tuple[str, ...]:
    """A run of recipe imagenet with whole batches as micro-batches: the fastest, so what it waits for shows most.

    Its compiled network is that of the part "step, compiled", whose results the compiler keeps.
    """
    size, batch = str(sizes.size), str(sizes.batch)
    return (
        *(*WORLDSIZE, "train", "imagenet", "--out", str(runs), "--name", name, "--max-steps", str(sizes.steps)),
        *("--global-batch", batch, "--micro-batch", batch, "--data.train-crop-size", size, "--data.val-resize-size", size),
        *("--data.val-crop-size", size, "--schedule.warmup-epochs", "0", "--optimizer.lr", "0.001"),
        *(("--model.name", "shufflenet_v2_x0_5", "--precision", "fp32") if sizes.tiny else ()),
        *settings,
    )


def synthetic(samples: int) -> tuple[str, ...]:
    """Images that cost the loader nothing but a copy."""
    return ("--data.name", "synthetic", "--data.samples", str(samples), "--data.train-crop", "none", "--data.no-flip")


def real_and_synthetic(runs: Path, root: Path, sizes: Sizes) -> Part:
    """The synthetic run has two epochs: only the second evaluation is warm."""
    real = training(runs, sizes, "real", "--data.root", str(root), "--evaluate-every", "100")
    other = training(runs, sizes, "synthetic", *synthetic(sizes.batch * sizes.steps // 2))
    command = ("bash", "-c", f"{shell(*real)} && {shell(*other)}")

    def read(_: str) -> str:
        on_disk, made = speed(runs / "real"), speed(runs / "synthetic")
        last = records(runs / "synthetic", "epoch")[-1]
        evaluated = f"evaluation {last['val_samples'] / last['val_s']:,.0f} images/s"
        return f"real JPEGs {on_disk:,.0f} images/s, synthetic {made:,.0f}: {on_disk / made:.3f}; {evaluated}"

    return Part("real and synthetic images", command, 90, read)


def snapshots(runs: Path, sizes: Sizes) -> Part:
    """One epoch: the step after an evaluation is not timed from the end of the step before."""
    every = sizes.steps // 6
    command = training(
        runs, sizes, "snapshots", *synthetic(sizes.batch * sizes.steps), "--checkpoint.every-steps", str(every)
    )

    def read(_: str) -> str:
        steps = steps_of(runs / "snapshots", warmup=every)
        after = statistics.median(s["step_ms"] for s in steps if s["step"] % every == 1)
        others = statistics.median(s["step_ms"] for s in steps if s["step"] % every not in (0, 1) or every == 2)
        return f"a step {others:.1f} ms, the one after a snapshot {after:.1f} ms"

    return Part("snapshots", command, 30, read)


def ddp(tiny: bool) -> Part:
    small = ("--batch", "2", "--size", "32", "--steps", "1", "--rounds", "1") if tiny else ()
    return Part("DDP, one rank", (sys.executable, str(FOLDER / "ddp.py"), *small), 25, last_line)


def to_94_percent(runs: Path, cifar10: Path, tiny: bool) -> Part:
    few = ("--max-steps", "2", "--epochs", "7", "--global-batch", "16", "--micro-batch", "16") if tiny else ()
    command = (
        *WORLDSIZE,
        "train",
        "cifar10-fast",
        "--out",
        str(runs),
        "--name",
        "cifar10",
        "--data.root",
        str(cifar10),
        *few,
    )

    def read(_: str) -> str:
        epochs, steps = records(runs / "cifar10", "epoch"), records(runs / "cifar10", "step")
        step = next((epoch["step"] for epoch in epochs if epoch["val_top1"] >= 0.94), None)
        spent = sum(r["step_ms"] for r in steps if step is None or r["step"] <= step) / 1000
        reached = f"94 % after {step:,} steps" if step else "94 % was not reached"
        return f"{reached}, {spent:.1f} s of training; best top-1 {max(epoch['val_top1'] for epoch in epochs):.2%}"

    return Part("CIFAR-10 to 94 %", command, 120, read)


def last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else "no output"


def records(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [record for record in lines if record["kind"] == kind]


def steps_of(run: Path, warmup: int = 5) -> list[dict]:
    return records(run, "step")[warmup:]


def speed(run: Path) -> float:
    """Images/s, the median over the steps after the first five."""
    return statistics.median(step["images_per_s"] for step in steps_of(run))


def shell(*words: str) -> str:
    return " ".join(f"'{word}'" for word in words)
