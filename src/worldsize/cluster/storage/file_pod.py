"""A short-lived pod that mounts a volume, for one file operation."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.spec import VOLUMES
from worldsize.cluster.objects import COMPONENT_LABEL, Object, event_time, is_ours, labels
from worldsize.cluster.storage import volumes
from worldsize.errors import SIGNAL_BASE, UserError

CONTAINER = "files"

_LIFETIME_S = 12 * 3600  # the cluster ends the pod after this if nothing else has
_GRACE_S = 5  # for cleanup after an interrupted transfer
_POLL_S = 0.3
# Waiting reasons that do not resolve by themselves.
_PERMANENT = (
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
    """Settings of a file pod.

    ``suffix`` keeps its name distinct from other file pods of the same volume. ``node`` is the node where it must run
    (``None``: any node); ``tolerations`` are those of the pod that already uses the volume there. ``fixed_user`` as in
    `PodJobSpec`.
    """

    volume: str
    namespace: str
    image: str
    suffix: str
    read_only: bool = True
    pull_secrets: tuple[str, ...] = ()
    node: str | None = None
    tolerations: tuple[Mapping[str, Any], ...] = ()
    fixed_user: bool = True


def manifest(settings: FilePod) -> Object:
    """The Pod (pure). Its container image needs only Python 3.9 and sleep."""
    name = f"files-{settings.volume[:40].replace('.', '-').rstrip('-')}-{settings.suffix}"
    resources = {"cpu": "200m", "memory": "256Mi"}
    spec: Object = {
        "activeDeadlineSeconds": _LIFETIME_S,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "command": ["sleep", str(_LIFETIME_S)],
                "image": settings.image,
                "imagePullPolicy": "IfNotPresent",
                "name": CONTAINER,
                "resources": {"limits": resources | {"cpu": "1"}, "requests": resources},
                "securityContext": pod.CONTAINER_SECURITY,
                "volumeMounts": [
                    {"mountPath": str(VOLUMES / settings.volume), "name": "volume", "readOnly": settings.read_only}
                ],
            }
        ],
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": pod.user_security(settings.fixed_user),
        "terminationGracePeriodSeconds": _GRACE_S,
        # On many clusters only GPU nodes have free capacity.
        "tolerations": [*map(dict, settings.tolerations), {"key": "nvidia.com/gpu", "operator": "Exists"}],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": settings.volume}}],
    }
    if settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in settings.pull_secrets]
    if settings.node:
        on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [settings.node]}]}
        required = {"nodeSelectorTerms": [on_node]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    pod_labels = labels(settings.volume[:63].rstrip("-."), "files") | pod.NO_MESH_LABELS
    return {
        **header("Pod"),
        "metadata": {
            "annotations": pod.NO_MESH_ANNOTATIONS,
            "labels": pod_labels,
            "name": name,
            "namespace": settings.namespace,
        },
        "spec": spec,
    }


def plan(
    cluster: Cluster,
    volume: str,
    suffix: str,
    image: str,
    read_only: bool,
    pull_secrets: tuple[str, ...] = (),
    fixed_user: bool = True,
) -> FilePod:
    """Settings of a pod that can mount this volume now.

    Args:
        image: container image; empty: that of the newest worldsize pod.

    Raises:
        UserError: the volume does not exist, or no pod can mount it this way.
    """
    claim = volumes.existing(cluster, volume)
    if volumes.is_raw_block(claim):
        raise UserError(f"volume {volume} is a raw block device (volumeMode Block), which pods cannot mount as a folder")
    modes = set(claim["spec"]["accessModes"])
    if not read_only and modes == {"ReadOnlyMany"}:
        raise UserError(f"volume {volume} is read-only (access rox)")
    pods = cluster.list("Pod")
    users = [user for user in volumes.users_of(volume, pods) if user["spec"].get("nodeName")]
    node, tolerations = None, ()
    if users and modes <= {"ReadWriteOnce", "ReadWriteOncePod"}:
        user = users[0]
        if "ReadWriteOncePod" in modes and not user["metadata"].get("deletionTimestamp"):
            raise UserError(f"volume {volume} allows one pod at a time and is in use by {user['metadata']['name']}")
        node, tolerations = user["spec"]["nodeName"], tuple(user["spec"].get("tolerations", ()))
    image = image or _newest_image(pods)
    return FilePod(volume, cluster.namespace, image, suffix, read_only, pull_secrets, node, tolerations, fixed_user)


@contextmanager
def running(cluster: Cluster, settings: FilePod, wait_s: float, log: Callable[[str], None]) -> Iterator[str]:
    """Create the pod, yield its name once it runs, and always delete it on exit.

    Args:
        wait_s: how long to wait for the pod to start.
        log: called with each new reason for waiting.

    Raises:
        ClusterError: the cluster rejects the pod or does not start it; includes the cluster's reason.
    """
    rendered = manifest(settings)
    name = str(rendered["metadata"]["name"])
    with _signals_as_exits():
        try:
            cluster.create(rendered)
            _wait_until_running(cluster, settings, name, wait_s, log)
            yield name
        finally:
            try:
                cluster.delete("Pod", name)
            except ClusterError as error:
                log(f"could not delete pod {name}; it ends within 12 h: {error}")


def why_not_running(found: Object, events: list[Object]) -> tuple[str, bool]:
    """Why the pod does not run yet, and whether that is permanent (pure)."""
    status = found["status"]
    if status.get("phase") in ("Succeeded", "Failed"):
        return f"{status.get('reason') or 'the pod exited immediately'}: {status.get('message', '')}".rstrip(": "), True
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "ContainerCreating") != "ContainerCreating":
            # Older kubelets report the cause only in an event.
            pulled = [str(event["message"]) for event in events if str(event.get("message")).startswith("Failed to pull")]
            reason = pulled[-1] if pulled else waiting.get("message", "")
            return f"{waiting['reason']}: {reason}".rstrip(": "), waiting["reason"] in _PERMANENT
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message') or condition.get('reason', '')}", False
    if events:
        last = events[-1]
        if last.get("type") == "Warning" or last.get("reason") == "Pulling":
            return f"{last.get('reason')}: {str(last.get('message', '')).strip()}", False
    return "", False


def _wait_until_running(cluster: Cluster, settings: FilePod, name: str, wait_s: float, log: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    logged = ""
    while True:
        found = cluster.get("Pod", name)
        if found is None:
            raise ClusterError(f"pod {name}, which accesses volume {settings.volume}, was deleted by someone else")
        if found["status"].get("phase") == "Running":
            return
        events = sorted(cluster.list("Event", fields=f"involvedObject.kind=Pod,involvedObject.name={name}"), key=event_time)
        reason, permanent = why_not_running(found, events)
        if permanent or time.monotonic() > deadline:
            details = _all_reasons(cluster, settings, reason)
            raise ClusterError(f"pod {name}, which accesses volume {settings.volume}, does not start{details}")
        if reason and reason != logged:
            log(f"waiting: {reason}")
            logged = reason
        time.sleep(_POLL_S)


def _all_reasons(cluster: Cluster, settings: FilePod, reason: str) -> str:
    """The pod's reason and, if the volume has no storage yet, the volume's reason."""
    claim = cluster.get("PersistentVolumeClaim", settings.volume)
    reasons = [reason]
    if claim is not None and claim.get("status", {}).get("phase") == "Pending":
        reasons.append(f"the volume has no storage: {volumes.why_pending(cluster, claim)}")
    return "".join(f"\n  {one_reason}" for one_reason in reasons if one_reason)


def _newest_image(pods: list[Object]) -> str:
    """Container image of the newest pod that runs worldsize."""
    own_pods = [one for one in pods if is_ours(one) and one["metadata"]["labels"].get(COMPONENT_LABEL) != "browse"]
    if not own_pods:
        raise UserError("--image is required; any image with Python 3 works")
    newest = max(own_pods, key=lambda one: str(one["metadata"]["creationTimestamp"]))
    return str(newest["spec"]["containers"][0]["image"])


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that cleanup runs as it does for Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_on_signal(number: int, frame: object) -> None:
        sys.exit(SIGNAL_BASE + number)

    previous = {number: signal.signal(number, exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
