"""Following jobs that wait, are given up, or come to nothing: what is noted, and when a job has failed."""

from __future__ import annotations

import threading
import time

import pytest

from fake_cluster import KeepingCluster, is_in
from followed import notes, pod
from specs import TORCH
from worldsize.cluster.api import client
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.jobs import follow
from worldsize.cluster.jobs.follow import Follower, Line, Note
from worldsize.cluster.manifests import base, load_target
from worldsize.cluster.manifests.pod import QUEUE_LABEL
from worldsize.cluster.objects import labels

FAKE_CLUSTER = KeepingCluster


def test_a_job_without_pods_and_events_is_reported_once(fake_cluster, clock):
    is_in(fake_cluster, "TrainJob")
    texts = notes(Follower(fake_cluster.cluster, load_target("trainjob"), "r50"), clock, 3 * follow._SILENCE_S)
    assert len(texts) == 2 and "no pods created and no events" in texts[1]


def test_the_silence_timeout_restarts_when_a_job_leaves_its_queue(fake_cluster, clock):
    is_in(fake_cluster, "PyTorchJob", "Suspended", labels=labels("r50") | {QUEUE_LABEL: "team"})
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
    assert texts == ["PyTorchJob r50: Suspended in Kueue queue team: it is Suspended", "PyTorchJob r50: Pending"]


def test_following_ends_when_a_stopped_job_has_no_pods_left(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Suspended")
    pod(fake_cluster, 0)
    follower, waited = Follower(fake_cluster.cluster, TORCH, "r50", logs=False), 0
    for event in follower.events():
        waited += event is None and follower.state.phase == "Suspended"
        if waited == 3:  # while its pod still saves
            fake_cluster.remove("/api/v1/namespaces/team/pods/r50-worker-0")
        assert waited < 200
    assert waited >= 3 and follower.state.phase == "Suspended"


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


def test_an_outage_of_the_server_is_reported_once_and_its_end_too(fake_cluster, monkeypatch):
    is_in(fake_cluster, "PyTorchJob", "Running")
    monkeypatch.setattr(client, "_MOMENT_S", 0.0)
    answer, refused = fake_cluster.answer, []

    def answers(method, path, query, body):
        if path.endswith("/pytorchjobs") and len(refused) < 4:
            refused.append(path)
            return 503, {"message": "no response"}
        return answer(method, path, query, body)

    monkeypatch.setattr(fake_cluster, "answer", answers)
    texts, started = [], time.monotonic()
    for event in Follower(fake_cluster.cluster, TORCH, "r50", logs=False).events():
        texts += [event.text] if isinstance(event, Note) else []
        if "PyTorchJob r50: Running" in texts:
            is_in(fake_cluster, "PyTorchJob", "Succeeded")
        assert time.monotonic() - started < 120
    reported = [text for text in texts if "respon" in text]
    assert reported == ["no response; trying again for up to 5 minutes", "the API server responds again"]


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


def test_each_failure_of_a_pod_is_reported_once_while_others_replace_it(fake_cluster, clock):
    is_in(fake_cluster, "TrainJob")
    follower, texts = Follower(fake_cluster.cluster, load_target("trainjob"), "r50", logs=False), []

    def fails(uid: str, code: int, **more) -> None:
        end = {"exitCode": code, "finishedAt": "2026-01-01T00:00:05Z", "message": "the log's end"} | more
        state = {"name": "node", "restartCount": 0, "state": {"terminated": end}}
        name = f"r50-node-0-1-{uid}"
        about = {"labels": labels("r50") | {"jobset.sigs.k8s.io/jobset-name": "r50"}, "uid": uid}
        about["labels"]["batch.kubernetes.io/job-completion-index"] = "1"
        fake_cluster.add("Pod", name, metadata=about, spec={}, status={"phase": "Failed", "containerStatuses": [state]})

    wanted = "node-1 failed with exit code 137 (out of memory)"
    fails("aaaaa", 137, reason="OOMKilled")
    fails("ccccc", 143)  # it was evicted
    for seen, event in enumerate(follower.events()):
        assert seen < 1000
        texts += [event.text] if isinstance(event, Note) else []
        count = texts.count(wanted)
        if count == 1:
            fails("bbbbb", 137, reason="OOMKilled")
        if count == 2:
            is_in(fake_cluster, "TrainJob", "Complete")
        assert count < 3
    assert [text for text in texts if "failed" in text] == [wanted] * 2
