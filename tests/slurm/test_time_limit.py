"""Whether a job that was stopped continues, with programs that stand in for Slurm's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from worldsize.slurm import script
from worldsize.slurm.spec import SlurmSpec

SOON = "date -d 'now + 60 seconds' +%FT%T"
LATE = "date -d 'now + 9 hours' +%FT%T"


@pytest.mark.parametrize(
    ("chain", "squeue", "requeues", "message"),
    [
        (True, SOON, True, "the time limit is near; the job continues later"),
        (False, SOON, False, "the time limit is near; submit the job again"),
        (False, LATE, True, "preempted; the job continues later"),
        (False, "echo NONE", True, "preempted; the job continues later"),  # squeue's word for no limit
        (True, "exit 1", True, "preempted; the job continues later"),
        (False, "exit 1", False, "preempted, or the time limit is near: Slurm did not say when; submit the job again"),
    ],
)
def test_only_a_job_that_may_continue_is_requeued(stand_in, tmp_path, chain, squeue, requeues, message):
    """Also where the user sees times in another format, which sbatch hands to the job."""
    stand_in("srun", "exit 75")  # a rank that has saved
    stand_in("scontrol", 'echo "$@" >> asked; echo "Job is pending execution"; exit 1')
    stand_in("squeue", f'[ "$SLURM_TIME_FORMAT" = standard ] || {{ echo "Tomorr 08:35"; exit; }}; {squeue}')
    spec = SlurmSpec(name="r50", recipe="epochs: 1\n", out=Path("runs"), python="python", chain=chain)
    (tmp_path / "job.sh").write_text(script.render(spec))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TIME_FORMAT": "relative"}
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 75 and message in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "asked").exists() == requeues
