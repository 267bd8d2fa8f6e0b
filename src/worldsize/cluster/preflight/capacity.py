"""Capacity checks: free resources on the nodes, memory per process, and admission by the namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from worldsize.cluster.api.errors import ClusterError, Unauthenticated, Unreachable
from worldsize.cluster.objects import Object
from worldsize.cluster.preflight import scheduling
from worldsize.cluster.preflight.base import Context, Finding, denied, get_optional
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
    (count, pod), *others = context.pods
    demand = scheduling.Demand.of(pod["spec"])
    launcher = scheduling.Demand.of(others[0][1]["spec"]) if others else None
    empty = scheduling.nodes(objects, ())
    min_nodes = context.spec.bounds[0]
    total = scheduling.capacity(empty, demand, launcher)
    if total < min_nodes:
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
    if _autoscales(context):
        return Finding("warning", what, f"the cluster may add nodes; if it does not, {remedy}")
    return Finding("error", what, remedy)


def _autoscales(context: Context) -> bool:
    """Whether the cluster seems to have an autoscaler that adds nodes on demand."""
    for path in ("/apis/karpenter.sh", "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"):
        try:
            if get_optional(context.cluster, path) is not None:
                return True
        except ClusterError as error:
            if not denied(error):
                raise
    return False


def _pods(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"


def memory(context: Context) -> Iterable[Finding]:
    """Check that each process has enough memory to start."""
    requested, procs = context.spec.resources.memory, context.spec.procs
    if requested is None or (each := quantity(requested) / procs) >= _MIN_PROCESS_MEMORY:
        return
    left, needed = (scheduling.formatted("memory", Fraction(amount)) for amount in (each, _MIN_PROCESS_MEMORY))
    what = f"--memory {requested} with --procs {procs} leaves {left} per process; at least {needed} is needed"
    remedy = "request more: a pod that runs out of memory before training starts is restarted without limit"
    yield Finding("warning", what, remedy)


def admission(context: Context) -> Iterable[Finding]:
    """Check that the namespace admits the pods: each pod (by a dry run on the server), and all pods (by its quotas)."""
    trials = [(count, *_try(context, template)) for count, template in context.pods]
    errors = list(dict.fromkeys(error for _, _, error in trials if error))
    by_quota = [error for error in errors if "exceeded quota" in error]
    for error in errors:
        if error not in by_quota:
            yield _rejected(error)
    exceeded = list(_quotas(context, [(count, pod) for count, pod, _ in trials]))
    yield from exceeded
    if by_quota and not exceeded:
        yield _rejected(by_quota[0])
    if not errors and not exceeded:
        yield Finding("ok", "the namespace admits the pods")


def _try(context: Context, template: Object) -> tuple[Object, str | None]:
    """The pod's spec after admission, and the server's error if it would reject the pod."""
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = template["metadata"] | {"name": f"{context.spec.name}-preflight"}
    try:
        return context.cluster.create(pod, dry_run=True)["spec"], None
    except (Unreachable, Unauthenticated):
        raise
    except ClusterError as error:
        return template["spec"], str(error)


def _rejected(why: str) -> Finding:
    unchecked = "cannot check whether the namespace admits the pods: "
    if "cannot create resource" in why:
        return Finding("warning", f"{unchecked}no permission to create pods", unchecked=True)
    if "does not support dry run" in why:
        return Finding("warning", f"{unchecked}{why}", unchecked=True)
    remedy = next((remedy for text, remedy in _REMEDIES if text in why), "")
    return Finding("error", f"the cluster would reject the job's pods: {why}", remedy)


def _quotas(context: Context, pods: Sequence[tuple[int, Object]]) -> Iterable[Finding]:
    for quota in context.cluster.list("ResourceQuota"):
        exceeded = scheduling.over_quota(quota, pods)
        if exceeded:
            name = quota["metadata"]["name"]
            remedy = "request less (--nodes, --gpus, --cpu, --memory), or see what else is running: worldsize jobs"
            yield Finding("error", f"quota {name} is too small for all pods of the job: {'; '.join(exceeded)}", remedy)
