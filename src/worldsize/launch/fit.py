"""Do the pods fit on the nodes and into the quotas (pure): objects of the API in, numbers and sentences out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from worldsize.launch.quantities import quantity

Object = dict[str, Any]
Amounts = Mapping[str, Fraction]


def shown(resource: str, amount: Fraction) -> str:
    """For people: memory and disk in GiB or MiB, all else as a plain number."""
    if resource not in ("memory", "ephemeral-storage"):
        return f"{float(amount):g}"
    unit, size = ("Gi", 2**30) if abs(amount) >= 2**30 else ("Mi", 2**20)
    return f"{float(round(amount / size, 1)):g}{unit}"


def amounts(pod: Object, side: str = "requests") -> dict[str, Fraction]:
    """What a pod takes of each resource; ``side`` is requests or limits.

    Containers add up. Init containers run before them, one after the other, so that only the greatest counts; but those
    that are restarted for ever (sidecars) go on beside all that comes later. What the pod itself names counts instead.
    """
    sidecars: list[Amounts] = []
    steps: list[Amounts] = []
    for container in pod.get("initContainers") or []:
        own = _amounts(container, side)
        steps.append(_sum([*sidecars, own]))
        if container.get("restartPolicy") == "Always":
            sidecars.append(own)
    steps.append(_sum([*sidecars, *(_amounts(container, side) for container in pod["containers"])]))
    greatest = {name: max(step.get(name, Fraction(0)) for step in steps) for step in steps for name in step}
    return _sum([greatest | _amounts(pod, side), _parse(pod.get("overhead"))])


def _amounts(holder: Object, side: str) -> dict[str, Fraction]:
    return _parse((holder.get("resources") or {}).get(side))


def _parse(written: Mapping[str, str] | None) -> dict[str, Fraction]:
    return {name: quantity(text) for name, text in (written or {}).items()}


def _sum(parts: Iterable[Amounts]) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Fraction(0)) + amount
    return total


# Nodes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One node: what it has, and what of it the pods that are there have left ``free``."""

    labels: Mapping[str, str]
    taints: Sequence[Object]
    allocatable: Amounts
    free: Amounts


@dataclass(frozen=True)
class Demand:
    """What one pod asks of its node."""

    amounts: Amounts
    selector: Mapping[str, str]
    tolerations: Sequence[Object]

    @classmethod
    def of(cls, pod: Object) -> Demand:
        """From a pod's spec."""
        asked = {name: amount for name, amount in amounts(pod).items() if amount > 0}
        return cls(asked | {"pods": Fraction(1)}, pod.get("nodeSelector") or {}, pod.get("tolerations") or [])

    def __str__(self) -> str:
        named = sorted(self.amounts.keys() - {"pods"})
        return ", ".join(f"{name} {shown(name, self.amounts[name])}" for name in named)


def nodes(objects: Iterable[Object], pods: Iterable[Object]) -> list[Node]:
    """The cluster's nodes, less what its ``pods`` take of them."""
    on: dict[str, list[Object]] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            on.setdefault(pod["spec"].get("nodeName") or "", []).append(pod["spec"])
    found = []
    for item in objects:
        there = on.get(item["metadata"]["name"], [])
        allocatable = _parse(item["status"].get("allocatable"))
        taken = _sum([*map(amounts, there), {"pods": Fraction(len(there))}])
        free = {name: amount - taken.get(name, 0) for name, amount in allocatable.items()}
        taints = item.get("spec", {}).get("taints") or []
        found.append(Node(item["metadata"].get("labels") or {}, taints, allocatable, free))
    return found


def hindrance(node: Node, demand: Demand) -> str | None:
    """Why the node would not take such a pod however empty it is; None where it would."""
    for key, value in demand.selector.items():
        if node.labels.get(key) != value:
            return f"not labelled {key}={value}"
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


def room(where: Sequence[Node], demand: Demand, beside: Demand | None = None) -> int:
    """How many such pods there is room for, when one pod ``beside`` them must also find a place."""
    copies = [_copies(node, demand) for node in where]
    if beside is None:
        return sum(copies)
    # The one pod may go to any node; it matters to which.
    best = 0
    for node, here in zip(where, copies, strict=True):
        if _copies(node, beside):
            left = {name: amount - beside.amounts.get(name, 0) for name, amount in node.free.items()}
            best = max(best, sum(copies) - here + _copies(replace(node, free=left), demand))
    return best


def _copies(node: Node, demand: Demand) -> int:
    if hindrance(node, demand):
        return 0
    return max(0, min(int(node.free.get(name, Fraction(0)) // amount) for name, amount in demand.amounts.items()))


def shortage(where: Sequence[Node], demand: Demand) -> str:
    """Why there is not more room for such pods."""
    reasons = Counter(filter(None, (hindrance(node, demand) for node in where)))
    counted = "; ".join(f"{count} {'are' if count > 1 else 'is'} {reason}" for reason, count in reasons.most_common(4))
    willing = [node for node in where if not hindrance(node, demand)]
    if not willing:
        return f"none of the {len(where)} nodes would take this pod: {counted}" if where else "the cluster has no nodes"
    others = f" (of the other nodes {counted})" if counted else ""
    for name in _devices_first(demand):
        if not any(node.allocatable.get(name) for node in where):
            return f"no node offers {name}{_offered(where)}"
    full = [node for node in willing if not _copies(node, demand)]
    short = _short(full, demand)
    if len(full) < len(willing):
        rest = f"; of the other nodes the largest has {short[1]} {short[0]} free (of {short[2]})" if short else ""
        return f"each takes {demand}{rest}{others}"
    if short is None:
        return f"no node has all of it free at once: {demand}{others}"
    asked = f"{shown(short[0], demand.amounts[short[0]])} {short[0]} per node"
    return f"{asked} asked for; the largest node that would take this pod has {short[1]} free (of {short[2]}){others}"


def _short(where: Sequence[Node], demand: Demand) -> tuple[str, str, str] | None:
    """(resource, free, in all) on the node that has most of it, for the first resource of which none has enough."""
    for name in _devices_first(demand):
        largest = max(where, key=lambda node: (node.free.get(name, 0), node.allocatable.get(name, 0)), default=None)
        if largest is not None and largest.free.get(name, 0) < demand.amounts[name]:
            free, whole = largest.free.get(name, Fraction(0)), largest.allocatable.get(name, Fraction(0))
            return name, shown(name, free), shown(name, whole)
    return None


def _devices_first(demand: Demand) -> list[str]:
    """The resources; GPUs and the like first, which are what is usually short."""
    return sorted(demand.amounts, key=lambda name: ("/" not in name, name))


def _offered(where: Sequence[Node]) -> str:
    devices = sorted({name for node in where for name, amount in node.allocatable.items() if "/" in name and amount})
    return f"; they offer {', '.join(devices)}" if devices else ""


# Quotas ---------------------------------------------------------------------------------------------------------------


def over_quota(quota: Object, pods: Sequence[tuple[int, Object]]) -> list[str]:
    """What a ResourceQuota leaves too little of for all of the ``pods`` (count, spec): a sentence for each resource."""
    status = quota.get("status") or {}
    hard = status.get("hard") or quota["spec"].get("hard") or {}
    counted = [(count, pod) for count, pod in pods if _in_scope(quota["spec"], pod)]
    found = []
    for name, limit in sorted(hard.items()):
        need = sum((count * _counted(name, pod) for count, pod in counted), Fraction(0))
        used = quantity((status.get("used") or {}).get(name, 0))
        if need > max(Fraction(0), quantity(limit) - used):
            resource = name.removeprefix("requests.").removeprefix("limits.")
            asked, taken, whole = (shown(resource, amount) for amount in (need, used, quantity(limit)))
            found.append(f"{name}: {asked} asked for, {taken} of {whole} in use")
    return found


def _counted(name: str, pod: Object) -> Fraction:
    """How much one pod takes of what a quota calls ``name``."""
    if name in ("pods", "count/pods"):
        return Fraction(1)
    side = "limits" if name.startswith("limits.") else "requests"
    return amounts(pod, side).get(name.removeprefix(f"{side}."), Fraction(0))


def _in_scope(spec: Object, pod: Object) -> bool:
    """Whether a quota counts this pod at all."""
    terms = [{"scopeName": scope, "operator": "Exists"} for scope in spec.get("scopes") or []]
    terms += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_matches(term, pod) for term in terms)


def _matches(term: Object, pod: Object) -> bool:
    best_effort = not ({"cpu", "memory"} & (amounts(pod).keys() | amounts(pod, "limits").keys()))
    ends = pod.get("activeDeadlineSeconds") is not None
    scopes = {"BestEffort": best_effort, "NotBestEffort": not best_effort, "Terminating": ends, "NotTerminating": not ends}
    if term["scopeName"] != "PriorityClass":
        return scopes.get(term["scopeName"], False)
    priority = pod.get("priorityClassName") or ""
    named = priority in (term.get("values") or [])
    return {"In": named, "NotIn": not named, "Exists": bool(priority), "DoesNotExist": not priority}[term["operator"]]
