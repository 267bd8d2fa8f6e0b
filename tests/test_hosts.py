"""What an MPIJob's launcher runs before mpirun: it waits until every worker can be reached."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from processes import free_port
from worldsize.errors import Unmet, UserError
from worldsize.launch import hosts


def hostfile(folder: Path, *names: str) -> Path:
    """One as mpi-operator writes it."""
    file = folder / "hostfile"
    file.write_text("".join(f"{name} slots=8\n" for name in names))
    return file


@pytest.fixture
def launcher(tmp_path):
    """launcher(port, *command) runs the command when 127.0.0.1 and localhost take connections there."""
    begun = []

    def launcher(port, *command):
        file = hostfile(tmp_path, "127.0.0.1", "localhost")
        words = [sys.executable, "-m", "worldsize.launch.hosts", str(file), str(port), *command]
        begun.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield launcher
    for process in begun:
        process.kill()
        process.communicate()


def test_the_command_begins_when_the_last_host_is_there_and_gets_its_place(launcher):
    port = free_port()
    process = launcher(port, "sh", "-c", "echo $$ is here; exit 3")
    assert process.stderr.readline() == f"worldsize: waiting for 127.0.0.1:{port} ([Errno 111] Connection refused)\n"
    with socket.create_server(("127.0.0.1", port)):
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (3, f"{process.pid} is here\n", "")


def test_a_launcher_that_waits_leaves_when_it_is_asked_to(launcher):
    process = launcher(free_port(), "true")
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


def test_a_host_without_a_name_or_a_hostfile_that_is_not_there_is_said(tmp_path):
    with pytest.raises(Unmet, match=r"worker-1\.invalid:2222 was not there within 0 s: .*(not known|resolution)"):
        hosts.wait_for(["worker-1.invalid"], 2222, patience_s=0)
    assert hosts.named_in(hostfile(tmp_path, "a-worker-0.a.ml.svc", "a-worker-1.a.ml.svc"))[1] == "a-worker-1.a.ml.svc"
    with pytest.raises(UserError, match="hostfile cannot be read"):
        hosts.named_in(tmp_path / "none" / "hostfile")
