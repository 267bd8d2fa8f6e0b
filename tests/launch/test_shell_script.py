"""``render --on local``: a job as a shell script for one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from processes import environment, worldsize
from waiting import until


@pytest.mark.slow
def test_a_job_renders_as_a_shell_script(tmp_path):
    """The script contains its recipe, handles any quoting, and when started again resumes its run."""
    folder = tmp_path / "it's here"
    options = ("--max-steps", "3", "--procs", "2", "--out", folder, "--name", "r", "--model.name", SMALL_NETWORK)
    script = worldsize("render", "digits", "--on", "local", *options, cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    bin_folder = Path(sys.executable).parent
    shell = environment(PATH=f"{bin_folder}:{os.environ['PATH']}", TMPDIR=str(tmp_path))
    first, second = (
        subprocess.run(["sh"], input=script.stdout, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=240)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert json.loads((folder / "r" / "result.json").read_text())["steps"] == 3
    assert json.loads((folder / "r" / "environment.json").read_text())["world_size"] == 2
    assert "nothing to do" in second.stdout
    assert not [*tmp_path.glob("tmp.*")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, False), (signal.SIGINT, True)], ids=["TERM", "Ctrl-C"])
def test_a_signal_lets_the_job_save_and_leaves_nothing(tmp_path, number, to_all):
    """SIGTERM reaches the script alone, as from timeout; Ctrl-C reaches all processes of the terminal."""
    options = ("--epochs", "1000", "--out", "runs", "--name", "r", "--model.name", SMALL_NETWORK)
    rendered = worldsize("render", "digits", "--on", "local", *options, cwd=tmp_path)
    (tmp_path / "job.sh").write_text(rendered.stdout)
    shell = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", TMPDIR=str(tmp_path))
    with (tmp_path / "said").open("w") as said:
        script = subprocess.Popen(
            ["sh", "job.sh"], cwd=tmp_path, env=shell, stdout=said, stderr=said, start_new_session=True
        )
    try:
        metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text(), "the run has done a step", running=script)
        os.killpg(script.pid, number) if to_all else script.send_signal(number)
        assert script.wait(240) == 75, (tmp_path / "said").read_text()
        assert [*(tmp_path / "runs" / "r" / "checkpoints").glob("step-*")]
        assert not [*tmp_path.glob("tmp.*")]
        with pytest.raises(ProcessLookupError):
            os.killpg(script.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
