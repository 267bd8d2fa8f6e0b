"""``render --on local``: a job as a shell script for one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from processes import environment, worldsize


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
