"""A pod that lives for one look into a volume."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from worldsize.errors import UserError
from worldsize.launch import pod, reasons, volumes
from worldsize.launch.answers import ClusterError
from worldsize.launch.cluster import Cluster
from worldsize.launch.spec import VOLUMES

Object = dict[str, Any]

CONTAINER = "files"

_LIFE_S = 12 * 3600  # then the cluster ends it, should nobody else have done so
_GRACE_S = 5  # to clean up after a transfer that broke off
_POLL_S = 0.3
# Waiting reasons that stay.
_HOPELESS = (
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)


@dataclass(frozen=True)
class FilePod:
    """What such a pod is made from.

    ``suffix`` tells it from the pods of others who look into the same volume. ``node`` is where it must run, ``None``:
    anywhere; ``tolerations`` are those of the pod that it joins there.
    """

    volume: str
    namespace: str
    image: str
    suffix: str
    read_only: bool = True
    pull_secrets: tuple[str, ...] = ()
    node: str | None = None
    tolerations: tuple[Mapping[str, Any], ...] = ()


def manifest(of: FilePod) -> Object:
    """The Pod (pure). It needs nothing of its image but Python 3.9 and sleep."""
    name = f"files-{of.volume[:40].replace('.', '-').rstrip('-')}-{of.suffix}"
    amounts = {"cpu": "200m", "memory": "256Mi"}
    spec: Object = {
        "activeDeadlineSeconds": _LIFE_S,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "command": ["sleep", str(_LIFE_S)],
                "image": of.image,
                "imagePullPolicy": "IfNotPresent",
                "name": CONTAINER,
                "resources": {"limits": amounts | {"cpu": "1"}, "requests": amounts},
                "securityContext": pod.CONTAINER_SECURITY,
                "volumeMounts": [{"mountPath": str(VOLUMES / of.volume), "name": "volume", "readOnly": of.read_only}],
            }
        ],
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": pod.POD_SECURITY,
        "terminationGracePeriodSeconds": _GRACE_S,
        # On many clusters all nodes that have room have GPUs.
        "tolerations": [*map(dict, of.tolerations), {"key": "nvidia.com/gpu", "operator": "Exists"}],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": of.volume}}],
    }
    if of.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in of.pull_secrets]
    if of.node:
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [of.node]}]}
        required = {"nodeSelectorTerms": [here]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    labels = pod.labels(of.volume[:63].rstrip("-."), "files") | {"sidecar.istio.io/inject": "false"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "annotations": {"sidecar.istio.io/inject": "false"},
            "labels": labels,
            "name": name,
            "namespace": of.namespace,
        },
        "spec": spec,
    }


def fitting(
    cluster: Cluster, volume: str, suffix: str, image: str, read_only: bool, pull_secrets: tuple[str, ...] = ()
) -> FilePod:
    """The pod that can look into this volume now.

    Args:
        image: empty for that of the newest pod of ours.

    Raises:
        UserError: there is no such volume, or no pod can.
    """
    claim = volumes.existing(cluster, volume)
    modes = set(claim["spec"]["accessModes"])
    if not read_only and modes == {"ReadOnlyMany"}:
        raise UserError(f"volume {volume} can only be read (access rox)")
    pods = cluster.list("Pod")
    users = [one for one in volumes.users_of(volume, pods) if one["spec"].get("nodeName")]
    node, tolerations = None, ()
    if users and modes <= {"ReadWriteOnce", "ReadWriteOncePod"}:
        user = users[0]
        if "ReadWriteOncePod" in modes and not user["metadata"].get("deletionTimestamp"):
            raise UserError(f"only one pod at a time can use volume {volume}, and {user['metadata']['name']} does")
        node, tolerations = user["spec"]["nodeName"], tuple(user["spec"].get("tolerations", ()))
    image = image or _newest_image(pods)
    return FilePod(volume, cluster.namespace, image, suffix, read_only, pull_secrets, node, tolerations)


@contextmanager
def running(cluster: Cluster, of: FilePod, wait_s: float, say: Callable[[str], None]) -> Iterator[str]:
    """Have the pod while the context lasts, however it is left; gives its name when it runs.

    Args:
        wait_s: for the pod to start.
        say: is told what it waits for.

    Raises:
        ClusterError: the cluster refuses the pod, or does not start it; with the cluster's reason.
    """
    whole = manifest(of)
    name = str(whole["metadata"]["name"])
    with _signals_as_exits():
        try:
            cluster.create(whole)
            _await(cluster, of, name, wait_s, say)
            yield name
        finally:
            try:
                cluster.delete("Pod", name)
            except ClusterError as error:
                say(f"pod {name} could not be deleted, and goes on for 12 h at most: {error}")


def hindrance(one: Object, events: list[Object]) -> tuple[str, bool]:
    """Why the pod does not run yet, and whether waiting is of no use (pure)."""
    status = one["status"]
    if status.get("phase") in ("Succeeded", "Failed"):
        return f"{status.get('reason') or 'it ended at once'}: {status.get('message', '')}".rstrip(": "), True
    for container in status.get("containerStatuses", []):
        wait = container.get("state", {}).get("waiting") or {}
        if wait.get("reason", "ContainerCreating") != "ContainerCreating":
            # Older kubelets give the reason in an event alone.
            pulled = [str(event["message"]) for event in events if str(event.get("message")).startswith("Failed to pull")]
            why = pulled[-1] if pulled else wait.get("message", "")
            return f"{wait['reason']}: {why}".rstrip(": "), wait["reason"] in _HOPELESS
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message') or condition.get('reason', '')}", False
    if events:
        last = events[-1]
        if last.get("type") == "Warning" or last.get("reason") == "Pulling":
            return f"{last.get('reason')}: {str(last.get('message', '')).strip()}", False
    return "", False


def _await(cluster: Cluster, of: FilePod, name: str, wait_s: float, say: Callable[[str], None]) -> None:
    until = time.monotonic() + wait_s
    told = ""
    while True:
        one = cluster.get("Pod", name)
        if one is None:
            raise ClusterError(f"somebody deleted the pod {name} that was to look into volume {of.volume}")
        if one["status"].get("phase") == "Running":
            return
        events = sorted(cluster.list("Event", fields=f"involvedObject.name={name}"), key=reasons.time_of)
        why, hopeless = hindrance(one, events)
        if hopeless or time.monotonic() > until:
            raise ClusterError(f"the pod that looks into volume {of.volume} does not start{_reasons(cluster, of, why)}")
        if why and why != told:
            say(f"waiting: {why}")
            told = why
        time.sleep(_POLL_S)


def _reasons(cluster: Cluster, of: FilePod, why: str) -> str:
    """The pod's reason and, where the volume has no storage yet, the volume's."""
    claim = cluster.get("PersistentVolumeClaim", of.volume)
    unbound = claim is not None and claim.get("status", {}).get("phase") == "Pending"
    ofs = [why, f"the volume has no storage: {volumes.why_pending(cluster, of.volume)}" if unbound else ""]
    return "".join(f"\n  {reason}" for reason in ofs if reason)


def _newest_image(pods: list[Object]) -> str:
    """The image of the newest pod that has worldsize in it."""
    ours = [
        one
        for one in pods
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "worldsize"
        and one["metadata"]["labels"].get("app.kubernetes.io/component") != "browse"
    ]
    if not ours:
        raise UserError("--image: which image shall the pod that looks into the volume have? any with Python 3 will do")
    newest = max(ours, key=lambda one: str(one["metadata"]["creationTimestamp"]))
    return str(newest["spec"]["containers"][0]["image"])


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program in good order, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
