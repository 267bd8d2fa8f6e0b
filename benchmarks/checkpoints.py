"""What checkpoints cost a run: the stall of the training thread, and the throughput, measured within one run.

    python benchmarks/checkpoints.py [--every 30] [--blocks 12]

Two processes train ResNet-50 with momentum at 64 pixels. Blocks of ``--every`` seconds take turns: with one checkpoint, and
without. The load of a shared machine differs more between two blocks than a checkpoint costs; therefore the CPU times of the
stall and of the thread that writes are measured too. They estimate the cost where each process has a core; they contain
neither waiting nor what the processes take from each other's memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cable import free_port

RANKS, WARMUP = 2, 6  # steps before the first block
NOTED = ("stall", "busy", "compare", "snapshot", "settle", "wall", "cpu")
STOPPED = 75  # the exit code of a run that was stopped by a signal
ARGUMENTS = (
    *("imagenet", "--data.name", "synthetic", "--data.samples", "4096", "--data.train-crop-size", "64"),
    *("--data.val-crop-size", "64", "--data.val-resize-size", "64", "--schedule.warmup-epochs", "0", "--precision", "fp32"),
    *("--epochs", "1000", "--evaluate-every", "1000"),
    *("--global-batch", "16", "--micro-batch", "8", "--checkpoint.every-seconds", "1000000", "--name", "a"),
)


class Blocks:
    """Makes a run save once in each second block, and notes what that costs this rank, in seconds."""

    def __init__(self, every_s: float, blocks: int) -> None:
        self._every_s, self._blocks = every_s, blocks
        self._begin: float | None = None
        self._saved = 0
        self._steps = 0
        self.ends: list[float] = []
        self.noted: dict[str, list[float]] = {name: [] for name in NOTED}

    def install(self) -> None:
        from worldsize.checkpoint import writer
        from worldsize.training import replicas, saver, trainer

        saver.Saver.due = lambda _: self._due()  # type: ignore[method-assign]
        self._time(trainer.Trainer, "_save", stall=time.perf_counter, busy=time.thread_time)
        self._time(replicas.Replicas, "compare", compare=time.thread_time)
        self._time(saver.Saver, "snapshot", snapshot=time.thread_time)
        self._time(saver.Saver, "settle", settle=time.perf_counter)
        for name in ("_write", "_write_own"):
            self._time(writer.Writer, name, wall=time.perf_counter, cpu=time.thread_time)

    def _due(self) -> bool:
        """Called in each step."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps <= WARMUP:
            return self._steps == 2  # the first save is not counted
        if self._begin is None:
            self._begin = now
            for values in self.noted.values():
                values.clear()
        self.ends.append(now - self._begin)
        block = int(self.ends[-1] // self._every_s) + 1
        if block > self._blocks >= self._saved:
            os.kill(os.getpid(), signal.SIGTERM)  # once: a second signal ends a process at once
        due = block % 2 == 1 and self._saved < block <= self._blocks
        self._saved = max(block, self._saved)
        return due

    def _time(self, owner: Any, name: str, **clocks: Callable[[], float]) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            begin = {key: clock() for key, clock in clocks.items()}
            try:
                return function(*arguments, **options)
            finally:
                for key, clock in clocks.items():
                    self._note(key, clock() - begin[key])

        setattr(owner, name, wrapper)

    def _note(self, key: str, seconds: float) -> None:
        """Each step settles; that one counts which follows a checkpoint, and it stalls the training thread too."""
        if key != "settle":
            self.noted[key].append(seconds)
        elif len(self.noted["settle"]) < len(self.noted["stall"]):
            self.noted["settle"].append(seconds)
            self.noted["stall"][-1] += seconds


def rank(every_s: float, blocks: int, folder: Path) -> None:
    """One process of the run."""
    from worldsize import cli

    measured = Blocks(every_s, blocks)
    measured.install()
    code = cli.main(["train", *ARGUMENTS, "--out", str(folder)])
    result = {"ends": measured.ends, "saves": blocks // 2, **measured.noted}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    sys.exit(code)


def environment(number: int, port: str) -> dict[str, str]:
    """As torchrun sets it for this rank."""
    ranks = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return os.environ | address | {name: str(value) for name, value in ranks.items()}


def report(every_s: float, blocks: int, ranks: list[dict[str, Any]]) -> str:
    """The tables. The saves after the last block, at the run's end, are not counted."""
    lines = ["| seconds per checkpoint | rank | median | longest |", "| --- | --- | --- | --- |"]
    titles = {
        "stall": "stall of the training thread",
        "busy": "CPU time of the stall",
        "compare": "of it comparing the weights of the ranks",
        "snapshot": "of it the snapshot",
        "settle": "waiting in the next step until the weights are copied, part of the stall",
        "wall": "in the background: copying, writing, hashing",
        "cpu": "CPU time of that",
    }
    for key, title in titles.items():
        for number, noted in enumerate(ranks):
            values = noted[key][: noted["saves"]]
            lines.append(f"| {title} | {number} | {statistics.median(values):.3f} | {max(values):.3f} |")
    steps = [sum(1 for end in ranks[0]["ends"] if end // every_s == block) for block in range(blocks)]
    ratios = [on / without for on, without in zip(steps[::2], steps[1::2], strict=True)]
    stall, work = (sum(statistics.median(noted[key][: noted["saves"]]) for noted in ranks) for key in ("busy", "cpu"))
    cores = os.cpu_count() or 1
    lines += [
        f"\nSteps per block of {every_s:g} s, with a checkpoint: {steps[::2]}; without: {steps[1::2]}.",
        f"Throughput with / without: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}.",
        f"\nOf {cores} cores, one checkpoint in {every_s:g} s costs {stall / every_s / cores:.2%} in the training "
        f"threads and {work / every_s / cores:.2%} in the background.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=30.0, help="seconds of a block (30)")
    parser.add_argument("--blocks", type=int, default=12, help="an even number of blocks (12)")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # the folder, in the run's processes
    options = parser.parse_args()
    if options.rank_of is not None:
        rank(options.every, options.blocks, options.rank_of)
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = [
            sys.executable,
            __file__,
            "--every",
            str(options.every),
            "--blocks",
            str(options.blocks),
            "--rank-of",
            folder,
        ]
        port = str(free_port())
        processes = [subprocess.Popen(command, env=environment(number, port), stdout=sys.stderr) for number in range(RANKS)]
        if (codes := [process.wait() for process in processes]) != [STOPPED] * RANKS:
            sys.exit(f"the run failed, with the exit codes {codes}")
        found = [json.loads((Path(folder) / f"rank-{number}.json").read_text()) for number in range(RANKS)]
    print(report(options.every, options.blocks, found))


if __name__ == "__main__":
    main()
