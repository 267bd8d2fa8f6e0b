"""Input and output of the preflight checks, and helpers for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unauthenticated, Unreachable
from worldsize.cluster.kinds import KINDS, header
from worldsize.cluster.manifests.pod import template
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import Object

A = TypeVar("A")
B = TypeVar("B")

_MAX_REQUESTS = 32  # at the same time
_DENIED = re.compile(r'cannot (\w+) resource "([^"]+)"')


@dataclass(frozen=True)
class Finding:
    """One line of the report. An error prevents the run; ``remedy`` is how to fix the problem."""

    level: Literal["ok", "warning", "error"]
    what: str
    remedy: str = ""
    unchecked: bool = False  # because of a missing permission or a server error


@dataclass(frozen=True)
class Admitted:
    """``count`` equal pods: the spec that was asked for, the one after admission, and the server's error if it refuses."""

    count: int
    asked: Object
    spec: Object
    error: str | None


@dataclass(frozen=True)
class Context:
    """The job to check and the cluster.

    ``kinds`` are the Kubernetes kinds of the jobs to check. ``manifests`` are all objects of the job; empty if no kind was
    chosen.
    """

    cluster: Cluster
    kinds: tuple[str, ...]
    spec: PodJobSpec
    manifests: tuple[Object, ...] = ()

    @cached_property
    def served(self) -> frozenset[tuple[str, str]]:
        """(group and version, plural) of the custom resources that the API server serves, in the groups we use."""

        def resources(version: str) -> list[tuple[str, str]]:
            found = get_optional(self.cluster, f"/apis/{version}") or {"resources": []}
            return [(version, resource["name"]) for resource in found["resources"]]

        versions = sorted({KINDS[kind].group_version for kind in ("PyTorchJob", "MPIJob", "TrainJob", "JobSet")})
        return frozenset(resource for group in concurrently(resources, versions) for resource in group)

    def serves(self, kind: str) -> bool:
        """Whether the API server serves this kind in the version that we use."""
        return (KINDS[kind].group_version, KINDS[kind].plural) in self.served

    @cached_property
    def pods(self) -> tuple[tuple[int, Object], ...]:
        """(count, template) of the workers and, for an MPIJob, of the launcher."""
        container = {"image": self.spec.image, "name": "worldsize"}
        workers = (self.spec.nodes, template(self.spec, container))
        if self.kinds != ("MPIJob",):
            return (workers,)
        return (workers, (1, template(self.spec, container, resources=False)))

    @cached_property
    def admitted(self) -> tuple[Admitted, ...]:
        """`pods` as a dry run returns them: with the defaults and containers that the namespace adds."""
        return tuple(self._admitted(count, template) for count, template in self.pods)

    def _admitted(self, count: int, template: Object) -> Admitted:
        pod = {**header("Pod"), **template}
        pod["metadata"] = template["metadata"] | {"name": f"{self.spec.name}-preflight"}
        try:
            return Admitted(count, template["spec"], self.cluster.create(pod, dry_run=True)["spec"], None)
        except (Unreachable, Unauthenticated):
            raise
        except ClusterError as error:
            return Admitted(count, template["spec"], template["spec"], str(error))


Check = Callable[[Context], Iterable[Finding]]


def findings_of(check: Check, context: Context) -> list[Finding]:
    """Run the check. Missing permissions and server errors become a warning.

    Raises:
        Unreachable, Unauthenticated: the server does not respond, or rejects the user, so no check can continue.
    """
    found: list[Finding] = []
    try:
        # One by one, to keep the findings before an error.
        for finding in check(context):
            found.append(finding)
    except (Unreachable, Unauthenticated):
        raise
    except ClusterError as error:
        found.append(_not_checked(check, error))
    return found


def _not_checked(check: Check, error: ClusterError) -> Finding:
    name = check.__name__.replace("_", " ")
    if (permission := denied(error)) is not None:
        return Finding("warning", f"cannot check {name}: no permission to {permission}", unchecked=True)
    return Finding("warning", f"cannot check {name}: {error}", unchecked=True)


def denied(error: ClusterError) -> str | None:
    """The permission that the user's role lacks, such as "list nodes"; None if the error has another cause."""
    match = _DENIED.search(str(error)) if error.status == 403 else None
    return f"{match[1]} {match[2]}" if match else None


def concurrently(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Like map(), with up to 32 calls at the same time; keeps the order."""
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(function, items))


def get_optional(cluster: Cluster, path: str) -> Object | None:
    """The object at this API path; None if it does not exist."""
    try:
        return dict(cluster.request("GET", path))
    except ClusterError as error:
        if error.status == 404:
            return None
        raise


def names(objects: Iterable[Object], none: str = "none") -> str:
    """The objects' names as text; ``none`` if there are no objects."""
    return ", ".join(sorted(str(one["metadata"]["name"]) for one in objects)) or none
