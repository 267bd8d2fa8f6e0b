"""What a check before a run is given, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.cluster import Cluster, Object
from worldsize.launch.kinds import KINDS
from worldsize.launch.pod import template
from worldsize.launch.spec import JobSpec

A = TypeVar("A")
B = TypeVar("B")

_AT_ONCE = 32
_DENIED = re.compile(r'cannot (\w+) resource "([^"]+)"')


@dataclass(frozen=True)
class Finding:
    """One line of the report; an error refuses the run. ``remedy``: what to do about it."""

    level: Literal["ok", "warning", "error"]
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """What is to be run where.

    ``kinds`` are the kinds of jobs asked about, as Kubernetes calls them. ``manifests`` are all objects that would be
    sent; there are none where no kind was chosen.
    """

    cluster: Cluster
    kinds: tuple[str, ...]
    spec: JobSpec
    manifests: tuple[Object, ...] = ()

    @cached_property
    def served(self) -> frozenset[tuple[str, str]]:
        """(group and version, plural) of the custom resources that the API server has, of the groups we use."""

        def look(version: str) -> list[tuple[str, str]]:
            found = optional(self.cluster, f"/apis/{version}") or {"resources": []}
            return [(version, resource["name"]) for resource in found["resources"]]

        versions = sorted({KINDS[kind].group_version for kind in ("PyTorchJob", "MPIJob", "TrainJob", "JobSet")})
        return frozenset(one for some in at_once(look, versions) for one in some)

    def serves(self, kind: str) -> bool:
        """Whether the API server has this kind in the version that we use."""
        return (KINDS[kind].group_version, KINDS[kind].plural) in self.served

    @cached_property
    def pods(self) -> tuple[tuple[int, Object], ...]:
        """(how many, template) of the pods that compute and, with MPI, of the one that starts their processes."""
        container = {"image": self.spec.image, "name": "worldsize"}
        computing = (self.spec.nodes, template(self.spec, container))
        if self.kinds != ("MPIJob",):
            return (computing,)
        return (computing, (1, template(self.spec, container, resources=False)))


Check = Callable[[Context], Iterable[Finding]]


def findings_of(check: Check, context: Context) -> list[Finding]:
    """What the check finds, and a warning where it may not look or the server fails.

    Raises:
        Unreachable: no check can go on.
    """
    found: list[Finding] = []
    try:
        # One by one, so that what was found before the server's refusal counts.
        for finding in check(context):
            found.append(finding)
    except Unreachable:
        raise
    except ClusterError as error:
        found.append(_unknown(check, error))
    return found


def _unknown(check: Check, error: ClusterError) -> Finding:
    name = check.__name__.replace("_", " ")
    if (right := denied(error)) is not None:
        return Finding("warning", f"cannot look at {name}: your role may not {right}")
    return Finding("warning", f"cannot look at {name}: {error}")


def denied(error: ClusterError) -> str | None:
    """What the user's role does not allow, such as "list nodes"; None where the refusal has another cause."""
    match = _DENIED.search(str(error)) if error.status == 403 else None
    return f"{match[1]} {match[2]}" if match else None


def at_once(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """The function of each item, in their order; no request waits for another."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, items))


def optional(cluster: Cluster, path: str) -> Object | None:
    """What the API server has at this path; None where there is nothing."""
    try:
        return dict(cluster.request("GET", path))
    except ClusterError as error:
        if error.status == 404:
            return None
        raise


def names(objects: Iterable[Object], none: str = "none") -> str:
    """The objects' names, for people."""
    return ", ".join(sorted(str(one["metadata"]["name"]) for one in objects)) or none
