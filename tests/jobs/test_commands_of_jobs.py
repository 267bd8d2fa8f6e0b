"""The commands for jobs on any scheduler, without one."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

from worldsize.cli import main
from worldsize.jobs.folder import JobFolder


@pytest.mark.parametrize("command", ["status", "logs", "wait", "stop", "delete"])
def test_a_mistyped_name_is_compared_with_the_jobs_in_the_folder(fails, monkeypatch, command):
    monkeypatch.setenv("KUBECONFIG", "missing")
    assert "no usable kubeconfig" in fails(command, "r50")
    for name in ("r50", "r101"):
        Path(f"runs/.jobs/{name}").mkdir(parents=True)
        Path(f"runs/.jobs/{name}/scheduler").write_text("slurm\n")
    Path("runs/.jobs/r5").mkdir()  # a script that was submitted by hand makes such a folder
    said = fails(command, "r5O")
    assert f"no job 'r5O' in {Path('runs/.jobs')}; existing jobs: r101, r50; did you mean 'r50'?" in said
    assert "no usable kubeconfig" in fails(command, "r5O", "--on", "kubernetes")


def test_a_script_for_this_machine_has_all_that_was_asked_for(fails):
    for options, message in {
        ("--stop-after", "5"): "omit --resume, --allow-changes and --stop-after",
        ("--retries", "-1"): "--retries -1 must be at least 0",
        ("--name", "../x"): "--name '../x' is not a folder name",
    }.items():
        assert message in fails("render", "digits", "--on", "local", *options)


def test_ages_and_host_files_that_cannot_be_read_are_refused(fails):
    assert "--older '99999999999999d'" in fails("delete", "--all", "--older", "99999999999999d", "--on", "ssh")
    Path("hosts").write_bytes(b"\xff\xfe")
    assert "--hostfile hosts is not a text file" in fails("train", "digits", "--on", "ssh", "--hostfile", "hosts", "--print")
    assert "--older is empty" in fails("delete", "--all", "--older", "", "--on", "slurm")
    assert "--out is empty" in fails("render", "digits", "--on", "local", "--out=")
    assert "--data.root is empty" in fails("train", "digits", "--data.root", "")
    assert "--interface is empty" in fails("train", "digits", "--on", "ssh", "--hosts", "a,b", "--interface", "")


def test_a_job_whose_clock_is_ahead_is_new(capsys, tmp_path):
    """As after this machine's clock was set back, or on one whose clock is behind."""
    job = JobFolder(tmp_path, "a")
    job.path.mkdir(parents=True)
    job.scheduler.write_text("ssh\n")
    job.launcher.write_text(f"{socket.gethostname()} 0\n")
    os.utime(job.launcher, (time.time() + 3600, time.time() + 3600))
    assert main(["jobs", "--on", "ssh", "--out", str(tmp_path)]) == 0
    assert re.search(r"\ba +ssh job .* 0s *$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    "where",
    [
        ("ssh", "--hosts", "h1,h2"),
        ("slurm", "--nodes", "2"),
        ("pytorchjob", "--image", "I", "--volume", "v"),
        ("dstack", "--nodes", "2"),
    ],
)
def test_no_gpus_for_a_recipe_that_requires_them_are_refused(fails, where):
    said = fails("render", "digits", "--on", *where, "--gpus", "0", "--device", "cuda")
    assert "--gpus 0 and --device cuda exclude each other" in said
