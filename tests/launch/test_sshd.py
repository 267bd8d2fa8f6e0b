"""The workers' start script with a real sshd: sessions, and SIGTERM, after which the ranks can save."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import pytest

from paths import ROOT
from processes import free_port
from waiting import until

needs_sshd = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs Debian's openssh-server")

# A rank with a child process: records whether the child is still alive, once the test lets it save.
RANK = """#!/bin/sh
sleep 1000 &
trap 'until [ -e may-save ]; do sleep 0.05; done; kill -0 $! && echo "child lives" >saved; kill $!; exit 75' TERM
echo >started
while :; do wait $!; done
"""


class Worker:
    """A minimal worker container: its user, its keys, its start script."""

    def __init__(self, folder: Path) -> None:
        self.home, self.port, self.log = folder / "home", free_port(), folder / "log"
        (self.home / ".ssh").mkdir(parents=True)
        folder.chmod(0o755)
        # As the operator mounts them: readable for everyone, and the folder also writable.
        (self.home / ".ssh").chmod(0o777)
        self.home.chmod(0o777)
        key = self.home / ".ssh/id_rsa"
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(key)], check=True, timeout=60)
        key.with_suffix(".pub").rename(self.home / ".ssh/authorized_keys")
        for name in ("worldsize-sshd", "sshd_config", "ssh_config"):
            shutil.copy(ROOT / "docker" / name, folder)
        (self.home / "rank.sh").write_text(RANK)
        (self.home / "rank.sh").chmod(0o755)
        self.folder = folder
        # A `sleep` that counts how often the start script waits.
        (folder / "bin").mkdir()
        (folder / "bin").chmod(0o777)
        (folder / "bin/sleep").write_text('#!/bin/sh\necho >>"${0%/*}/waits"\nexec /bin/sleep "$@"\n')
        (folder / "bin/sleep").chmod(0o755)
        self.user, self.enter = getuser(), []
        if os.getuid() == 0:
            self.user, self.enter = "worldsize", self._as_another_user()
            key.chmod(0o600)
            os.chown(key, 1000, 1000)

    def _as_another_user(self) -> list[str]:
        """Command prefix that drops to uid 1000 without any privileges, under the user name of the container image."""
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if ":1000:" not in line]
        (self.folder / "passwd").write_text("\n".join([f"worldsize:x:1000:1000::{self.home}:/bin/sh", *others, ""]))
        drop = "setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --bounding-set -all --inh-caps -all"
        script = f'mount --bind {self.folder}/passwd /etc/passwd && cd {self.home} && exec {drop} "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh"]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The start script; its output goes to ``log``."""
        keys = f"AuthorizedKeysFile={self.home}/.ssh/authorized_keys"
        place = ["-f", f"{self.folder}/sshd_config", "-p", str(self.port), "-o", "ListenAddress=127.0.0.1", "-o", keys]
        command = [*self.enter, str(self.folder / "worldsize-sshd"), *place, *arguments]
        path = f"/opt/worldsize/bin:{self.folder}/bin:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "TMPDIR": str(self.home)}
        return subprocess.Popen(command, env=environment, stdout=self.log.open("wb"), stderr=subprocess.STDOUT)

    def ssh(self, command: str) -> list[str]:
        """The client's command line."""
        key = ["-i", f"{self.home}/.ssh/id_rsa", "-o", "ConnectionAttempts=10"]
        place = ["-F", f"{self.folder}/ssh_config", "-p", str(self.port), f"{self.user}@127.0.0.1"]
        return [*self.enter, "ssh", *key, *place, command]

    def connects(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def worker() -> Iterator[Worker]:
    # pytest's temporary folders are not accessible to other users.
    with tempfile.TemporaryDirectory(prefix="worldsize-test-") as folder:
        worker = Worker(Path(folder))
        if worker.enter and subprocess.run([*worker.enter, "true"], capture_output=True, check=False).returncode:
            pytest.skip("cannot run as another user: mounting is not permitted")
        yield worker


@pytest.fixture
def sshd(worker: Worker) -> Iterator[subprocess.Popen[bytes]]:
    process = worker.start()
    try:
        until(lambda: worker.connects() or process.poll() is not None, "sshd listens")
        assert process.poll() is None, worker.log.read_text()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(240)


@needs_sshd
def test_a_session_finds_the_environment(worker: Worker, sshd: subprocess.Popen[bytes]):
    session = subprocess.run(
        worker.ssh("echo $PATH; id -u; exit 7"), capture_output=True, text=True, timeout=60, check=False
    )
    assert session.returncode == 7, session.stderr
    path, user = session.stdout.splitlines()
    assert path.startswith("/opt/worldsize/bin:")
    assert user == str(os.getuid() or 1000)
    # Neither the session nor the port probes logged anything.
    assert session.stderr == worker.log.read_text() == ""


@needs_sshd
def test_sigterm_reaches_the_rank_and_nothing_ends_before_it(worker: Worker, sshd: subprocess.Popen[bytes]):
    command = (
        f"cd {worker.home}; OMPI_COMM_WORLD_RANK=3 ./rank.sh; echo the rank ended with $?; sleep 0.3; echo >reported; exit 9"
    )
    session = subprocess.Popen(worker.ssh(command), stdout=subprocess.PIPE, text=True)
    # A rank of another job of the same user, on this machine but not in this container.
    stranger = subprocess.Popen([*worker.enter, "sleep", "1000"], env=os.environ | {"OMPI_COMM_WORLD_RANK": "0"})
    try:
        until((worker.home / "started").exists, "the rank has started")
        sshd.send_signal(signal.SIGTERM)
        until(lambda: not worker.connects(), "sshd has stopped listening")
        assert sshd.poll() is None
        (worker.home / "may-save").touch()
        assert sshd.wait(120) == 0
        assert (worker.home / "saved").read_text() == "child lives\n"
        assert (worker.folder / "bin/waits").exists()
        # The session (which stands in for Open MPI's daemon) could report its rank's exit code.
        assert (worker.home / "reported").exists()
        assert session.communicate(timeout=120)[0] == "the rank ended with 75\n"
        assert session.returncode == 9
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        session.kill()
    # Once to each process. A child that outlives its rank for a moment may be signaled as well.
    signaled = re.findall(r"forwarding SIGTERM to process (\d+)", worker.log.read_text())
    assert signaled
    assert len(set(signaled)) == len(signaled)
    assert list(worker.home.glob("worldsize-sshd*")) == []


@needs_sshd
def test_without_ranks_it_leaves_at_once(worker: Worker, sshd: subprocess.Popen[bytes]):
    sshd.send_signal(signal.SIGTERM)
    assert sshd.wait(120) == 0
    assert not (worker.folder / "bin/waits").exists()


@needs_sshd
def test_an_sshd_that_cannot_start_is_no_success(worker: Worker):
    with socket.create_server(("127.0.0.1", worker.port)):
        assert worker.start().wait(120) == 255
    assert worker.start("-t").wait(120) == 0
    assert list(worker.home.glob("worldsize-sshd*")) == []
