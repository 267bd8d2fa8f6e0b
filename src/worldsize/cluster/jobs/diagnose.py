"""Why pods are waiting and why they ended, in one sentence each (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from worldsize.cluster.manifests.base import Target
from worldsize.cluster.objects import Object, event_time
from worldsize.launch.agent import RETRYABLE

# Waiting reasons of a normal start.
_NORMAL = ("ContainerCreating", "PodInitializing")
# Events that repeat a pod's status, which has more detail.
_IN_POD_STATUS = ("BackOff", "Failed", "FailedScheduling", "Unhealthy", "SetPodTemplateRestartPolicy", "ExitedWithCode")


def waiting(target: Target, pods: list[Object]) -> list[str]:
    """Why pods are not running yet: each reason once, with the pods that it applies to."""
    by_reason: dict[str, list[str]] = {}
    for pod in sorted(pods, key=target.place):
        reason = _why_not_running(pod)
        if reason:
            by_reason.setdefault(reason, []).append(target.place(pod)[1])
    return [f"{_summary(names)}: {reason}" for reason, names in by_reason.items()]


def queued(workloads: list[Object], job: Object) -> list[str]:
    """Kueue's messages about the job: whether its quota is reserved, whether it is admitted, and why not."""
    uid = job["metadata"]["uid"]
    messages = []
    for workload in workloads:
        if uid in [owner["uid"] for owner in workload["metadata"].get("ownerReferences", [])]:
            conditions = workload.get("status", {}).get("conditions", [])
            messages += [str(one.get("message", "")) for one in conditions if one["type"] in ("QuotaReserved", "Admitted")]
    return [f"Kueue: {message}" for message in messages if message]


def failures(target: Target, pods: list[Object]) -> list[str]:
    """Failed containers and pods, earliest first: pod, exit code and termination message."""
    ended = []
    for pod in pods:
        name = target.place(pod)[1]
        for status in pod["status"].get("containerStatuses", []):
            end = status.get("state", {}).get("terminated") or {}
            if end.get("exitCode"):
                ended.append((end.get("finishedAt") or "", f"{name} failed with {_ending(end)}"))
        if pod["status"].get("phase") == "Failed" and pod["status"].get("reason"):
            ended.append(("", f"{name}: {pod['status']['reason']}: {pod['status'].get('message', '')}".rstrip(": ")))
    return [text for _, text in sorted(ended)]


def losses(target: Target, pods: list[Object]) -> list[tuple[str, str]]:
    """(text, key) of the failures of pods and containers until now, earliest first: one line each, with the exit code.

    Runs of a container before it was restarted in place are included, pods that were asked to leave are not.
    """
    found = []
    for pod in pods:
        name, uid = target.place(pod)[1], pod["metadata"].get("uid", pod["metadata"]["name"])
        for status in pod["status"].get("containerStatuses", []):
            for end in (status.get(state, {}).get("terminated") or {} for state in ("lastState", "state")):
                if end.get("exitCode") and end["exitCode"] != RETRYABLE:
                    at = end.get("finishedAt") or ""
                    found.append((at, f"{name} failed with {_code(end)}", f"{uid} {at}"))
        if pod["status"].get("phase") == "Failed" and pod["status"].get("reason"):
            reason = pod["status"]["reason"]
            found.append(("", f"{name}: {reason}: {pod['status'].get('message', '')}".rstrip(": "), f"{uid} {reason}"))
    return [(text, key) for _, text, key in sorted(found)]


def warnings(target: Target, events: list[Object], job: Object) -> list[tuple[str, str, str]]:
    """(reason, message, key) of warnings about the job or its objects, earliest first; times are compared in seconds.

    Older events belong to an earlier job of the same name.
    """
    found = []
    for event in _warning_events(target, events, job):
        reason, message = str(event.get("reason", "")), _message(event)
        found.append((reason, message, f"{reason} {event['involvedObject'].get('kind')} {message}"))
    return found


def last_warnings(target: Target, events: list[Object], job: Object, count: int = 3) -> list[tuple[str, str]]:
    """(text, time of its last event) of the newest of the `warnings`, the newest last."""
    last: dict[str, str] = {}
    for event in _warning_events(target, events, job):
        text = f"{event.get('reason', '')}: {_message(event)}"
        last.pop(text, None)
        last[text] = event_time(event)
    return [*last.items()][-count:]


def _warning_events(target: Target, events: list[Object], job: Object) -> Iterator[Object]:
    since = job["metadata"]["creationTimestamp"]
    for event in sorted(events, key=_second):
        recent = _second(event) >= since[:19]
        if not recent or not _concerns(target, event["involvedObject"], job["metadata"]):
            continue
        if event.get("type") == "Warning" and event.get("reason") not in _IN_POD_STATUS:
            yield event


def _message(event: Object) -> str:
    return str(event.get("message", "")).strip()


def _concerns(target: Target, about: Object, job: Object) -> bool:
    """Whether an event ``about`` this object is about the ``job`` (its metadata) or an object that its operator created.

    The names of two jobs may start equally, and jobs of two kinds may have the same name.
    """
    name, suffix = str(about.get("name", "")), target.parts.get(str(about.get("kind")))
    if about.get("kind") == target.kind:
        return name == job["name"] and about.get("uid") in (None, "", job["uid"])
    return suffix is not None and re.fullmatch(re.escape(job["name"]) + suffix, name) is not None


def _second(event: Object) -> str:
    """`event_time` without a fraction, which only some events have: as text, 03.5Z sorts before 03Z."""
    return event_time(event)[:19]


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
    message = str(end.get("message") or "").strip()
    return _code(end) + (f":\n{message}" if message else "")


def _code(end: Object) -> str:
    return f"exit code {end['exitCode']}" + (" (out of memory)" if end.get("reason") == "OOMKilled" else "")


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} pods ({names[0]}, {names[1]}, ...)"
