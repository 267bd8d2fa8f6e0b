"""Computes whether pods fit on the nodes and into the quotas (pure): API objects in, numbers and messages out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from worldsize.cluster.objects import Object
from worldsize.jobs.quantities import quantity

Amounts = Mapping[str, Fraction]

_NONE: Mapping[str, int] = MappingProxyType({})
# Taints that Kubernetes and autoscalers set for a while.
_TEMPORARY = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "ToBeDeletedByClusterAutoscaler")
_CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}


def formatted(resource: str, amount: Fraction) -> str:
    """The amount as text: memory and disk in Gi or Mi, other resources as a plain number."""
    if resource not in ("memory", "ephemeral-storage"):
        return f"{float(amount):g}"
    unit, size = ("Gi", 2**30) if abs(amount) >= 2**30 else ("Mi", 2**20)
    return f"{float(round(amount / size, 1)):g}{unit}"


def amounts(pod: Object, side: str = "requests") -> dict[str, Fraction]:
    """What a pod uses of each resource; ``side`` is "requests" or "limits".

    The amounts of the containers add up. Init containers run before them, one at a time, so only the largest counts.
    Sidecars (init containers that are always restarted) keep running alongside everything that starts later. Pod-level
    resources override the result.
    """
    sidecars: list[Amounts] = []
    steps: list[Amounts] = []
    for container in pod.get("initContainers") or []:
        used = _amounts(container, side)
        steps.append(_sum([*sidecars, used]))
        if container.get("restartPolicy") == "Always":
            sidecars.append(used)
    steps.append(_sum([*sidecars, *(_amounts(container, side) for container in pod["containers"])]))
    largest = {name: max(step.get(name, Fraction(0)) for step in steps) for step in steps for name in step}
    return _sum([largest | _amounts(pod, side), _parse(pod.get("overhead"))])


def _amounts(holder: Object, side: str) -> dict[str, Fraction]:
    return _parse((holder.get("resources") or {}).get(side))


def _parse(quantities: Mapping[str, str] | None) -> dict[str, Fraction]:
    return {name: quantity(text) for name, text in (quantities or {}).items()}


def _sum(parts: Iterable[Amounts]) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Fraction(0)) + amount
    return total


# Nodes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One node; ``free`` is the part of ``allocatable`` that its pods do not use."""

    labels: Mapping[str, str]
    taints: Sequence[Object]
    allocatable: Amounts
    free: Amounts


@dataclass(frozen=True)
class Demand:
    """The requirements of one pod on its node."""

    amounts: Amounts
    selector: Mapping[str, str]
    tolerations: Sequence[Object]

    @classmethod
    def of(cls, pod: Object) -> Demand:
        """The demand of a pod with this spec."""
        requested = {name: amount for name, amount in amounts(pod).items() if amount > 0}
        return cls(requested | {"pods": Fraction(1)}, pod.get("nodeSelector") or {}, pod.get("tolerations") or [])

    def __str__(self) -> str:
        names = sorted(self.amounts.keys() - {"pods"})
        return ", ".join(f"{name} {formatted(name, self.amounts[name])}" for name in names)


def nodes(objects: Iterable[Object], pods: Iterable[Object]) -> list[Node]:
    """The cluster's nodes, with the resources that its ``pods`` leave free."""
    by_node: dict[str, list[Object]] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            by_node.setdefault(pod["spec"].get("nodeName") or "", []).append(pod["spec"])
    found = []
    for item in objects:
        specs = by_node.get(item["metadata"]["name"], [])
        allocatable = _parse(item["status"].get("allocatable"))
        used = _sum([*map(amounts, specs), {"pods": Fraction(len(specs))}])
        free = {name: amount - used.get(name, 0) for name, amount in allocatable.items()}
        taints = [*(item.get("spec", {}).get("taints") or [])]
        ready = {one["type"]: one["status"] for one in item["status"].get("conditions") or []}.get("Ready", "True")
        # Kubernetes sets the taint a moment after the field or the condition.
        for applies, taint in ((item.get("spec", {}).get("unschedulable"), _CORDONED), (ready != "True", _NOT_READY)):
            if applies and taint["key"] not in [one["key"] for one in taints]:
                taints.append(taint)
        found.append(Node(item["metadata"].get("labels") or {}, taints, allocatable, free))
    return found


def recovered(node: Node) -> Node:
    """The node once it is ready and no longer cordoned; other taints, such as of GPU nodes, remain."""
    return replace(node, taints=[taint for taint in node.taints if not taint["key"].startswith(_TEMPORARY)])


def exclusion(node: Node, demand: Demand) -> str | None:
    """Why the node does not accept the pod even if it is empty; None if it does."""
    for key, value in demand.selector.items():
        if node.labels.get(key) != value:
            return f"not labeled {key}={value}"
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in demand.tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"tainted {taint['key']}{value}:{taint['effect']}"
    return None


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def capacity(nodes: Sequence[Node], demand: Demand, launcher: Demand | None = None) -> int:
    """How many such pods fit on the nodes; with a ``launcher``, how many fit in addition to it."""
    copies = [_copies(node, demand) for node in nodes]
    if launcher is None:
        return sum(copies)
    # The choice of the launcher's node matters: try each.
    best = 0
    for node, count in zip(nodes, copies, strict=True):
        if _copies(node, launcher):
            free = {name: amount - launcher.amounts.get(name, 0) for name, amount in node.free.items()}
            best = max(best, sum(copies) - count + _copies(replace(node, free=free), demand))
    return best


def _copies(node: Node, demand: Demand) -> int:
    """How many such pods fit on the node."""
    if exclusion(node, demand):
        return 0
    return max(0, min(int(node.free.get(name, Fraction(0)) // amount) for name, amount in demand.amounts.items()))


def shortage(nodes: Sequence[Node], demand: Demand) -> str:
    """The reason why no more such pods fit."""
    reasons = Counter(filter(None, (exclusion(node, demand) for node in nodes)))
    excluded = "; ".join(f"{count} {'are' if count > 1 else 'is'} {reason}" for reason, count in reasons.most_common(4))
    eligible = [node for node in nodes if not exclusion(node, demand)]
    if not eligible:
        return f"none of the {len(nodes)} nodes accepts this pod: {excluded}" if nodes else "the cluster has no nodes"
    others = f" (of the other nodes, {excluded})" if excluded else ""
    for name in _devices_first(demand):
        if not any(node.allocatable.get(name) for node in nodes):
            return f"no node has {name}{_available_devices(nodes)}"
    full = [node for node in eligible if not _copies(node, demand)]
    scarce = _scarce_resource(full, demand)
    if len(full) < len(eligible):
        rest = f"; of the other nodes, the largest has {scarce[1]} {scarce[0]} free (of {scarce[2]})" if scarce else ""
        return f"each pod needs {demand}{rest}{others}"
    if scarce is None:
        return f"no single node has all of this free: {demand}{others}"
    requested = f"{formatted(scarce[0], demand.amounts[scarce[0]])} {scarce[0]} per node requested"
    return f"{requested}; the largest node that accepts this pod has {scarce[1]} free (of {scarce[2]}){others}"


def _scarce_resource(nodes: Sequence[Node], demand: Demand) -> tuple[str, str, str] | None:
    """(resource, free, total) for the first resource of which no node has enough, on the node with most of it free."""
    for name in _devices_first(demand):
        largest = max(nodes, key=lambda node: (node.free.get(name, 0), node.allocatable.get(name, 0)), default=None)
        if largest is not None and largest.free.get(name, 0) < demand.amounts[name]:
            free, total = largest.free.get(name, Fraction(0)), largest.allocatable.get(name, Fraction(0))
            return name, formatted(name, free), formatted(name, total)
    return None


def _devices_first(demand: Demand) -> list[str]:
    """The requested resources, GPUs and other devices first, because they are the most likely to be scarce."""
    return sorted(demand.amounts, key=lambda name: ("/" not in name, name))


def _available_devices(nodes: Sequence[Node]) -> str:
    devices = sorted({name for node in nodes for name, amount in node.allocatable.items() if "/" in name and amount})
    return f"; available: {', '.join(devices)}" if devices else ""


# Quotas ---------------------------------------------------------------------------------------------------------------


def over_quota(quota: Object, pods: Sequence[tuple[int, Object]], objects: Mapping[str, int] = _NONE) -> list[str]:
    """What a ResourceQuota is too small for, one message each.

    Args:
        pods: (count, spec) of equal pods.
        objects: numbers of other objects, by resource, such as services.
    """
    status = quota.get("status") or {}
    hard = status.get("hard") or quota["spec"].get("hard") or {}
    counted = [(count, pod) for count, pod in pods if _in_scope(quota["spec"], pod)]
    found = []
    for name, limit in sorted(hard.items()):
        need = sum((count * _counted(name, pod) for count, pod in counted), Fraction(0))
        if not (quota["spec"].get("scopes") or quota["spec"].get("scopeSelector")):  # which only pods can match
            need += objects.get(name, 0)
        used = quantity((status.get("used") or {}).get(name, 0))
        if need > max(Fraction(0), quantity(limit) - used):
            resource = name.removeprefix("requests.").removeprefix("limits.")
            requested, in_use, hard_limit = (formatted(resource, amount) for amount in (need, used, quantity(limit)))
            found.append(f"{name}: {requested} requested, {in_use} of {hard_limit} in use")
    return found


def _counted(name: str, pod: Object) -> Fraction:
    """How much one pod uses of a quota's resource ``name``."""
    if name in ("pods", "count/pods"):
        return Fraction(1)
    side = "limits" if name.startswith("limits.") else "requests"
    return amounts(pod, side).get(name.removeprefix(f"{side}."), Fraction(0))


def _in_scope(spec: Object, pod: Object) -> bool:
    """Whether the quota applies to this pod."""
    terms = [{"scopeName": scope, "operator": "Exists"} for scope in spec.get("scopes") or []]
    terms += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_matches(term, pod) for term in terms)


def _matches(term: Object, pod: Object) -> bool:
    best_effort = not ({"cpu", "memory"} & (amounts(pod).keys() | amounts(pod, "limits").keys()))
    limited = pod.get("activeDeadlineSeconds") is not None
    scopes = {"BestEffort": best_effort, "NotBestEffort": not best_effort}
    scopes |= {"Terminating": limited, "NotTerminating": not limited}
    if term["scopeName"] != "PriorityClass":
        return scopes.get(term["scopeName"], False)
    priority = pod.get("priorityClassName") or ""
    listed = priority in (term.get("values") or [])
    return {"In": listed, "NotIn": not listed, "Exists": bool(priority), "DoesNotExist": not priority}[term["operator"]]
