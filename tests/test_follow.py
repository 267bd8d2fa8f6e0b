"""Following jobs, the parts that need no cluster: log lines after lost connections, and reasons in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch import reasons
from worldsize.launch.follow import Line, _line
from worldsize.launch.lastlines import LastLines
from worldsize.launch.target import load

TORCH = load("pytorchjob")


def stamp(nanoseconds: int) -> str:
    """As the kubelet writes time: RFC 3339 without trailing zeros in the fraction."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    digits = f"{fraction:09}".rstrip("0")
    return f"2026-01-01T00:00:{seconds:02}" + (f".{digits}" if digits else "") + "Z"


@given(
    st.lists(st.integers(0, 5 * 10**9) | st.sampled_from([0, 10**9, 15 * 10**8, 151 * 10**7]), max_size=30),
    st.lists(st.integers(0, 12), max_size=8),
)
def test_every_line_comes_once_and_in_order_whatever_connections_break(times, breaks):
    written = [(stamp(time), f"line {i}") for i, time in enumerate(sorted(times))]
    seen, got = LastLines(), []
    for length in [*breaks, len(written)]:
        since = seen.since.get("sinceTime", "")
        sent = [f"{time} {text}" for time, text in written if time[:19] >= since[:19]]
        got += [text for line in sent[:length] if (text := seen.new(line)) is not None]
    sent = [f"{time} {text}" for time, text in written if time[:19] >= seen.since.get("sinceTime", "")[:19]]
    got += [text for line in sent if (text := seen.new(line)) is not None]
    assert got == [text for _, text in written]


def test_lines_know_their_rank():
    assert _line("worker-1", "[3] epoch 1") == Line("worker-1", 3, "epoch 1")
    assert _line("launcher", "[1,12]<stdout>: epoch 1") == Line("launcher", 12, "epoch 1")
    assert _line("launcher", "[1,0]<stderr>:") == Line("launcher", 0, "")
    assert _line("worker-1", "worldsize: waiting") == Line("worker-1", None, "worldsize: waiting")


def pod(index: int, **status) -> dict:
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index)}
    return {"metadata": {"name": f"j-worker-{index}", "labels": labels}, "spec": {}, "status": status}


def unscheduled(message: str) -> dict:
    return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def test_pods_that_wait_for_one_reason_are_told_together():
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
    assert reasons.waiting(TORCH, pods) == [
        f"5 pods (worker-0, worker-1, ...): not scheduled: {message}",
        'worker-5: ImagePullBackOff: Back-off pulling image "x:1"',
    ]


def test_failures_come_in_the_order_in_which_they_happened():
    def ended(at: str, code: int, **more) -> dict:
        state = {"terminated": {"exitCode": code, "finishedAt": at} | more}
        return {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": state}]}

    pods = [
        pod(0, **ended("2026-01-01T00:00:09Z", 70, message="lost a peer")),
        pod(1, **ended("2026-01-01T00:00:05Z", 137, reason="OOMKilled")),
        pod(2, **ended("2026-01-01T00:00:01Z", 0)),
    ]
    assert reasons.failures(TORCH, pods) == [
        "worker-1 ended with exit code 137 (out of memory)",
        "worker-0 ended with exit code 70:\nlost a peer",
    ]


def test_warnings_are_of_this_job_and_of_this_time():
    def event(name: str, at: str, message: str, **more) -> dict:
        about = {"kind": "MPIJob", "name": name}
        return (
            {"metadata": {}, "involvedObject": about, "type": "Warning", "reason": "ValidationError", "message": message}
            | {"lastTimestamp": at}
            | more
        )

    events = [
        event("j", "2026-01-01T00:00:05Z", "second"),
        event("j", "2026-01-01T00:00:01Z", "of the job before"),
        event("jj", "2026-01-01T00:00:05Z", "of another job"),
        event("j-launcher", "2026-01-01T00:00:04Z", "first"),
        event("j", "2026-01-01T00:00:05Z", "normal", type="Normal"),
        # The scheduler's events have neither first nor last timestamp.
        event("j", "", "scheduler", eventTime="2026-01-01T00:00:06.000000Z"),
    ]
    told = [message for _, message, _ in reasons.warnings(events, "j", "2026-01-01T00:00:03Z")]
    assert told == ["first", "second", "scheduler"]
