"""Strategies over slow networks, measured and predicted: ``python benchmarks/links.py [--out FOLDER]``.

Two processes, each in a network namespace of its own, train ResNet-18 over a cable of 10, 1 and 0.1 Gbit/s: with DDP, with
bf16 and PowerSGD compression, and with local SGD. `worldsize plan` predicts the same from runs without communication: two
of one process each, at the same time. Writes links.md, links.csv and links.svg. Needs root, two processors, `ip` and `tc`;
takes a quarter of an hour, in which the machine should have nothing else to do. ``--draw`` only draws links.svg again from
links.csv, without measuring.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import altair as alt
from cable import free_port, inside, network, place

from worldsize.bench.tables import table
from worldsize.distributed.rank import cores
from worldsize.report.charts import Figure, layered, legend, svg
from worldsize.report.data import Data
from worldsize.training.environment import device_name

GBIT = (10.0, 1.0, 0.1)
STRATEGIES = {
    "ddp": "--parallel.strategy ddp",
    "ddp bf16": "--parallel.strategy ddp --parallel.compression bf16",
    "ddp powersgd": "--parallel.strategy ddp --parallel.compression powersgd --parallel.powersgd-start 2",
    "localsgd": "--parallel.strategy localsgd --parallel.local-steps 8",
}
WARMUP, STEPS = 8, 16  # two rounds of local SGD
BATCH = 32  # images per process
ROUNDS = 2
RECIPE = (
    f"digits --data.name synthetic --data.classes 100 --data.samples {4 * BATCH * (WARMUP + STEPS)} --model.name resnet18 "
    f"--data.train-crop-size 32 --data.val-crop-size 32 --epochs 3 --precision fp32 --micro-batch {BATCH}"
)
Speeds = dict[tuple[str, float], list[float]]  # by strategy and Gbit/s: images/s of one process


def start(folder: Path, name: str, words: str, env: dict[str, str], before: list[str]) -> subprocess.Popen[bytes]:
    """Start one process of a run."""
    command = [*before, sys.executable, "-m", "worldsize", "train", *RECIPE.split(), *words.split()]
    command += ["--out", str(folder), "--name", name, "--stop-after", f"{WARMUP + STEPS}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | env
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait() for process in processes]
    if any(code != 75 for code in codes):  # they stop before their end
        raise SystemExit(f"exit codes {codes}")


def speed(run: Path) -> float:
    """Images/s of one process, without the first steps."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [step["step_ms"] for step in steps if step["kind"] == "step"][WARMUP:]
    return BATCH / statistics.fmean(counted) * 1000


def alone(folder: Path, name: str) -> float:
    """The mean speed of two runs of one process that do not communicate; the second one is in ``name``-1."""
    finish([start(folder, f"{name}-{i}", f"--global-batch {BATCH}", {}, []) for i in range(2)])
    return statistics.fmean(speed(folder / f"{name}-{i}") for i in range(2))


def together(folder: Path, name: str, strategy: str, gbit: float) -> float:
    """Two processes over the cable."""
    words = f"--global-batch {2 * BATCH} {STRATEGIES[strategy]}"
    with network(f"{round(gbit * 1000)}mbit"):
        port = free_port()
        finish([start(folder, name, words, place(rank, 2, port, cabled=True), inside(rank)) for rank in range(2)])
    return speed(folder / name)


def predicted(folder: Path, base: str, strategy: str, gbit: float) -> dict[str, float]:
    """What `worldsize plan` says of the same: images/s of one process as value, low and high."""
    out = folder / "plan.json"
    words = f"--global-batch {2 * BATCH} {STRATEGIES[strategy]} --devices 2 --devices-per-node 1 --from {folder / base}"
    words += f" --node-bandwidth-gbit {gbit} --link-latency-us 50 --json {out}"
    command = [sys.executable, "-m", "worldsize", "plan", *RECIPE.split(), *words.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (forecast,) = json.loads(out.read_text())["forecasts"]
    return {name: value / 2 for name, value in forecast["images_per_s"].items()}


def report(base: float, measured: Speeds, plans: dict[tuple[str, float], dict[str, float]]) -> str:
    rows = [("strategy", "Gbit/s", "measured", "of no network", "predicted", "5th to 95th", "difference")]
    for (strategy, gbit), speeds in measured.items():
        mean, plan = statistics.fmean(speeds), plans[strategy, gbit]
        shares = f"{mean / base:.0%}", f"{plan['value']:.1f}", f"{plan['low']:.1f} to {plan['high']:.1f}"
        rows.append((strategy, f"{gbit:g}", f"{mean:.1f}", *shares, f"{plan['value'] / mean - 1:+.0%}"))
    where = f"`python benchmarks/links.py`, {device_name('cpu')}, {cores()} cores, {time.strftime('%Y-%m-%d')}"
    what = f"images/s of each of two processes, ResNet-18, {BATCH} images of 32 pixels per process and step, {ROUNDS} rounds"
    picture = "![measured and predicted](links.svg)"
    return f"{where}: {what}. Without a network, the faster round: {base:.1f}.\n\n{table(rows)}\n\n{picture}\n"


def rows_of(measured: Speeds, plans: dict[tuple[str, float], dict[str, float]]) -> list[dict[str, Any]]:
    """What the chart draws: images/s of one process, the mean over the rounds, and the prediction with its interval."""
    return [
        {"strategy": strategy, "gbit": gbit, "measured": statistics.fmean(speeds)}
        | {f"predicted{end}": plans[strategy, gbit][of] for end, of in (("", "value"), ("_low", "low"), ("_high", "high"))}
        for (strategy, gbit), speeds in measured.items()
    ]


def table_of(rows: list[dict[str, Any]]) -> Data:
    columns = {name: "string" if name == "strategy" else "number" for name in rows[0]}
    return Data("links", "images/s per process over the rate of the cable", columns, rows)


def chart(data: Data) -> Figure:
    """Speed over the cable's rate: where the lines of two strategies cross, one overtakes the other."""
    title = "images/s per process"
    x = alt.X("gbit:Q", scale=alt.Scale(type="log"), title="rate of the cable, Gbit/s", axis=alt.Axis(values=list(GBIT)))
    color = alt.Color("strategy:N", sort=list(STRATEGIES), legend=legend())
    solid = alt.Chart().mark_line(point={"size": 50}).encode(x, alt.Y("measured:Q", title=title), color)
    dotted = alt.Chart().mark_line(strokeDash=[2, 3], opacity=0.6).encode(x, alt.Y("predicted:Q", title=title), color)
    caption = "Solid: measured. Dotted: predicted by `worldsize plan`."
    return Figure(
        "links", "Strategies over slow networks: measured (solid) and predicted", caption, layered(data, solid, dotted)
    )


def draw(folder: Path) -> None:
    """Draw links.svg from links.csv."""
    with open(folder / "links.csv", encoding="utf-8", newline="") as file:
        rows = [{k: v if k == "strategy" else float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    data = table_of(rows)
    (folder / "links.svg").write_text(svg(chart(data), [data]), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for links.md, links.csv and links.svg")
    parser.add_argument("--draw", action="store_true", help="draw links.svg from links.csv; measure nothing")
    asked = parser.parse_args()
    if not asked.draw:
        measure(asked.out)
    draw(asked.out)


def measure(out: Path) -> None:
    """Measure and predict everything; write links.md and links.csv."""
    measured: Speeds = {}
    bases = []
    with tempfile.TemporaryDirectory(prefix="worldsize-links-") as name:
        folder = Path(name)
        for turn in range(ROUNDS):
            bases.append(alone(folder, f"alone-{turn}"))
            print(f"round {turn + 1}: no network {bases[-1]:.1f} images/s per process", flush=True)
            for gbit in GBIT:
                for strategy in STRATEGIES:
                    found = together(folder, f"{turn}-{strategy.replace(' ', '-')}-{gbit:g}", strategy, gbit)
                    measured.setdefault((strategy, gbit), []).append(found)
                    print(f"round {turn + 1}: {strategy:<14} {gbit:4g} Gbit/s {found:8.1f}", flush=True)
        plans = {key: predicted(folder, "alone-0-1", *key) for key in measured}
    ordered = {(strategy, gbit): measured[strategy, gbit] for strategy in STRATEGIES for gbit in GBIT}
    text = report(max(bases), ordered, plans)
    print("\n" + text)
    (out / "links.md").write_text(text)
    (out / "links.csv").write_text(table_of(rows_of(ordered, plans)).csv(), "utf-8")


if __name__ == "__main__":
    main()
