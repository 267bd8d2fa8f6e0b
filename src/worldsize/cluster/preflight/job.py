"""Checks for one job: objects that must exist on the cluster, and objects that must not."""

from __future__ import annotations

import re
from collections.abc import Iterable

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unauthenticated, Unreachable
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, base, load_target, pod
from worldsize.cluster.objects import Object, is_ours
from worldsize.cluster.preflight.base import Context, Finding, concurrently, denied, get_optional, names
from worldsize.cluster.storage.volumes import is_raw_block
from worldsize.jobs.state import Phase

_VOLCANO = "/apis/scheduling.volcano.sh/v1beta1"
_DOCKER = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
# (regular expression for the server's error, remedy)
_REMEDIES = (
    (
        "failed calling webhook",
        "the operator's webhook does not respond: it is starting or down; ask your cluster administrator",
    ),
    (
        "unknown field .*runtimePatches.*terminationGracePeriodSeconds",
        "--grace with --runtime requires Kubeflow Trainer 2.3 or newer: upgrade it, or omit --runtime",
    ),
    ("unknown field", "the operator on the cluster is older than the versions that worldsize supports: upgrade it"),
)


def secrets(context: Context) -> Iterable[Finding]:
    """Check that the Secrets exist and have the requested keys."""
    keys: dict[str, list[str]] = {name: [] for name in context.spec.pull_secrets}
    for reference in context.spec.secrets:
        keys.setdefault(reference.secret, []).append(reference.key)
    found = concurrently(lambda name: context.cluster.get("Secret", name), keys)
    for (name, required), secret in zip(keys.items(), found, strict=True):
        is_pull = name in context.spec.pull_secrets
        yield _secret(context.cluster.namespace, name, required, is_pull, secret)


def _secret(namespace: str, name: str, keys: list[str], is_pull: bool, secret: Object | None) -> Finding:
    if secret is None:
        create = f"kubectl -n {namespace} create secret docker-registry {name} --docker-server=... --docker-username=..."
        remedy = create if is_pull else f"worldsize cluster secret create {name} --from-env {keys[0]}"
        return Finding("error", f"Secret {name} does not exist in namespace {namespace}", remedy)
    data = secret.get("data") or {}
    missing = sorted(set(keys) - data.keys())
    if missing:
        existing = ", ".join(sorted(data)) or "none"
        what = f"Secret {name} has no key {', '.join(missing)}; its keys: {existing}"
        return Finding("error", what, f"--secret {name}/KEY")
    if is_pull and secret.get("type") not in _DOCKER:
        what = f"Secret {name} is not a pull secret: its type is {secret.get('type')}, not {_DOCKER[0]}"
        return Finding("error", what, f"create one: kubectl -n {namespace} create secret docker-registry ...")
    return Finding("ok", f"Secret {name}")


def volumes(context: Context) -> Iterable[Finding]:
    """Check that the volumes exist and that all pods can write to them."""
    if not context.spec.volumes:
        return
    existing = {claim["metadata"]["name"]: claim for claim in context.cluster.list("PersistentVolumeClaim")}
    for name in context.spec.volumes:
        if name not in existing:
            found = names(existing.values())
            what = f"volume {name} does not exist in namespace {context.cluster.namespace}; existing volumes: {found}"
            yield Finding("error", what, f"worldsize cluster volume create {name} --size 100Gi")
        else:
            yield _volume(context, name, existing[name])


def _volume(context: Context, name: str, claim: Object) -> Finding:
    if claim["metadata"].get("deletionTimestamp"):
        return Finding("error", f"volume {name} is being deleted", "choose another with --volume")
    if is_raw_block(claim):
        what = f"volume {name} is a raw block device (volumeMode Block), which pods cannot mount as a folder"
        return Finding("error", what, f"worldsize cluster volume create {name}-files --size ...")
    problem = _access(context, name, claim)
    if problem:
        return problem
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return Finding("ok", f"volume {name}")
    if phase == "Lost":
        return Finding("error", f"volume {name} has lost its storage", "ask your cluster administrator")
    return _binding(context, name, claim["spec"].get("storageClassName") or "")


def _access(context: Context, name: str, claim: Object) -> Finding | None:
    """The finding if some pods cannot write to the volume; None if all can."""
    modes = claim.get("status", {}).get("accessModes") or claim["spec"]["accessModes"]
    # The run is written to the first volume; the other volumes may be read-only.
    if "ReadWriteMany" in modes or ("ReadOnlyMany" in modes and name != context.spec.volumes[0]):
        return None
    remedy = f"create a shared volume: worldsize cluster volume create {name}-shared --size ... --access rwx"
    max_nodes = context.spec.bounds[1]
    if max_nodes > 1:
        what = f"volume {name} is writable from one node only ({', '.join(modes)}); the job has {max_nodes} nodes"
        single_node = "--nodes 1 without --elastic" if context.spec.elastic else "--nodes 1"
        return Finding("error", what, f"{remedy}; or use {single_node}")
    if {"ReadWriteOnce", "ReadWriteOncePod"} & set(modes):
        return None
    return Finding("error", f"volume {name} ({', '.join(modes)}) is not writable by the job's pods", remedy)


def _binding(context: Context, name: str, storage: str) -> Finding:
    """Check whether an unbound volume will be bound when the job starts."""
    if not storage:
        return Finding("error", f"volume {name} has no StorageClass and is not bound", "recreate it with --class")
    found = context.cluster.get("StorageClass", storage)
    if found is None:
        return _static(context, name, storage)
    if found.get("volumeBindingMode") == "WaitForFirstConsumer":
        return Finding("ok", f"volume {name} will be bound when the first pod uses it")
    remedy = f"a new volume may need a moment; for details: kubectl -n {context.cluster.namespace} describe pvc {name}"
    return Finding("warning", f"volume {name} is not bound yet; the pods wait for it", remedy)


def _static(context: Context, name: str, storage: str) -> Finding:
    """Check an unbound volume whose class has no object: it is bound to a volume that an administrator created."""
    what = f"volume {name} uses StorageClass {storage}, which does not exist"
    try:
        found = get_optional(context.cluster, "/api/v1/persistentvolumes") or {"items": []}
    except ClusterError as error:
        if not denied(error):
            raise
    else:
        if not any(_may_be_bound(one, context.cluster.namespace, name, storage) for one in found["items"]):
            existing = names(context.cluster.list("StorageClass"))
            remedy = f"recreate it with --class; existing StorageClasses: {existing}"
            return Finding("error", f"{what}, and no PersistentVolume has this class and is free", remedy)
    remedy = (
        f"the pods wait for a PersistentVolume of that class: kubectl -n {context.cluster.namespace} describe pvc {name}"
    )
    return Finding("warning", f"{what}, and is not bound yet", remedy)


def _may_be_bound(volume: Object, namespace: str, claim: str, storage: str) -> bool:
    """Whether the PersistentVolume is of the class, and free or reserved for the claim."""
    if volume["spec"].get("storageClassName") != storage:
        return False
    reserved = volume["spec"].get("claimRef")
    return reserved is None or (reserved.get("namespace"), reserved.get("name")) == (namespace, claim)


def queue(context: Context) -> Iterable[Finding]:
    """Check that the queue exists and accepts jobs."""
    cluster, placement = context.cluster, context.spec.placement
    if placement.queue:
        kueue = get_optional(cluster, "/apis/kueue.x-k8s.io")
        if kueue is None:
            yield Finding("error", f"--queue {placement.queue}: Kueue is not installed on this cluster", "omit --queue")
            return
        path = f"/apis/{kueue['preferredVersion']['groupVersion']}/namespaces/{cluster.namespace}/localqueues"
        existing = {one["metadata"]["name"]: one for one in cluster.request("GET", path)["items"]}
        if placement.queue not in existing:
            what = f"LocalQueue {placement.queue} does not exist in namespace {cluster.namespace}"
            yield Finding("error", what, f"--queue: existing queues: {names(existing.values())}")
        else:
            yield _local_queue(placement.queue, existing[placement.queue])
    if placement.volcano_queue:
        name = placement.volcano_queue
        if get_optional(cluster, f"{_VOLCANO}/queues/{name}") is not None:
            yield Finding("ok", f"Volcano queue {name}")
        elif get_optional(cluster, _VOLCANO) is None:
            what = f"--volcano-queue {name}: Volcano is not installed on this cluster"
            yield Finding("error", what, "omit --volcano-queue")
        else:
            # The plain name may be that of another scheduler's queues.
            remedy = "to list the queues: kubectl get queues.scheduling.volcano.sh"
            yield Finding("error", f"Volcano queue {name} does not exist", remedy)


def _local_queue(name: str, queue: Object) -> Finding:
    for condition in queue.get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            return Finding("warning", f"LocalQueue {name} is not accepting jobs: {condition.get('message', '')}")
    return Finding("ok", f"LocalQueue {name}")


def runtime(context: Context) -> Iterable[Finding]:
    """Check that the requested runtime exists."""
    name = context.spec.runtime
    if name is None or not context.serves("ClusterTrainingRuntime"):
        return
    existing = context.cluster.list("ClusterTrainingRuntime")
    if name in (one["metadata"]["name"] for one in existing):
        yield Finding("ok", f"ClusterTrainingRuntime {name}")
    else:
        remedy = f"--runtime: existing runtimes: {names(existing)}; without --runtime the job creates its own"
        yield Finding("error", f"ClusterTrainingRuntime {name} does not exist", remedy)


def leftovers(context: Context) -> Iterable[Finding]:
    """Check that the name is free. A failed or stopped job of that name is replaced, and its run resumes."""
    rendered = [(one["kind"], one["metadata"]["name"]) for one in context.manifests]
    if not rendered:
        return
    jobs = [(load_target(on).kind, context.spec.name) for on in TARGETS]
    existing = _existing(context, [*jobs, *rendered])
    found = _job_among(context, existing)
    if not found and (found := _left(context, existing)):
        # Somebody else may have submitted the job after the first look.
        found = _job_among(context, _existing(context, jobs)) or found
    yield from found


def _existing(context: Context, keys: list[tuple[str, str]]) -> dict[str, Object]:
    """The objects of these kinds and names that exist, by kind."""
    keys = list(dict.fromkeys(keys))
    found = concurrently(lambda key: _get(context, *key), keys)
    return {kind: one for (kind, _), one in zip(keys, found, strict=True) if one}


def _job_among(context: Context, existing: dict[str, Object]) -> list[Finding]:
    for target in map(load_target, TARGETS):
        if target.kind in existing:
            job, pods = existing[target.kind], context.cluster.list("Pod", target.selector(context.spec.name))
            return [_existing_job(context.cluster, target.kind, job, target.state(job, pods).phase)]
    return []


def _left(context: Context, existing: dict[str, Object]) -> list[Finding]:
    """What keeps the name although there is no such job."""
    name, cluster = context.spec.name, context.cluster
    found = []
    for kind, taken in load_target(context.kinds[0].lower()).created(context.spec) if len(context.kinds) == 1 else ():
        if (one := _get(context, kind, taken)) is not None and not one["metadata"].get("deletionTimestamp"):
            what = f"{kind} {taken} exists, but job {name} does not: its operator could not create its own"
            delete = f"kubectl -n {cluster.namespace} delete {KINDS[kind].plural}/{taken}"
            found.append(Finding("error", what, f"choose another --name, or delete it: {delete}"))
    if existing:
        found.append(_other_objects(cluster.namespace, name, existing))
    elif pods := cluster.list("Pod", base.training_pods(name)):
        what = f"pods of an earlier job {name} are still terminating: {names(pods)}"
        found.append(Finding("error", what, "wait a moment and retry"))
    return found


def _get(context: Context, kind: str, name: str) -> Object | None:
    try:
        return context.cluster.get(kind, name)
    except ClusterError as error:
        if denied(error):  # reported by the permissions check
            return None
        raise


def _existing_job(cluster: Cluster, kind: str, job: Object, phase: Phase) -> Finding:
    name = job["metadata"]["name"]
    if job["metadata"].get("deletionTimestamp"):
        return Finding("error", f"{kind} {name} is being deleted", "wait a moment and retry")
    queue = pod.queue_of(job)
    if phase == "Failed" or (phase == "Suspended" and queue is None):
        return Finding("ok", f"{kind} {name} is {phase}; it will be replaced, and its run resumes")
    logs, stop, delete = (cluster.command(word, name) for word in ("logs", "stop", "delete"))
    if phase == "Succeeded":
        remedy = f"{delete} removes the job and keeps its run on the volume; or choose another --name"
    else:
        remedy = f"{logs} follows it, {stop if queue is None else delete} ends it; or choose another --name"
    return Finding("error", f"{kind} {name} already exists and is {phase}", remedy)


def _other_objects(namespace: str, name: str, existing: dict[str, Object]) -> Finding:
    what = f"job {name} does not exist, but other objects with that name do: {', '.join(existing)}"
    if all(is_ours(one) for one in existing.values()):
        objects = " ".join(f"{KINDS[kind].plural}/{name}" for kind in existing)
        return Finding("error", what, f"left over from an earlier job; delete them: kubectl -n {namespace} delete {objects}")
    return Finding("error", what, "not all of them were created by worldsize: choose another --name")


def dry_run(context: Context) -> Iterable[Finding]:
    """Check by dry runs that the server and the operators' webhooks accept every object."""
    tried = concurrently(lambda one: _try(context, one), context.manifests)
    yield from (finding for finding in tried if finding and finding.level == "error")
    accepted = [finding.what for finding in tried if finding and finding.level == "ok"]
    if accepted:
        yield Finding("ok", f"the server would accept {', '.join(accepted)}")


def _try(context: Context, manifest: Object) -> Finding | None:
    """The result of one dry run; None if it is not possible, for a reason that other checks report."""
    kind = manifest["kind"]
    if kind == "TrainJob":
        # Its webhook requires the runtime, but a dry run does not create the job's own runtime.
        runtime = manifest["spec"]["runtimeRef"]
        if _get(context, runtime["kind"], runtime["name"]) is None:
            return None
    try:
        context.cluster.create(manifest, dry_run=True)
    except ClusterError as error:
        unknown = error.status == 404 and "/" in manifest["apiVersion"] and not context.serves(kind)
        if isinstance(error, (Unreachable, Unauthenticated)):
            raise
        if denied(error) or unknown:
            return None
        # The server reports an existing name only after all other validation has passed.
        if error.status != 409:
            remedy = next((remedy for text, remedy in _REMEDIES if re.search(text, str(error))), "")
            return Finding("error", f"the server would reject {kind} {manifest['metadata']['name']}: {error}", remedy)
    return Finding("ok", kind)


def old_labels(context: Context) -> Iterable[Finding]:
    """Check the node selector for labels that newer clusters do not set."""
    old = "failure-domain.beta.kubernetes.io/"
    for key, value in context.spec.placement.node_selector:
        if key.startswith(old):
            new = key.replace(old, "topology.kubernetes.io/")
            what = f"--node-selector {key}: this label is deprecated and not set on newer nodes"
            yield Finding("warning", what, f"use {new}={value}")
