"""Volumes (PersistentVolumeClaims): where data sets and runs live."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from worldsize.errors import UserError
from worldsize.launch import pod, reasons
from worldsize.launch.answers import ClusterError
from worldsize.launch.cluster import Cluster
from worldsize.launch.options import Where
from worldsize.launch.quantities import quantity
from worldsize.launch.show import note

Object = dict[str, Any]
Access = Literal["rwx", "rwo", "rox"]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]

MODES: dict[str, str] = {"rwx": "ReadWriteMany", "rwo": "ReadWriteOnce", "rox": "ReadOnlyMany"}

_SHORT = {mode: short for short, mode in MODES.items()} | {"ReadWriteOncePod": "rwop"}
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_BINDING_S = 10.0
_LEAVING_S = 10.0


@dataclass(frozen=True)
class VolumeCreate:
    """Make a volume that pods can mount, and wait a moment for its storage. The same volume again is no error."""

    name: Name
    """Its name; in every pod it is at /mnt/NAME."""
    size: str
    """Such as 400Gi."""
    storage_class: Annotated[str | None, tyro.conf.arg(name="class")] = None
    """StorageClass (default: the cluster's own default)."""
    access: Access = "rwx"
    """rwx: pods on many nodes write; rwo: those of one node; rox: all only read."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


@dataclass(frozen=True)
class VolumeList:
    """The volumes of the namespace, and which pods use them."""

    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


@dataclass(frozen=True)
class VolumeDelete:
    """Delete a volume and all that is on it."""

    name: Name
    """Its name."""
    yes: bool = False
    """Yes, the data may be lost."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


def manifest(name: str, namespace: str, size: str, access: str, storage_class: str | None) -> Object:
    """The claim (pure); ``access`` is a key of MODES.

    Raises:
        UserError: no cluster would take it.
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UserError(f"a volume cannot be called {name!r}: use at most 63 lower-case letters, digits and '-'")
    try:
        enough = quantity(size) >= 1
    except ValueError:
        enough = False
    if not enough:
        raise UserError(f"--size {size}: write it like 400Gi")
    spec: Object = {"accessModes": [MODES[access]], "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"labels": pod.labels(name, "volume"), "name": name, "namespace": namespace},
        "spec": spec,
    }


def create(asked: VolumeCreate, cluster: Cluster, wait_s: float = _BINDING_S) -> int:
    """``worldsize cluster volume create``. The exit code is 1 if the storage's provider has failed so far.

    Raises:
        UserError: there is another volume of that name, or no such class.
    """
    claim = manifest(asked.name, cluster.namespace, asked.size, asked.access, asked.storage_class)
    there = cluster.get("PersistentVolumeClaim", asked.name)
    if there is not None:
        _refuse_another(there, claim)
        print(f"volume {asked.name} is there already: {_described(there)}")
    else:
        _refuse_unknown_class(cluster, asked.storage_class)
        there = cluster.create(claim)
        print(f"volume {asked.name} created: {_described(there)}")
    return _await_storage(cluster, there, wait_s)


def show(asked: VolumeList, cluster: Cluster) -> int:
    """``worldsize cluster volume list``."""
    from rich.console import Console
    from rich.table import Table

    claims = cluster.list("PersistentVolumeClaim")
    if not claims:
        print(f"namespace {cluster.namespace} has no volume; worldsize cluster volume create NAME --size 400Gi makes one")
        return 0
    pods = cluster.list("Pod")
    table = Table("volume", "size", "access", "class", "phase", "used by", box=None, header_style="bold")
    for claim in claims:
        name, spec = claim["metadata"]["name"], claim["spec"]
        users = ", ".join(one["metadata"]["name"] for one in users_of(name, pods))
        table.add_row(name, _size(claim), _access(claim), spec.get("storageClassName") or "", _phase(claim), users)
    Console().print(table)
    return 0


def delete(asked: VolumeDelete, cluster: Cluster) -> int:
    """``worldsize cluster volume delete``.

    Raises:
        UserError: there is no such volume, it is not ours, a pod uses it, or --yes is missing.
    """
    claim = existing(cluster, asked.name)
    if claim["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") != "worldsize":
        raise UserError(f"volume {asked.name} was not made by worldsize: kubectl delete pvc {asked.name} would delete it")
    pods = [one for one in cluster.list("Pod") if not one["metadata"].get("deletionTimestamp")]
    users = [one["metadata"]["name"] for one in users_of(asked.name, pods)]
    if users:
        raise UserError(f"volume {asked.name} is in use by {', '.join(users)}: end what uses it first")
    if not asked.yes:
        raise UserError(
            f"volume {asked.name} ({_described(claim)}) and all its data would be lost for good: add --yes if so"
        )
    cluster.delete("PersistentVolumeClaim", asked.name)
    until = time.monotonic() + _LEAVING_S
    while cluster.get("PersistentVolumeClaim", asked.name) is not None and time.monotonic() < until:
        time.sleep(0.2)
    print(f"volume {asked.name} deleted")
    return 0


def existing(cluster: Cluster, name: str) -> Object:
    """The claim of this name.

    Raises:
        UserError: there is none, or it is about to go.
    """
    claim = cluster.get("PersistentVolumeClaim", name)
    if claim is None:
        names = [one["metadata"]["name"] for one in cluster.list("PersistentVolumeClaim")]
        there = f"there are: {', '.join(names)}" if names else "there is none; worldsize cluster volume create makes one"
        raise UserError(f"namespace {cluster.namespace} has no volume {name!r}; {there}")
    if claim["metadata"].get("deletionTimestamp"):
        raise UserError(f"volume {name} is being deleted")
    return claim


def users_of(name: str, pods: list[Object]) -> list[Object]:
    """The pods that have not ended and mount the volume."""
    return [
        one
        for one in pods
        if one["status"].get("phase") not in ("Succeeded", "Failed")
        and any(v.get("persistentVolumeClaim", {}).get("claimName") == name for v in one["spec"].get("volumes", []))
    ]


def why_pending(cluster: Cluster, name: str) -> str:
    """The cluster's latest words on a claim that has no storage yet; empty where there are none."""
    about = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={name}"
    events = sorted(cluster.list("Event", fields=about), key=reasons.time_of)
    return f"{events[-1].get('reason')}: {str(events[-1].get('message', '')).strip()}" if events else ""


def _refuse_another(there: Object, asked: Object) -> None:
    """A claim cannot be changed, so what differs is refused; a class that was not asked for does not differ."""
    name, spec, wanted = there["metadata"]["name"], there["spec"], asked["spec"]
    if there["metadata"].get("deletionTimestamp"):
        raise UserError(f"a volume {name} is just being deleted: wait until it is gone")
    has, size = (claim["resources"]["requests"]["storage"] for claim in (spec, wanted))
    of = spec.get("storageClassName", "")
    differences = [
        *([f"--size {has}, not {size}"] if quantity(has) != quantity(size) else []),
        *([f"--access {_access(there)}, not {_access(asked)}"] if _access(there) != _access(asked) else []),
        *([f"--class {of!r}, not {wanted['storageClassName']!r}"] if wanted.get("storageClassName", of) != of else []),
    ]
    if differences:
        raise UserError(
            f"there is a volume {name} with {'; '.join(differences)}, and a volume cannot be changed: choose another name, "
            f"or lose its data with: worldsize cluster volume delete {name}"
        )


def _refuse_unknown_class(cluster: Cluster, asked: str | None) -> None:
    if asked == "":  # storage that was set aside by hand has no class
        return
    try:
        classes = cluster.list("StorageClass")
    except ClusterError as error:
        if error.status == 403:  # then the claim's events must tell
            return
        raise
    names = ", ".join(one["metadata"]["name"] for one in classes) or "none at all"
    default = [one for one in classes if one["metadata"].get("annotations", {}).get(_DEFAULT_CLASS) == "true"]
    if asked is None and not default:
        raise UserError(f"the cluster has no default StorageClass: choose one with --class; there are: {names}")
    if asked is not None and asked not in [one["metadata"]["name"] for one in classes]:
        raise UserError(f"--class {asked}: the cluster has no such StorageClass; there are: {names}")


def _await_storage(cluster: Cluster, claim: Object, wait_s: float) -> int:
    """Say what becomes of a new claim."""
    name = claim["metadata"]["name"]
    until = time.monotonic() + wait_s
    why = ""
    while _phase(claim) == "Pending" and not why.startswith("WaitForFirstConsumer") and time.monotonic() < until:
        time.sleep(0.3)
        claim = existing(cluster, name)
        why = why_pending(cluster, name)
    if _phase(claim) != "Pending":
        print(f"it is {_phase(claim)}")
        return 0 if _phase(claim) == "Bound" else 1
    if why.startswith("WaitForFirstConsumer"):
        print("it gets its storage with the first pod that uses it")
        return 0
    note(f"it has no storage yet, and the cluster goes on trying: {why or 'no reason is given'}")
    if "ProvisioningFailed" in why and "ReadWriteMany" in claim["spec"]["accessModes"]:
        note("not every StorageClass can be written from many nodes: another --class, or --access rwo for one node")
    return 1 if "Failed" in why else 0


def _described(claim: Object) -> str:
    of = claim["spec"].get("storageClassName")
    return f"{_size(claim)}, {_access(claim)}" + (f", class {of}" if of else "")


def _size(claim: Object) -> str:
    asked = claim["spec"]["resources"]["requests"]["storage"]
    return str(claim.get("status", {}).get("capacity", {}).get("storage", asked))


def _access(claim: Object) -> str:
    return "+".join(_SHORT.get(mode, mode) for mode in claim["spec"]["accessModes"])


def _phase(claim: Object) -> str:
    if claim["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str(claim.get("status", {}).get("phase", "Pending"))
