"""Checks of the cluster itself: API server, namespace, permissions, kinds of jobs and operators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import yaml

from worldsize.cluster.api.errors import ClusterError, Unauthenticated, Unreachable
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.objects import Object
from worldsize.cluster.preflight.base import Context, Finding, concurrently, get_optional, names

# Oldest Kubernetes version: training-operator requires 1.28, Trainer 1.31.
_OLDEST = {"PyTorchJob": (1, 28), "MPIJob": (1, 28), "TrainJob": (1, 31)}

_OPERATORS = {
    "PyTorchJob": ("training-operator", "Kubeflow's training-operator 1.9"),
    "MPIJob": ("mpi-operator", "Kubeflow's mpi-operator 0.8"),
    "TrainJob": ("kubeflow-trainer-controller-manager", "Kubeflow Trainer 2.2 or newer"),
}

_GANG_FLAGS = {"PyTorchJob": "gang-scheduler-name", "MPIJob": "gang-scheduling"}

_JOB = ("create", "get", "list", "watch", "patch", "delete")
_JOB_PART = ("create", "get", "list", "patch", "delete")
# (kind, subresource, verbs)
_PERMISSIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ConfigMap", "", _JOB_PART),
    ("NetworkPolicy", "", _JOB_PART),
    ("Pod", "", ("list", "watch")),
    ("Pod", "log", ("get",)),
    ("Event", "", ("list", "watch")),
)
_FETCH_PERMISSIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (("Job", "", _JOB),)
_FILES_PERMISSIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("PersistentVolumeClaim", "", ("get", "list")),
    ("Pod", "", ("create", "get", "list", "delete")),
    # A websocket starts with a GET, for which API servers require one or the other.
    ("Pod", "exec", ("create", "get")),
    ("Event", "", ("list",)),
)

_Permission = tuple[str, str, str]  # verb, kind, subresource


def server(context: Context) -> Iterable[Finding]:
    """Check that the API server responds and is new enough."""
    cluster = context.cluster
    try:
        version = cluster.version
    except Unreachable as error:
        remedy = "check that the cluster is running and reachable from this machine: kubectl cluster-info"
        yield Finding("error", str(error), remedy)
        return
    except Unauthenticated:
        raise
    except ClusterError as error:
        yield Finding("error", f"{cluster.server}: {error}")
        return
    except (KeyError, TypeError, ValueError):
        yield Finding("error", f"{cluster.server} is not a Kubernetes API server", "check the server in your kubeconfig")
        return
    number = re.match(r"v?(\d+)\.(\d+)", version)
    oldest = max(_OLDEST[kind] for kind in context.kinds) if len(context.kinds) == 1 else min(_OLDEST.values())
    if number and (int(number[1]), int(number[2])) < oldest:
        required = ".".join(map(str, oldest))
        yield Finding("warning", f"Kubernetes {version}: Kubeflow's operators require {required} or newer")
        return
    yield Finding("ok", f"Kubernetes {version} at {cluster.server}")


def namespace(context: Context) -> Iterable[Finding]:
    """Check that the namespace exists."""
    cluster = context.cluster
    name = cluster.namespace
    found = cluster.get("Namespace", name)
    if found is None:
        remedy = f"choose another with --namespace, or create it: kubectl create namespace {name}"
        yield Finding("error", f"namespace {name} does not exist{_existing_namespaces(context)}", remedy)
        return
    if found.get("status", {}).get("phase") == "Terminating":
        yield Finding("error", f"namespace {name} is being deleted", "choose another with --namespace")
        return
    labels = found["metadata"].get("labels", {})
    mesh = labels.get("istio-injection") == "enabled" or "istio.io/rev" in labels
    yield Finding("ok", f"namespace {name}" + (" (Istio injects sidecars here; the job's pods opt out)" if mesh else ""))


def _existing_namespaces(context: Context) -> str:
    try:
        return f"; existing namespaces: {names(context.cluster.list('Namespace'))}"
    except ClusterError:
        return ""


def permissions(context: Context) -> Iterable[Finding]:
    """Check that the user has all permissions that a run requires."""
    kinds = [kind for kind in context.kinds if len(context.kinds) == 1 or context.serves(kind)]
    required = [*((kind, "", _JOB) for kind in kinds), *_PERMISSIONS]
    if "TrainJob" in kinds and context.spec.runtime is None:
        required.append(("TrainingRuntime", "", _JOB_PART))
    missing = _missing(context, required)
    # If no kind was chosen, one usable kind is enough.
    affected = {"TrainJob" if kind == "TrainingRuntime" else kind for _, kind, _ in missing}
    usable = [kind for kind in kinds if kind not in affected]
    if missing:
        what = f"missing permissions in namespace {context.cluster.namespace}: {_listed(missing)}"
        level: Literal["warning", "error"] = "warning" if usable and affected <= set(kinds) else "error"
        yield Finding(level, what, _role("worldsize", missing, context.cluster.namespace))
    else:
        yield Finding("ok", f"you have all permissions required for {', '.join(kinds) or 'a job'}")


def files(context: Context) -> Iterable[Finding]:
    """Check that the user can access files on volumes."""
    yield _optional(context, "cluster files", _FILES_PERMISSIONS, "worldsize-files")


def fetches(context: Context) -> Iterable[Finding]:
    """Check that the user can fetch datasets to volumes."""
    yield _optional(context, "cluster data fetch", _FETCH_PERMISSIONS, "worldsize-fetch")


def _optional(context: Context, command: str, required: Iterable[tuple[str, str, tuple[str, ...]]], role: str) -> Finding:
    """Whether the user may do what ``command`` does, which a run does not require."""
    missing = _missing(context, required)
    if missing:
        what = f"`worldsize {command}` may not work; missing permissions: {_listed(missing)}"
        return Finding("warning", what, _role(role, missing, context.cluster.namespace))
    return Finding("ok", f"you have all permissions required for `worldsize {command}`")


def _missing(context: Context, required: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[_Permission]:
    each = [(verb, kind, subresource) for kind, subresource, verbs in required for verb in verbs]
    allowed = concurrently(lambda permission: context.cluster.allowed(*permission), each)
    return [permission for permission, ok in zip(each, allowed, strict=True) if not ok]


def _resource(kind: str, subresource: str) -> str:
    return KINDS[kind].plural + (f"/{subresource}" if subresource else "")


def _verbs(permissions: Iterable[_Permission]) -> dict[tuple[str, str], list[str]]:
    """Verbs by (group, resource)."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb, kind, subresource in permissions:
        verbs.setdefault((KINDS[kind].group, _resource(kind, subresource)), []).append(verb)
    return verbs


def _listed(permissions: Iterable[_Permission]) -> str:
    return "; ".join(f"{', '.join(verbs)} {resource}" for (_, resource), verbs in _verbs(permissions).items())


def _role(name: str, permissions: Iterable[_Permission], namespace: str) -> str:
    rules = [{"apiGroups": [g], "resources": [r], "verbs": verbs} for (g, r), verbs in _verbs(permissions).items()]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": rules,
    }
    text = yaml.safe_dump(role, default_flow_style=None, width=120)
    return f"ask your cluster administrator to bind you to this role:\n{text.rstrip()}"


def kinds(context: Context) -> Iterable[Finding]:
    """Check that the cluster serves these kinds of jobs in the versions that we use."""
    problems = {kind: _problem(context, kind) for kind in context.kinds}
    served = [kind for kind in _OPERATORS if context.serves(kind)]
    for kind, problem in problems.items():
        if problem is None:
            yield Finding("ok", f"{kind} ({KINDS[kind].group_version}) is available")
            continue
        remedy = f"ask your cluster administrator to install {_OPERATORS[kind][1]}"
        if served and len(context.kinds) == 1 and kind not in served:
            remedy += f"; this cluster has {' and '.join(served)}: use --on {served[0].lower()}"
        yield Finding("warning" if len(context.kinds) > 1 and served else "error", f"{kind}: {problem}", remedy)


def _problem(context: Context, kind: str) -> str | None:
    """Why jobs of this kind cannot run; None if they can."""
    if not context.serves(kind):
        if kind == "MPIJob" and ("kubeflow.org/v1", "mpijobs") in context.served:
            return "the cluster has v1 (training-operator), but v2beta1 (mpi-operator) is required; they cannot coexist"
        return f"not installed on this cluster (no {KINDS[kind].plural} in {KINDS[kind].group_version})"
    if kind != "TrainJob":
        return None
    if not context.serves("JobSet"):
        return "JobSet is not installed, but Kubeflow Trainer requires it"
    fields = _fields(context)
    if fields and "runtimePatches" not in fields:
        return "the cluster's Kubeflow Trainer is older than 2.2 (its TrainJob has no runtimePatches)"
    return None


def _fields(context: Context) -> frozenset[str]:
    """Fields of a TrainJob's spec on this cluster; empty if the server does not publish the schema."""
    schema = get_optional(context.cluster, f"/openapi/v3/apis/{KINDS['TrainJob'].group_version}") or {}
    for name, shape in schema.get("components", {}).get("schemas", {}).items():
        if name.endswith(".TrainJob"):
            return frozenset(shape["properties"]["spec"].get("properties", {}))
    return frozenset()


def _gang_scheduling(context: Context, kind: str, deployments: list[Object]) -> Finding | None:
    """The finding if a job asks for Volcano and its operator was not told to use it: it would ignore the queue."""
    if context.spec.placement.volcano_queue is None or kind not in _GANG_FLAGS:
        return None
    containers = [one for item in deployments for one in item["spec"]["template"]["spec"]["containers"]]
    words = [word for one in containers for word in (*(one.get("command") or ()), *(one.get("args") or ()))]
    if re.search(rf"(^|\s)--?{_GANG_FLAGS[kind]}[=\s]volcano(\s|$)", " ".join(words)):
        return None
    what = f"{_OPERATORS[kind][0]} runs without --{_GANG_FLAGS[kind]}=volcano, so it ignores --volcano-queue"
    return Finding("warning", what, "ask your cluster administrator to set it, or use --on trainjob or a Kueue --queue")


def operators(context: Context) -> Iterable[Finding]:
    """Check that the operators are running. They may also run where the user cannot see them."""
    for kind in filter(context.serves, context.kinds):
        name = _OPERATORS[kind][0]
        try:
            found = context.cluster.list("Deployment", fields=f"metadata.name={name}", everywhere=True)
        except ClusterError as error:
            if error.status != 403:
                raise
            return
        if not found:
            yield Finding("ok", f"no Deployment {name} on this cluster; the operator may run elsewhere")
        elif any(one.get("status", {}).get("availableReplicas") for one in found):
            yield _gang_scheduling(context, kind, found) or Finding("ok", f"{name} is running")
        else:
            where = found[0]["metadata"]["namespace"]
            remedy = f"no {kind} starts without it; see: kubectl -n {where} describe deployment {name}"
            yield Finding("error", f"{name} has no ready pod", remedy)
