"""Following on a real cluster: complete logs, lost connections, and one clear message for each kind of stuck job."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice, zip_longest
from urllib.parse import urlsplit

import pytest

from processes import environment, worldsize
from specs import PLAIN
from waiting import until
from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.jobs import manage
from worldsize.cluster.jobs.follow import Follower, Line, Note
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.spec import Placement, PodResources, SecretKey

pytestmark = pytest.mark.cluster

LINES = 100_000


def spec_of(cluster, image: str, **changes):
    """A small job; `shell` replaces its command and removes its volumes."""
    small = PodResources(cpu="100m", memory="128Mi", shm="16Mi")
    return replace(PLAIN, name="j", namespace=cluster.namespace, image=image, procs=1, resources=small, grace_s=2, **changes)


def shell(manifests: list[dict], script: str) -> list[dict]:
    """The same job, but its pods run a shell script and mount no volume."""

    def visit(value):
        if isinstance(value, dict):
            if "containers" in value:
                value["volumes"] = [v for v in value["volumes"] if not v["name"].startswith("volume-")]
                for container in value["containers"]:
                    container["command"] = ["sh", "-c", script]
                    container["volumeMounts"] = [m for m in container["volumeMounts"] if not m["name"].startswith("volume-")]
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    visit(manifests)
    return manifests


def submit(cluster, kind: str, spec, script: str) -> Follower:
    target = load_target(kind)
    manage.submit(cluster, spec, shell(target.render(spec), script))
    return Follower(cluster, target, spec.name)


def test_all_lines_of_all_pods_arrive_in_order(cluster, image):
    # containerd loses output that is written just before a process exits, so this one sleeps first.
    follower = submit(cluster, "pytorchjob", spec_of(cluster, image), f"seq 1 {LINES}; sleep 3")
    got: dict[str, list[str]] = {}
    for event in follower.events():
        if isinstance(event, Line):
            got.setdefault(event.source, []).append(event.text)
    assert follower.state.phase == "Succeeded"
    expected = [str(number) for number in range(1, LINES + 1)]
    assert sorted(got) == ["worker-0", "worker-1"]
    for lines in got.values():
        # Only the first difference, for a readable message.
        assert next((pair for pair in zip_longest(lines, expected) if len(set(pair)) > 1), None) is None


class Gate:
    """A local port that forwards to the API server, and can be closed."""

    def __init__(self, host: str, port: int) -> None:
        self._to, self._open, self._sockets = (host, port), True, []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self, seconds: float) -> None:
        """Drop every connection, and refuse new ones for ``seconds``."""
        self._open = False
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        time.sleep(seconds)
        self._open = True

    def _accept(self) -> None:
        while True:
            near = self._listening.accept()[0]
            if not self._open:
                near.close()
                continue
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                sink.sendall(chunk)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def test_a_server_that_goes_away_for_a_while_costs_no_line(cluster, image):
    submit(cluster, "pytorchjob", spec_of(cluster, image, nodes=1), "for i in $(seq 1 40); do echo $i; sleep 0.2; done")
    server = urlsplit(cluster.server)
    gate = Gate(server.hostname, server.port or 443)
    through = Cluster(namespace=cluster.namespace)
    through._settings.host = f"https://{server.hostname}:{gate.port}"
    if server.hostname != "127.0.0.1":
        pytest.skip("the API server's certificate is not valid for 127.0.0.1")
    got = []
    for event in Follower(through, load_target("pytorchjob"), "j").events():
        if isinstance(event, Line):
            got.append(int(event.text))
            if event.text in ("5", "20"):
                gate.close(2.0)
    assert got == [*range(1, 41)]


def test_an_expired_watch_restarts(cluster, monkeypatch):
    real, stale = cluster._list, iter(["1"])

    def listed(*arguments):
        items, version = real(*arguments)
        return items, next(stale, version)

    monkeypatch.setattr(cluster, "_list", listed)
    started = time.monotonic()
    named = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
    threading.Timer(2.0, lambda: cluster.create(named)).start()
    for found in cluster.watch("ConfigMap", stop=lambda: time.monotonic() - started > 30):
        if "late" in [item["metadata"]["name"] for item in found]:
            return
    raise AssertionError("the watch never reported the new object")


def test_detached_by_ctrl_c_and_followed_again(cluster, image):
    submit(cluster, "pytorchjob", spec_of(cluster, image, nodes=1), "for i in 1 2 3 4 5 6; do echo line $i; sleep 1; done")
    command = [sys.executable, "-m", "worldsize", "logs", "j", "--namespace", cluster.namespace]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "line" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130 and f"Follow it with: worldsize logs j --namespace {cluster.namespace}" in err
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert [line.split("| ")[1] for line in again.stdout.splitlines()] == [f"line {i}" for i in range(1, 7)]


def test_a_failed_container_is_reported_with_its_exit_code_and_last_lines(cluster, image, tmp_path):
    submit(cluster, "pytorchjob", spec_of(cluster, image), "echo these are the last words; exit 64")
    waited = worldsize("wait", "j", "--namespace", cluster.namespace, cwd=tmp_path, timeout=60)
    assert waited.returncode == 1, waited.stderr
    assert "failed with exit code 64" in waited.stderr and "these are the last words" in waited.stderr


def test_a_timeout_has_its_own_code(cluster, image, tmp_path):
    submit(cluster, "pytorchjob", spec_of(cluster, image, nodes=1), "sleep 60")
    waited = worldsize("wait", "j", "--timeout", "3", "--namespace", cluster.namespace, cwd=tmp_path, timeout=60)
    assert waited.returncode == 3 and "keeps running" in waited.stderr
    assert worldsize("delete", "--all", "--namespace", cluster.namespace, cwd=tmp_path).returncode == 0
    assert manage.list_jobs(cluster) == [] and cluster.list("Pod") == []


@pytest.mark.parametrize("kind", TARGETS)
def test_stopped_jobs_leave_no_pods_and_are_replaced(cluster, image, kind):
    spec = spec_of(cluster, image)
    submit(cluster, kind, spec, "sleep 600")
    until(lambda: cluster.list("Pod", load_target(kind).selector("j")), "the job has pods", every=0.2)
    manage.stop(cluster, manage.find(cluster, "j"))
    stopped = manage.find(cluster, "j")
    # Pods that have ended may exist a moment longer, until their kubelet has reported it.
    assert stopped.state.phase == "Suspended"
    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in stopped.pods)
    submit(cluster, kind, spec, "sleep 600")
    assert manage.find(cluster, "j").state.phase != "Suspended"
    manage.delete(cluster, manage.find(cluster, "j"))
    for left in ("ConfigMap", "NetworkPolicy", "TrainingRuntime"):
        assert [item for item in cluster.list(left) if item["metadata"]["name"] == "j"] == []


STUCK = [
    ("pytorchjob", {"secrets": (SecretKey("absent", "KEY", "KEY"),)}, 'secret "absent" not found'),
    ("pytorchjob", {"image": "localhost:5000/no-such-image:1"}, "ErrImagePull"),
    (
        "pytorchjob",
        {"resources": PodResources(gpus=1, cpu="100m", memory="128Mi", shm="16Mi")},
        "Insufficient nvidia.com/gpu",
    ),
    ("pytorchjob", {"placement": Placement(node_selector=(("disk", "moon"),))}, "didn't match Pod's node affinity/selector"),
    ("mpijob", {"image": "localhost:5000/no-such-image:1"}, "ErrImagePull"),
    ("trainjob", {"secrets": (SecretKey("absent", "KEY", "KEY"),)}, 'secret "absent" not found'),
]


@pytest.mark.parametrize(("kind", "change", "message"), STUCK)
def test_the_reason_is_reported_while_the_job_waits(cluster, image, kind, change, message):
    follower = submit(cluster, kind, replace(spec_of(cluster, image), **change), "sleep 60")
    assert message in notes_until(follower, message)[-1]


def notes_until(follower: Follower, message: str, seconds: float = 60) -> list[str]:
    """The notes up to the one with this message, or all notes within ``seconds``."""
    started, notes = time.monotonic(), []
    for event in follower.events():
        notes += [event.text] if isinstance(event, Note) else []
        if (notes and message in notes[-1]) or time.monotonic() - started > seconds:
            break
    return notes


def test_an_mpijob_that_its_operator_finds_invalid_has_failed(cluster, image):
    target, spec = load_target("mpijob"), spec_of(cluster, image)
    manifests = shell(target.render(spec), "true")
    manifests[-1]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = 0
    manage.submit(cluster, spec, manifests)
    follower = Follower(cluster, target, "j")
    for _ in follower.events():
        pass
    assert follower.state.phase == "Failed" and follower.state.reason.startswith("ValidationError")


@pytest.mark.parametrize(("kind", "length"), [("pytorchjob", 60), ("trainjob", 49)])
def test_a_name_that_is_too_long_is_reported(cluster, image, kind, length):
    """Submitted although our own rules reject it: operators set no condition, and the trainer not always an event."""
    target, name = load_target(kind), "j" * length
    short = spec_of(cluster, image)
    manifests = shell(target.render(short), "true")
    for manifest in manifests:
        manifest["metadata"]["name"] = name
    if kind == "trainjob":
        manifests[-1]["spec"]["runtimeRef"]["name"] = name
    manage.submit(cluster, replace(short, name=name), manifests)
    follower = Follower(cluster, target, name, logs=False)
    text, started = "", time.monotonic()
    for event in follower.events():
        text += event.text if isinstance(event, Note) else ""
        if "no pods created and no events" in text:
            break
        assert time.monotonic() - started < 90, text
    assert follower.state.phase == "Failed" or "no pods created" in text, text


def test_a_missing_runtime_is_refused_and_leaves_nothing(cluster, image):
    spec = spec_of(cluster, image, runtime="no-such-runtime")
    with pytest.raises(ClusterError, match="no-such-runtime"):
        manage.submit(cluster, spec, load_target("trainjob").render(spec))
    assert [item for item in cluster.list("ConfigMap") if item["metadata"]["name"] == "j"] == []


def test_an_exceeded_quota_is_reported(cluster, image):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"requests.cpu": "50m"}},
    }
    cluster.create(quota)
    follower = submit(cluster, "pytorchjob", spec_of(cluster, image), "true")
    assert "exceeded quota: q" in notes_until(follower, "exceeded quota")[-1]


def test_a_proxy_that_ends_streams_costs_no_line_and_ends_nothing(cluster, image, monkeypatch):
    """As proxies with an idle timeout do: the response ends cleanly, sometimes without a new line."""
    submit(cluster, "pytorchjob", spec_of(cluster, image, nodes=1), "for i in $(seq 1 20); do echo $i; sleep 1; done")
    stream, responses = cluster.stream, []

    def ending(path, *more):
        lines = stream(path, *more)
        if not path.endswith("/log"):
            return lines
        responses.append(path)
        return islice(lines, len(responses) % 3)  # every third response ends at once

    monkeypatch.setattr(cluster, "stream", ending)
    follower = Follower(cluster, load_target("pytorchjob"), "j")
    got = [event.text for event in follower.events() if isinstance(event, Line)]
    # The rest of a log can only be read if its responses are complete; until then, each gives a line or none.
    assert got == [str(number) for number in range(1, len(got) + 1)] and len(got) > 5
    assert follower.state.phase == "Succeeded" and len(responses) > 5


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_events_of_a_job_whose_name_starts_equally_do_not_count(cluster, image, kind):
    target, spec = load_target(kind), spec_of(cluster, image, nodes=1)
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "other"}, "type": "Warning"}
    about = {"apiVersion": "v1", "kind": target.kind, "name": "j-2", "namespace": cluster.namespace}
    event |= {"involvedObject": about, "reason": "ValidationError", "message": "about j-2", "firstTimestamp": None}
    event["lastTimestamp"] = "2099-01-01T00:00:00Z"
    cluster.create(event)
    seen, until_then = [], time.monotonic() + 15
    follower = submit(cluster, kind, spec, "sleep 5")
    for one in follower.events():  # an MPIJob whose workers have no sshd stays Created
        seen += [one.text] if isinstance(one, Note) else []
        if time.monotonic() > until_then:
            break
    assert not any("about j-2" in text for text in seen) and follower.state.phase != "Failed"


def test_values_arrive_as_they_were_given(cluster, image):
    values = {"ONE": "$(HOME)", "TWO": "$$", "THREE": "$$(HOME) $HOME", "FOUR": "$(ONE)"}
    spec = spec_of(cluster, image, nodes=1, env=tuple(values.items()))
    follower = submit(cluster, "pytorchjob", spec, "env | grep -E '^(ONE|TWO|THREE|FOUR)='; sleep 3")
    got = {event.text for event in follower.events() if isinstance(event, Line)}
    assert got == {f"{name}={value}" for name, value in values.items()}
