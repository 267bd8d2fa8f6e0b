"""Following jobs on a pretended cluster: what is said, once and in order, and the exit codes.

There are no operators here: a job and its pods are in the state that a test puts them in.
"""

from __future__ import annotations

import socket
import time

import pytest

from apiserver import KeepingWorld, is_in
from processes import worldsize
from specs import TORCH
from worldsize import cli
from worldsize.launch import follow, target
from worldsize.launch.follow import Follower, Line, Note
from worldsize.launch.pod import QUEUE_LABEL, labels

WORLD = KeepingWorld


def pod(world, index, *, exit_code=None, restarts=0, logs=(), logs_before=(), **status):
    """A worker of r50 whose container runs, or ended with this code."""
    name = f"r50-worker-{index}"
    ended = {"exitCode": exit_code, "finishedAt": f"2026-01-01T00:00:{30 - index}Z"}
    state = {"running": {}} if exit_code is None else {"terminated": ended}
    role = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index)}
    phase = {None: "Running", 0: "Succeeded"}.get(exit_code, "Failed")
    container = {"name": "pytorch", "state": state, "restartCount": restarts}
    about = {"phase": phase, "containerStatuses": [container]} | status
    world.add("Pod", name, metadata={"labels": labels("r50") | role}, spec={}, status=about)
    stamped = [[f"2026-01-01T00:00:{i:02}.5Z {line}" for i, line in enumerate(lines)] for lines in (logs, logs_before)]
    world.logs[name], world.logs_before[name] = stamped


def notes(follower, seconds):
    """What is said about the job itself, until it has ended or this time has passed."""
    said, begun = [], time.monotonic()
    for event in follower.events():
        said += [event.text] if isinstance(event, Note) else []
        if time.monotonic() - begun > seconds:
            break
    return said


def test_a_log_whose_connections_break_comes_once_and_in_order(world):
    is_in(world, "PyTorchJob", "Succeeded")
    pod(world, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    world.breaks = [3, 0, 5]
    follower = Follower(world.cluster, TORCH, "r50")
    assert [event.text for event in follower.events() if isinstance(event, Line)] == [f"line {i}" for i in range(20)]
    assert follower.state.phase == "Succeeded"


def test_a_server_that_is_gone_is_noticed_by_connections_on_which_nothing_comes(world):
    world.cluster.list("Pod")
    pool = world.cluster._client.rest_client.pool_manager.connection_from_url(world.cluster.server)
    connected = pool._get_conn().sock
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # urllib3's own


def test_following_prints_each_rank_and_ends_with_0(world, capsys):
    is_in(world, "PyTorchJob", "Succeeded")
    pod(world, 0, exit_code=0, logs=["[0] one", "[1] two", "worldsize: waiting"])
    pod(world, 1, exit_code=0, logs=["[2] three"])
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


def test_a_failed_job_ends_with_1_and_tells_the_first_failure_first(world, capsys):
    is_in(world, "PyTorchJob", "Failed")
    pod(world, 0, exit_code=70)
    pod(world, 1, exit_code=64)
    assert cli.main(["wait", "r50", "--namespace", "team"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-3:] == ["failed: it is Failed", "  worker-1 ended with exit code 64", "  worker-0 ended with exit code 70"]


def test_a_job_that_goes_on_ends_following_with_3(world, tmp_path):
    """However much happens beside it: the watches of this world end and begin anew all the time."""
    is_in(world, "PyTorchJob", "Running")
    pod(world, 0)
    kubeconfig = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    waited = worldsize("wait", "r50", "--timeout", "0.5", "--namespace", "team", cwd=tmp_path, timeout=30, **kubeconfig)
    assert waited.returncode == 3, waited.stderr
    assert "it goes on. worldsize logs r50 --namespace team follows it" in waited.stderr


def test_a_container_that_was_restarted_in_place_is_read_from_where_it_was_not_seen(world):
    is_in(world, "PyTorchJob", "Succeeded")
    pod(world, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
    lines = [one.text for one in Follower(world.cluster, TORCH, "r50").events() if isinstance(one, Line)]
    assert lines == ["before", "again"]


def test_a_run_before_that_was_read_is_not_read_again(world):
    is_in(world, "PyTorchJob", "Running")
    pod(world, 0, logs=["[0] before"])
    lines = []
    for event in Follower(world.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            if event.text == "before":
                pod(world, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
                is_in(world, "PyTorchJob", "Succeeded")
    assert lines == ["before", "again"]


def test_who_reads_slowly_gets_every_line(world, monkeypatch):
    monkeypatch.setattr(follow, "_DRAIN_S", 1.0)
    is_in(world, "PyTorchJob", "Succeeded")
    pod(world, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    lines = []
    for event in Follower(world.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            time.sleep(1.5 if len(lines) == 1 else 0.1)
    assert lines == [f"line {i}" for i in range(20)]


def test_a_log_that_does_not_end_with_its_job_is_given_up_and_that_is_told(world, monkeypatch):
    monkeypatch.setattr(follow, "_DRAIN_S", 0.5)
    monkeypatch.setattr(world, "log", lambda *_: time.sleep(5) or (200, b""))
    is_in(world, "PyTorchJob", "Succeeded")
    pod(world, 0, exit_code=0)
    told = notes(Follower(world.cluster, TORCH, "r50"), 4)
    assert "lines may be missing" in told[-1]


def test_a_job_that_is_deleted_meanwhile_has_failed(world):
    is_in(world, "PyTorchJob", "Running")
    follower = Follower(world.cluster, TORCH, "r50")
    told, begun = [], time.monotonic()
    for event in follower.events():
        told += [event.text] if isinstance(event, Note) else []
        if follower.state.phase == "Running":  # it was seen
            world.objects.pop("/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50", None)
        assert time.monotonic() - begun < 120  # it would go on for ever
    assert follower.state.phase == "Failed" and told[-1] == "the job was deleted"


def test_a_job_that_is_deleted_before_it_is_looked_at_has_failed(world):
    follower = Follower(world.cluster, TORCH, "r50")
    assert notes(follower, 30) == ["the job was deleted"]
    assert follower.state.phase == "Failed"


def test_a_job_of_which_nobody_says_anything_is_told_once(world, monkeypatch):
    monkeypatch.setattr(follow, "_PATIENCE_S", 1.0)
    is_in(world, "TrainJob")
    told = notes(Follower(world.cluster, target.load("trainjob"), "r50"), 3)
    assert len(told) == 2 and "no pod yet, and no reason given" in told[1]


def test_patience_begins_anew_when_a_job_leaves_its_queue(world, monkeypatch):
    monkeypatch.setattr(follow, "_PATIENCE_S", 2.0)
    is_in(world, "PyTorchJob", "Suspended")
    follower, told, begun = Follower(world.cluster, TORCH, "r50"), [], time.monotonic()
    for event in follower.events():
        told += [event.text] if isinstance(event, Note) else []
        if follower.state.phase == "Suspended" and time.monotonic() - begun > 3:
            is_in(world, "PyTorchJob", "Created")
        if time.monotonic() - begun > 4.5:
            break
    assert told == ["PyTorchJob r50: Suspended", "PyTorchJob r50: Pending"]


def queued(world):
    """A job that Kueue keeps waiting, and another one's of the same name before it."""
    is_in(world, "PyTorchJob", "Suspended", labels=labels("r50") | {QUEUE_LABEL: "team"})
    job = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50"
    for name, owner, message in (("new", job, "insufficient unused quota"), ("old", "gone", "of another")):
        conditions = [
            {"type": "QuotaReserved", "status": "False", "message": message},
            {"type": "Requeued", "status": "True", "message": "not told"},
        ]
        about = {"ownerReferences": [{"kind": "PyTorchJob", "name": "r50", "uid": owner}]}
        world.add("Workload", name, metadata=about, status={"conditions": conditions})


def test_why_a_job_waits_in_kueues_queue_is_told_once(world):
    queued(world)
    told = notes(Follower(world.cluster, TORCH, "r50"), 2)
    assert told == ["PyTorchJob r50: Suspended, in Kueue's queue team: it is Suspended", "Kueue: insufficient unused quota"]


def test_who_may_not_read_kueues_words_follows_all_the_same(world):
    queued(world)
    world.denied = {("list", "workloads")}
    told = notes(Follower(world.cluster, TORCH, "r50"), 2)
    assert told == ["PyTorchJob r50: Suspended, in Kueue's queue team: it is Suspended"]


@pytest.mark.parametrize("state", ["Suspended", "Created"])
def test_of_a_job_that_need_not_have_pods_or_has_some_nothing_is_told(world, monkeypatch, state):
    monkeypatch.setattr(follow, "_PATIENCE_S", 0.5)
    is_in(world, "PyTorchJob", state)
    if state == "Created":
        pod(world, 0, phase="Pending")
    told = notes(Follower(world.cluster, TORCH, "r50"), 2)
    assert told and "no pod yet" not in " ".join(told)


def invalid(world):
    """The mpi-operator's only word about a job that it will never start."""
    about = {"kind": "MPIJob", "name": "r50"}
    event = {"type": "Warning", "reason": "ValidationError", "message": "no workers"}
    world.add("Event", "e", involvedObject=about, lastTimestamp="2026-01-01T00:00:01Z", **event)


def test_a_job_that_its_operator_gave_up_has_failed_and_one_that_has_begun_has_not(world):
    invalid(world)
    is_in(world, "MPIJob")
    follower = Follower(world.cluster, target.load("mpijob"), "r50")
    for _ in follower.events():
        pass
    assert (follower.state.phase, follower.state.reason) == ("Failed", "ValidationError: no workers")
    is_in(world, "MPIJob", "Running")
    follower = Follower(world.cluster, target.load("mpijob"), "r50")
    told = []
    for event in follower.events():
        told += [event.text] if isinstance(event, Note) else []
        if "ValidationError: no workers" in told and event is None:
            break
    assert follower.state.phase == "Running"


SETBACKS = [("trainjob", "TrainJobResourcesCreationFailed"), ("pytorchjob", "FailedCreateService")]


def set_back(world, kind, reason):
    """A job that its operator could not begin, and tries to again."""
    is_in(world, kind.kind)
    event = {"type": "Warning", "reason": reason, "message": "conflict"}
    world.add("Event", "e", involvedObject={"kind": kind.kind, "name": "r50"}, lastTimestamp="2026-01-01T00:00:01Z", **event)


@pytest.mark.parametrize(("on", "reason"), SETBACKS)
def test_a_job_that_comes_to_nothing_after_a_setback_has_failed_in_the_end(world, monkeypatch, on, reason):
    monkeypatch.setattr(follow, "_SETBACK_S", 1.5)
    kind = target.load(on)
    set_back(world, kind, reason)
    follower, begun = Follower(world.cluster, kind, "r50"), time.monotonic()
    *first, last = notes(follower, 20)
    # Whichever of them is seen first.
    assert sorted(first) == sorted([f"{kind.kind} r50: Created", f"{reason}: conflict"])
    assert last == f"{kind.kind} r50: Failed"
    assert (follower.state.phase, follower.state.reason) == ("Failed", f"{reason}: conflict")
    assert time.monotonic() - begun > 1.5


def test_a_job_that_is_given_up_is_not_waited_for(world, monkeypatch):
    """Its pods may go on, and their logs with them."""

    def endless(self, pod, container, stop):
        while not stop():
            time.sleep(0.05)
        yield from ()

    monkeypatch.setattr(type(world.cluster), "logs", endless)
    monkeypatch.setattr(follow, "_SETBACK_S", 0.0)
    set_back(world, TORCH, "FailedCreateService")
    pod(world, 0)
    follower = Follower(world.cluster, TORCH, "r50")
    said = notes(follower, follow._DRAIN_S + 5)
    assert follower.state.phase == "Failed"
    assert not any("lines may be missing" in one for one in said)


@pytest.mark.parametrize(("on", "reason"), SETBACKS)
def test_a_job_that_gets_on_after_a_setback_has_not_failed(world, monkeypatch, on, reason):
    """Not even where its pods then wait for long, or are all gone for a moment."""
    monkeypatch.setattr(follow, "_SETBACK_S", 1.0)
    kind = target.load(on)
    set_back(world, kind, reason)
    follower, begun = Follower(world.cluster, kind, "r50", logs=False), time.monotonic()
    for _ in follower.events():
        passed = time.monotonic() - begun
        if on == "pytorchjob":
            is_in(world, kind.kind, "Created" if 0.5 < passed < 2 else None)
        else:
            pod(world, 0, phase="Pending")
            waiting = world.objects["/api/v1/namespaces/team/pods/r50-worker-0"]["metadata"]
            waiting["labels"] = {"jobset.sigs.k8s.io/jobset-name": "r50" if 0.5 < passed < 2 else "another"}
        if passed > 4:
            break
    assert follower.state.phase == "Created"


def test_a_setback_that_is_over_costs_the_lines_after_it_nothing(world, monkeypatch):
    monkeypatch.setattr(follow, "_SETBACK_S", 0.0)
    asked = []
    monkeypatch.setattr(type(TORCH), "state", lambda *_: asked.append(1) or target.State("Running"))
    set_back(world, TORCH, "FailedCreateService")
    pod(world, 0, logs=[f"[0] line {i}" for i in range(60)])
    lines, follower = 0, Follower(world.cluster, TORCH, "r50")
    for event in follower.events():
        lines += isinstance(event, Line)
        if lines == 60:
            break
    assert len(asked) < 60
