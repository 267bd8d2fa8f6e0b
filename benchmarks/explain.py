"""Does `worldsize explain` find the cause of a slow run? ``python benchmarks/explain.py [--only TEXT] [--out FILE.md]``.

Each case is a real run that is made slow on purpose: by the real thing where one machine has it (a CPU quota, a busy
processor, a stopped process, a slow disk, a slow network, settings that cost time), otherwise by sleeping at the place
(`slowdowns`). The first cause that `explain` names must be the one that was made. Where its remedy is a setting, the same
run is repeated with it, and the gain is compared with the predicted one.

Needs root, two processors, and `ip` and `tc` for the network. Do nothing else on the machine meanwhile: that would be a
cause of its own. Exits with 1 if fewer than --enough of the causes are found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cable import free_port, inside, network, place
from PIL import Image

from worldsize.bench.tables import table
from worldsize.distributed.rank import cores
from worldsize.training.environment import device_name

HERE = Path(__file__).parent
CGROUPS = Path("/sys/fs/cgroup")
CYCLE_S = 2.0  # of stopping and continuing
BURN = "while True: pass"


@dataclass(frozen=True)
class Case:
    """A slow run and the ``cause`` and ``part`` that `explain` should find.

    ``words`` are settings; ``slow`` is what slows down the last process and ``first`` what is done to the others, see
    `slowdowns`; ``during`` is what happens while it runs, see `disturbed`; ``link`` is the rate of a network between two
    processes. ``remedy``: settings that should help; "named": those that `explain` names.
    """

    name: str
    cause: str
    words: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    part: str = ""
    processes: int = 1
    first: tuple[str, ...] = ()
    during: str = ""
    link: str = ""
    val: int = 16
    remedy: tuple[str, ...] = ()


def cases() -> list[Case]:
    reader, worker, every = ("--data.readers", "1"), ("--data.workers", "1"), "--checkpoint.every-steps"
    collect, epochs = ("--track.every-seconds", "0"), ("--epochs", "10", "--max-steps", "48")
    two, bound = {"processes": 2}, ("cpu=0",)
    found: list[Case] = []
    for s in (0.08, 0.12, 0.2):
        found.append(
            Case(f"reads wait {s} s, one reader", "reading", reader, (f"reads={s}",), remedy=("--data.readers", "16"))
        )
        found.append(Case(f"decoding waits {s} s, one thread", "decoding", worker, (f"decoding={s}",)))
    for mb in (0.4, 0.6, 0.8):
        found.append(Case(f"disk of {mb} MB/s", "reading", ("--max-steps", "30"), (f"disk={mb}",)))
    for share in (0.3, 0.5, 0.7):
        found.append(Case(f"CPU quota of {share}", "CPU quota", (), (f"quota={share}",)))
        found.append(Case(f"stopped {share:.0%} of the time", "paused", during=f"stop {share}"))
    for programs in (3, 4, 6):
        found.append(Case(f"{programs} busy programs", "busy processors", during=f"busy {programs}"))
    for rate in ("2gbit", "1gbit", "500mbit"):
        found.append(Case(f"network of {rate}", "transfer", ("--max-steps", "20"), link=rate, **two))
    for n in (1, 2, 3):
        found.append(Case(f"checkpoint every {n} steps", "checkpoints", (every, f"{n}"), remedy=(every, f"{10 * n}")))
    for n in (64, 128, 256):
        found.append(Case(f"{n} images to evaluate per 256", "evaluation", epochs, val=n, remedy=("named",)))
    for s in (0.1, 0.2, 0.3):
        found.append(Case(f"tracker of {s} s", "metrics", collect, (f"trackers={s}",), remedy=("named",)))
    for n in (2, 4):
        found.append(Case(f"forward passes of {n}", "small forward passes", ("--micro-batch", f"{n}"), remedy=("named",)))
    found += [
        Case("rank 1 stopped 40%", "slow rank", part="paused", during="stop 0.4", **two),
        Case("rank 1 has a CPU quota of 0.4", "slow rank", (), ("quota=0.4",), "throttled", **two),
        Case("rank 1 shares its processor", "slow rank", (), ("cpu=1",), "no_cpu", 2, bound, "busy 1 on 1"),
        Case("rank 1 reads slowly", "slow rank", reader, ("reads=0.2",), "read_ms", **two),
        Case("rank 1 decodes slowly", "slow rank", worker, ("decoding=0.2",), "decode_ms", **two),
    ]
    return found


@dataclass(frozen=True)
class Result:
    """``found``: the first cause, in words; ``predicted`` and ``measured``: the gain of the remedy; None: not tried."""

    case: Case
    right: bool
    found: str
    lost: float
    predicted: float | None = None
    measured: float | None = None


# Runs ---------------------------------------------------------------------------------------------------------------------


def images(folder: Path, val: int) -> Path:
    """A dataset of 256 noisy JPEGs (of 13 kB) and ``val`` validation images."""
    root = folder / f"images-{val}"
    random = np.random.default_rng(0)
    for split, count in (("train", 256), ("val", val)):
        for i in range(count):
            path = root / split / f"class{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (120, 120, 3), np.uint8)).save(path, quality=90)
    return root


def train(case: Case, folder: Path, name: str, more: tuple[str, ...] = ()) -> Path:
    """Make the run of a case. Returns its folder.

    Raises:
        RuntimeError: it failed.
    """
    root = folder / f"images-{case.val}"
    base = f"train digits --data.name folder --data.root {root} --model.name resnet18 --data.train-crop-size 32 "
    base += "--data.train-crop random_resized --data.val-crop-size 32 --data.val-resize-size 36 "
    # Forward passes are not small, as far as the processes can share the batch.
    base += f"--global-batch 32 --micro-batch {32 // case.processes} --epochs 100 --max-steps 40 --evaluate-every 100 "
    base += f"--out {folder} --name {name}"
    words = [*base.split(), *case.words, *more]
    if case.cause == "evaluation" and "--evaluate-every" not in more:
        words += ["--evaluate-every", "1"]
    if case.slow and case.slow[0].startswith("disk"):
        _forget(root)
    with ExitStack() as stack:
        if case.link:
            stack.enter_context(network(case.link))
        port = free_port()
        runs = [stack.enter_context(_process(case, rank, port, words, folder)) for rank in range(case.processes)]
        stack.enter_context(disturbed(case.during, runs[-1].pid, folder / name / "metrics.jsonl"))
        codes = [run.wait(300) for run in runs]
    if any(codes):
        raise RuntimeError(f"{case.name}: exit codes {codes}: {(folder / 'log').read_text()[-2000:]}")
    return folder / name


@contextmanager
def _process(case: Case, rank: int, port: int, words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    last = rank == case.processes - 1
    slow = [_with_folder(word, folder / f"images-{case.val}") for word in (case.slow if last else case.first)]
    command = [sys.executable, str(HERE / "slowdowns.py"), *slow, "--", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if case.processes > 1:
        env |= place(rank, case.processes, port, bool(case.link))
    if case.link:
        command = [*inside(rank), *command]
    with open(folder / "log", "wb" if rank == 0 else "ab") as log:
        run = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        yield run
    finally:
        run.kill()
        run.wait()
        for group in CGROUPS.glob(f"**/worldsize-{run.pid}"):
            with suppress(OSError):
                group.rmdir()


def _with_folder(slow: str, root: Path) -> str:
    """The rate of a slow disk is a number of MB/s: say of which disk."""
    name, _, value = slow.partition("=")
    return f"{name}={round(float(value) * 1e6)}@{root}" if name == "disk" else slow


def _forget(root: Path) -> None:
    """Drop the images from the page cache."""
    os.sync()
    for path in root.rglob("*.jpg"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def disturbed(how: str, pid: int, metrics: Path) -> Iterator[None]:
    """Once the run has metrics: ``busy N [on CPU]`` starts programs, ``stop SHARE`` stops the process now and then."""
    if not how:
        yield
        return
    ended = threading.Event()
    what, value, *at = how.split()
    burners: list[subprocess.Popen[bytes]] = []

    def disturb() -> None:
        while not ended.wait(0.1) and not (metrics.exists() and metrics.stat().st_size):
            pass
        if what == "busy":
            bind = ["taskset", "-c", at[1]] if at else []
            burners.extend(subprocess.Popen([*bind, sys.executable, "-c", BURN]) for _ in range(int(value)))
        while what == "stop" and not ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(CYCLE_S * float(value))
                os.kill(pid, signal.SIGCONT)
            ended.wait(CYCLE_S * (1 - float(value)))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for burner in burners:
            burner.kill()
            burner.wait()


# Verdicts -----------------------------------------------------------------------------------------------------------------


def explained(run: Path) -> dict[str, Any]:
    """What `worldsize explain` says."""
    out = run.with_suffix(".json")
    command = [sys.executable, "-m", "worldsize", "explain", str(run), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return json.loads(out.read_text())


def judge(case: Case, folder: Path, number: int) -> Result:
    """Make the run of the case, explain it, and try the remedy."""
    seen = explained(train(case, folder, f"{number}"))
    first = seen["causes"][0] if seen["causes"] else {"loss": {"cause": "none", "lost": 0, "part": "", "rank": None}}
    loss = first["loss"]
    rank = case.processes - 1 if case.cause == "slow rank" else None
    right = (loss["cause"], loss["rank"], loss["part"]) == (case.cause, rank, case.part)
    words = " ".join(str(loss[name]) for name in ("cause", "rank", "part") if loss[name] not in (None, ""))
    if not (right and case.remedy):
        return Result(case, right, words, loss["lost"])
    remedy = case.remedy
    if remedy == ("named",):
        remedy = tuple(first["remedy"][first["remedy"].index("--") :].split()[:2])
    better = explained(train(case, folder, f"{number}-better", remedy))
    measured = (seen["seconds"] / seen["steps"]) / (better["seconds"] / better["steps"]) - 1
    return Result(case, right, words, loss["lost"], first["gain"], measured)


def report(results: list[Result], missing: list[str]) -> str:
    rows = [("what was done", "first cause found", "share", "right", "predicted gain", "measured gain")]
    for one in results:
        gains = [f"{gain:+.0%}" if gain is not None else "" for gain in (one.predicted, one.measured)]
        rows.append((one.case.name, one.found, f"{one.lost:.0%}", "yes" if one.right else "NO", *gains))
    right = sum(one.right for one in results)
    lines = [
        f"`python benchmarks/explain.py`, {device_name('cpu')}, {cores()} cores, {time.strftime('%Y-%m-%d')}.",
        "",
        f"{right} of {len(results)} causes found.",
        *(f"Not made here: {name}." for name in missing),
        "",
        table(rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--enough", type=float, default=28 / 30, help="share of causes that must be found (28/30)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    asked = parser.parse_args()
    wanted = [case for case in cases() if not asked.only or any(text in case.name for text in asked.only)]
    results, missing = [], []
    with tempfile.TemporaryDirectory(prefix="worldsize-explain-") as name:
        folder = Path(name)
        for val in sorted({case.val for case in wanted}):
            images(folder, val)
        for number, case in enumerate(wanted):
            try:
                results.append(judge(case, folder, number))
            except (OSError, subprocess.CalledProcessError) as error:  # no root, no cgroup, no tc
                missing.append(f"{case.name} ({error})")
                continue
            print(report(results[-1:], []).splitlines()[-1], flush=True)
    text = report(results, missing)
    print("\n" + text)
    if asked.out is not None:
        asked.out.write_text(text)
    return 0 if sum(one.right for one in results) >= asked.enough * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
