"""Jobs over real ssh connections between hosts with networks of their own: interrupted, cut off, and started wrongly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import SHARED
from processes import environment, free_port, start_python, worldsize
from waiting import until

HOSTS = os.environ.get("WORLDSIZE_HOSTS", "").split()
BED = SHARED / "hosts"
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(len(HOSTS) < 2, reason="no hosts: WORLDSIZE_HOSTS is not set (see CONTRIBUTING)"),
]

# 29 steps per epoch, some 15 of them per second.
SETTINGS = (
    *("--model.name", "shufflenet_v2_x0_5", "--data.train-crop-size", "16", "--data.val-crop-size", "16"),
    *("--data.val-resize-size", "16", "--precision", "fp32", "--device", "cpu", "--parallel.strategy", "bitwise"),
    *("--global-batch", "48", "--micro-batch", "12", "--epochs", "12", "--track.every-seconds", "0"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the same run in one process on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = worldsize("train", "digits", *SETTINGS, "--name", "a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(json.loads((folder / "runs/a/result.json").read_text())["chain"])


class Job:
    """A job on h1 and h2, in a folder that both see."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.name = f"t-{uuid.uuid4().hex[:12]}"
        self.run = cwd / "runs" / self.name
        self.port = str(free_port())

    def words(self, *options: str) -> tuple[str, ...]:
        where = ("--on", "ssh", "--hosts", "h1:1,h2:1", "--ssh-config", os.environ["WORLDSIZE_HOSTS_SSH"])
        return ("train", "digits", *SETTINGS, *where, "--gpus", "0", "--name", self.name, "--port", self.port, *options)

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.launcher = start_python(*self.words(*options), cwd=self.cwd)
        return self.launcher

    def completes(self, fingerprint: str) -> None:
        """The same command resumes it, and it ends with the bits of the undisturbed run."""
        done = worldsize(*self.words(), cwd=self.cwd)
        assert done.returncode == 0, done.stderr
        assert json.loads((self.run / "result.json").read_text())["chain"] == fingerprint

    def history(self, event: str) -> list[dict[str, object]]:
        path = self.run / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def until(self, event: str, count: int = 1) -> None:
        until(lambda: len(self.history(event)) >= count, f"{event} number {count}", running=self.launcher, every=0.1)

    def processes(self) -> list[int]:
        """All processes of the job on its hosts, which are namespaces of this machine."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if self.name.encode() in words and b"--on" not in words:
                found.append(int(path.parent.name))
        return found

    def ends_everywhere(self) -> None:
        until(lambda: not self.processes(), "the job has no processes", 240, every=0.2)


def reachable(host: str) -> bool:
    options = ("-F", os.environ["WORLDSIZE_HOSTS_SSH"], "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    return subprocess.run(["ssh", *options, host, "true"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    for pid in one.processes():
        os.kill(pid, signal.SIGKILL)


def test_two_hosts_compute_the_run_of_one_process_here(job, undisturbed):
    job.completes(undisturbed)
    started = job.history("started")[0]
    assert sorted(started["hosts"]) == ["h1", "h2"]
    log = (job.cwd / "runs/.jobs" / job.name / "log.txt").read_text()
    assert "h1 uses the interface eth0; h2 is reached by eth0" in log
    assert "[0] " in log
    assert "Succeeded" in worldsize("status", job.name, cwd=job.cwd).stdout
    assert job.name in worldsize("jobs", "--on", "ssh", cwd=job.cwd).stdout
    job.ends_everywhere()


def test_ctrl_c_saves_on_every_host_and_the_same_command_resumes(job, undisturbed):
    running = job.start()
    job.until("saved")
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 75, out
    assert "stopped; the state is saved" in out and len(job.history("stopped")) == 1
    job.ends_everywhere()
    job.completes(undisturbed)
    assert job.history("started")[1]["step"] == job.history("stopped")[0]["step"]


def test_worldsize_stop_ends_it_from_another_terminal(job):
    running = job.start()
    job.until("saved")
    second = worldsize(*job.words("--no-preflight"), cwd=job.cwd)
    assert second.returncode == 64 and "already runs: its launcher is process" in second.stderr
    done = worldsize("stop", job.name, cwd=job.cwd)
    assert done.returncode == 0, done.stderr
    running.communicate(timeout=240)
    assert running.returncode == 75 and "Suspended" in worldsize("status", job.name, cwd=job.cwd).stdout
    job.ends_everywhere()


def test_kill_9_of_the_launcher_leaves_nothing_and_loses_no_step(job, undisturbed):
    running = job.start()
    job.until("saved")
    running.kill()
    running.communicate(timeout=240)
    job.ends_everywhere()
    assert len(job.history("stopped")) == 1
    job.completes(undisturbed)


@pytest.mark.slow
def test_a_launcher_that_stands_still_is_taken_for_gone(job):
    running = job.start("--epochs", "1000")  # the run must last until its hosts miss the launcher
    job.until("saved")
    running.send_signal(signal.SIGSTOP)
    try:
        job.ends_everywhere()
    finally:
        running.send_signal(signal.SIGCONT)
    out, _ = running.communicate(timeout=240)
    assert running.returncode == 69 and "lost contact with this launcher" in out
    assert len(job.history("stopped")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["h1", "h2"])
def test_a_host_that_is_cut_off_ends_the_job_on_all(job, undisturbed, cut):
    running = job.start("--grace", "20")
    job.until("saved")
    subprocess.run([BED / "partition", cut], check=True, timeout=60)
    try:
        out, _ = running.communicate(timeout=150)
        assert running.returncode == 69, out
        assert f"the connection to {cut} was lost" in out or f"{cut} does not answer" in out
        job.ends_everywhere()
    finally:
        subprocess.run([BED / "heal", cut], check=True, timeout=60)
    until(lambda: reachable(cut), f"{cut} can be reached again", every=0.5)
    job.completes(undisturbed)


def test_what_is_wrong_with_a_host_is_said_before_anything_starts(job, tmp_path):
    """A host with an unknown key, one that refuses ours, one without worldsize, one that is not there."""
    config = Path(os.environ["WORLDSIZE_HOSTS_SSH"]).read_text()
    unknown, refused = tmp_path / "unknown", tmp_path / "refused"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True, timeout=60)
    refused.write_text(re.sub(r"IdentityFile .*", f"IdentityFile {tmp_path / 'key'}", config))
    unknown.write_text("Host *\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n" + config)
    expected = [
        (("--ssh-config", str(unknown)), "has an unknown or changed host key: connect once with `ssh h1`"),
        (("--python", "/usr/bin/python3"), "cannot run worldsize"),
        (("--ssh-config", str(refused)), "h1 refuses your key or asks for a password: set up a key with `ssh-copy-id h1`"),
        (("--hosts", "h1:1,h77:1"), "h77 is unknown: check --hosts"),
        (("--data.name", "folder", "--data.root", "/no/such"), "/no/such"),
    ]
    for options, message in expected:
        done = worldsize(*job.words(*options), cwd=job.cwd)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    listen = f"s = socket.create_server(('', {job.port})); print('listens', flush=True); time.sleep(600)"
    command = [BED / "exec", "h1", "python3", "-c", f"import socket, time; {listen}"]
    taken = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert taken.stdout.readline() == "listens\n"
        done = worldsize(*job.words(), cwd=job.cwd)
        assert done.returncode == 2 and f"port {job.port} is in use on h1" in done.stderr, done.stderr
    finally:
        taken.kill()
        taken.wait()
    assert not job.run.exists() and job.processes() == []
