"""What recording the margins of training images costs: ``python benchmarks/margins.py [train arguments]``.

The default is ``digits --max-steps 20``. Runs with and without
``--track.no-margins`` take turns; of those with margins, the time inside the recording is measured too, which the load of
the machine affects less than the difference of two runs. Prints a Markdown table.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from fingerprints import timed

from worldsize import cli
from worldsize.reproduce import scratch_runs
from worldsize.runs.run_folder import RunFolder
from worldsize.training import margins, objective

ROUNDS = 3


def main(arguments: list[str]) -> None:
    spent: dict[str, float] = {}
    for owner, name in ((margins.Margins, "add"), (margins.Margins, "merge"), (objective, "margin")):
        timed(owner, name, spent)
    step_ms: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            for on in (True, False):
                spent.clear()
                steps = run(Path(folder), f"{turn}-{on}", [*arguments, *([] if on else ["--track.no-margins"])])
                step_ms[on].append(statistics.median(steps))
                if on:
                    shares.append(1000 * sum(spent.values()) / sum(steps))
    print("\n| | step, ms, median of each round | recording, share of the steps |\n| --- | --- | --- |")
    for on, title in ((True, "with margins"), (False, "without")):
        share = ", ".join(f"{value:.3%}" for value in shares) if on else ""
        print(f"| {title} | {', '.join(f'{value:.1f}' for value in step_ms[on])} | {share} |")


def run(folder: Path, name: str, arguments: list[str]) -> list[float]:
    """Train. Returns the milliseconds of each step but the first two, which are slower."""
    assert cli.main(["train", *arguments, "--out", str(folder), "--name", name]) == 0
    return [step["step_ms"] for step in scratch_runs.steps_of(RunFolder(folder / name))][2:]


if __name__ == "__main__":
    main(sys.argv[1:] or ["digits", "--max-steps", "20"])
