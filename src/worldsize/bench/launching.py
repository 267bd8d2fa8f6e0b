"""Starts runs on this machine for benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from worldsize.errors import SUCCESS, Stopped, UserError
from worldsize.launch import entry_point
from worldsize.parallel.base import Variant
from worldsize.reproduce.training_process import finished, last_step


class RunFailed(UserError):
    """A run of a benchmark failed. Other configurations may still work."""


def train_here(variant: Variant, procs: int, threads: int, words: Sequence[str], metrics: Path, until: int) -> None:
    """Run ``worldsize train WORDS`` with ``procs`` processes of ``threads`` threads, as the variant's launcher does.

    Args:
        metrics: metrics.jsonl of the run.
        until: its last step.

    Raises:
        RunFailed: it failed, or was stopped before that step; the message is the run's own.
    """
    command = [*entry_point.command(sys.executable), "train", *words, *variant.settings]
    if variant.threads:
        command += ["--parallel.threads", str(threads)]
    if variant.mpirun:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", "-np", str(procs), *root, "--oversubscribe", "--bind-to", "none", *command]
    else:
        command += ["--procs", str(procs)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = finished(command, env=env)
    # With --stop-after a training ends as one that a signal stopped.
    complete = done.returncode == SUCCESS or (done.returncode == Stopped.exit_code and last_step(metrics) >= until)
    if not complete:
        raise RunFailed(f"{variant.name} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
