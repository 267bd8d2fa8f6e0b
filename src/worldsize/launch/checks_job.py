"""Checks of what one job needs to find on the cluster, and must not find there."""

from __future__ import annotations

from collections.abc import Iterable

from worldsize.launch import pod, target
from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.checks import Context, Finding, at_once, denied, names, optional
from worldsize.launch.cluster import Cluster, Object
from worldsize.launch.kinds import KINDS

_OURS = "app.kubernetes.io/managed-by"
_DOCKER = "kubernetes.io/dockerconfigjson"


def secrets(context: Context) -> Iterable[Finding]:
    """Are the Secrets there, with their keys?"""
    keys: dict[str, list[str]] = {name: [] for name in context.spec.pull_secrets}
    for reference in context.spec.secrets:
        keys.setdefault(reference.secret, []).append(reference.key)
    found = at_once(lambda name: context.cluster.get("Secret", name), keys)
    for (name, wanted), secret in zip(keys.items(), found, strict=True):
        pulls = name in context.spec.pull_secrets
        yield _secret(context.cluster.namespace, name, wanted, pulls, secret)


def _secret(namespace: str, name: str, keys: list[str], pulls: bool, secret: Object | None) -> Finding:
    if secret is None:
        make = f"kubectl -n {namespace} create secret docker-registry {name} --docker-server=... --docker-username=..."
        remedy = make if pulls else f"worldsize cluster secret create {name} --from-env {keys[0]}"
        return Finding("error", f"there is no Secret {name} in {namespace}", remedy)
    there = secret.get("data") or {}
    missing = sorted(set(keys) - there.keys())
    if missing:
        has = ", ".join(sorted(there)) or "none"
        return Finding("error", f"Secret {name} has no key {', '.join(missing)}; its keys: {has}", f"--secret {name}/KEY")
    if pulls and secret.get("type") != _DOCKER:
        what = f"Secret {name} is no pull secret: its type is {secret.get('type')}, not {_DOCKER}"
        return Finding("error", what, f"make one with: kubectl -n {namespace} create secret docker-registry ...")
    return Finding("ok", f"Secret {name}")


def volumes(context: Context) -> Iterable[Finding]:
    """Are the volumes there, and can all pods write to them?"""
    if not context.spec.volumes:
        return
    there = {claim["metadata"]["name"]: claim for claim in context.cluster.list("PersistentVolumeClaim")}
    for name in context.spec.volumes:
        if name not in there:
            what = f"there is no volume {name} in {context.cluster.namespace}; there are: {names(there.values())}"
            yield Finding("error", what, f"worldsize cluster volume create {name} --size 100Gi")
        else:
            yield _volume(context, name, there[name])


def _volume(context: Context, name: str, claim: Object) -> Finding:
    if claim["metadata"].get("deletionTimestamp"):
        return Finding("error", f"volume {name} is being deleted", "name another with --volume")
    problem = _access(context, name, claim)
    if problem:
        return problem
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return Finding("ok", f"volume {name}")
    if phase == "Lost":
        return Finding("error", f"volume {name} has lost its storage", "ask whoever runs the cluster")
    return _binding(context, name, claim["spec"].get("storageClassName") or "")


def _access(context: Context, name: str, claim: Object) -> Finding | None:
    """Why not all pods can write to the volume."""
    modes = claim.get("status", {}).get("accessModes") or claim["spec"]["accessModes"]
    # The run is written to the first volume; data may be on one that can only be read.
    if "ReadWriteMany" in modes or ("ReadOnlyMany" in modes and name != context.spec.volumes[0]):
        return None
    remedy = f"make a volume for several: worldsize cluster volume create {name}-shared --size ... --access rwx"
    most = context.spec.bounds[1]
    if most > 1:
        what = f"volume {name} can be written from one node only ({', '.join(modes)}); the job has {most}"
        alone = "--nodes 1 without --elastic" if context.spec.elastic else "--nodes 1"
        return Finding("error", what, f"{remedy}; or use {alone}")
    if {"ReadWriteOnce", "ReadWriteOncePod"} & set(modes):
        return None
    return Finding("error", f"volume {name} ({', '.join(modes)}) cannot be written by the job's pods", remedy)


def _binding(context: Context, name: str, storage: str) -> Finding:
    """A volume that is not bound yet: will it be?"""
    if not storage:
        return Finding("error", f"volume {name} has no StorageClass and is not bound", "make it with --class")
    found = context.cluster.get("StorageClass", storage)
    if found is None:
        what = f"volume {name} names StorageClass {storage}, which does not exist"
        return Finding("error", what, f"there are: {names(context.cluster.list('StorageClass'))}; make it anew with --class")
    if found.get("volumeBindingMode") == "WaitForFirstConsumer":
        return Finding("ok", f"volume {name} will be bound when the first pod needs it")
    remedy = f"a new volume may take a moment; else: kubectl -n {context.cluster.namespace} describe pvc {name}"
    return Finding("error", f"volume {name} is not bound yet", remedy)


def queue(context: Context) -> Iterable[Finding]:
    """Is there the queue, and does it take jobs?"""
    cluster, place = context.cluster, context.spec.placement
    if place.queue:
        kueue = optional(cluster, "/apis/kueue.x-k8s.io")
        if kueue is None:
            yield Finding("error", f"--queue {place.queue}: Kueue is not installed here", "leave --queue out")
            return
        path = f"/apis/{kueue['preferredVersion']['groupVersion']}/namespaces/{cluster.namespace}/localqueues"
        there = {one["metadata"]["name"]: one for one in cluster.request("GET", path)["items"]}
        if place.queue not in there:
            what = f"there is no LocalQueue {place.queue} in {cluster.namespace}"
            yield Finding("error", what, f"--queue: there are {names(there.values())}")
        else:
            yield _local_queue(place.queue, there[place.queue])
    if place.volcano_queue:
        found = optional(cluster, f"/apis/scheduling.volcano.sh/v1beta1/queues/{place.volcano_queue}")
        if found is None:
            yield Finding("error", f"there is no Volcano queue {place.volcano_queue}", "kubectl get queues lists them")
        else:
            yield Finding("ok", f"Volcano queue {place.volcano_queue}")


def _local_queue(name: str, queue: Object) -> Finding:
    for condition in queue.get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            return Finding("warning", f"LocalQueue {name} takes no jobs at present: {condition.get('message', '')}")
    return Finding("ok", f"LocalQueue {name}")


def runtime(context: Context) -> Iterable[Finding]:
    """Is there the runtime that is to be used?"""
    name = context.spec.runtime
    if name is None or not context.serves("ClusterTrainingRuntime"):
        return
    there = context.cluster.list("ClusterTrainingRuntime")
    if name in (one["metadata"]["name"] for one in there):
        yield Finding("ok", f"ClusterTrainingRuntime {name}")
    else:
        remedy = f"--runtime: there are {names(there)}; without --runtime the job brings its own"
        yield Finding("error", f"there is no ClusterTrainingRuntime {name}", remedy)


def leftovers(context: Context) -> Iterable[Finding]:
    """Is the name free? A job of that name that failed or was stopped makes way, and its run goes on."""
    name, cluster = context.spec.name, context.cluster
    rendered = [(one["kind"], one["metadata"]["name"]) for one in context.manifests]
    jobs = [(target.load(on).kind, name) for on in target.TARGETS] if rendered else []
    asked = list(dict.fromkeys([*jobs, *rendered]))
    there = {kind: one for (kind, _), one in zip(asked, at_once(lambda one: _get(context, *one), asked), strict=True) if one}
    for on in target.TARGETS:
        one = target.load(on)
        if one.kind in there:
            pods = cluster.list("Pod", one.selector(name))
            yield _earlier(cluster, one.kind, there[one.kind], one.state(there[one.kind], pods).phase)
            return
    if there:
        yield _remains(cluster.namespace, name, there)
    elif rendered and (pods := cluster.list("Pod", target.training_pods(name))):
        yield Finding("error", f"pods of an earlier {name} have not left yet: {names(pods)}", "wait a moment and try again")


def _get(context: Context, kind: str, name: str) -> Object | None:
    try:
        return context.cluster.get(kind, name)
    except ClusterError as error:
        if denied(error):  # which the check of permissions says
            return None
        raise


def _earlier(cluster: Cluster, kind: str, job: Object, phase: target.Phase) -> Finding:
    name = job["metadata"]["name"]
    if job["metadata"].get("deletionTimestamp"):
        return Finding("error", f"{kind} {name} is being deleted", "wait a moment and try again")
    queue = pod.queue_of(job)
    if phase == "Failed" or (phase == "Suspended" and queue is None):
        return Finding("ok", f"{kind} {name} is {phase}; it makes way, and its run goes on")
    logs, stop, delete = (cluster.command(word, name) for word in ("logs", "stop", "delete"))
    if phase == "Succeeded":
        remedy = f"{delete} removes the job; its run stays on the volume. Or choose another --name"
    else:
        remedy = f"{logs} follows it, {stop if queue is None else delete} ends it. Or choose another --name"
    return Finding("error", f"{kind} {name} is {phase} already", remedy)


def _remains(namespace: str, name: str, there: dict[str, Object]) -> Finding:
    what = f"there is no job {name}, but objects of that name: {', '.join(there)}"
    if all(one["metadata"].get("labels", {}).get(_OURS) == "worldsize" for one in there.values()):
        objects = " ".join(f"{KINDS[kind].plural}/{name}" for kind in there)
        return Finding("error", what, f"they are left from an earlier job: kubectl -n {namespace} delete {objects}")
    return Finding("error", what, "not all of them are worldsize's: choose another --name")


def dry_run(context: Context) -> Iterable[Finding]:
    """Would the server and the operators' webhooks accept every object?"""
    tried = at_once(lambda one: _try(context, one), context.manifests)
    yield from (finding for finding in tried if finding and finding.level == "error")
    accepted = [finding.what for finding in tried if finding and finding.level == "ok"]
    if accepted:
        yield Finding("ok", f"the server would accept {', '.join(accepted)}")


def _try(context: Context, manifest: Object) -> Finding | None:
    """The server's opinion of one object; None where it cannot have one, which other checks explain."""
    kind = manifest["kind"]
    if kind == "TrainJob":
        # It is refused while its runtime is not there, and one of its own is sent just before it.
        needed = manifest["spec"]["runtimeRef"]
        if _get(context, needed["kind"], needed["name"]) is None:
            return None
    try:
        context.cluster.create(manifest, dry_run=True)
    except ClusterError as error:
        unknown = error.status == 404 and "/" in manifest["apiVersion"] and not context.serves(kind)
        if isinstance(error, Unreachable):
            raise
        if denied(error) or unknown:
            return None
        # An object of that name is found only after all others had agreed.
        if error.status != 409:
            remedy = ""
            if "failed calling webhook" in str(error):
                remedy = "the operator's webhook does not answer: it is starting, or down; ask whoever runs the cluster"
            return Finding("error", f"the server would refuse {kind} {manifest['metadata']['name']}: {error}", remedy)
    return Finding("ok", kind)


def old_labels(context: Context) -> Iterable[Finding]:
    """Does the node selector use labels that newer clusters do not set?"""
    old = "failure-domain.beta.kubernetes.io/"
    for key, value in context.spec.placement.node_selector:
        if key.startswith(old):
            new = key.replace(old, "topology.kubernetes.io/")
            yield Finding("warning", f"--node-selector {key}: deprecated, and not set on newer nodes", f"{new}={value}")
