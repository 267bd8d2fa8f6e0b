"""``wait_for_hosts``, which an MPI launcher runs before mpirun: waits until every worker is reachable."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from processes import free_port
from worldsize.errors import PeersUnreachable, UserError
from worldsize.launch import entry_point, wait_for_hosts


def hostfile(folder: Path, *names: str) -> Path:
    """A hostfile as mpi-operator writes it."""
    file = folder / "hostfile"
    file.write_text("".join(f"{name} slots=8\n" for name in names))
    return file


@pytest.fixture
def launcher(tmp_path):
    """launcher(port, *command) runs the command when 127.0.0.1 and localhost accept connections on the port."""
    started = []

    def launcher(port, *command):
        file = hostfile(tmp_path, "127.0.0.1", "localhost")
        words = [*entry_point.command(sys.executable, "worldsize.launch.wait_for_hosts"), str(file), str(port), *command]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield launcher
    for process in started:
        process.kill()
        process.communicate()


def test_the_command_begins_when_the_last_host_is_there_and_gets_its_place(launcher):
    port = free_port()
    process = launcher(port, "sh", "-c", "echo $$ is here; exit 3")
    assert process.stderr.readline() == f"worldsize: waiting for 127.0.0.1:{port} ([Errno 111] Connection refused)\n"
    with socket.create_server(("127.0.0.1", port)):
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (3, f"{process.pid} is here\n", "")


def test_a_launcher_that_waits_leaves_when_it_is_asked_to(launcher):
    process = launcher(free_port(), "true")
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 143


def test_an_unreachable_host_and_a_missing_hostfile_are_reported(tmp_path):
    with pytest.raises(
        PeersUnreachable, match=r"worker-1\.invalid:2222 was not reachable within 0 s: .*(not known|resolution)"
    ):
        wait_for_hosts.wait_for(["worker-1.invalid"], 2222, timeout_s=0)
    names = ["a-worker-0.a.ml.svc", "a-worker-1.a.ml.svc"]
    assert wait_for_hosts.read_hosts(hostfile(tmp_path, *names)) == names
    with pytest.raises(UserError, match="hostfile cannot be read"):
        wait_for_hosts.read_hosts(tmp_path / "none" / "hostfile")
