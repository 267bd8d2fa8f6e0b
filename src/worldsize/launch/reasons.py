"""Why pods wait and why they ended (pure): what kubectl shows in six places, in a sentence each."""

from __future__ import annotations

from typing import Any

from worldsize.launch.target import Target

Object = dict[str, Any]

# Waiting reasons that pass by themselves.
_NORMAL = ("ContainerCreating", "PodInitializing")
# Events that only repeat what a pod's own status says better.
_TOLD_BY_PODS = ("BackOff", "Failed", "FailedScheduling", "Unhealthy", "SetPodTemplateRestartPolicy", "ExitedWithCode")


def waiting(target: Target, pods: list[Object]) -> list[str]:
    """Why pods do not run yet, each reason once with the pods that have it."""
    by_reason: dict[str, list[str]] = {}
    for pod in sorted(pods, key=target.place):
        reason = _why_not_running(pod)
        if reason:
            by_reason.setdefault(reason, []).append(target.place(pod)[1])
    return [f"{_some(names)}: {reason}" for reason, names in by_reason.items()]


def queued(workloads: list[Object], job: Object) -> list[str]:
    """What Kueue says of the job: whether quota is reserved for it, whether it is admitted, and why not."""
    uid = job["metadata"]["uid"]
    told = []
    for workload in workloads:
        if uid in [owner["uid"] for owner in workload["metadata"].get("ownerReferences", [])]:
            conditions = workload.get("status", {}).get("conditions", [])
            told += [str(one.get("message", "")) for one in conditions if one["type"] in ("QuotaReserved", "Admitted")]
    return [f"Kueue: {message}" for message in told if message]


def failures(target: Target, pods: list[Object]) -> list[str]:
    """How containers ended that did not end well, the earliest first: pod, exit code and last words."""
    ended = []
    for pod in pods:
        who = target.place(pod)[1]
        for status in pod["status"].get("containerStatuses", []):
            end = status.get("state", {}).get("terminated") or {}
            if end.get("exitCode"):
                ended.append((end.get("finishedAt") or "", f"{who} ended with {_ending(end)}"))
        if pod["status"].get("phase") == "Failed" and pod["status"].get("reason"):
            ended.append(("", f"{who}: {pod['status']['reason']}: {pod['status'].get('message', '')}".rstrip(": ")))
    return [text for _, text in sorted(ended)]


def warnings(events: list[Object], name: str, since: str) -> list[tuple[str, str, str]]:
    """(reason, message, key) of warnings about the job or what was made for it, the earliest first, by the second.

    Args:
        since: RFC 3339 time; what is older belongs to an earlier job of the same name.
    """
    told = []
    for event in sorted(events, key=_second):
        about = event["involvedObject"]
        ours = about.get("name") == name or str(about.get("name", "")).startswith(f"{name}-")
        new = _second(event) >= since[:19]
        if ours and new and event.get("type") == "Warning" and event.get("reason") not in _TOLD_BY_PODS:
            message = str(event.get("message", "")).strip()
            told.append((str(event.get("reason", "")), message, f"{event.get('reason')} {about.get('kind')} {message}"))
    return told


def time_of(event: Object) -> str:
    """When the event happened last; the scheduler's have neither first nor last timestamp."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), str(event["metadata"].get("creationTimestamp", "")))


def _second(event: Object) -> str:
    """`time_of` without the fraction, which only some have: as text, one with it comes before the second itself."""
    return time_of(event)[:19]


def _why_not_running(pod: Object) -> str:
    status = pod["status"]
    if pod["metadata"].get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed"):
        return ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message') or condition.get('reason', '')}"
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        wait = container.get("state", {}).get("waiting")
        if wait and wait.get("reason") not in _NORMAL:
            return f"{wait.get('reason')}: {wait.get('message', '')}".rstrip(": ")
    return ""


def _ending(end: Object) -> str:
    code = end["exitCode"]
    hint = " (out of memory)" if end.get("reason") == "OOMKilled" else ""
    words = str(end.get("message") or "").strip()
    return f"exit code {code}{hint}" + (f":\n{words}" if words else "")


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} pods ({names[0]}, {names[1]}, ...)"
