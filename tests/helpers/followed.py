"""Pods and clocks of the tests that follow jobs."""

from __future__ import annotations

from worldsize.cluster.jobs.follow import Note
from worldsize.cluster.objects import labels


def pod(fake_cluster, index, *, exit_code=None, message="", restarts=0, logs=(), logs_before=(), **status):
    """A worker of r50 whose container is running, or exited with this code."""
    name = f"r50-worker-{index}"
    ended = {"exitCode": exit_code, "finishedAt": f"2026-01-01T00:00:{30 - index}Z", "message": message}
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
