"""Checks of room: do the pods fit on the nodes and the processes in their memory, and does the namespace let them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worldsize.launch import fit
from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.checks import Context, Finding, denied, optional
from worldsize.launch.cluster import Object
from worldsize.launch.quantities import quantity

_LIVE = "status.phase!=Succeeded,status.phase!=Failed"

# Bytes for each process. ResNet-18 on digits, on a CPU, has taken 606 MB when its first steps are done (measured; its own
# pages alone, without those of libraries).
_TO_BEGIN = 512 << 20

# What a refusal of a pod contains, and what to do about it.
_REMEDIES = (
    (
        "violates PodSecurity",
        "--resource adds the capability IPC_LOCK, which this namespace forbids: leave it out, or ask for a namespace with "
        "the label pod-security.kubernetes.io/enforce=privileged",
    ),
    ("usage per", "a LimitRange of the namespace sets this bound: change --cpu, --memory or --gpus"),
    ("no PriorityClass", "--priority: kubectl get priorityclasses lists them"),
    ("failed quota", "a quota of the namespace counts this, so ask for it: --cpu, --memory"),
    ("service account", "a new namespace needs a moment; try again"),
)


def nodes(context: Context) -> Iterable[Finding]:
    """Is there room for the pods, now or at least when nothing else runs?"""
    objects = context.cluster.list("Node")
    (count, pod), *others = context.pods
    demand = fit.Demand.of(pod["spec"])
    beside = fit.Demand.of(others[0][1]["spec"]) if others else None
    empty = fit.nodes(objects, ())
    fewest = context.spec.bounds[0]
    most = fit.room(empty, demand, beside)
    if most < fewest:
        yield _never(context, fit.shortage(empty, demand), fewest, most)
        return
    try:
        pods = context.cluster.list("Pod", fields=_LIVE, everywhere=True)
    except ClusterError as error:
        if not denied(error):
            raise
        yield Finding("ok", f"room for {_some(most)} on empty nodes (your role may not see what runs on them)")
        return
    now = fit.nodes(objects, pods)
    free = fit.room(now, demand, beside)
    if free < count:
        what = f"{_some(count)} asked for, and room for {free} at present: {fit.shortage(now, demand)}"
        yield Finding("warning", what, "pods that find no room wait until other work ends; the others wait for them")
    else:
        yield Finding("ok", f"room for {_some(count)}{f' of {demand}' if str(demand) else ''}")


def _never(context: Context, why: str, fewest: int, most: int) -> Finding:
    what = f"room for {most} of {_some(fewest)} even on empty nodes: {why}"
    remedy = "ask for less on each node, or for other nodes: --gpus, --cpu, --memory, --node-selector, --toleration"
    if _grows(context):
        return Finding("warning", what, f"the cluster may add nodes; if it does not, {remedy}")
    return Finding("error", what, remedy)


def _grows(context: Context) -> bool:
    """Whether there are signs that the cluster adds nodes as they are needed."""
    for path in ("/apis/karpenter.sh", "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"):
        try:
            if optional(context.cluster, path) is not None:
                return True
        except ClusterError as error:
            if not denied(error):
                raise
    return False


def _some(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"


def memory(context: Context) -> Iterable[Finding]:
    """Is there memory enough for the processes to begin?"""
    asked, procs = context.spec.resources.memory, context.spec.procs
    if asked is None or (each := quantity(asked) / procs) >= _TO_BEGIN:
        return
    what = f"--memory {asked} with --procs {procs}: a process takes more to begin than {fit.shown('memory', each)}"
    remedy = "ask for more: a pod whose memory runs out before the run has begun is started again and again"
    yield Finding("warning", what, remedy)


def admission(context: Context) -> Iterable[Finding]:
    """Does the namespace let the pods in: each of them (a trial on the server), and all together (its quotas)?"""
    trials = [(count, *_try(context, template)) for count, template in context.pods]
    refusals = list(dict.fromkeys(refusal for _, _, refusal in trials if refusal))
    by_quota = [refusal for refusal in refusals if "exceeded quota" in refusal]
    for refusal in refusals:
        if refusal not in by_quota:
            yield _refused(refusal)
    over = list(_quotas(context, [(count, pod) for count, pod, _ in trials]))
    yield from over
    if by_quota and not over:
        yield _refused(by_quota[0])
    if not refusals and not over:
        yield Finding("ok", "the namespace lets the pods in")


def _try(context: Context, template: Object) -> tuple[Object, str | None]:
    """The pod's spec, as admission would complete it, and why the server would refuse it."""
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = template["metadata"] | {"name": f"{context.spec.name}-preflight"}
    try:
        return context.cluster.create(pod, dry_run=True)["spec"], None
    except Unreachable:
        raise
    except ClusterError as error:
        return template["spec"], str(error)


def _refused(why: str) -> Finding:
    if "cannot create resource" in why:
        return Finding("warning", "whether the namespace lets such pods in cannot be tried: your role may not create pods")
    if "does not support dry run" in why:
        return Finding("warning", f"whether the namespace lets such pods in cannot be tried: {why}")
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in why), "")
    return Finding("error", f"the cluster would refuse the job's pods: {why}", remedy)


def _quotas(context: Context, pods: Sequence[tuple[int, Object]]) -> Iterable[Finding]:
    for quota in context.cluster.list("ResourceQuota"):
        too_much = fit.over_quota(quota, pods)
        if too_much:
            name = quota["metadata"]["name"]
            remedy = "ask for less (--nodes, --gpus, --cpu, --memory), or see what else runs: worldsize jobs"
            yield Finding("error", f"quota {name} does not allow the whole job: {'; '.join(too_much)}", remedy)
