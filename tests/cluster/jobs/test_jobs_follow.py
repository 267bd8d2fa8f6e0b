"""Following jobs on a fake cluster: the notes and log lines, each once and in order, and the exit codes.

There are no operators: each test sets the state of the job and its pods.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

from fake_cluster import KeepingCluster, is_in
from processes import worldsize
from specs import TORCH
from worldsize import cli
from worldsize.cluster.api import logs
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.jobs import follow
from worldsize.cluster.jobs.follow import Follower, Line, Note
from worldsize.cluster.manifests import base, load_target
from worldsize.cluster.manifests.pod import QUEUE_LABEL
from worldsize.cluster.objects import labels

FAKE_CLUSTER = KeepingCluster


def pod(fake_cluster, index, *, exit_code=None, restarts=0, logs=(), logs_before=(), **status):
    """A worker of r50 whose container is running, or exited with this code."""
    name = f"r50-worker-{index}"
    ended = {"exitCode": exit_code, "finishedAt": f"2026-01-01T00:00:{30 - index}Z"}
    state = {"running": {}} if exit_code is None else {"terminated": ended}
    role = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index)}
    phase = {None: "Running", 0: "Succeeded"}.get(exit_code, "Failed")
    container = {"name": "pytorch", "state": state, "restartCount": restarts}
    about = {"phase": phase, "containerStatuses": [container]} | status
    fake_cluster.add("Pod", name, metadata={"labels": labels("r50") | role}, spec={}, status=about)
    stamped = [[f"2026-01-01T00:00:{i:02}.5Z {line}" for i, line in enumerate(lines)] for lines in (logs, logs_before)]
    fake_cluster.logs[name], fake_cluster.logs_before[name] = stamped


class Clock:
    """What a follower takes for the time; it stands still unless a test moves it."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(follow, "time", one)
    return one


def notes(follower, clock, seconds=float("inf"), begins=lambda texts: True):
    """The notes about the job, until it has ended or ``seconds`` have passed on its clock.

    They begin when the follower has seen the job and its pods, and ``begins(texts)`` is true.
    """
    texts, end = [], None
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if follower._seen.job_loaded and follower._seen.pods_listed and begins(texts):
            end = end or clock.now + seconds
            clock.now += 5
        if end is not None and clock.now > end:
            break
    return texts


def test_a_log_whose_connections_break_comes_once_and_in_order(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    fake_cluster.breaks = [3, 0, 5]
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    assert [event.text for event in follower.events() if isinstance(event, Line)] == [f"line {i}" for i in range(20)]
    assert follower.state.phase == "Succeeded"


def test_a_log_that_a_proxy_ends_again_and_again_is_read_to_the_end_of_its_container(fake_cluster, monkeypatch):
    monkeypatch.setattr(logs, "_LONGEST_PAUSE_S", 0.05)
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0, logs=[f"[0] line {i}" for i in range(4)])
    fake_cluster.ends = [1, 0, 0, 0, 0, 3, 0, 0, 0]
    lines, started = [], time.monotonic()
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        lines += [event.text] if isinstance(event, Line) else []
        assert time.monotonic() - started < 120  # it would follow forever
        if len(lines) == 4:
            pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(5)])
            is_in(fake_cluster, "PyTorchJob", "Succeeded")
    assert lines == [f"line {i}" for i in range(5)]


def test_a_server_that_is_gone_is_noticed_by_connections_on_which_nothing_comes(fake_cluster):
    fake_cluster.cluster.list("Pod")
    pool = fake_cluster.cluster._client.rest_client.pool_manager.connection_from_url(fake_cluster.cluster.server)
    connected = pool._get_conn().sock
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # set by urllib3


def test_following_prints_each_rank_and_ends_with_0(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=["[0] one", "[1] two", "worldsize: waiting"])
    pod(fake_cluster, 1, exit_code=0, logs=["[2] three"])
    assert cli.main(["logs", "r50", "--namespace", "team"]) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["  0 | one", "  1 | two", "  2 | three", "worker-0 | worldsize: waiting"]
    assert [line for line in out.splitlines() if "worker-0" in line or line[2] in "01"] == [
        "  0 | one",
        "  1 | two",
        "worker-0 | worldsize: waiting",
    ]
    assert err.splitlines()[-1] == "succeeded"
    assert cli.main(["logs", "r50", "--rank", "0", "--namespace", "team"]) == 0
    assert capsys.readouterr().out == "  0 | one\n"
    assert cli.main(["wait", "r50", "--namespace", "team"]) == 0
    assert capsys.readouterr().out == ""


def test_a_failed_job_exits_with_1_and_reports_the_first_failure_first(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Failed")
    pod(fake_cluster, 0, exit_code=70)
    pod(fake_cluster, 1, exit_code=64)
    assert cli.main(["wait", "r50", "--namespace", "team"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-3:] == ["failed: it is Failed", "  worker-1 failed with exit code 64", "  worker-0 failed with exit code 70"]


def test_following_a_job_that_keeps_running_times_out_with_3(fake_cluster, tmp_path):
    """However many other events arrive: the watches of this cluster end and restart all the time."""
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0)
    kubeconfig = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    waited = worldsize("wait", "r50", "--timeout", "0.5", "--namespace", "team", cwd=tmp_path, **kubeconfig)
    assert waited.returncode == 3, waited.stderr
    assert "it keeps running. Follow it with: worldsize logs r50 --namespace team" in waited.stderr


def test_a_container_that_was_restarted_in_place_is_read_from_where_it_was_not_seen(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
    lines = [one.text for one in Follower(fake_cluster.cluster, TORCH, "r50").events() if isinstance(one, Line)]
    assert lines == ["before", "again"]


def test_a_run_before_that_was_read_is_not_read_again(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0, logs=["[0] before"])
    lines = []
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            if event.text == "before":
                pod(fake_cluster, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
                is_in(fake_cluster, "PyTorchJob", "Succeeded")
    assert lines == ["before", "again"]


def test_who_reads_slowly_gets_every_line(fake_cluster, clock):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    lines = []
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            clock.now += 1.5 * follow._DRAIN_S if len(lines) == 1 else 0.1 * follow._DRAIN_S
    assert lines == [f"line {i}" for i in range(20)]


def test_a_log_that_does_not_end_with_its_job_is_abandoned_with_a_note(fake_cluster, clock, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(fake_cluster, "log", lambda *_: over.wait(600) and (200, b""))
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0)
    texts = notes(Follower(fake_cluster.cluster, TORCH, "r50"), clock)
    over.set()
    assert "lines may be missing" in texts[-1]


def test_a_job_that_is_deleted_meanwhile_has_failed(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Running")
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    texts = []
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if follower.state.phase == "Running":  # it was seen
            fake_cluster.objects.pop("/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50", None)
    assert follower.state.phase == "Failed" and texts[-1] == "the job was deleted"


def test_a_job_that_is_deleted_before_it_is_looked_at_has_failed(fake_cluster, clock):
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    assert notes(follower, clock) == ["the job was deleted"]
    assert follower.state.phase == "Failed"


def test_a_job_without_pods_and_events_is_reported_once(fake_cluster, clock):
    is_in(fake_cluster, "TrainJob")
    texts = notes(Follower(fake_cluster.cluster, load_target("trainjob"), "r50"), clock, 3 * follow._SILENCE_S)
    assert len(texts) == 2 and "no pods created and no events" in texts[1]


def test_the_silence_timeout_restarts_when_a_job_leaves_its_queue(fake_cluster, clock):
    is_in(fake_cluster, "PyTorchJob", "Suspended")
    follower, texts, left_at = Follower(fake_cluster.cluster, TORCH, "r50"), [], None
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        clock.now += 5
        if follower.state.phase == "Suspended" and clock.now > 1000 + 3 * follow._SILENCE_S:
            is_in(fake_cluster, "PyTorchJob", "Created")
        if follower.state.phase == "Pending":
            left_at = left_at or clock.now
            if clock.now > left_at + follow._SILENCE_S - 15:
                break
    assert texts == ["PyTorchJob r50: Suspended", "PyTorchJob r50: Pending"]


def test_following_works_without_permission_to_read_events(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0)
    fake_cluster.denied = {("list", "events")}
    follower, texts, started = Follower(fake_cluster.cluster, TORCH, "r50", logs=False), [], time.monotonic()
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if len(texts) == 2:
            is_in(fake_cluster, "PyTorchJob", "Succeeded")
        assert time.monotonic() - started < 120
    assert follower.state.phase == "Succeeded"
    assert any("you have no permission to read events" in text for text in texts)


def queued(fake_cluster):
    """A job waiting in a Kueue queue, and the workload of an earlier job of the same name."""
    is_in(fake_cluster, "PyTorchJob", "Suspended", labels=labels("r50") | {QUEUE_LABEL: "team"})
    job = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50"
    for name, owner, message in (("new", job, "insufficient unused quota"), ("old", "gone", "of another")):
        conditions = [
            {"type": "QuotaReserved", "status": "False", "message": message},
            {"type": "Requeued", "status": "True", "message": "not shown"},
        ]
        about = {"ownerReferences": [{"kind": "PyTorchJob", "name": "r50", "uid": owner}]}
        fake_cluster.add("Workload", name, metadata=about, status={"conditions": conditions})


def test_the_reason_for_waiting_in_a_kueue_queue_is_reported_once(fake_cluster, clock):
    queued(fake_cluster)
    texts = notes(Follower(fake_cluster.cluster, TORCH, "r50"), clock, 60, lambda texts: len(texts) > 1)
    assert texts == ["PyTorchJob r50: Suspended in Kueue queue team: it is Suspended", "Kueue: insufficient unused quota"]


def test_following_works_without_permission_to_read_workloads(fake_cluster, clock, monkeypatch):
    queued(fake_cluster)
    fake_cluster.denied = {("list", "workloads")}
    refused, watch = threading.Event(), fake_cluster.cluster.watch

    def watched(kind, *arguments, **options):
        try:
            yield from watch(kind, *arguments, **options)
        except ClusterError:
            refused.set()
            raise

    monkeypatch.setattr(fake_cluster.cluster, "watch", watched)
    texts = notes(Follower(fake_cluster.cluster, TORCH, "r50"), clock, 60, lambda _: refused.is_set())
    assert texts == ["PyTorchJob r50: Suspended in Kueue queue team: it is Suspended"]


@pytest.mark.parametrize("state", ["Suspended", "Created"])
def test_no_note_about_a_suspended_job_or_one_with_pods(fake_cluster, clock, state):
    is_in(fake_cluster, "PyTorchJob", state)
    if state == "Created":
        pod(fake_cluster, 0, phase="Pending")
    texts = notes(Follower(fake_cluster.cluster, TORCH, "r50"), clock, 3 * follow._SILENCE_S, bool)
    assert texts and "no pods created" not in " ".join(texts)


def invalid(fake_cluster):
    """The only event of the mpi-operator about a job that it will never start."""
    about = {"kind": "MPIJob", "name": "r50"}
    event = {"type": "Warning", "reason": "ValidationError", "message": "no workers"}
    fake_cluster.add("Event", "e", involvedObject=about, lastTimestamp="2026-01-01T00:00:01Z", **event)


def test_a_job_that_its_operator_gave_up_has_failed_and_one_that_has_started_has_not(fake_cluster):
    invalid(fake_cluster)
    is_in(fake_cluster, "MPIJob")
    follower = Follower(fake_cluster.cluster, load_target("mpijob"), "r50")
    for _ in follower.events():
        pass
    assert (follower.state.phase, follower.state.reason) == ("Failed", "ValidationError: no workers")
    is_in(fake_cluster, "MPIJob", "Running")
    follower = Follower(fake_cluster.cluster, load_target("mpijob"), "r50")
    texts = []
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if "ValidationError: no workers" in texts and event is None:
            break
    assert follower.state.phase == "Running"


def test_an_event_about_a_job_whose_name_starts_equally_is_not_about_this_one(fake_cluster):
    about = {"kind": "MPIJob", "name": "r50-2"}
    event = {"type": "Warning", "reason": "ValidationError", "message": "no workers"}
    fake_cluster.add("Event", "e", involvedObject=about, lastTimestamp="2026-01-01T00:00:01Z", **event)
    is_in(fake_cluster, "MPIJob")
    follower, seen = Follower(fake_cluster.cluster, load_target("mpijob"), "r50"), []
    for event in follower.events():
        seen += [event.text] if isinstance(event, Note) else []
        if follower._seen.events and follower._seen.job:
            is_in(fake_cluster, "MPIJob", "Succeeded")
    assert follower.state.phase == "Succeeded" and not any("ValidationError" in text for text in seen)


SETBACKS = [("trainjob", "TrainJobResourcesCreationFailed"), ("pytorchjob", "FailedCreateService")]


def set_back(fake_cluster, kind, reason):
    """A job that its operator could not start, and retries."""
    is_in(fake_cluster, kind.kind)
    event = {"type": "Warning", "reason": reason, "message": "conflict"}
    fake_cluster.add(
        "Event", "e", involvedObject={"kind": kind.kind, "name": "r50"}, lastTimestamp="2026-01-01T00:00:01Z", **event
    )


@pytest.mark.parametrize(("on", "reason"), SETBACKS)
def test_a_job_that_comes_to_nothing_after_a_setback_has_failed_in_the_end(fake_cluster, clock, on, reason):
    kind = load_target(on)
    set_back(fake_cluster, kind, reason)
    follower = Follower(fake_cluster.cluster, kind, "r50")
    *first, last = notes(follower, clock, begins=lambda texts: len(texts) > 1)
    # In either order.
    assert sorted(first) == sorted([f"{kind.kind} r50: Created", f"{reason}: conflict"])
    assert last == f"{kind.kind} r50: Failed"
    assert (follower.state.phase, follower.state.reason) == ("Failed", f"{reason}: conflict")
    assert clock.now > 1000 + follow._SETBACK_S


def test_a_job_that_is_given_up_is_not_waited_for(fake_cluster, clock, monkeypatch):
    """Its pods may keep running, and their logs may not end."""

    def endless(self, pod, container, run, stop):
        while not stop():
            time.sleep(0.05)
        yield from ()

    monkeypatch.setattr(type(fake_cluster.cluster), "logs", endless)
    set_back(fake_cluster, TORCH, "FailedCreateService")
    pod(fake_cluster, 0)
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    texts = notes(follower, clock)
    assert follower.state.phase == "Failed"
    assert not any("lines may be missing" in text for text in texts)


@pytest.mark.parametrize(("on", "reason"), SETBACKS)
def test_a_job_that_gets_on_after_a_setback_has_not_failed(fake_cluster, clock, on, reason):
    """Not even if its pods then wait for a long time, or are all gone for a moment."""
    kind = load_target(on)
    set_back(fake_cluster, kind, reason)

    def gets_on(on_its_way):
        if on == "pytorchjob":
            is_in(fake_cluster, kind.kind, "Created" if on_its_way else None)
        else:
            pod(fake_cluster, 0, phase="Pending")
            waiting = fake_cluster.objects["/api/v1/namespaces/team/pods/r50-worker-0"]["metadata"]
            waiting["labels"] = {"jobset.sigs.k8s.io/jobset-name": "r50" if on_its_way else "another"}

    gets_on(False)
    follower, texts, phases = Follower(fake_cluster.cluster, kind, "r50", logs=False), [], ["Created"]
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if f"{reason}: conflict" not in texts:
            continue
        clock.now += 5
        if follower.state.phase != phases[-1]:
            phases.append(follower.state.phase)
            changed_at = clock.now
        if len(phases) == 1:
            gets_on(True)
        elif len(phases) == 2 and clock.now > changed_at + follow._SETBACK_S:
            gets_on(False)
        elif len(phases) > 2 and clock.now > changed_at + 2 * follow._SETBACK_S:
            break
    assert phases == ["Created", "Pending", "Created"]


def test_a_setback_that_is_over_costs_the_lines_after_it_nothing(fake_cluster, monkeypatch):
    monkeypatch.setattr(follow, "_SETBACK_S", 0.0)
    calls = []
    monkeypatch.setattr(type(TORCH), "state", lambda *_: calls.append(1) or base.JobState("Running"))
    set_back(fake_cluster, TORCH, "FailedCreateService")
    pod(fake_cluster, 0, logs=[f"[0] line {i}" for i in range(60)])
    lines, follower = 0, Follower(fake_cluster.cluster, TORCH, "r50")
    handle, news = follower._handle, []
    monkeypatch.setattr(follower, "_handle", lambda what, value: news.append(what) or handle(what, value))
    for event in follower.events():
        lines += isinstance(event, Line)
        if lines == 60:
            break
    assert lines == 60
    assert len(calls) <= sum(what != "line" for what in news) + 2
