"""Ctrl-C while a job is being submitted: nothing was submitted, or the job runs; it says which. Nothing is half done."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

from fake_cluster import KeepingCluster
from worldsize import cli
from worldsize.cluster.jobs import manage
from worldsize.hosts import preflight
from worldsize.slurm import commands as slurm

FAKE_CLUSTER = KeepingCluster
POD = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "data", "--name", "r50", "--gpus", "0")
TRAIN = ("train", "digits", *POD, "--no-preflight", "--namespace", "team")
FETCH = ("cluster", "data", "fetch", "folder", *POD[2:6], "--from", "https://example.org/a.zip", "--namespace", "team")
SLURM = ("train", "digits", "--on", "slurm", "--name", "a", "--gpus", "0", "--no-preflight")


def ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def ours(fake_cluster):
    own = {*KeepingCluster().objects}
    return {path.split("/")[-2]: one for path, one in fake_cluster.objects.items() if path not in own}


def at(fake_cluster, monkeypatch, method, plural):
    """Ctrl-C arrives after the server has done the first such request, and before it answers."""
    answer, left = fake_cluster.answer, [1]

    def answers(requested, path, query, body):
        answered = answer(requested, path, query, body)
        if requested == method and f"/{plural}" in path and "dryRun" not in query and left:
            left.pop()
            ctrl_c()
        return answered

    monkeypatch.setattr(fake_cluster, "answer", answers)


@pytest.mark.parametrize(
    ("method", "plural"),
    [("GET", "pytorchjobs"), ("POST", "configmaps"), ("POST", "networkpolicies"), ("POST", "pytorchjobs")],
)
def test_before_the_job_is_known_to_exist_nothing_is_left_and_that_is_said(
    fake_cluster, monkeypatch, capsys, method, plural
):
    at(fake_cluster, monkeypatch, method, plural)
    assert cli.main(TRAIN) == 130
    assert capsys.readouterr().err == "worldsize: interrupted; nothing was submitted\n"
    assert ours(fake_cluster) == {}


@pytest.mark.parametrize("plural", ["configmaps", "networkpolicies"])
def test_of_a_job_that_exists_all_objects_are_made_its_own_before_it_is_left(fake_cluster, monkeypatch, capsys, plural):
    at(fake_cluster, monkeypatch, "PATCH", plural)
    assert cli.main(TRAIN) == 130
    err = capsys.readouterr().err
    assert "Created PyTorchJob r50" in err and "Detached; r50 keeps running. Follow it with: worldsize logs r50" in err
    left = ours(fake_cluster)
    job = left.pop("pytorchjobs")
    owners = [[owner["uid"] for owner in one["metadata"]["ownerReferences"]] for one in left.values()]
    assert owners == [[job["metadata"]["uid"]]] * 2


def test_between_submitting_and_following_a_job_it_is_left_running(fake_cluster, monkeypatch, capsys):
    submit = manage.submit

    def submitted(*arguments):
        held = submit(*arguments)
        at(fake_cluster, monkeypatch, "GET", "pytorchjobs")
        return held

    monkeypatch.setattr(manage, "submit", submitted)
    assert cli.main(TRAIN) == 130
    assert "Detached; r50 keeps running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "plural", "said"),
    [
        ("GET", "persistentvolumeclaims", "worldsize: interrupted; nothing was submitted"),
        ("POST", "jobs", "Detached; fetch-folder keeps running; run the same command again to follow it"),
    ],
)
def test_a_fetch_is_submitted_or_not_too(fake_cluster, monkeypatch, capsys, method, plural, said):
    at(fake_cluster, monkeypatch, method, plural)
    assert cli.main([*FETCH]) == 130
    assert capsys.readouterr().err == f"{said}\n"
    assert [*ours(fake_cluster)] == (["jobs"] if "Detached" in said else [])


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An sbatch that submits the job as number 7, but before that sends Ctrl-C to the foreground, as a terminal does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    sends = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nprint(7, os.getsid(0) == os.getpid())\n"
    (tmp_path / "bin/sbatch").write_text(f"#!{sys.executable}\n{sends}")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.usefixtures("sbatch")
def test_a_job_that_slurm_gets_is_recorded_before_it_is_left(tmp_path, capsys):
    assert cli.main(SLURM) == 130
    assert "Detached; a keeps running. Follow it with: worldsize logs a" in capsys.readouterr().err
    # sbatch has a session of its own, so the terminal's Ctrl-C does not end it.
    assert "7 True" in (tmp_path / "runs/.jobs/a/ids").read_text()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "name", "words", "done"),
    [
        (slurm, "_passes", ("train", "digits", "--on", "slurm", "--gpus", "0"), "submitted"),
        (preflight, "problems", ("train", "digits", "--on", "ssh", "--hosts", "a:1"), "started"),
    ],
)
def test_other_schedulers_say_so_too(tmp_path, monkeypatch, capsys, module, name, words, done):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, name, interrupted)
    assert cli.main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"worldsize: interrupted; nothing was {done}"


def test_while_a_command_is_being_loaded_it_has_done_nothing(monkeypatch, capsys):
    monkeypatch.setattr("worldsize.cli.command.load", interrupted)
    assert cli.main(["jobs"]) == 130
    assert capsys.readouterr().err == "worldsize: interrupted; nothing was done\n"
