"""Jobs on a real Slurm: they save, continue, and end as they should, with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import SHARED
from processes import worldsize
from waiting import until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="no Slurm: SLURM_CONF is not set (see CONTRIBUTING)"),
]

BED = SHARED / "slurm"
# 29 steps per epoch, some 15 of them per second.
SETTINGS = (
    *("--model.name", "shufflenet_v2_x0_5", "--data.train-crop-size", "16", "--data.val-crop-size", "16"),
    *("--data.val-resize-size", "16", "--precision", "fp32", "--device", "cpu", "--parallel.strategy", "bitwise"),
    *("--global-batch", "48", "--micro-batch", "12", "--epochs", "12", "--track.every-seconds", "0"),
)
STEPS = 12 * 29


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the same run in one process on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = worldsize("train", "digits", *SETTINGS, "--name", "a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(json.loads((folder / "runs/a/result.json").read_text())["chain"])


class Job:
    """A job with two nodes and one process on each, in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cwd = folder
        self.name = name
        self.run = folder / "runs" / name
        self.files = folder / "runs" / ".jobs" / name

    def worldsize(self, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return worldsize(*words, cwd=self.cwd, timeout=timeout, SLURM_CONF=os.environ["SLURM_CONF"])

    def train(self, *options: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        where = ("--on", "slurm", "--nodes", str(nodes), "--gpus", "0", "--name", self.name)
        return self.worldsize("train", "digits", *SETTINGS, *where, *options)

    def submit(self, *options: str) -> None:
        done = self.train("--detach", *options)
        assert done.returncode == 0, done.stderr

    @property
    def job_id(self) -> str:
        return (self.files / "ids").read_text().split()[-1]

    def history(self, event: str) -> list[dict[str, object]]:
        path = self.run / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def until(self, event: str, count: int = 1) -> None:
        """Wait until the run's history has ``count`` such events."""
        try:
            until(lambda: len(self.history(event)) >= count, f"{event} number {count}", 300, every=0.1)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{(self.files / 'log.txt').read_text()}") from None

    def succeeds(self, fingerprint: str) -> None:
        """It ends by itself, without a lost step, with the bits of the undisturbed run."""
        done = self.worldsize("wait", self.name)
        assert done.returncode == 0, done.stderr + (self.files / "log.txt").read_text()
        assert json.loads((self.run / "result.json").read_text())["chain"] == fingerprint
        starts, stops = self.history("started"), self.history("stopped")
        assert [stop["step"] for stop in stops] == [start["step"] for start in starts[1:]]

    def slurm_state(self) -> str:
        command = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.job_id}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def ranks(self) -> list[int]:
        """The process ids of its ranks on this machine, which has all nodes."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().split(b"\0") if path.exists() else []
            if (
                b"train" in words
                and str(self.name).encode() in words
                and b"srun" not in words[0]
                and b"--autoresume" in words
            ):
                found.append(int(path.parent.name))
        return found


def preempt() -> None:
    """Submit a job that needs both nodes and goes first."""
    subprocess.run(
        ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null", "--wrap", "sleep 2"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    one = Job(tmp_path, f"t-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}")
    yield one
    if (one.files / "ids").exists():
        for job_id in (one.files / "ids").read_text().split():
            subprocess.run(["scancel", job_id], check=False, timeout=60, capture_output=True)
        active = ("RUNNING", "COMPLETING", "PENDING")
        until(lambda: one.slurm_state() not in active, "the job has left Slurm's queue", every=0.5)


def test_a_job_is_submitted_followed_and_is_the_run_of_one_process_here(job, undisturbed):
    done = job.train()
    assert done.returncode == 0, done.stderr
    assert "Submitted Slurm job" in done.stderr and f"{job.name}: Running on n" in done.stderr
    assert "succeeded" in done.stderr and f"Next: worldsize eval runs/{job.name}" in done.stderr
    assert "  0 | epoch" in done.stdout or "  0 |          12" in done.stdout
    job.succeeds(undisturbed)
    hosts = job.history("started")[0]
    assert hosts["world_size"] == 2
    script = job.worldsize(
        "render", "digits", *SETTINGS, *("--on", "slurm", "--nodes", "2", "--gpus", "0", "--name", job.name)
    )
    assert script.stdout == (job.files / "job.sh").read_text()
    again = job.train()
    assert again.returncode == 64 and "has already succeeded" in again.stderr
    assert job.name in job.worldsize("jobs", "--on", "slurm").stdout
    status = job.worldsize("status", job.name).stdout
    assert "Succeeded" in status and f"step {STEPS}" in status and "images/s" in status
    assert "deleted Slurm job" in job.worldsize("delete", job.name).stdout
    assert job.run.exists() and not job.files.exists()


def test_preemption_costs_no_step_and_no_bit(job, undisturbed):
    job.submit("--partition", "low")
    job.until("saved")
    preempt()
    job.until("stopped")
    job.succeeds(undisturbed)
    assert "preempted; the job continues later" in (job.files / "log.txt").read_text()


def test_stop_saves_and_the_same_command_resumes(job, undisturbed):
    job.submit()
    job.until("saved")
    refused = job.train()
    assert refused.returncode == 64 and "already exists and is Running" in refused.stderr
    done = job.worldsize("stop", job.name)
    assert done.returncode == 0 and "is stopped" in done.stdout, done.stderr
    assert len(job.history("stopped")) == 1
    assert "Suspended" in job.worldsize("status", job.name).stdout
    assert job.worldsize("wait", job.name).returncode == 1
    done = job.train()
    assert done.returncode == 0, done.stderr
    assert "start 1" in done.stdout and "resuming after step" in done.stdout
    job.succeeds(undisturbed)


def test_scancel_saves_and_ends_the_job(job, undisturbed):
    job.submit()
    job.until("saved")
    subprocess.run(["scancel", job.job_id], check=True, timeout=60)
    done = job.worldsize("wait", job.name)
    assert done.returncode == 1 and "cancelled" in done.stderr, done.stderr
    assert len(job.history("stopped")) == 1
    until(lambda: job.slurm_state() == "CANCELLED", "Slurm calls the job cancelled", every=0.1)
    job.submit()
    job.succeeds(undisturbed)


def test_a_killed_rank_is_started_again_in_the_same_allocation(job, undisturbed):
    job.submit("--checkpoint.every-steps", "20")
    job.until("saved", 3)
    os.kill(job.ranks()[0], signal.SIGKILL)
    job.until("started", 2)
    done = job.worldsize("wait", job.name)
    assert done.returncode == 0, done.stderr
    assert json.loads((job.run / "result.json").read_text())["chain"] == undisturbed
    assert "starting all ranks again" in (job.files / "log.txt").read_text()
    assert len((job.files / "ids").read_text().split()) == 1


def test_an_error_of_the_user_ends_the_job_with_its_message(job):
    done = job.train("--loss.teacher", "no-such-run")
    assert done.returncode == 1
    assert "exit code 64" in done.stderr and "no-such-run" in done.stderr
    assert (job.files / "exit").read_text() == "64\n"


def test_what_this_slurm_cannot_run_is_refused_before_it_is_submitted(job):
    expected = {
        ("--partition", "hgh"): "--partition hgh does not exist; partitions: high, low; did you mean 'high'?",
        ("--time", "9-0"): "--time 9-0: partition low allows 1-00:00:00",
        ("--memory", "900Gi"): "--memory 900Gi: nodes of partition low have at most 8000 MiB",
        ("--procs", "64"): "--procs 64 needs 64 cores per node; nodes of partition low have at most 4",
        ("--nodes", "9"): "--nodes 9: partition low has",
        ("--constraint", "gold"): "Invalid feature specification",
        ("--gpus", "4", "--procs", "4"): "--gpus 4: nodes of partition low have at most 2; lower --procs",
    }
    any_shape = ("--global-batch", "1152", "--micro-batch", "1")  # which 128, 9 and 8 processes can share
    for options, message in expected.items():
        done = job.train(*any_shape, *options)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (job.files / "ids").exists()


def test_the_probe_runs_on_the_nodes(job, monkeypatch):
    done = job.train("--probe", "--detach")
    assert done.returncode == 0, done.stderr
    assert not (job.files / "probe").exists()
    job.worldsize("stop", job.name)
    done = job.train("--probe", "--python", "/usr/bin/python3")
    assert done.returncode == 2 and "cannot run worldsize: " in done.stderr and "No module named" in done.stderr


def test_two_jobs_at_once_do_not_meet(job, undisturbed, tmp_path):
    """Both begin on the same nodes, which are one machine here: their ports must differ."""
    other = Job(tmp_path, f"{job.name}-b")
    job.submit("--epochs", "2", "--schedule.warmup-epochs", "0")
    other.submit("--epochs", "2", "--schedule.warmup-epochs", "0")
    assert job.job_id != other.job_id
    for one in (job, other):
        done = one.worldsize("wait", one.name)
        assert done.returncode == 0, done.stderr + (one.files / "log.txt").read_text()
    chains = {json.loads((one.run / "result.json").read_text())["chain"] for one in (job, other)}
    assert len(chains) == 1 and undisturbed not in chains


@pytest.mark.slow
@pytest.mark.skipif(not (BED / "crash").exists(), reason="no Slurm whose nodes can be crashed")
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(job, undisturbed):
    job.submit("--checkpoint.every-steps", "20", "--epochs", "40")
    job.until("saved", 3)
    subprocess.run([BED / "crash", "n2"], check=True, timeout=60, capture_output=True)
    try:
        until(lambda: job.slurm_state() != "RUNNING", "Slurm has noticed the lost node", 300, every=1)
    finally:
        subprocess.run([BED / "up"], check=True, timeout=120, capture_output=True)
    job.until("started", 2)
    assert int(str(job.history("started")[1]["step"])) >= int(str(job.history("saved")[2]["step"]))


@pytest.mark.slow
def test_the_time_limit_chains_allocations(job, undisturbed):
    job.submit("--time", "2", "--grace", "50", "--epochs", "1000")
    job.until("stopped")
    job.until("started", 2)
    assert "the time limit is near; the job continues later" in (job.files / "log.txt").read_text()
    assert job.history("started")[1]["step"] == job.history("stopped")[0]["step"]


@pytest.mark.slow
def test_where_slurm_does_not_requeue_a_dependent_job_continues(job, undisturbed):
    job.submit("--partition", "low", "--sbatch=--no-requeue")
    job.until("saved")
    subprocess.run(["scancel", "--signal=TERM", job.job_id], check=True, timeout=60)
    job.until("started", 2)
    assert len((job.files / "ids").read_text().split()) == 2
    job.succeeds(undisturbed)


@pytest.mark.slow
def test_an_array_is_a_run_per_seed(job):
    done = job.train("--array-seeds", "3,4", "--epochs", "3", nodes=1)
    assert done.returncode == 0, done.stderr
    chains = set()
    for seed in (3, 4):
        result = json.loads((job.cwd / "runs" / f"{job.name}-seed{seed}" / "result.json").read_text())
        chains.add(result["chain"])
    assert len(chains) == 2


@pytest.mark.slow
def test_horovod_under_mpirun_saves_when_it_is_preempted_stopped_or_cancelled(job):
    pytest.importorskip("horovod.torch", reason="no Horovod: `make horovod` builds it")
    # Open MPI's mpirun refuses to start as root, which the nodes of this Slurm are.
    allow = "OMPI_ALLOW_RUN_AS_ROOT"
    root = () if os.getuid() else ("--env", f"{allow}=1", "--env", f"{allow}_CONFIRM=1")
    words = ("--parallel.strategy", "horovod", "--checkpoint.every-steps", "10", *root)
    job.submit("--partition", "low", *words)
    job.until("saved")
    preempt()
    job.until("started", 2)
    stopped = job.worldsize("stop", job.name)
    assert stopped.returncode == 0 and "is stopped" in stopped.stdout, stopped.stderr
    job.submit(*words)
    job.until("saved", len(job.history("saved")) + 1)
    subprocess.run(["scancel", job.job_id], check=True, timeout=60)
    assert job.worldsize("wait", job.name).returncode == 1
    done = job.train(*words)
    log = (job.files / "log.txt").read_text()
    assert done.returncode == 0, done.stderr + log
    assert "preempted; the job continues later" in log and "starting all ranks again" not in log
    assert "\x1b" not in log  # no progress bars
    starts, stops = job.history("started"), job.history("stopped")
    assert [start["world_size"] for start in starts] == [2, 2, 2, 2]
    assert [stop["step"] for stop in stops] == [start["step"] for start in starts[1:]]
