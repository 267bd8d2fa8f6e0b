"""Commands that are the first process (PID 1) of a container: the kernel drops signals that they do not handle."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paths import ROOT
from processes import environment, free_port, workers
from waiting import until
from worldsize.launch import entry_point

# A library that is still being imported: it says so, and does not return.
IMPORTING = "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
PLACE = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
AGENT = ("agent", "--id", "a", "--", "train", "digits", "--name", "a")
Start = Callable[..., "tuple[subprocess.Popen[str], int]"]


@pytest.fixture
def first(tmp_path) -> Iterator[Start]:
    """first(*command, **variables) starts it as the first process of a namespace; returns its parent and its process id."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare --pid --mount-proc` and the right to use it")
    started = []

    def first(*command: str, **variables: str) -> tuple[subprocess.Popen[str], int]:
        parent = subprocess.Popen(
            [*UNSHARE, *command],
            cwd=tmp_path,
            env=environment(PYTHONUNBUFFERED="1", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(parent)
        return parent, until(lambda: workers(parent.pid), "the command has started", running=parent)[0]

    yield first
    for parent in started:
        parent.kill()
        parent.communicate()


def stand_in(folder: Path, module: str) -> dict[str, str]:
    """The variables with which ``import module`` does not return."""
    (folder / "libraries").mkdir()
    (folder / "libraries" / f"{module}.py").write_text(IMPORTING)
    path = [str(folder / "libraries"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("module", "words"),
    [("torch", AGENT), ("tyro", AGENT), ("tyro", ("data", "fetch", "imagenet", "--to", "x")), ("tyro", ("train", "digits"))],
)
def test_a_signal_during_the_first_imports_ends_the_command(first, tmp_path, module, words, number):
    variables = stand_in(tmp_path, module) | PLACE | {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    parent, pid = first(*entry_point.command(sys.executable), *words, **variables)
    assert parent.stdout.readline() == "importing\n"
    os.kill(pid, number)
    assert parent.wait(timeout=60) == 128 + number


def test_an_agent_that_waits_for_the_others_leaves_when_it_is_asked_to(first):
    port = free_port()
    parent, pid = first(*entry_point.command(sys.executable), *AGENT, PET_RDZV_ENDPOINT=f"127.0.0.1:{port}", **PLACE)
    until(lambda: connects(port), "the agent waits for the other node", running=parent)
    os.kill(pid, signal.SIGTERM)
    assert parent.wait(timeout=240) == 143


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_signal_that_was_blocked_when_the_command_started_ends_it(first, tmp_path):
    blocks = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
    sends = "os.kill(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
    command = [*entry_point.command(sys.executable), *AGENT]
    parent, _ = first(sys.executable, "-c", blocks + sends, *command, **stand_in(tmp_path, "tyro"))
    assert parent.wait(timeout=60) == 143


def test_a_worker_of_an_mpijob_leaves_while_it_makes_its_host_key(first, tmp_path):
    (tmp_path / "bin").mkdir()
    keygen = tmp_path / "bin/ssh-keygen"
    keygen.write_text(f"#!{sys.executable}\nprint('making a key', flush=True)\nopen({str(tmp_path / 'go')!r}).read()\n")
    keygen.chmod(0o755)
    os.mkfifo(tmp_path / "go")
    path = f"{keygen.parent}:{os.environ['PATH']}"
    parent, pid = first("sh", str(ROOT / "docker/worldsize-sshd"), PATH=path, TMPDIR=str(tmp_path))
    assert parent.stdout.readline() == "making a key\n"
    os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").write_text("")  # returns when the key is being read
    assert parent.wait(timeout=60) == 0
    assert not list(tmp_path.glob("worldsize-sshd.*"))
