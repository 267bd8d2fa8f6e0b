"""Runs the benchmarks of benchmarks/README.md and writes the tables to benchmarks/results.

    python benchmarks/measure.py overhead|scaling|startup|libraries|all

Every result is a ratio or a difference of two commands, interleaved in one run. Run it on an idle machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WARMUP = 2  # steps at the start of every process that are not counted
TRAIN = (
    *("train", "imagenet", "--data.name", "synthetic", "--schedule.warmup-epochs", "0"),
    *("--checkpoint.every-seconds", "100000", "--name", "measured"),
)


def main() -> None:
    parts = {"overhead": overhead, "scaling": scaling, "startup": startup, "libraries": libraries}
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    if chosen not in (*parts, "all"):
        sys.exit(__doc__)
    RESULTS.mkdir(exist_ok=True)
    for name, measure in parts.items():
        if chosen in (name, "all"):
            table = f"{machine()}\n\n{measure()}\n"
            (RESULTS / f"{name}.md").write_text(f"# {name}: `python benchmarks/measure.py {name}`\n\n{table}")
            print(table)


def overhead(rounds: int = 3, steps: int = 7, batch: int = 32) -> str:
    """Throughput of `worldsize train` relative to a bare loop: ResNet-50, 224 px, one process, all cores."""
    rows = []
    for precision in ("fp32", "bf16"):
        for turn in range(rounds):
            ours = batch / mean_step(run_worldsize(1, steps, batch, precision))
            bare = batch / mean_step(run_bare(1, steps, batch, precision))
            rows.append((precision, turn + 1, f"{ours:.2f}", f"{bare:.2f}", f"{ours / bare:.3f}"))
    return table(("precision", "round", "worldsize images/s", "bare images/s", "ratio"), rows) + medians(rows)


def scaling(rounds: int = 3, steps: int = 4, batch: int = 32) -> str:
    """Weak scaling from one to two processes with one thread each: ResNet-50, 224 px, micro-batch 32."""
    rows = []
    for precision in ("bf16", "fp32"):
        for turn in range(rounds if precision == "bf16" else 2):
            one = batch / mean_step(run_worldsize(1, steps, batch, precision, threads=1))
            two = 2 * batch / mean_step(run_worldsize(2, steps, batch, precision, threads=1))
            rows.append((precision, turn + 1, f"{one:.2f}", f"{two:.2f}", f"{two / one / 2:.3f}"))
    return table(("precision", "round", "1 process images/s", "2 processes images/s", "efficiency"), rows) + medians(rows)


def startup(rounds: int = 4) -> str:
    """Seconds from the command to the end of the first step with two processes, and of `worldsize --help`."""
    rows = []
    for turn in range(rounds):
        start = time.time()
        ours = run_worldsize(2, 1, 4, "fp32", threads=1, size=64)[0] - start
        start = time.time()
        bare = run_bare(2, 1, 4, "fp32", threads=1, size=64)[0] - start
        rows.append((turn + 1, f"{ours:.2f}", f"{bare:.2f}", f"{ours - bare:+.2f}"))
    helps = []
    for _ in range(9):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "worldsize", "--help"], check=True, capture_output=True)
        helps.append(time.perf_counter() - start)
    text = table(("round", "worldsize train --procs 2, s", "torchrun bare.py, s", "difference, s"), rows)
    difference = statistics.median(float(row[-1]) for row in rows)
    return f"{text}\nMedian difference {difference:+.2f} s. `worldsize --help`: median {statistics.median(helps):.2f} s."


def libraries(rounds: int = 3, steps: int = 16, batch: int = 8, size: int = 128) -> str:
    """Throughput of two worldsize processes relative to a bare loop with the same library: ResNet-50, 128 px, fp32."""
    average, adasum = ("--parallel.strategy", "horovod"), ("--parallel.strategy", "horovod", "--parallel.op", "adasum")
    pairs = [("DDP", (), ()), ("Horovod, MPI", average, ("--horovod", "average"))]
    pairs.append(("Horovod's Adasum, MPI", adasum, ("--horovod", "adasum")))
    if importlib.util.find_spec("horovod") is None:
        print("skipped Horovod, which is not installed: run `make horovod`", file=sys.stderr)
        del pairs[1:]
    rows = []
    for turn in range(rounds):
        for name, settings, options in pairs:
            mpirun = bool(options)
            ours = 2 * batch / mean_step(run_worldsize(2, steps, batch, "fp32", 1, size, more=settings, mpirun=mpirun))
            bare = 2 * batch / mean_step(run_bare(2, steps, batch, "fp32", 1, size, more=options))
            rows.append((name, turn + 1, f"{ours:.2f}", f"{bare:.2f}", f"{ours / bare:.3f}"))
    return table(("library", "round", "worldsize images/s", "bare images/s", "ratio"), rows) + medians(rows)


def run_worldsize(
    procs: int,
    steps: int,
    batch: int,
    precision: str,
    threads: int = 0,
    size: int = 224,
    more: tuple[str, ...] = (),
    mpirun: bool = False,
) -> tuple[float, list[float]]:
    """(Unix time when the first step was complete, seconds of each step)."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "worldsize", *TRAIN, "--out", out, *more]
        command = [*under_mpirun(procs), *command] if mpirun else [*command, "--procs", str(procs)]
        command += ["--global-batch", str(batch * procs), "--micro-batch", str(batch), "--max-steps", str(steps)]
        command += ["--precision", precision, "--data.train-crop-size", str(size), "--track.every-seconds", "0"]
        # One epoch, so that no evaluation or checkpoint interrupts the steps. Images that need no cropping, as in the bare
        # loop. A short evaluation at the end.
        command += ["--data.samples", str(batch * procs * steps), "--data.train-crop", "none", "--data.no-flip"]
        command += ["--epochs", "1", "--data.val-resize-size", "32", "--data.val-crop-size", "32"]
        metrics = Path(out) / "measured" / "metrics.jsonl"
        process = subprocess.Popen(command, env=environment(threads), stdout=subprocess.DEVNULL)
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        first = time.time()
        if process.wait():
            sys.exit(f"failed: {' '.join(command)}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return first, [r["step_ms"] / 1000 for r in records if r["kind"] == "step"]


def under_mpirun(procs: int) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "-np", str(procs), *root, "--oversubscribe", "--bind-to", "none"]


def run_bare(
    procs: int, steps: int, batch: int, precision: str, threads: int = 0, size: int = 224, more: tuple[str, ...] = ()
) -> tuple[float, list[float]]:
    """The same for bare.py. If there are ``more`` options, they are for Horovod, and mpirun starts the processes."""
    command = [sys.executable, str(HERE / "bare.py"), *more]
    if more:
        command = [*under_mpirun(procs), *command]
    elif procs > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(procs)]
    command += ["--steps", str(steps), "--batch", str(batch)]
    command += ["--size", str(size), "--precision", precision, "--threads", str(threads)]
    done = subprocess.run(command, env=environment(threads), check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["first_step_at"], result["seconds"]


def environment(threads: int) -> dict[str, str]:
    return os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def mean_step(run: tuple[float, list[float]]) -> float:
    counted = run[1][WARMUP:]
    return sum(counted) / len(counted)


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def medians(rows: list[tuple]) -> str:
    """The median of the last column for each value of the first."""
    kinds = dict.fromkeys(row[0] for row in rows)
    parts = (f"{kind} {statistics.median(float(r[-1]) for r in rows if r[0] == kind):.3f}" for kind in kinds)
    return f"\nMedians: {', '.join(parts)}."


def machine() -> str:
    import torch

    cpu = next((x.split(":", 1)[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of a virtual machine ({cpu}), torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."


if __name__ == "__main__":
    main()
