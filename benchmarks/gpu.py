"""Everything that one GPU can tell about worldsize, in under nine minutes (with CIFAR-10, in under eleven):

    python benchmarks/gpu.py [--out FOLDER] [--root SHARDS_OR_IMAGES] [--cifar10 FOLDER]

Correctness first, then speed. Each part is a process with a time limit of its own, and a part that fails does not stop the
others. FOLDER gets the output of each part and README.md with a table. ``--tiny`` runs the same commands with small sizes
on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

WORLDSIZE = (sys.executable, "-m", "worldsize")
REPOSITORY = Path(__file__).resolve().parents[1]
HOST = REPOSITORY / "benchmarks" / "host.py"
TARGET = 6350  # images/s of ResNet-50 on an H200: 80 % of MLPerf v4.0's published 7,942
ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
device = "cuda" if torch.cuda.is_available() else "cpu"
store = dist.HashStore()
dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
for megabytes in map(int, sys.argv[1:]):
    tensor = torch.zeros(megabytes * 2**18, device=device)
    for turn in range(2):
        begin = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
    print(f"{megabytes} MiB: {(time.perf_counter() - begin) / 20 * 1e3:.3f} ms")
"""


@dataclass(frozen=True)
class Part:
    """A command. ``reads`` makes the part's line of the table from its output; ``limit_s`` ends it."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    reads: Callable[[str], str]


def last_lines(count: int) -> Callable[[str], str]:
    return lambda output: "; ".join(line.strip() for line in output.strip().splitlines()[-count:])


def best_of_table(output: str) -> str:
    """The rows of ``bench step``'s table, in short."""
    rows = [line.split("|")[1:5] for line in output.splitlines() if line.startswith(("| bare", "| torch", "| world"))]
    return "; ".join(f"{name.strip()} {speed.strip()} ({ratio.strip()} of bare)" for name, speed, ratio, _ in rows)


def bottleneck(output: str) -> str:
    """What ``bench loader`` says below its table."""
    return "; ".join(line.strip() for line in output.splitlines() if line.startswith("bottleneck") or " per image:" in line)


def steps_of(run: Path) -> list[dict]:
    records = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [record for record in records if record["kind"] == "step"][5:]


def speed(run: Path) -> float:
    """Images/s, the median over the steps after the first five."""
    return statistics.median(step["images_per_s"] for step in steps_of(run))


def real_against_synthetic(runs: Path) -> Callable[[str], str]:
    def read(_: str) -> str:
        real, synthetic = speed(runs / "real"), speed(runs / "synthetic")
        return f"real JPEGs {real:,.0f} images/s, synthetic {synthetic:,.0f}: {real / synthetic:.3f}"

    return read


def snapshots(runs: Path) -> Callable[[str], str]:
    def read(_: str) -> str:
        steps = steps_of(runs / "snapshots")
        saved = statistics.median(s["step_ms"] for s in steps if s["step"] % 10 == 1)  # the step after a snapshot
        others = statistics.median(s["step_ms"] for s in steps if s["step"] % 10 not in (0, 1))
        return f"a step {others:.1f} ms, the one after a snapshot {saved:.1f} ms"

    return read


def to_94_percent(runs: Path) -> Callable[[str], str]:
    def read(_: str) -> str:
        records = list(map(json.loads, (runs / "cifar10" / "metrics.jsonl").read_text("utf-8").splitlines()))
        epochs = [record for record in records if record["kind"] == "epoch"]
        best = max(epoch["val_top1"] for epoch in epochs)
        step = next((epoch["step"] for epoch in epochs if epoch["val_top1"] >= 0.94), None)
        spent = sum(r["step_ms"] for r in records if r["kind"] == "step" and (step is None or r["step"] <= step)) / 1000
        reached = f"94 % after {step:,} steps" if step else "94 % was not reached"
        return f"{reached}, {spent:.1f} s of training; best top-1 {best:.2%}"

    return read


def images(folder: Path, count: int) -> Path:
    """A folder of JPEGs of ImageNet's usual size, with smooth noise, in ten classes."""
    generator = np.random.default_rng(0)
    for split, number in (("train", count), ("val", max(20, count // 10))):
        for i in range(number):
            path = folder / split / f"class-{i % 10}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8))
            noise.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder


def parts(out: Path, root: Path, tiny: bool, cifar10: Path | None = None) -> list[Part]:
    runs = out / "runs"
    step = ["--steps", "2", "--warmup", "4", "--rounds", "1", "--batch", "4", "--size", "32", "--model", "resnet18"]
    steps, batch, size = ("12", "8", "32") if tiny else ("80", "256", "224")
    train = (
        *(*WORLDSIZE, "train", "imagenet", "--out", str(runs), "--max-steps", steps, "--global-batch", batch),
        *("--micro-batch", batch, "--data.train-crop-size", size, "--data.val-resize-size", size),
        *("--data.val-crop-size", size, "--schedule.warmup-epochs", "0", "--track.every-seconds", "0"),
        *(("--model.name", "resnet18", "--epochs", "1") if tiny else ()),
    )
    synthetic = ("--data.name", "synthetic", "--data.samples", str(int(batch) * 20))
    real = ("--data.root", str(root))
    both = f"{shell(*train, '--name', 'real', *real)} && {shell(*train, '--name', 'synthetic', *synthetic)}"
    snapshot = (*train, "--name", "snapshots", *synthetic, "--checkpoint.every-steps", "10")
    few = ("--max-steps", "2", "--epochs", "7", "--global-batch", "16", "--micro-batch", "16") if tiny else ()
    fast = (*WORLDSIZE, "train", "cifar10-fast", "--out", str(runs), "--name", "cifar10", "--data.root", str(cifar10), *few)
    on_request = [] if cifar10 is None else [Part("CIFAR-10 to 94 %", fast, 120, to_94_percent(runs))]
    measure = (*WORLDSIZE, "bench", "step", "--out", str(runs), *(step if tiny else ("--steps", "10", "--rounds", "3")))
    load = ("bench", "loader", "--root", str(root), "--out", str(runs), "--rounds", "2", "--feed", str(TARGET))
    few_images = ("--images", "40", "--batch", "16") if tiny else ()
    found = [
        Part("correctness", (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"), 110, last_lines(1)),
        Part("host time", (sys.executable, str(HOST), *(("--steps", "20") if tiny else ())), 20, last_lines(1)),
        Part("step", measure, 70, best_of_table),
        Part("step, compiled", (*measure, "--compile", "--precision", "bf16"), 150, best_of_table),
        Part("loader and device", (*WORLDSIZE, *load, *few_images), 30, bottleneck),
        Part("real and synthetic images", ("bash", "-c", both), 80, real_against_synthetic(runs)),
        Part("evaluation", (*WORLDSIZE, "eval", str(runs / "real")), 25, last_lines(1)),
        Part("snapshots", snapshot, 30, snapshots(runs)),
        Part("NCCL, one rank", (sys.executable, "-c", ALL_REDUCE, "1", "25", "100"), 15, last_lines(3)),
        *on_request,
    ]
    # A small run is a test, on whatever machine: the limits are a GPU's.
    return [replace(part, limit_s=part.limit_s * 5) for part in found] if tiny else found


def shell(*words: str) -> str:
    return " ".join(f"'{word}'" for word in words)


def run(part: Part, out: Path) -> tuple[str, float]:
    """Run the part. Returns its line of the table, and its seconds."""
    begin = time.monotonic()
    log = out / f"{part.name.replace(', ', '-').replace(' ', '-')}.log"
    try:
        with open(log, "w", encoding="utf-8") as file:
            code = finished(part, file)
        line = part.reads(log.read_text("utf-8")) if code == 0 else f"FAILED ({code}), see {log.name}"
    except subprocess.TimeoutExpired:
        line = f"not finished after {part.limit_s:.0f} s, see {log.name}"
    except Exception as error:  # the output is not what was expected
        line = f"UNREADABLE ({error}), see {log.name}"
    return line, time.monotonic() - begin


def finished(part: Part, output: IO[str]) -> int:
    """Run the part's command; its exit code. After its time, ends it with all processes that it started."""
    process = subprocess.Popen(part.command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(part.limit_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for the results (runs/gpu)")
    parser.add_argument("--root", type=Path, help="images or shards (default: generated JPEGs of 500 x 375 pixels)")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10: also train it to 94 %% (recipe cifar10-fast)")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    root = arguments.root or images(out / "images", 80 if arguments.tiny else 6000)
    generated = time.monotonic() - begin
    environment = subprocess.run((*WORLDSIZE, "env"), capture_output=True, text=True, check=False).stdout
    lines = ["# One GPU", "", "```", environment.rstrip(), "```", "", "| part | result | seconds |", "| --- | --- | ---: |"]
    lines.append(f"| test images | {'given' if arguments.root else 'generated'} | {generated:.0f} |")
    cifar10 = arguments.cifar10 and arguments.cifar10.resolve()
    for part in parts(out, root.resolve(), arguments.tiny, cifar10):
        line, seconds = run(part, out)
        print(f"{part.name} ({seconds:.0f} s): {line}", flush=True)
        lines.append(f"| {part.name} | {line} | {seconds:.0f} |")
        (out / "README.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
