"""Following jobs, without a cluster: log lines across lost connections, and reasons as text."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs import TORCH
from worldsize.cluster.api import logs
from worldsize.cluster.api.errors import ClusterError, Unreachable
from worldsize.cluster.api.log_cursor import LogCursor
from worldsize.cluster.api.logs import Run
from worldsize.cluster.jobs import diagnose
from worldsize.cluster.jobs.follow import Line, _lines_of
from worldsize.cluster.manifests import load_target


def stamp(nanoseconds: int) -> str:
    """A time as the kubelet writes it: RFC 3339, without trailing zeros in the fraction."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    digits = f"{fraction:09}".rstrip("0")
    return f"2026-01-01T00:00:{seconds:02}" + (f".{digits}" if digits else "") + "Z"


@given(
    st.lists(st.integers(0, 5 * 10**9) | st.sampled_from([0, 10**9, 15 * 10**8, 151 * 10**7]), max_size=30),
    st.lists(st.integers(0, 12), max_size=8),
)
def test_every_line_comes_once_and_in_order_after_any_lost_connection(times, breaks):
    written = [(stamp(time), f"line {i}") for i, time in enumerate(sorted(times))]
    seen, got = LogCursor(), []
    for length in [*breaks, len(written)]:
        since = seen.since.get("sinceTime", "")
        sent = [f"{time} {text}" for time, text in written if time[:19] >= since[:19]]
        got += [text for line in sent[:length] if (text := seen.new(line)) is not None]
    sent = [f"{time} {text}" for time, text in written if time[:19] >= seen.since.get("sinceTime", "")[:19]]
    got += [text for line in sent if (text := seen.new(line)) is not None]
    assert got == [text for _, text in written]


@pytest.mark.parametrize("zone", ["+08:00", "-05:30", "Z"])
def test_no_line_is_lost_if_the_node_uses_another_time_zone(zone):
    """Container runtimes write local time with its offset, and the kubelet passes it on."""
    seen = LogCursor()
    assert seen.new(f"2026-01-01T00:00:01.5{zone} a") == "a"
    asked = datetime.fromisoformat(seen.since["sinceTime"].replace("Z", "+00:00"))
    assert asked == datetime.fromisoformat(f"2026-01-01T00:00:01{zone.replace('Z', '+00:00')}")
    sent = [f"2026-01-01T00:00:01.5{zone} a", f"2026-01-01T00:00:01.51{zone} b"]
    assert [seen.new(line) for line in sent] == [None, "b"]


def test_no_line_is_lost_when_daylight_saving_time_ends():
    seen = LogCursor()
    assert [seen.new(f"2026-10-25T02:59:59.9{zone} a") for zone in ("+02:00", "+01:00")] == ["a", "a"]
    assert seen.new("2026-10-25T02:00:00+01:00 b") is None
    assert seen.new("2026-10-25T03:00:00+01:00 c") == "c"


def test_messages_of_the_kubelet_come_once_and_do_not_move_the_cursor():
    error = "unable to retrieve container logs for containerd://0123"
    seen = LogCursor()
    assert (seen.new(error), seen.since, seen.new(error)) == (error, {}, None)
    assert seen.new("2026-01-01T00:00:01Z a") == "a"
    assert seen.new("failed to watch file: no space left on device") == "failed to watch file: no space left on device"
    assert seen.since == {"sinceTime": "2026-01-01T00:00:01Z"}


GONE = b'rpc error: code = NotFound desc = an error occurred when try to find container "f85b": not found'
A, B, CUT = b"2026-01-01T00:00:01Z a\n", b"2026-01-01T00:00:02Z b\n", b"2026-01-01T00:00:03Z c"
FULL = b"failed to create fsnotify watcher: too many open files"


RUN = Run("u", 0)


def reported(state="running", restarts=0, uid="u", phase="Running"):
    """What the API server reports about the pod whose container c is in this state."""
    container = {"name": "c", "restartCount": restarts, "state": {state: {}}}
    return {"metadata": {"uid": uid}, "status": {"phase": phase, "containerStatuses": [container]}}


def followed(monkeypatch, answers, pods, run=RUN):
    """The lines of a log whose requests get these answers, and the queries; after each, the pod's next status."""
    monkeypatch.setattr(logs, "_SETTLING_S", 0.0)
    answers, pods, queries = iter(answers), iter(pods), []

    def request(query):
        queries.append(query)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return iter(answer)

    lines = list(logs.follow(request, lambda: next(pods), "c", run, bool))
    assert list(answers) == [] and list(pods) == []
    return lines, queries


ENDED = reported("terminated", phase="Succeeded")


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        ([[A, B], [B]], ["a", "b"]),
        ([[A], [A, B], [B]], ["a", "b"]),
        ([[A, B, CUT], [B, CUT]], ["a", "b", "c"]),
        ([[A, B, CUT], [GONE]], ["a", "b", "c"]),
        ([[A, B], [GONE]], ["a", "b"]),  # the pod was removed between the two answers
        ([[GONE], [GONE]], [GONE.decode()]),
        ([[A, FULL], [A, FULL]], ["a", FULL.decode()]),
    ],
)
def test_a_log_ends_when_its_server_has_nothing_new(monkeypatch, answers, lines):
    """Responses recorded from kubelets: a log that ends is requested again, and by then its container may be gone."""
    assert followed(monkeypatch, answers, [ENDED])[0] == lines


def test_a_stream_that_ends_while_the_container_runs_is_requested_again(monkeypatch):
    """As often as proxies with an idle timeout end it, with and without new lines in between."""
    answers = [[A], [], [], [A], [A, B], [B], [B]]
    assert followed(monkeypatch, answers, [*[reported()] * 5, ENDED])[0] == ["a", "b"]


def test_a_log_that_its_server_cannot_find_is_requested_again_while_the_container_runs(monkeypatch):
    """As a kubelet that has just started answers, which does not know its pods yet."""
    unknown = ClusterError("the server could not find the requested resource", 404)
    answers = [[A], unknown, unknown, [A, B], [B]]
    assert followed(monkeypatch, answers, [*[reported()] * 3, ENDED])[0] == ["a", "b"]
    assert followed(monkeypatch, [[A], unknown], [reported(), None])[0] == ["a"]
    assert followed(monkeypatch, [[A], unknown], [ENDED])[0] == ["a"]


@pytest.mark.parametrize("after", [None, reported(uid="its replacement")])
def test_a_log_ends_with_its_pod_and_not_with_the_pod_that_replaces_it(monkeypatch, after):
    assert followed(monkeypatch, [[A], [A, CUT]], [reported(), after])[0] == ["a", "c"]


def test_the_log_of_a_pod_ends_when_the_one_that_replaces_it_has_none_yet(monkeypatch):
    """The API server knows pods by name."""
    waits = ClusterError('container "c" in pod "j-worker-0" is waiting to start: ContainerCreating', 400)
    replacement = reported("waiting", uid="its replacement", phase="Pending")
    assert followed(monkeypatch, [waits], [replacement])[0] == []
    assert followed(monkeypatch, [[A], waits], [reported(), replacement])[0] == ["a"]
    with pytest.raises(ClusterError, match="waiting to start"):
        followed(monkeypatch, [waits], [reported()])


def test_the_rest_of_a_log_whose_container_was_restarted_is_read_and_nothing_of_the_next_run(monkeypatch):
    lost = Unreachable("lost")
    monkeypatch.setattr(logs, "wait_for_server", lambda *_: 0.0)
    lines, queries = followed(monkeypatch, [[A], lost, lost, [A, B], [B]], [reported(), reported(restarts=1)])
    assert lines == ["a", "b"]
    assert ["previous" in query for query in queries] == [False, False, True, True, True]
    refused = ClusterError("previous terminated container not found", 400)
    assert followed(monkeypatch, [[A], refused], [reported(restarts=1)])[0] == ["a"]


@pytest.mark.parametrize("status", [reported(phase="Failed"), reported("waiting")])
def test_a_container_that_a_lost_node_still_reports_as_running_has_ended(monkeypatch, status):
    assert followed(monkeypatch, [[A], [A]], [status])[0] == ["a"]
    assert followed(monkeypatch, [[A], [A]], [status], run=None)[0] == ["a"]


def test_lines_know_their_rank():
    assert _lines_of("worker-1", "[3] epoch 1") == [Line("worker-1", 3, "epoch 1")]
    assert _lines_of("launcher", "[1,12]<stdout>: epoch 1") == [Line("launcher", 12, "epoch 1")]
    assert _lines_of("launcher", "[1,0]<stderr>:") == [Line("launcher", 0, "")]
    assert _lines_of("worker-1", "worldsize: waiting") == [Line("worker-1", None, "worldsize: waiting")]


def test_what_open_mpi_writes_into_one_line_are_lines_of_each_rank():
    """It ends a rank's output with no line break if the rank was killed or did not write one."""
    text = "[1,1]<stderr>:worldsize: /data: no such folder[1,0]<stderr>:worldsize: /data: no such folder[1,2]<stdout>:"
    lines = [Line("launcher", rank, "worldsize: /data: no such folder") for rank in (1, 0)]
    assert _lines_of("launcher", text) == [*lines, Line("launcher", 2, "")]
    assert _lines_of("launcher", "mpirun: killed[1,0]<stderr>:bye") == [
        Line("launcher", None, "mpirun: killed"),
        Line("launcher", 0, "bye"),
    ]
    for plain in ("[0] x[1] y [1,2]", "shape [1,224] and a[1,2]<std>:"):
        assert len(_lines_of("worker-0", plain)) == 1


def pod(index: int, **status) -> dict:
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index)}
    return {"metadata": {"name": f"j-worker-{index}", "labels": labels}, "spec": {}, "status": status}


def unscheduled(message: str) -> dict:
    return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def test_pods_that_wait_for_the_same_reason_are_grouped():
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    image = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}}
    pods = [pod(i, **unscheduled(message)) for i in range(5)]
    pods += [pod(5, phase="Pending", containerStatuses=[{"name": "pytorch", "state": image}])]
    pods += [
        pod(
            6,
            phase="Pending",
            containerStatuses=[{"name": "pytorch", "state": {"waiting": {"reason": "ContainerCreating"}}}],
        )
    ]
    assert diagnose.waiting(TORCH, pods) == [
        f"5 pods (worker-0, worker-1, ...): not scheduled: {message}",
        'worker-5: ImagePullBackOff: Back-off pulling image "x:1"',
    ]


def test_pods_are_listed_in_rank_order():
    image = {"waiting": {"reason": "ErrImagePull"}}
    waiting = {"phase": "Pending", "containerStatuses": [{"name": "pytorch", "state": image}]}
    pods = [pod(i, **waiting) for i in (10, 2)]
    assert diagnose.waiting(TORCH, pods) == ["worker-2, worker-10: ErrImagePull"]


def test_init_containers_wait_for_reasons_and_pods_that_leave_or_have_ended_do_not():
    pull = [{"name": "init", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]
    leaving = pod(1, phase="Pending", initContainerStatuses=pull)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pods = [pod(0, phase="Pending", initContainerStatuses=pull), leaving, pod(2, phase="Failed", initContainerStatuses=pull)]
    assert diagnose.waiting(TORCH, pods) == ["worker-0: ErrImagePull: no such image"]


def test_an_evicted_pod_has_failed_without_a_container():
    pods = [pod(0, phase="Failed", reason="Evicted", message="low on disk"), pod(1, phase="Failed", reason="NodeLost")]
    assert diagnose.failures(TORCH, pods) == ["worker-0: Evicted: low on disk", "worker-1: NodeLost"]


def true(*kinds: str) -> dict:
    return {"status": {"conditions": [{"type": kind, "status": "True", "message": f"it is {kind}"} for kind in kinds]}}


# The conditions of Kubeflow's API reference; the operators leave "Created" true forever.
@pytest.mark.parametrize("kind", ["pytorchjob", "mpijob"])
@pytest.mark.parametrize(
    ("conditions", "phase"),
    [
        ((), "Created"),
        (("Created",), "Pending"),
        (("Created", "Running"), "Running"),
        (("Created", "Restarting"), "Restarting"),
        (("Created", "Running", "Suspended"), "Suspended"),
        (("Created", "Running", "Succeeded"), "Succeeded"),
        (("Created", "Restarting", "Failed"), "Failed"),
    ],
)
def test_where_a_job_of_conditions_is(kind, conditions, phase):
    state = load_target(kind).state(true(*conditions), [])
    assert state.phase == phase
    over = true(*conditions)
    over["status"]["conditions"] += [{"type": other, "status": "False"} for other in ("Suspended", "Failed")]
    assert load_target(kind).state(over, []).phase == phase


def phases(*of: str) -> list[dict]:
    return [{"status": {"phase": phase}} for phase in of]


@pytest.mark.parametrize(
    ("conditions", "pods", "phase"),
    [
        ((), (), "Created"),
        ((), ("Pending", "Pending"), "Pending"),
        ((), ("Pending", "Running"), "Running"),
        # One of the two is being replaced.
        ((), ("Failed", "Pending"), "Running"),
        ((), ("Succeeded", "Running"), "Running"),
        (("Suspended",), (), "Suspended"),
        (("Suspended", "Failed"), (), "Failed"),
        (("Suspended", "Complete"), ("Succeeded",), "Succeeded"),
        (("Failed",), ("Running",), "Failed"),
    ],
)
def test_where_a_trainjob_is(conditions, pods, phase):
    assert load_target("trainjob").state(true(*conditions), phases(*pods)).phase == phase


def test_failures_come_in_the_order_in_which_they_happened():
    def ended(at: str, code: int, **more) -> dict:
        state = {"terminated": {"exitCode": code, "finishedAt": at} | more}
        return {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": state}]}

    pods = [
        pod(0, **ended("2026-01-01T00:00:09Z", 70, message="lost a peer")),
        pod(1, **ended("2026-01-01T00:00:05Z", 137, reason="OOMKilled")),
        pod(2, **ended("2026-01-01T00:00:01Z", 0)),
    ]
    assert diagnose.failures(TORCH, pods) == [
        "worker-1 failed with exit code 137 (out of memory)",
        "worker-0 failed with exit code 70:\nlost a peer",
    ]


JOB = {"metadata": {"name": "j", "uid": "u", "creationTimestamp": "2026-01-01T00:00:03Z"}}


@pytest.mark.parametrize(
    ("on", "own", "others"),
    [
        (
            "pytorchjob",
            ["Pod j-worker-1", "Service j-worker-10"],
            ["Pod j-2-worker-1", "Pod j-worker-worker-0", "PyTorchJob j-2"],
        ),
        (
            "mpijob",
            ["Pod j-worker-1", "Pod j-launcher-x7k2p", "Job j-launcher", "Service j", "Secret j-ssh"],
            ["Pod j-2-worker-1", "Pod j-launcher-worker-0", "Job j-2-launcher", "Secret j-2-ssh", "TrainJob j", "JobSet j"],
        ),
        (
            "trainjob",
            ["JobSet j", "Job j-node-0", "Pod j-node-0-1-x7k2p"],
            [
                "JobSet j-2",
                "Job j-2-node-0",
                "Pod j-2-node-0-1-x7k2p",
                "Pod j-node-0-node-0-1-x7k2p",
                "PersistentVolumeClaim j",
            ],
        ),
        ("fetchjob", ["Pod j-x7k2p"], ["Pod j-2-x7k2p", "Job j-2"]),
    ],
)
def test_warnings_are_of_this_job_and_of_what_its_operator_creates(on, own, others):
    events = [
        {
            "metadata": {"creationTimestamp": "2026-01-01T00:00:05Z"},
            "involvedObject": dict(zip(("kind", "name"), one.split(), strict=True)),
            "type": "Warning",
            "reason": "Reason",
            "message": one,
        }
        for one in [*own, *others]
    ]
    assert [message for _, message, _ in diagnose.warnings(load_target(on), events, JOB)] == own


def test_warnings_are_of_this_job_and_of_this_time():
    def event(name: str, at: str, message: str, kind="MPIJob", uid="u", **more) -> dict:
        about = {"kind": kind, "name": name, "uid": uid}
        return (
            {"metadata": {}, "involvedObject": about, "type": "Warning", "reason": "ValidationError", "message": message}
            | {"lastTimestamp": at}
            | more
        )

    events = [
        event("j", "2026-01-01T00:00:05Z", "second"),
        event("j", "2026-01-01T00:00:01Z", "of the job before"),
        event("jj", "2026-01-01T00:00:05Z", "of another job"),
        event("j", "2026-01-01T00:00:05Z", "of a deleted job of this name", uid="before"),
        event("j", "2026-01-01T00:00:05Z", "of a job of this name of another kind", kind="TrainJob"),
        event("j-launcher", "2026-01-01T00:00:05Z", "of a job whose name starts equally"),
        event("j-launcher", "2026-01-01T00:00:04Z", "first", kind="Job"),
        event("j", "2026-01-01T00:00:05Z", "normal", type="Normal"),
        # The scheduler's events have neither first nor last timestamp.
        event("j", "", "scheduler", eventTime="2026-01-01T00:00:06.000000Z"),
        # A recurring event that started earlier.
        event("j", "", "again", eventTime="2026-01-01T00:00:02Z", series={"lastObservedTime": "2026-01-01T00:00:07Z"}),
        event("j-worker-0", "2026-01-01T00:00:08Z", "repeats the pod's status", reason="FailedScheduling"),
        # In the same second as the job's creation, with microseconds as in the newer events API.
        event("j", "", "at once", eventTime="2026-01-01T00:00:03.123456Z"),
    ]
    messages = [message for _, message, _ in diagnose.warnings(load_target("mpijob"), events, JOB)]
    assert messages == ["at once", "first", "second", "scheduler", "again"]
