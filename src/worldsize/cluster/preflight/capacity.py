"""Capacity checks: free resources on the nodes, memory per process, and admission by the namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.objects import Object
from worldsize.cluster.preflight import scheduling
from worldsize.cluster.preflight.base import Admitted, Context, Finding, denied, get_optional
from worldsize.jobs.quantities import quantity

_LIVE = "status.phase!=Succeeded,status.phase!=Failed"

# Bytes per process. Measured: ResNet-18 on digits on a CPU uses 606 MB after its first steps (private pages only, without
# those of libraries).
_MIN_PROCESS_MEMORY = 512 << 20

# (substring of an admission error, remedy)
_REMEDIES = (
    (
        "violates PodSecurity",
        "--resource adds the capability IPC_LOCK, which this namespace forbids: omit it, or use a namespace with the label "
        "pod-security.kubernetes.io/enforce=privileged",
    ),
    (
        "unable to validate against any security context constraint",
        "OpenShift chooses the user of pods in this namespace: pass --no-fixed-user (not with mpijob), or ask your cluster "
        "administrator for the security context constraint nonroot-v2",
    ),
    ("usage per", "a LimitRange of the namespace sets this limit: change --cpu, --memory or --gpus"),
    ("no PriorityClass", "--priority: to list the available classes: kubectl get priorityclasses"),
    ("failed quota", "a quota of the namespace requires a value for this resource: set --cpu and --memory"),
    ("service account", "a new namespace needs a moment; retry"),
)


def nodes(context: Context) -> Iterable[Finding]:
    """Check the capacity of the nodes for the pods: currently free, and in total."""
    objects = context.cluster.list("Node")
    workers, *others = context.admitted
    count, demand = workers.count, scheduling.Demand.of(workers.spec)
    launcher = scheduling.Demand.of(others[0].spec) if others else None
    empty = scheduling.nodes(objects, ())
    min_nodes = context.spec.bounds[0]
    total = scheduling.capacity(empty, demand, launcher)
    if total < min_nodes:
        ready = scheduling.capacity([scheduling.recovered(node) for node in empty], demand, launcher)
        if ready >= min_nodes:
            what = f"capacity for {total} of {_pods(min_nodes)}: {scheduling.shortage(empty, demand)}"
            yield Finding("warning", what, "the pods wait until nodes are ready and schedulable again: kubectl get nodes")
        else:
            yield _too_large(context, scheduling.shortage(empty, demand), min_nodes, total)
        return
    try:
        pods = context.cluster.list("Pod", fields=_LIVE, everywhere=True)
    except ClusterError as error:
        if not denied(error):
            raise
        yield Finding("ok", f"capacity for {_pods(total)} on empty nodes (no permission to list the pods that use them)")
        return
    current = scheduling.nodes(objects, pods)
    free = scheduling.capacity(current, demand, launcher)
    if free < count:
        what = f"{_pods(count)} requested, current capacity {free}: {scheduling.shortage(current, demand)}"
        yield Finding("warning", what, "pods that do not fit wait until other jobs end; the other pods wait for them")
    else:
        yield Finding("ok", f"capacity for {_pods(count)}{f' of {demand}' if str(demand) else ''}")


def _too_large(context: Context, why: str, min_nodes: int, total: int) -> Finding:
    what = f"capacity for {total} of {_pods(min_nodes)} even on empty nodes: {why}"
    remedy = "request less per node or use other nodes: --gpus, --cpu, --memory, --node-selector, --toleration"
    autoscales = _autoscales(context)
    if autoscales is None:
        return Finding("warning", what, f"no permission to see whether the cluster adds nodes; if it does not, {remedy}")
    if autoscales:
        return Finding("warning", what, f"the cluster may add nodes; if it does not, {remedy}")
    return Finding("error", what, remedy)


def _autoscales(context: Context) -> bool | None:
    """Whether the cluster seems to have an autoscaler that adds nodes on demand; None if that may not be looked up."""
    unknown = False
    for path in ("/apis/karpenter.sh", "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"):
        try:
            if get_optional(context.cluster, path) is not None:
                return True
        except ClusterError as error:
            if not denied(error):
                raise
            unknown = True
    return None if unknown else False


def _pods(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"


def memory(context: Context) -> Iterable[Finding]:
    """Check that each process has enough memory to start."""
    requested, procs = context.spec.resources.memory, context.spec.procs
    own = f"--memory {requested}"
    if requested is None:
        workers = context.admitted[0]
        own_name = workers.asked["containers"][0]["name"]  # others may have been added before it
        container: Object = next((one for one in workers.spec["containers"] if one["name"] == own_name), {})
        limit = (container.get("resources") or {}).get("limits", {}).get("memory")
        requested, own = limit, f"the namespace's default limit of memory, {limit},"
    if requested is None or (each := quantity(requested) / procs) >= _MIN_PROCESS_MEMORY:
        return
    left, needed = (scheduling.formatted("memory", Fraction(amount)) for amount in (each, _MIN_PROCESS_MEMORY))
    what = f"{own} with --procs {procs} leaves {left} per process; at least {needed} is needed"
    ends = "is restarted, by a PyTorchJob without limit"
    if "PyTorchJob" not in context.kinds:
        ends = "is restarted until the job's retries are used up"
    yield Finding("warning", what, f"request more: a pod that runs out of memory before training starts {ends}")


def admission(context: Context) -> Iterable[Finding]:
    """Check that the namespace admits the pods: each pod (by a dry run on the server), and all pods (by its quotas)."""
    errors = list(dict.fromkeys(pods.error for pods in context.admitted if pods.error))
    by_quota = [error for error in errors if "exceeded quota" in error]
    for error in errors:
        if error not in by_quota:
            yield _rejected(error)
    exceeded = list(_quotas(context, [(pods.count, pods.spec) for pods in context.admitted]))
    yield from exceeded
    added = list(dict.fromkeys(name for pods in context.admitted for name in _added(pods)))
    if added:
        what = f"the cluster adds containers to the job's pods: {', '.join(added)}"
        yield Finding("warning", what, "a container that does not end keeps the job from ending: exclude it here")
    if by_quota and not exceeded:
        yield _rejected(by_quota[0])
    if not errors and not exceeded:
        yield Finding("ok", "the namespace admits the pods")


def _added(pods: Admitted) -> list[str]:
    """Names of the containers that were not asked for."""
    asked = {one["name"] for one in pods.asked["containers"]}
    found = [*pods.spec["containers"], *(pods.spec.get("initContainers") or [])]
    return [str(one["name"]) for one in found if one["name"] not in asked]


def _rejected(why: str) -> Finding:
    unchecked = "cannot check whether the namespace admits the pods: "
    if "cannot create resource" in why:
        return Finding("warning", f"{unchecked}no permission to create pods", unchecked=True)
    if "does not support dry run" in why:
        return Finding("warning", f"{unchecked}{why}", unchecked=True)
    remedy = next((remedy for text, remedy in _REMEDIES if text in why), "")
    return Finding("error", f"the cluster would reject the job's pods: {why}", remedy)


def _objects(context: Context) -> dict[str, int]:
    """The job's own objects and those that its operator creates, counted by their names in quotas."""
    counts: Counter[str] = Counter()
    if len(context.kinds) == 1:
        target = next((one for one in map(load_target, TARGETS) if one.kind == context.kinds[0]), None)
        made = [(one["kind"], one["metadata"]["name"]) for one in context.manifests]
        for kind, _ in [*made, *(target.created(context.spec) if target else ())]:
            group, plural = KINDS[kind].group, KINDS[kind].plural
            counts[f"count/{plural}.{group}" if group else f"count/{plural}"] += 1
            if not group:
                counts[plural] += 1
    return dict(counts)


def _quotas(context: Context, pods: Sequence[tuple[int, Object]]) -> Iterable[Finding]:
    objects = _objects(context)
    for quota in context.cluster.list("ResourceQuota"):
        exceeded = scheduling.over_quota(quota, pods, objects)
        if exceeded:
            name = quota["metadata"]["name"]
            remedy = "request less (--nodes, --gpus, --cpu, --memory), or see what else is running: worldsize jobs"
            yield Finding("error", f"quota {name} is too small for all pods of the job: {'; '.join(exceeded)}", remedy)
