"""Jobs on a list of hosts, without any: options, commands, checks, and the process that watches over a host's part."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from processes import free_port
from waiting import all_end, until
from worldsize import __version__, cli
from worldsize.hosts import preflight, probe
from worldsize.hosts.connection import Connection
from worldsize.hosts.scheduler import state_of
from worldsize.hosts.spec import HostsSpec, agent, by_hand, problems, remote
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.spec import Resources
from worldsize.jobs.state import JobState
from worldsize.launch import entry_point, lifeline

SPEC = HostsSpec(
    name="r50",
    recipe="epochs: 1\n",
    nodes=2,
    procs=8,
    resources=Resources(gpus=8),
    hosts=("h1", "me@h2"),
    out=Path("runs"),
    folder=Path("/home/me/my work"),
    python="/venv/bin/python",
    address="h1",
    port=29400,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--hosts", "h1:8,h2:8"), ["h1", "h2"]),
        (("--hosts", "me@h1:8,[fd00::2]:8"), ["me@h1", "[fd00::2]"]),
        (("--hostfile", "hosts"), ["h1", "h2"]),
    ],
)
def test_hosts_are_read_as_written(given, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# two\nh1 slots=8\n\nh2:8\n")
    assert cli.main(["render", "digits", "--on", "ssh", "--micro-batch", "4", *given]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^# On (?!every)(.*), in ", text, re.MULTILINE) == expected
    assert text.count("PET_NPROC_PER_NODE=8") == 2


def test_without_gpus_the_recipe_trains_on_the_cpu(capsys):
    def rendered(*options: str) -> str:
        assert cli.main(["render", "digits", "--on", "ssh", "--micro-batch", "4", "--hosts", "h1:2,h2:2", *options]) == 0
        return capsys.readouterr().out

    assert "device: cpu" in rendered("--gpus", "0")
    assert "device: auto" in rendered() == rendered("--gpus", "2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "--on ssh needs --hosts h1:8,h2:8 or --hostfile FILE"),
        (("--hosts", "h1:8,h2:4"), "every host must have the same number of processes"),
        (("--hosts", "h1:a"), "'h1:a' is not HOST or HOST:PROCESSES"),
        (("--hosts", "h1,-oProxyCommand=x"), "'-oProxyCommand=x' is not HOST"),
        (("--hosts", "h1,h1"), "h1 is listed more than once"),
        (("--hosts", "h1", "--name", "../../runs"), "--name '../../runs' is not a folder name: use letters"),
        (("--hosts", "h1", "--port", "0"), "--port 0: pass a port from 1 to 65535"),
        (("--hostfile", "none"), "--hostfile none cannot be read"),
    ],
)
def test_bad_options_are_named(given, message, fails):
    assert message in fails("train", "digits", "--on", "ssh", *given)


def test_the_remote_command_survives_the_shell():
    spec = replace(SPEC, env=(("NOTE", "it's $HOME"),))
    folder, _, command = remote(spec, 1).partition(" && exec ")
    assert shlex.split(folder) == ["cd", "/home/me/my work"]
    words = shlex.split(command)
    assert words[:6] == [*entry_point.command("/venv/bin/python", "worldsize.launch.lifeline"), "120"]
    assert words[6:] == agent(spec, 1) and "NOTE=it's $HOME" in words
    assert "PET_NODE_RANK=1" in words and "WORLDSIZE_PEERS=h1" in words
    assert "WORLDSIZE_PEERS=h2" in agent(spec, 0)
    assert "WORLDSIZE_PEERS=fd00::2" in agent(replace(SPEC, hosts=("h1", "me@[fd00::2]")), 0)
    assert by_hand(spec) == by_hand(replace(spec))


def test_a_machine_without_ssh_is_told_so(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for options in ((), ("--no-preflight",)):
        assert "ssh is not on this machine" in fails("train", "digits", "--on", "ssh", "--hosts", "h1:1", *options)


@pytest.fixture
def local_ssh(monkeypatch, tmp_path):
    """An ssh that runs the command on this machine."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=os.pathsep)


def test_content_that_fills_the_pipe_arrives_whole_and_nothing_within_it(local_ssh, tmp_path):
    recipe = b"0123456789" * 100_000
    go, received = tmp_path / "go", tmp_path / "received"
    os.mkfifo(go)
    one = Connection("h1", f"read word < {go}; cat > {received}", lambda _: None, None)
    one.send(recipe)
    one.offer(b"beat\n")  # dropped
    one.send(b"stop\n")
    go.write_text("go\n")
    one.finish()
    assert until(lambda: one.poll() is not None, "the command has ended") and one.wait() == 0
    assert received.read_bytes() == recipe + b"stop\n"


def test_a_host_is_asked_about_a_recipe_of_any_length(local_ssh, tmp_path):
    recipe = "data: {name: digits}\nmodel: {name: resnet18}\n" + "# a comment of a network\n" * 8_000
    spec = replace(SPEC, hosts=("localhost",), nodes=1, procs=1, resources=Resources(), recipe=recipe)
    assert preflight.problems(replace(spec, folder=tmp_path, python=sys.executable, port=free_port()), None) == []


@pytest.fixture
def answering_ssh(monkeypatch, tmp_path):
    """answering_ssh(line, ...) puts an ssh on the path that prints these lines."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def write(*lines: str) -> None:
        (tmp_path / "ssh").write_text("#!/bin/sh\n" + "".join(f"echo {shlex.quote(line)}\n" for line in lines))
        (tmp_path / "ssh").chmod(0o755)

    return write


def test_lines_of_the_host_are_not_taken_for_its_answer(answering_ssh):
    answering_ssh("{ welcome }", "{}", "[1]", json.dumps({"version": "0.0.9"}), "{ bye", '{"load": 1}')
    expected = [
        f"{host} has worldsize 0.0.9, this machine has {__version__}: install the same version" for host in SPEC.hosts
    ]
    assert preflight.problems(SPEC, None) == expected
    answering_ssh("{ welcome }")
    assert "h1 cannot run worldsize ({ welcome })" in preflight.problems(SPEC, None)[0]


def test_a_host_is_waited_for_by_a_clock_that_nobody_sets(answering_ssh, monkeypatch):
    answering_ssh(json.dumps({"version": __version__}))
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(**vars(time) | {"time": lambda: next(hours)}))
    facts = preflight._ask(SPEC, 0, None)
    assert facts == {"version": __version__, "asked": 0.0, "answered": 3600.0}


def test_a_job_that_another_machine_started_is_not_taken_for_a_failed_one(fails, monkeypatch, tmp_path):
    """Several login nodes can share the folder of the runs."""
    monkeypatch.chdir(tmp_path)
    job = JobFolder(Path("runs"), "r50")
    job.path.mkdir(parents=True)
    job.scheduler.write_text("ssh\n")
    job.launcher.write_text("login2 4711 123456\n")
    for command in ("stop", "delete"):
        assert f"run worldsize {command} r50 there" in fails(command, "r50")
    assert state_of(job) == JobState("Running", "as far as can be seen from here: it was started from login2")
    (job.path / "exit").write_text("0\n")
    assert cli.main(["delete", "r50"]) == 0 and not job.path.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"out": Path("r\udcff")},
        {"folder": Path("/r\udcff")},
        {"python": "/r\udcff/python"},
        {"hosts": ("r\udcff", "h2"), "address": "r\udcff"},
        {"env": (("A", "r\udcff"),)},
    ],
)
def test_what_is_not_utf8_is_refused(change):
    """It would be printed as something else."""
    assert ["r\\udcff" in one and "is not UTF-8" in one for one in problems(replace(SPEC, **change))] == [True]


def test_strategies_that_need_mpi_are_refused():
    assert ["requires MPI" in problem for problem in problems(replace(SPEC, needs_mpi=True))] == [True]


DATA = {"train": "a" * 64, "train_samples": 10, "val": "b" * 64, "val_samples": 2}
FACT = {
    **{"version": __version__, "torch": "2.12.1", "time": 100.0, "asked": 90.0, "answered": 101.0, "gpus": 8},
    **{"port_free": True, "writable": True, "routes": {"h1": ["eth0", "10.0.0.1"]}, "problem": None, "data": DATA},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.0.9"}, "h2 has worldsize 0.0.9, this machine has"),
        ({"torch": "2.11.0"}, "h2 has torch 2.11.0, h1 has 2.12.1"),
        ({"time": 161.0}, "the clock of h2 is +60 s off"),
        ({"time": 80.0}, "the clock of h2 is -10 s off"),
        ({"gpus": 4}, "h2 has 4 GPUs, the job needs 8"),
        ({"port_free": False}, "port 29400 is in use on h2"),
        ({"writable": False}, "h2 cannot write to runs"),
        ({"routes": {"h1": None}}, "h2 does not reach h1"),
        ({"data": DATA | {"train": "c" * 64}}, "the data of h2 (10 training images, cccccccc) differs from that of h1"),
        ({"problem": "no such folder: /data"}, "h2: no such folder: /data"),
    ],
)
def test_what_differs_between_hosts_is_named(change, message):
    assert list(preflight.compare(SPEC, "h2", FACT, ("h1", FACT))) == []
    found = list(preflight.compare(SPEC, "h2", FACT | change, ("h1", FACT)))
    assert len(found) == 1 and message in found[0]


def test_facts_of_another_version_are_not_compared():
    """They may have other names."""
    other = {"version": "0.0.9", "asked": 0.0, "answered": 1.0}
    assert len(list(preflight.compare(SPEC, "h1", other, ("h1", other)))) == 1
    assert list(preflight.compare(SPEC, "h2", FACT, ("h1", other))) == []


def test_a_host_describes_itself(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        recipe = "data: {name: digits}\nmodel: {name: resnet18}\n"
        asked = {"out": str(tmp_path), "port": port, "gpus": False, "recipe": recipe, "peers": ["localhost", "no.such.host"]}
        fact = probe.describe(asked)
    assert fact["version"] == __version__ and fact["writable"] and not fact["port_free"]
    assert fact["routes"]["localhost"][0] == "lo" and fact["routes"]["no.such.host"] is None
    assert fact["data"]["train_samples"] == 1437 and fact["problem"] is None
    missing = probe.describe(
        asked | {"port": 0, "recipe": "data: {name: folder, root: /no/such}\nmodel: {name: resnet18}\n"}
    )
    assert missing["port_free"] and "/no/such" in missing["problem"]


# A command with a child of its own that ignores SIGTERM; it takes a moment to save when it is stopped.
CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                         start_new_session=True)
def stop(*_):
    time.sleep(SAVING)
    print("saved", open(sys.argv[1]).read(), flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("started", child.pid, flush=True)
while True: time.sleep(1)
"""


# With another limit of silence.
LIFELINE = "import sys; from worldsize.launch import lifeline as l; l.SILENCE_S = {}; sys.exit(l.main(sys.argv[1:]))"


class Lifeline:
    def __init__(self, saving: float = 0.5, grace: float = 600, silence: float = 600) -> None:
        words = [sys.executable, "-c", CHILD.replace("SAVING", str(saving)), "{recipe}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIFELINE.format(silence), str(grace), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0,
        )  # fmt: skip
        self.send("recipe 6\nabc\nde")
        self.child = int(self.process.stdout.readline().split()[1])

    def send(self, content: str) -> None:
        os.write(self.process.stdin.fileno(), content.encode())

    def ends(self, code: int, *said: str, saves: bool = True) -> None:
        """It exits with the code, the command has saved the recipe, and nothing is left."""
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == code
        assert ("saved abc\nde" in out) == saves
        assert all(words in err for words in said), err
        all_end([self.child])


def test_a_stop_lets_the_command_save():
    one = Lifeline()
    one.send("beat\nstop\n")
    one.ends(143)


def test_a_launcher_that_is_gone_stops_the_command():
    one = Lifeline()
    one.process.stdin.close()
    one.process.stdin = None
    one.ends(143, "the launcher is gone; saving and stopping")


def test_a_signal_stops_the_command():
    one = Lifeline()
    one.process.send_signal(signal.SIGHUP)
    one.ends(143)


def test_a_command_that_does_not_end_is_killed():
    one = Lifeline(saving=600, grace=1)
    one.send("stop\n")
    one.ends(128 + signal.SIGKILL, "killed", saves=False)


def test_a_launcher_that_is_silent_for_too_long_is_gone():
    one = Lifeline(silence=2)
    heard = time.monotonic()
    one.send("beat\n")
    one.process.wait(240)  # its input stays open
    assert time.monotonic() - heard > 2
    one.ends(143, "the launcher was silent for 2 s; saving and stopping")


def test_a_line_of_the_launcher_ends_its_silence(monkeypatch):
    now = iter([100.0, 120.0])
    monkeypatch.setattr(lifeline, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(lifeline, "select", SimpleNamespace(select=lambda *_: ([0], [], [])))
    monkeypatch.setattr(lifeline, "os", SimpleNamespace(read=lambda *_: b"beat\n"))
    source = lifeline._Input()
    assert source.lines(0.2) == ["beat"] and source.heard == 120.0
