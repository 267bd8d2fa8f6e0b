"""One run that begins on Slurm, is preempted, continues on hosts, and ends on this machine after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from processes import environment, free_port, start_python, workers, worldsize
from waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.hosts,
    pytest.mark.skipif(
        not {"SLURM_CONF", "WORLDSIZE_HOSTS"} <= os.environ.keys(),
        reason="no Slurm or no hosts: SLURM_CONF and WORLDSIZE_HOSTS are not both set (see CONTRIBUTING)",
    ),
]
SETTINGS = (
    *("--model.name", "shufflenet_v2_x0_5", "--data.train-crop-size", "16", "--data.val-crop-size", "16"),
    *("--data.val-resize-size", "16", "--precision", "fp32", "--device", "cpu", "--parallel.strategy", "bitwise"),
    *("--global-batch", "48", "--micro-batch", "12", "--epochs", "20", "--track.every-seconds", "0"),
    *("--checkpoint.every-steps", "25"),
)


def events(run: Path, event: str) -> list[dict[str, object]]:
    path = run / "history.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == event]


def happens(run: Path, event: str, count: int) -> None:
    """Wait until the run's history has ``count`` such events."""
    until(lambda: len(events(run, event)) >= count, f"{event} number {count}", 300, every=0.1)


def test_a_moved_run_has_the_bits_of_one_that_stayed(tmp_path):
    alone = worldsize("train", "digits", *SETTINGS, "--name", "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    run, name = tmp_path / "runs" / "relay", "relay"

    on_slurm = ("--on", "slurm", "--nodes", "2", "--gpus", "0", "--partition", "low", "--detach", "--name", name)
    done = worldsize("train", "digits", *SETTINGS, *on_slurm, cwd=tmp_path, SLURM_CONF=os.environ["SLURM_CONF"])
    assert done.returncode == 0, done.stderr
    happens(run, "saved", 2)
    preempting = [
        "sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--time=1",
        "--output=/dev/null",
        "--wrap",
        "true",
    ]
    subprocess.run(preempting, check=True, timeout=60, capture_output=True, env=environment() | os.environ)
    happens(run, "started", 2)
    saved = len(events(run, "saved"))
    happens(run, "saved", saved + 1)
    done = worldsize("stop", name, cwd=tmp_path, SLURM_CONF=os.environ["SLURM_CONF"])
    assert done.returncode == 0, done.stderr

    on_hosts = ("--on", "ssh", "--hosts", "h1:2,h2:2", "--ssh-config", os.environ["WORLDSIZE_HOSTS_SSH"], "--gpus", "0")
    launcher = start_python(
        "train", "digits", *SETTINGS, *on_hosts, "--name", name, "--port", str(free_port()), cwd=tmp_path
    )
    happens(run, "started", 3)
    saved = len(events(run, "saved"))
    happens(run, "saved", saved + 1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 75

    local = start_python("train", "--resume", "runs/relay", "--procs", "2", cwd=tmp_path)
    happens(run, "started", 4)
    saved = len(events(run, "saved"))
    happens(run, "saved", saved + 1)
    os.kill(workers(local.pid)[-1], signal.SIGKILL)
    local.communicate(timeout=120)
    assert local.returncode == 128 + signal.SIGKILL
    done = worldsize("train", "--resume", "runs/relay", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    chains = [json.loads((tmp_path / "runs" / one / "result.json").read_text())["chain"] for one in ("alone", "relay")]
    assert chains[0] == chains[1]
    assert [start["world_size"] for start in events(run, "started")] == [2, 2, 4, 2, 1]
