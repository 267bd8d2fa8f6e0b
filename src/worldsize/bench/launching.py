"""Starts runs on this machine for benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from worldsize.errors import SUCCESS, Stopped, UserError
from worldsize.launch import entry_point
from worldsize.parallel.base import Variant


class RunFailed(UserError):
    """A run of a benchmark failed. Other configurations may still work."""


def train_here(variant: Variant, procs: int, threads: int, words: Sequence[str]) -> None:
    """Run ``worldsize train WORDS`` with ``procs`` processes of ``threads`` threads, as the variant's launcher does.

    Raises:
        RunFailed: the message is the run's own.
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
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (SUCCESS, Stopped.exit_code):
        raise RunFailed(f"{variant.name} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
