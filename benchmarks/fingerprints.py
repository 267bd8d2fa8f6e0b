"""What the fingerprints of steps cost: the share of a run's training time, measured within one run.

.venv/bin/python benchmarks/fingerprints.py [train arguments, default: digits --max-steps 40]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worldsize import cli
from worldsize.reproduce import scratch_runs
from worldsize.runs import step_hashes
from worldsize.runs.run_folder import RunFolder
from worldsize.training import gradients


def timed(module: Any, name: str, spent: dict[str, float]) -> None:
    """Add up the seconds that a function of the module takes."""
    function: Callable[..., Any] = getattr(module, name)

    def wrapper(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    setattr(module, name, wrapper)


def main(arguments: list[str]) -> None:
    spent: dict[str, float] = {}
    timed(gradients, "digest", spent)
    timed(step_hashes, "link", spent)
    timed(step_hashes, "of_samples", spent)
    with tempfile.TemporaryDirectory() as folder:
        code = cli.main(["train", *arguments, "--out", folder, "--name", "a"])
        assert code == 0
        steps = scratch_runs.steps_of(RunFolder(Path(folder) / "a"))
    step_ms = sum(step["step_ms"] for step in steps) / len(steps)
    own_ms = sum(spent.values()) * 1000 / len(steps)
    print(f"\nfingerprints: {own_ms:.3f} ms of {step_ms:.1f} ms per step, {own_ms / step_ms:.4%}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["digits", "--max-steps", "40"])
