"""What the batch script takes for a new checkpoint."""

from __future__ import annotations

import subprocess

from worldsize.cli import main


def test_a_folder_that_a_killed_process_left_is_no_new_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["render", "digits", "--on", "slurm", "--name", "run", "--time", "1:00:00"]) == 0
    (function,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint()")]
    for name in ("step-99999999", "step-100000000", "step-100000020.tmp-0123456789ab-1"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    script = f"out={tmp_path} run=run; {function}; checkpoint"
    assert subprocess.check_output(["bash", "-c", script], text=True) == "step-100000000\n"
