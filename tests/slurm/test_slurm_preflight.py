"""What is checked before a job is submitted, with programs that stand in for Slurm's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from worldsize.errors import UserError
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.spec import Resources
from worldsize.slurm import api, preflight, script
from worldsize.slurm.spec import SlurmSpec

PLAIN = SlurmSpec(name="r50", recipe="epochs: 1\n", nodes=2, procs=2, out=Path("runs"), python="python", partition="gpu")
# In the format of api.partitions: name, up, time limit, nodes, cores, memory (MiB), generic resources.
SINFO = "cpu*|up|infinite|4|64|256000|(null)\ngpu|up|4:00:00|2|32|512000|gpu:2\nbig|down|2-00:00:00|9|32|512000|gpu:4"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"partition": "gpu,cpu", "nodes": 4}, None),
        ({"partition": "gpu,cpu", "nodes": 5}, "--nodes 5: partitions cpu, gpu have 4"),
        ({"partition": "gpu,gpo"}, "--partition gpo does not exist; partitions: big, cpu, gpu; did you mean 'gpu'?"),
        ({"partition": "big"}, "partition big is down"),
        ({"partition": "gpu,big", "time": "5:00:00"}, None),
        ({"time": "5:00:00"}, "--time 5:00:00: partition gpu allows 4:00:00"),
        ({"time": "0"}, "--time 0: partition gpu allows 4:00:00"),
        ({"partition": None, "time": "0"}, None),
        ({"partition": "gpu,cpu", "resources": Resources(gpus=4)}, "--gpus 4: nodes of partitions cpu, gpu have at most 2"),
    ],
)
def test_partitions_are_compared_with_the_job(stand_in, tmp_path, change, problem):
    stand_in("sinfo", f'[[ " $* " = *" --all "* ]] || exit 1; echo "{SINFO}"')
    stand_in("sbatch", "")
    (tmp_path / "job.sh").write_text("")
    found = preflight.problems(replace(PLAIN, **change), tmp_path / "job.sh")
    assert [problem in one for one in found] == [True] if problem else not found


def test_variables_of_sbatch_do_not_override_the_job(stand_in, tmp_path, monkeypatch):
    """sbatch prefers its variables to the lines of the script. Those for what the script leaves open stay."""
    stand_in("sbatch", "env | grep ^SBATCH_ >> variables; echo 7")
    monkeypatch.chdir(tmp_path)
    for name in ("PARTITION", "TIMELIMIT", "SIGNAL", "NO_REQUEUE", "OPEN_MODE", "JOB_NAME", "ACCOUNT", "MEM_PER_CPU"):
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    Path("job.sh").write_text(script.render(replace(PLAIN, time="4:00:00", resources=Resources(memory="4Gi"))))
    assert api.submit(Path("job.sh")) == "7" and api.would_accept(Path("job.sh")) is None
    assert Path("variables").read_text() == "SBATCH_ACCOUNT=x\n" * 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"setup": ("export PATH=$PWD/env:$PATH", "echo ready")}, None),
        ({}, "cannot run worldsize: bash: line 1: of-setup: command not found"),
        ({"container": "image"}, None),
    ],
)
def test_the_probe_runs_what_the_job_would_run(stand_in, tmp_path, monkeypatch, change, problem):
    """With a stand-in for srun, which runs the command here."""
    stand_in("srun", 'until [ "$1" = bash ]; do shift; done; "$@" | sed "s/^/0: /"')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/of-setup").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "env/of-setup").chmod(0o755)
    found = preflight.probe(replace(PLAIN, python="of-setup", **change), JobFolder(Path("runs"), "r50"))
    assert [problem in one for one in found] == [True] if problem else not found


def test_a_folder_that_cannot_be_written_is_named_before_the_probe(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"cannot write .*/file/x/\.jobs/r50: Not a directory; choose another folder with --out"
    ):
        preflight.probe(PLAIN, JobFolder(tmp_path / "file" / "x", "r50"))


def test_the_probe_asks_for_the_nodes_of_the_job(stand_in, tmp_path, monkeypatch):
    """A line of the site's own, such as from TaskProlog, comes before the node's answer."""
    stand_in("srun", 'echo "$@" > asked; until [ "$1" = bash ]; do shift; done; { echo hello; "$@"; } | sed "s/^/0: /"')
    monkeypatch.chdir(tmp_path)
    extra = ("--reservation=r1", "--exclude=n7", "--mail-type=END")
    spec = replace(PLAIN, python=sys.executable, qos="high", constraint="a&b", account="lab", extra=extra)
    assert not preflight.probe(spec, JobFolder(Path("runs"), "r50"))
    asked = Path("asked").read_text().split(" bash ")[0].split()
    wanted = ["--partition=gpu", "--account=lab", "--qos=high", "--constraint=a&b", "--reservation=r1", "--exclude=n7"]
    assert asked[asked.index("--immediate=60") + 1 :] == wanted
    stand_in("srun", "echo 0: hello")
    assert "did not answer the probe, but printed: hello" in preflight.probe(spec, JobFolder(Path("runs"), "r50"))[0]
