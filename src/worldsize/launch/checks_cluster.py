"""Checks of the cluster itself: is it there, may this user use it, and does it run these kinds of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import yaml

from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.checks import Context, Finding, at_once, names, optional
from worldsize.launch.kinds import KINDS

# training-operator's own requirement is 1.28, Trainer's 1.31.
_OLDEST = {"PyTorchJob": (1, 28), "MPIJob": (1, 28), "TrainJob": (1, 31)}

_OPERATORS = {
    "PyTorchJob": ("training-operator", "Kubeflow's training-operator 1.9"),
    "MPIJob": ("mpi-operator", "Kubeflow's mpi-operator 0.8"),
    "TrainJob": ("kubeflow-trainer-controller-manager", "Kubeflow Trainer 2.2 or newer"),
}

_JOB = ("create", "get", "list", "watch", "patch", "delete")
_PART_OF_A_JOB = ("create", "get", "list", "patch", "delete")
_RIGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ConfigMap", "", _PART_OF_A_JOB),
    ("NetworkPolicy", "", _PART_OF_A_JOB),
    ("Pod", "", ("list", "watch")),
    ("Pod", "log", ("get",)),
    ("Event", "", ("list", "watch")),
)
_RIGHTS_FOR_FILES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("PersistentVolumeClaim", "", ("get", "list")),
    ("Pod", "", ("create", "get", "list", "delete")),
    # A websocket begins with a GET, for which servers ask for one or the other.
    ("Pod", "exec", ("create", "get")),
    ("Event", "", ("list",)),
)

_Right = tuple[str, str, str]  # verb, kind, subresource


def server(context: Context) -> Iterable[Finding]:
    """Does the API server answer, and is it new enough?"""
    cluster = context.cluster
    try:
        version = cluster.version
    except Unreachable as error:
        remedy = "is the cluster up, and this machine in its network? `kubectl cluster-info` asks the same"
        yield Finding("error", str(error), remedy)
        return
    except ClusterError as error:
        yield Finding("error", f"{cluster.server}: {error}")
        return
    except (KeyError, TypeError, ValueError):
        yield Finding("error", f"{cluster.server} answers, but is no Kubernetes API server", "look into your kubeconfig")
        return
    number = re.match(r"v?(\d+)\.(\d+)", version)
    oldest = max(_OLDEST[kind] for kind in context.kinds) if len(context.kinds) == 1 else min(_OLDEST.values())
    if number and (int(number[1]), int(number[2])) < oldest:
        needed = ".".join(map(str, oldest))
        yield Finding("warning", f"Kubernetes {version}: Kubeflow's operators ask for {needed} or newer")
        return
    yield Finding("ok", f"Kubernetes {version} at {cluster.server}")


def namespace(context: Context) -> Iterable[Finding]:
    """Is there the namespace?"""
    cluster = context.cluster
    name = cluster.namespace
    found = cluster.get("Namespace", name)
    if found is None:
        remedy = f"name another with --namespace, or make it: kubectl create namespace {name}"
        yield Finding("error", f"there is no namespace {name}{_others(context)}", remedy)
        return
    if found.get("status", {}).get("phase") == "Terminating":
        yield Finding("error", f"namespace {name} is being deleted", "name another with --namespace")
        return
    labels = found["metadata"].get("labels", {})
    mesh = labels.get("istio-injection") == "enabled" or "istio.io/rev" in labels
    yield Finding("ok", f"namespace {name}" + (" (Istio adds sidecars here; the job's pods opt out)" if mesh else ""))


def _others(context: Context) -> str:
    try:
        return f"; there are: {names(context.cluster.list('Namespace'))}"
    except ClusterError:
        return ""


def permissions(context: Context) -> Iterable[Finding]:
    """May the user do all that a run needs?"""
    kinds = [kind for kind in context.kinds if len(context.kinds) == 1 or context.serves(kind)]
    rights = [*((kind, "", _JOB) for kind in kinds), *_RIGHTS]
    if "TrainJob" in kinds and context.spec.runtime is None:
        rights.append(("TrainingRuntime", "", _PART_OF_A_JOB))
    missing = _missing(context, rights)
    # In a general check one kind that the user may use is enough.
    lacking = {"TrainJob" if kind == "TrainingRuntime" else kind for _, kind, _ in missing}
    usable = [kind for kind in kinds if kind not in lacking]
    if missing:
        what = f"your role in {context.cluster.namespace} may not {_listed(missing)}"
        level: Literal["warning", "error"] = "warning" if usable and lacking <= set(kinds) else "error"
        yield Finding(level, what, _role("worldsize", missing, context.cluster.namespace))
    else:
        yield Finding("ok", f"your role allows all that {' or '.join(kinds) or 'a job'} needs")


def files(context: Context) -> Iterable[Finding]:
    """May the user look into volumes?"""
    missing = _missing(context, _RIGHTS_FOR_FILES)
    if missing:
        what = f"`worldsize cluster files` may not work: your role may not {_listed(missing)}"
        yield Finding("warning", what, _role("worldsize-files", missing, context.cluster.namespace))
    else:
        yield Finding("ok", "your role allows what `worldsize cluster files` needs")


def _missing(context: Context, rights: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[_Right]:
    each = [(verb, kind, subresource) for kind, subresource, verbs in rights for verb in verbs]
    allowed = at_once(lambda right: context.cluster.allowed(*right), each)
    return [right for right, yes in zip(each, allowed, strict=True) if not yes]


def _resource(kind: str, subresource: str) -> str:
    return KINDS[kind].plural + (f"/{subresource}" if subresource else "")


def _verbs(rights: Iterable[_Right]) -> dict[tuple[str, str], list[str]]:
    """Verbs by (group, resource)."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb, kind, subresource in rights:
        group = KINDS[kind].group_version.rpartition("/")[0]
        verbs.setdefault((group, _resource(kind, subresource)), []).append(verb)
    return verbs


def _listed(rights: Iterable[_Right]) -> str:
    return "; ".join(f"{', '.join(verbs)} {resource}" for (_, resource), verbs in _verbs(rights).items())


def _role(name: str, rights: Iterable[_Right], namespace: str) -> str:
    rules = [{"apiGroups": [g], "resources": [r], "verbs": verbs} for (g, r), verbs in _verbs(rights).items()]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": rules,
    }
    text = yaml.safe_dump(role, default_flow_style=None, width=120)
    return f"ask whoever runs the cluster to bind you to this role:\n{text.rstrip()}"


def kinds(context: Context) -> Iterable[Finding]:
    """Does the cluster know these kinds of jobs, in the versions that we write?"""
    problems = {kind: _unusable(context, kind) for kind in context.kinds}
    usable = [kind for kind in _OPERATORS if context.serves(kind)]
    for kind, problem in problems.items():
        if problem is None:
            yield Finding("ok", f"{kind} ({KINDS[kind].group_version}) can be used")
            continue
        remedy = f"ask whoever runs the cluster to install {_OPERATORS[kind][1]}"
        if usable and len(context.kinds) == 1 and kind not in usable:
            remedy += f"; this cluster has {' and '.join(usable)}: --on {usable[0].lower()}"
        yield Finding("warning" if len(context.kinds) > 1 and usable else "error", f"{kind}: {problem}", remedy)


def _unusable(context: Context, kind: str) -> str | None:
    """Why no job of this kind could run; None where one could."""
    if not context.serves(kind):
        if kind == "MPIJob" and ("kubeflow.org/v1", "mpijobs") in context.served:
            return "the cluster has only v1, training-operator's, and needs v2beta1, mpi-operator's; they exclude each other"
        return f"the cluster does not know it (there is no {KINDS[kind].plural} in {KINDS[kind].group_version})"
    if kind != "TrainJob":
        return None
    if not context.serves("JobSet"):
        return "there is no JobSet, which Kubeflow Trainer is built on"
    fields = _fields(context)
    if fields and "runtimePatches" not in fields:
        return "the cluster's Kubeflow Trainer is older than 2.2 (its TrainJob has no runtimePatches)"
    return None


def _fields(context: Context) -> frozenset[str]:
    """What a TrainJob's spec can have on this cluster; empty where the server does not say."""
    schema = optional(context.cluster, f"/openapi/v3/apis/{KINDS['TrainJob'].group_version}") or {}
    for name, shape in schema.get("components", {}).get("schemas", {}).items():
        if name.endswith(".TrainJob"):
            return frozenset(shape["properties"]["spec"].get("properties", {}))
    return frozenset()


def operators(context: Context) -> Iterable[Finding]:
    """Is somebody there to run the jobs? Operators may also run where this user cannot see them."""
    for kind in filter(context.serves, context.kinds):
        name = _OPERATORS[kind][0]
        try:
            found = context.cluster.list("Deployment", fields=f"metadata.name={name}", everywhere=True)
        except ClusterError as error:
            if error.status != 403:
                raise
            return
        if not found:
            yield Finding("ok", f"{name} is no Deployment of this cluster; it may run elsewhere")
        elif any(one.get("status", {}).get("availableReplicas") for one in found):
            yield Finding("ok", f"{name} runs")
        else:
            place = found[0]["metadata"]["namespace"]
            remedy = f"kubectl -n {place} describe deployment {name}; without it no {kind} is started"
            yield Finding("error", f"{name} has no pod that is ready", remedy)
