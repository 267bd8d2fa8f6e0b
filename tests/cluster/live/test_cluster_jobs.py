"""Complete jobs on a real cluster: commands, their output, and pods that are lost during training."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import bits, distance, environment, losses, numbers, weights, worldsize
from worldsize.cluster.api.client import Cluster
from worldsize.cluster.manifests import TARGETS, load_target

pytestmark = pytest.mark.cluster

SMALL = (
    *(
        "--model.name",
        "resnet18",
        "--precision",
        "fp64",
        "--deterministic",
        "--epochs",
        "2",
        "--schedule.warmup-epochs",
        "1",
    ),
    *("--data.train-crop-size", "16", "--data.val-resize-size", "16", "--data.val-crop-size", "16"),
)
BITWISE = ("--precision", "fp32", "--parallel.strategy", "bitwise")
POD = ("--nodes", "2", "--procs", "1", "--gpus", "0", "--cpu", "850m", "--memory", "3Gi", "--shm", "256Mi", "--grace", "60")


class Runs:
    """Jobs in a namespace with a volume called ``data``."""

    def __init__(self, cluster: Cluster, image: str, cwd: Path) -> None:
        self.cluster, self.image, self.cwd = cluster, image, cwd
        self.command("cluster", "volume", "create", "data", "--size", "1Gi")

    def command(self, *arguments: str, timeout: float = 900, code: int = 0) -> str:
        done = worldsize(*arguments, "--namespace", self.cluster.namespace, cwd=self.cwd, timeout=timeout)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(self, kind: str, name: str, *options: str, code: int = 0) -> str:
        return self.command(*self.arguments(kind, name, *options), code=code)

    def arguments(self, kind: str, name: str, *options: str) -> tuple[str, ...]:
        where = ("--image", self.image, "--volume", "data", "--name", name)
        return ("train", "digits", "--on", kind, *SMALL, *POD, *where, *options)

    def start(self, kind: str, name: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "worldsize", *self.arguments(kind, name, *options)]
        command += ["--namespace", self.cluster.namespace]
        return subprocess.Popen(
            command, cwd=self.cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def fetched(self, name: str) -> Path:
        """The run's folder, downloaded."""
        target = self.cwd / "downloads" / name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            self.command("cluster", "files", "get", f"data:/runs/{name}", str(target), "--image", self.image)
        return target

    def pods(self, kind: str, name: str) -> list[dict]:
        target = load_target(kind)
        return sorted(self.cluster.list("Pod", target.selector(name)), key=target.place)


@pytest.fixture
def runs(cluster, image, tmp_path) -> Runs:
    return Runs(cluster, image, tmp_path)


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """The same run on this machine."""
    cwd = tmp_path_factory.mktemp("local")
    done = worldsize("train", "digits", *SMALL, "--procs", "2", "--name", "local", cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "local"


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read the process's output up to a line that matches."""
    read = ""
    for line in process.stdout:
        read += line
        if re.search(pattern, line):
            return read
    raise AssertionError(f"no line matches {pattern!r}:\n{read}")


def evict(cluster: Cluster, pod: str) -> None:
    """Evict a pod, as `kubectl drain` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": cluster.namespace}}
    cluster.request("POST", f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/eviction", None, eviction)


@pytest.mark.parametrize("kind", TARGETS)
def test_each_kind_trains_as_two_processes_here_do(runs, local, kind):
    output = runs.train(kind, "r")
    assert re.search(r"^ +0 \| .*top-1", output, re.MULTILINE), output
    assert "succeeded" in output
    run = runs.fetched("r")
    # Another number of threads changes the rounding, and training amplifies the difference.
    assert distance(weights(run), weights(local)) < 1e-6
    assert (run / "result.json").exists()
    runs.command("delete", "--all")
    left = [
        item["metadata"]["name"]
        for kind in ("Pod", "ConfigMap", "NetworkPolicy", "Service", "Job", "TrainingRuntime", "Secret")
        for item in runs.cluster.list(kind)
        if item["metadata"]["name"].startswith("r") and not item["metadata"].get("deletionTimestamp")
    ]
    assert [name for name in left if name == "r" or name.startswith("r-")] == []


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """The bit-identical run with one process on this machine."""
    cwd = tmp_path_factory.mktemp("single")
    done = worldsize("train", "digits", *SMALL, *BITWISE, "--name", "single", cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "single"


@pytest.mark.parametrize("kind", TARGETS)
def test_bitwise_gives_the_bits_of_one_process_here(runs, single, kind):
    runs.train(kind, "b", *BITWISE)
    run = runs.fetched("b")
    assert bits(run) == bits(single)
    assert numbers(run) == numbers(single)


@pytest.mark.parametrize("op", ["average", pytest.param("adasum", marks=pytest.mark.slow)])
def test_horovod_under_an_mpijob(runs, local, op):
    runs.train("mpijob", "h", "--parallel.strategy", "horovod", "--parallel.op", op)
    run = runs.fetched("h")
    assert json.loads((run / "environment.json").read_text())["strategy"].startswith("horovod")
    if op == "average":
        assert distance(weights(run), weights(local)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("pytorchjob", 1),
        pytest.param("pytorchjob", 0, marks=pytest.mark.slow),
        pytest.param("trainjob", 1, marks=pytest.mark.slow),
        pytest.param("mpijob", 1, marks=pytest.mark.slow),
    ],
)
def test_an_evicted_pod_costs_nothing(runs, local, kind, lost):
    process = runs.start(kind, "e", "--track.every-seconds", "0")
    until(process, r" 0 \| +1 ")
    time.sleep(random.Random(lost).uniform(0, 3))
    evict(runs.cluster, runs.pods(kind, "e")[lost]["metadata"]["name"])
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    run = runs.fetched("e")
    assert len(losses(run)) == len(losses(local))
    assert distance(weights(run), weights(local)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_a_killed_pod_costs_the_steps_since_the_last_checkpoint(runs, local, kind):
    process = runs.start(kind, "k", "--track.every-seconds", "0", "--checkpoint.every-steps", "5")
    until(process, r" 0 \| +1 ")
    # As if its node were lost: no signal and no grace period.
    name = runs.pods(kind, "k")[1]["metadata"]["name"]
    path = f"/api/v1/namespaces/{runs.cluster.namespace}/pods/{name}"
    runs.cluster.request("DELETE", path, None, {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"})
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert distance(weights(runs.fetched("k")), weights(local)) < 1e-6


@pytest.mark.parametrize("kind", ["pytorchjob", pytest.param("trainjob", marks=pytest.mark.slow)])
def test_a_wrong_recipe_fails_once(runs, kind):
    runs.train(kind, "w", "--max-steps", "4")
    runs.command("delete", "w")
    output = runs.train(kind, "w", "--optimizer.lr", "0.02", code=1)
    assert "optimizer.lr: was 0.03, is 0.02" in output
    assert "exit code 64" in output
    pods = runs.pods(kind, "w")
    assert len(pods) <= 2
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in pods)


@pytest.mark.slow
def test_a_runtime_of_the_clusters_trains_the_same(runs, local):
    runs.train("trainjob", "t", "--runtime", "torch-distributed")
    assert distance(weights(runs.fetched("t")), weights(local)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_a_deadline_ends_the_job(runs, kind):
    output = runs.train(kind, "d", "--epochs", "1000", "--deadline", "30", code=1)
    assert re.search("deadline|active longer", output, re.IGNORECASE), output
    assert not [pod for pod in runs.pods(kind, "d") if pod["status"]["phase"] == "Running"]


def test_the_same_command_refuses_and_resumes(runs, local):
    process = runs.start("pytorchjob", "s")
    until(process, r" 0 \| +1 ")
    assert "already exists and is Running" in runs.train("pytorchjob", "s", code=2)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 130 and f"Follow it with: worldsize logs s --namespace {runs.cluster.namespace}" in output
    runs.command("stop", "s")
    assert "Suspended" in runs.command("status", "s")
    output = runs.train("pytorchjob", "s")
    assert "resuming after step" in output
    assert distance(weights(runs.fetched("s")), weights(local)) < 1e-6
    assert "already exists and is Succeeded" in runs.train("pytorchjob", "s", code=2)


@pytest.mark.slow
def test_elastic_two_one_two(runs, local):
    process = runs.start("pytorchjob", "x", "--elastic", "1:2", "--epochs", "4")
    for epoch, replicas in ((1, 1), (2, 2)):
        until(process, rf"\| +{epoch} ")
        change = {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}}}
        runs.cluster.patch("PyTorchJob", "x", change)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    steps = [
        record["step"]
        for record in map(json.loads, (runs.fetched("x") / "metrics.jsonl").read_text().splitlines())
        if record.get("kind") == "step"
    ]
    assert steps == sorted(set(steps))


def test_a_secret_is_seen_nowhere(runs, tmp_path):
    canary = f"canary{random.Random().getrandbits(64):x}"
    done = worldsize(
        "cluster",
        "secret",
        "create",
        "token",
        "--from-env",
        "TOKEN",
        "--namespace",
        runs.cluster.namespace,
        cwd=tmp_path,
        TOKEN=canary,
    )
    assert done.returncode == 0, done.stderr
    assert canary not in done.stdout + done.stderr
    process = runs.start("mpijob", "c", "--secret", "token/TOKEN", "--max-steps", "4")
    seen = []
    while process.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    seen.append(canary.encode() in (entry / "cmdline").read_bytes())
                except OSError:
                    continue
        time.sleep(0.5)
    assert process.returncode == 0, process.stdout.read()
    assert seen and not any(seen)
    for kind in ("Pod", "ConfigMap", "MPIJob", "Job", "Event", "Service"):
        assert canary not in json.dumps(runs.cluster.list(kind))
    for file in runs.fetched("c").rglob("*"):
        assert not file.is_file() or canary.encode() not in file.read_bytes()
