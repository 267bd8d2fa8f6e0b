"""Multi-node jobs with one agent per node: after a node is lost, moved or stopped, the nodes reconnect and lose nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import Forked, free_port, identical, losses, start, weights, worldsize
from waiting import until
from worldsize.distributed.rank import LOCAL_LAUNCH
from worldsize.errors import PERMANENT, NoProgress, UserError
from worldsize.launch import agent
from worldsize.launch.local import Outcome
from worldsize.runs import run_folder

SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "432", "--data.classes", "10"),
    *("--model.name", "shufflenet_v2_x0_5", "--epochs", "3", "--global-batch", "48", "--micro-batch", "6"),
    *("--precision", "fp32", "--deterministic", "--track.every-seconds", "0", "--optimizer.lr", "0.01"),
)


class Job:
    """Two nodes on this machine, with one process each."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.port = str(free_port())
        self.nodes: list[Forked] = [self.start(0), self.start(1)]

    def start(self, rank: int, *options: str) -> Forked:
        place = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        place |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port, "WORLDSIZE_ADDRESS": "127.0.0.1"}
        train = ("train", "digits", *SETTINGS, "--name", "a", "--autoresume", *options)
        return start("agent", "--id", "job", "--", *train, cwd=self.cwd, PYTHONUNBUFFERED="1", **place)

    @property
    def folder(self) -> Path:
        return self.cwd / "runs" / "a"

    def until(self, step: int) -> None:
        """Wait until the run has completed ``step``."""
        metrics = self.folder / "metrics.jsonl"

        def reached() -> bool:
            assert all(node.poll() is None for node in self.nodes), f"a node ended before step {step}"
            return metrics.exists() and metrics.read_text().count('"step", ') >= step

        until(reached, f"the run has reached step {step}")

    def end(self) -> tuple[list[int], str]:
        """The exit codes, and everything that was printed."""
        outputs = [node.communicate(timeout=180)[0] for node in self.nodes]
        return [node.returncode for node in self.nodes], "\n".join(outputs)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            node.communicate()


@pytest.fixture
def job(tmp_path):
    running = Job(tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def unbroken(ranks) -> Path:
    ranks(2).run("train", "digits", *SETTINGS, "--name", "unbroken")
    return ranks.cwd / "runs" / "unbroken"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [1, 0])
def test_a_node_that_must_leave_and_comes_back_costs_no_step(job, unbroken, leaves):
    job.until(7)
    job.nodes[leaves].send_signal(signal.SIGTERM)
    output = job.nodes[leaves].communicate(timeout=240)[0]
    assert job.nodes[leaves].returncode == agent.RETRYABLE, output
    job.nodes[leaves] = job.start(leaves)
    codes, output = job.end()
    assert codes == [0, 0], output
    assert identical(weights(job.folder), weights(unbroken))
    assert losses(job.folder) == losses(unbroken)
    assert re.search(r"^\[0\] .*resuming after step \d+", output, re.MULTILINE), output


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again(job, unbroken):
    job.until(5)
    os.kill(children(job.nodes[1].pid)[0], signal.SIGKILL)
    codes, output = job.end()
    assert codes == [0, 0], output
    assert identical(weights(job.folder), weights(unbroken))


@pytest.mark.slow
def test_what_must_not_be_retried_ends_all_nodes_once(tmp_path):
    ranks = Job(tmp_path)
    try:
        codes, output = ranks.end()
        assert codes == [0, 0], output
        ranks.port = str(free_port())
        ranks.nodes = [ranks.start(rank, "--optimizer.lr", "0.02", "--max-steps", "50") for rank in (0, 1)]
        codes, output = ranks.end()
        assert codes == [64, 64], output
        assert output.count("optimizer.lr: was 0.01, is 0.02") == 2, output
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_run_that_gets_no_further_is_given_up(tmp_path):
    train = ("train", "digits", *SETTINGS, "--name", "a", "--autoresume", "--retries", "1")
    for _ in range(2):
        process = start(*train, cwd=tmp_path)
        until((tmp_path / "runs/a/environment.json").exists, "the run has begun", running=process)
        (tmp_path / "runs/a/environment.json").unlink()
        process.kill()
        process.communicate()
    ended = worldsize(*train, cwd=tmp_path)
    assert ended.returncode == 71, ended.stderr
    assert "was started 2 times from step 0" in ended.stderr
    (tmp_path / "runs/a/starts.json").unlink()
    assert worldsize(*train, "--max-steps", "2", cwd=tmp_path).returncode == 0


def test_progress_resets_the_count_of_starts(tmp_path):
    folder = run_folder.RunFolder(tmp_path)
    for step in (0, 0, 9, 9, 18):
        run_folder.count_start(folder, step, retries=1)
    run_folder.count_start(folder, 18, retries=1)
    for _ in range(2):  # a refused start does not count
        with pytest.raises(NoProgress, match=r"2 times from step 18.*allow one more start with --retries 2"):
            run_folder.count_start(folder, 18, retries=1)
    run_folder.count_start(folder, 18, retries=2)
    folder.starts.write_text("{")
    run_folder.count_start(folder, 18, retries=1)


# The agent's own timeout is half an hour.
ALONE = """
import sys
from worldsize.launch import agent
agent._RENDEZVOUS_TIMEOUT_S = 1.0
node = agent.Node("job", (2, 2), 1, "127.0.0.1", int(sys.argv[1]), True, "127.0.0.1")
outcome = agent.run(["train"], node)
print(outcome.code, outcome.message)
"""


def test_a_node_whose_peers_never_come_says_so():
    """With a code that job controllers retry: the peers may still wait for room on the cluster."""
    port = str(free_port())
    ended = subprocess.run([sys.executable, "-c", ALONE, port], capture_output=True, text=True, timeout=240, check=False)
    message = f"143 the nodes did not connect at 127.0.0.1:{port} within 1 s: RendezvousTimeoutError"
    assert ended.stdout.splitlines() == [message], ended.stderr


def test_places_are_read_as_torchrun_reads_them(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "j-worker-0")
    elastic = {"PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "j-worker-0:23456"}
    elastic |= {"WORLDSIZE_ADDRESS": "10.0.0.7"}
    node = agent.discover("j", elastic)
    assert node == agent.Node("j", (1, 3), 8, "j-worker-0", 23456, True, "10.0.0.7")
    fixed = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}
    fixed |= {"PET_MASTER_ADDR": "j-node-0-0.j", "PET_MASTER_PORT": "29500"}
    assert agent.discover("j", fixed) == agent.Node("j", (2, 2), 4, "j-node-0-0.j", 29500, False, "j-worker-0")
    with pytest.raises(UserError, match="PET_NPROC_PER_NODE is not set"):
        agent.discover("j", {"PET_NNODES": "1", "PET_RDZV_ENDPOINT": "a:1"})
    with pytest.raises(UserError, match="torchrun cannot read them"):
        agent.discover("j", fixed | {"PET_NPROC_PER_NODE": "many"})
    assert agent.discover("j", fixed, procs=1).procs == 1


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *[(host, True) for host in ("n1", "N1.Cluster", "n1.cluster", "n1.other", "localhost", "Localhost", "127.0.0.1")],
        *[(host, False) for host in ("n2", "n2.cluster", "n", "192.0.2.1", "2001:db8::1")],
    ],
)
def test_a_machine_knows_that_it_hosts_the_rendezvous(monkeypatch, host, here):
    monkeypatch.setattr("socket.gethostname", lambda: "n1.cluster")
    place = {"PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": f"{host}:29400"}
    assert agent.discover("j", place).is_host == here


@pytest.mark.parametrize(("gpus", "words"), [(0, {"auto": 3, "cpu": 3}), (2, {"auto": 2, "gpu": 2, "cpu": 3})])
def test_the_agent_understands_torchruns_words_for_the_number_of_processes(monkeypatch, gpus, words):
    """Kubeflow's operators set them, auto by default."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(agent, "cores", lambda: 3)
    place = {"PET_NNODES": "1", "PET_RDZV_ENDPOINT": "a:1"}
    found = {word: agent.discover("j", place | {"PET_NPROC_PER_NODE": word}).procs for word in words}
    assert found == words
    if not gpus:
        with pytest.raises(UserError, match="PET_NPROC_PER_NODE is gpu, but torch finds no GPU"):
            agent.discover("j", place | {"PET_NPROC_PER_NODE": "gpu"})


# The non-retryable codes are those of the table in `worldsize.errors`, on which users' scripts rely.
@pytest.mark.parametrize("code", [0, 1, 64, 65, 66, 69, 70, 71, 74, 75, 76, 130, 137, 143])
def test_only_a_process_that_an_agent_started_hides_what_must_not_be_retried(monkeypatch, code):
    permanent = code in (64, 65, 66, 71, 74, 76)
    assert permanent == (code in PERMANENT)
    for agents, launched in ((False, False), (True, False), (False, True), (True, True)):
        for name, is_set in ((agent.AGENT, agents), (LOCAL_LAUNCH, launched)):
            monkeypatch.setenv(name, "1") if is_set else monkeypatch.delenv(name, raising=False)
        worker = agents and launched
        assert agent.worker_exit_code(code) == (0 if worker and permanent else code)
        assert agent.retried(code) == (worker and not permanent)


def test_a_run_that_was_asked_to_stop_is_tried_again_and_nothing_else():
    """Job controllers retry exit codes of 128 and above; a job on a drained node must be retried."""
    assert agent._retryable_if_stopped(Outcome(75, "stopped")) == Outcome(143, "stopped")
    for code in (0, 64, 70, 71, 137):
        assert agent._retryable_if_stopped(Outcome(code, "x")) == Outcome(code, "x")
