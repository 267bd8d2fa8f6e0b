"""Volumes (PersistentVolumeClaims) for datasets and runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.objects import Object, event_time
from worldsize.cluster.options import Where
from worldsize.cluster.storage import named
from worldsize.cluster.storage.named import Name
from worldsize.config.command_line import Flat
from worldsize.errors import UserError
from worldsize.jobs.quantities import quantity
from worldsize.jobs.terminal import note

Access = Literal["rwx", "rwo", "rox"]

MODES: dict[str, str] = {"rwx": "ReadWriteMany", "rwo": "ReadWriteOnce", "rox": "ReadOnlyMany"}

_SHORT = {mode: short for short, mode in MODES.items()} | {"ReadWriteOncePod": "rwop"}
# Kubernetes accepts the beta name too.
_DEFAULT_CLASS = tuple(f"storageclass.{beta}kubernetes.io/is-default-class" for beta in ("", "beta."))
_MIN_SIZE = 1 << 20  # bytes; a smaller size is a size without its unit
_BIND_WAIT_S = 10.0
_DELETE_WAIT_S = 10.0


@dataclass(frozen=True)
class VolumeCreate:
    """Create a volume that pods can mount, and wait briefly for its storage. Succeeds if the same volume already exists."""

    name: Name
    """Name of the volume; every pod mounts it at /mnt/NAME."""
    size: str
    """Size, such as 400Gi."""
    storage_class: Annotated[str | None, tyro.conf.arg(name="class")] = None
    """StorageClass (default: the cluster's default)."""
    access: Access = "rwx"
    """rwx: read-write from many nodes; rwo: read-write from one node; rox: read-only from many nodes."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class VolumeList:
    """List the volumes of the namespace and the pods that use them."""

    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class VolumeDelete:
    """Delete a volume and all its data."""

    name: Name
    """Name of the volume."""
    yes: bool = False
    """Confirm that all data on the volume is deleted."""
    where: Flat[Where] = field(default_factory=Where)


def manifest(name: str, namespace: str, size: str, access: str, storage_class: str | None) -> Object:
    """The PersistentVolumeClaim (pure); ``access`` is a key of MODES.

    Raises:
        UserError: invalid name or size.
    """
    try:
        valid = quantity(size) >= _MIN_SIZE
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"--size {size} is not a size of at least 1Mi; use a value such as 400Gi")
    spec: Object = {"accessModes": [MODES[access]], "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return named.manifest("volume", name, namespace, {"spec": spec})


def create(options: VolumeCreate, cluster: Cluster, wait_s: float = _BIND_WAIT_S) -> int:
    """``worldsize cluster volume create``. The exit code is 1 if provisioning has failed so far.

    Raises:
        UserError: a different volume of that name exists, or the class does not exist.
    """
    claim = manifest(options.name, cluster.namespace, options.size, options.access, options.storage_class)
    current = cluster.get("PersistentVolumeClaim", options.name)
    if current is not None:
        _require_same(current, claim)
        print(f"volume {options.name} already exists: {_description(current)}")
    else:
        _require_known_class(cluster, options.storage_class)
        current = cluster.create(claim)
        print(f"volume {options.name} created: {_description(current)}")
    return _wait_for_storage(cluster, current, wait_s)


def show(options: VolumeList, cluster: Cluster) -> int:
    """``worldsize cluster volume list``."""

    from worldsize.config import tables

    claims = cluster.list("PersistentVolumeClaim")
    if not claims:
        print(f"no volumes in namespace {cluster.namespace}; create one: worldsize cluster volume create NAME --size 400Gi")
        return 0
    pods = cluster.list("Pod")
    table = tables.table("volume", "size", "access", "class", "phase", "used by")
    for claim in claims:
        name, spec = claim["metadata"]["name"], claim["spec"]
        users = ", ".join(item["metadata"]["name"] for item in users_of(name, pods))
        table.add_row(name, _size(claim), _access(claim), spec.get("storageClassName") or "", _phase(claim), users)
    tables.console().print(table)
    return 0


def delete(options: VolumeDelete, cluster: Cluster) -> int:
    """``worldsize cluster volume delete``.

    Raises:
        UserError: the volume does not exist, worldsize did not create it, a pod uses it, or --yes is missing.
    """
    claim = existing(cluster, options.name)
    named.require_ours("volume", claim)
    pods = [item for item in cluster.list("Pod") if not item["metadata"].get("deletionTimestamp")]
    users = [item["metadata"]["name"] for item in users_of(options.name, pods)]
    if users:
        raise UserError(f"volume {options.name} is in use by {', '.join(users)}; stop these pods first")
    if not options.yes:
        raise UserError(
            f"this permanently deletes volume {options.name} ({_description(claim)}) and all its data; pass --yes to confirm"
        )
    cluster.delete("PersistentVolumeClaim", options.name)
    deadline = time.monotonic() + _DELETE_WAIT_S
    while cluster.get("PersistentVolumeClaim", options.name) is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    print(f"volume {options.name} deleted")
    return 0


def existing(cluster: Cluster, name: str) -> Object:
    """The claim of this name.

    Raises:
        UserError: it does not exist, or is being deleted.
    """
    claim = cluster.get("PersistentVolumeClaim", name)
    if claim is None:
        names = [item["metadata"]["name"] for item in cluster.list("PersistentVolumeClaim")]
        hint = f"existing volumes: {', '.join(names)}" if names else "create it: worldsize cluster volume create"
        raise named.missing("volume", name, cluster.namespace, hint)
    if claim["metadata"].get("deletionTimestamp"):
        raise UserError(f"volume {name} is being deleted")
    return claim


def is_raw_block(claim: Object) -> bool:
    """Whether pods cannot mount it as a folder."""
    return bool(claim["spec"].get("volumeMode") == "Block")


def users_of(name: str, pods: list[Object]) -> list[Object]:
    """The pods that mount the volume and have not ended."""
    return [
        item
        for item in pods
        if item["status"].get("phase") not in ("Succeeded", "Failed")
        and any(v.get("persistentVolumeClaim", {}).get("claimName") == name for v in item["spec"].get("volumes", []))
    ]


def why_pending(cluster: Cluster, claim: Object) -> str:
    """The latest event of a claim that has no storage yet; empty if there is none."""
    about = {"kind": "PersistentVolumeClaim", "name": claim["metadata"]["name"]}
    if uid := claim["metadata"].get("uid"):  # events of a deleted claim of this name remain for an hour
        about["uid"] = uid
    selector = ",".join(f"involvedObject.{key}={value}" for key, value in about.items())
    events = sorted(cluster.list("Event", fields=selector), key=event_time)
    return f"{events[-1].get('reason')}: {str(events[-1].get('message', '')).strip()}" if events else ""


def _require_same(current: Object, wanted: Object) -> None:
    """Reject differences, because a claim cannot be changed. A class that was not specified is not a difference."""
    name, spec, wanted_spec = current["metadata"]["name"], current["spec"], wanted["spec"]
    if current["metadata"].get("deletionTimestamp"):
        raise UserError(f"volume {name} is being deleted; wait until that has finished")
    current_size, size = (claim["resources"]["requests"]["storage"] for claim in (spec, wanted_spec))
    current_class = spec.get("storageClassName", "")
    wanted_class = wanted_spec.get("storageClassName", current_class)
    differences = [
        *([f"--size {current_size}, not {size}"] if quantity(current_size) != quantity(size) else []),
        *([f"--access {_access(current)}, not {_access(wanted)}"] if _access(current) != _access(wanted) else []),
        *([f"--class {current_class!r}, not {wanted_class!r}"] if wanted_class != current_class else []),
    ]
    if differences:
        raise UserError(
            f"volume {name} already exists with {'; '.join(differences)}, and a volume cannot be changed: choose another "
            f"name, or delete it with all its data: worldsize cluster volume delete {name}"
        )


def _require_known_class(cluster: Cluster, name: str | None) -> None:
    if name == "":  # manually provisioned storage has no class
        return
    try:
        classes = cluster.list("StorageClass")
    except ClusterError as error:
        if error.status == 403:  # no permission to list classes; the claim's events report an unknown one
            return
        raise
    names = ", ".join(item["metadata"]["name"] for item in classes) or "none"
    marks = [item["metadata"].get("annotations", {}) for item in classes]
    defaults = [mark for mark in marks if "true" in (mark.get(key) for key in _DEFAULT_CLASS)]
    if name is None and not defaults:
        raise UserError(f"the cluster has no default StorageClass; pass --class with one of: {names}")
    if name is not None and name not in [item["metadata"]["name"] for item in classes]:
        raise UserError(f"--class {name}: the cluster has no such StorageClass; existing: {names}")


def _wait_for_storage(cluster: Cluster, claim: Object, wait_s: float) -> int:
    """Wait for the storage and report the state; returns the exit code."""
    name = claim["metadata"]["name"]
    deadline = time.monotonic() + wait_s
    reason = ""
    while _phase(claim) == "Pending" and not reason.startswith("WaitForFirstConsumer") and time.monotonic() < deadline:
        time.sleep(0.3)
        claim = existing(cluster, name)
        reason = why_pending(cluster, claim)
    if _phase(claim) != "Pending":
        print(f"storage: {_phase(claim)}")
        return 0 if _phase(claim) == "Bound" else 1
    if reason.startswith("WaitForFirstConsumer"):
        print("storage: allocated when the first pod uses the volume")
        return 0
    note(f"no storage yet; the cluster keeps trying: {reason or 'no reason reported'}")
    if "ProvisioningFailed" in reason and "ReadWriteMany" in claim["spec"]["accessModes"]:
        note("not every StorageClass supports rwx: choose another --class, or pass --access rwo for one node")
    return 1 if "Failed" in reason else 0


def _description(claim: Object) -> str:
    storage_class = claim["spec"].get("storageClassName")
    return f"{_size(claim)}, {_access(claim)}" + (f", class {storage_class}" if storage_class else "")


def _size(claim: Object) -> str:
    requested = claim["spec"]["resources"]["requests"]["storage"]
    return str(claim.get("status", {}).get("capacity", {}).get("storage", requested))


def _access(claim: Object) -> str:
    return "+".join(_SHORT.get(mode, mode) for mode in claim["spec"]["accessModes"])


def _phase(claim: Object) -> str:
    if claim["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str(claim.get("status", {}).get("phase", "Pending"))
