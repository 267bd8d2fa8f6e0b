"""The specification of a job, independent of Kubernetes: the input from which every target renders its objects."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePosixPath

from worldsize.cluster.manifests.quantities import quantity
from worldsize.errors import UserError

# Paths inside a pod, shared by the container image and the manifests.
VOLUMES = PurePosixPath("/mnt")
RECIPE = PurePosixPath("/run/worldsize/recipe.yaml")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESERVED = re.compile(r"(PET|OMPI|PRTE|WORLDSIZE)_.*|MASTER_ADDR|HOME|PATH|USER")


@dataclass(frozen=True)
class Resources:
    """Resources of one node's pod; requests equal limits.

    ``cpu``, ``memory``, ``shm`` (size of /dev/shm, counts toward memory) and ``disk`` (node-local) are quantities ("8",
    "500m", "64Gi"); None: not requested. ``devices`` are additional resources by name, such as ``rdma/ib``.
    """

    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    shm: str = "1Gi"
    disk: str | None = None
    devices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SecretKey:
    """A key of a Secret, passed to the processes as an environment variable."""

    secret: str
    key: str
    variable: str


@dataclass(frozen=True)
class Toleration:
    """A tolerated node taint; an empty ``value`` or ``effect`` matches any."""

    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class Placement:
    """Where the pods may run, and the queue that decides when.

    ``queue`` is a Kueue LocalQueue, ``volcano_queue`` a Volcano queue. ``spread`` ("host" or "zone") distributes the pods
    over hosts or zones as far as possible.
    """

    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    spread: str | None = None
    priority: str | None = None
    queue: str | None = None
    volcano_queue: str | None = None


@dataclass(frozen=True)
class JobSpec:
    """One training job.

    ``name`` is the name of the run and of all objects created for it. ``recipe`` is the recipe as YAML, ``command`` the
    arguments of ``worldsize`` on every rank. ``procs`` is the number of processes per node, each with one GPU if GPUs are
    requested. ``volumes`` are volume names; volume V is mounted at /mnt/V. ``secrets`` are passed to the processes only as
    environment variables. ``retries`` is the number of restarts without a new checkpoint in between. ``deadline_s`` ends
    the job (None: no limit); ``grace_s`` is the time to save a checkpoint when a pod is terminated. ``elastic`` is
    (minimum, maximum) number of nodes.
    """

    name: str
    namespace: str
    image: str
    recipe: str
    command: tuple[str, ...]
    nodes: int = 1
    procs: int = 1
    resources: Resources = field(default_factory=Resources)
    volumes: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[SecretKey, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    retries: int = 3
    deadline_s: int | None = None
    grace_s: int = 120
    elastic: tuple[int, int] | None = None
    needs_mpi: bool = False
    runtime: str | None = None

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.procs

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return self.elastic or (self.nodes, self.nodes)


def general_problems(spec: JobSpec) -> Iterable[str]:
    """Problems of the spec for every kind of job on any cluster: one sentence each, with the remedy."""
    yield from _names(spec)
    yield from amount_problems(spec)
    if not spec.volumes:
        yield "--volume is required, or the run is lost with its pods (worldsize cluster volume create creates a volume)"
    if re.fullmatch(r"[^@]*:latest", spec.image) or not re.search(r":[^/]+$", spec.image):
        yield f"--image {spec.image}: use a digest or a tag other than latest, so that every pod runs the same code"
    variables = [name for name, _ in spec.env] + [secret.variable for secret in spec.secrets]
    reserved = {name for name in variables if _RESERVED.fullmatch(name)}
    if reserved:
        yield f"--env or --secret {', '.join(sorted(reserved))}: reserved, set by the launcher"
    duplicates = {name for name in variables if variables.count(name) > 1}
    if duplicates:
        yield f"--env or --secret {', '.join(sorted(duplicates))}: set more than once"


def _names(spec: JobSpec) -> Iterable[str]:
    if not _NAME.fullmatch(spec.name):
        yield f"--name {spec.name!r}: use lowercase letters, digits and '-'; start with a letter, do not end with '-'"
    for volume in spec.volumes:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", volume):
            yield f"--volume {volume!r} is not a valid volume name: use lowercase letters, digits and '-'"
    duplicates = {volume for volume in spec.volumes if spec.volumes.count(volume) > 1}
    if duplicates:
        yield f"--volume {', '.join(sorted(duplicates))}: given more than once"


def amount_problems(spec: JobSpec) -> Iterable[str]:
    """The subset of `general_problems` that concerns amounts and resources."""
    requested = {flag: getattr(spec.resources, flag) for flag in ("cpu", "memory", "shm", "disk")}
    amounts = {flag: _amount(text) for flag, text in requested.items() if text is not None}
    for flag, amount in amounts.items():
        if amount is None:
            yield f"--{flag} {requested[flag]!r}: expected a quantity such as 8, 500m or 16Gi"
    memory, shm = amounts.get("memory"), amounts["shm"]
    if memory is not None and shm is not None and shm >= memory:
        yield f"--shm {spec.resources.shm} must be less than --memory {spec.resources.memory}, which includes /dev/shm"
    if spec.resources.gpus not in (0, spec.procs):
        yield f"--gpus {spec.resources.gpus} and --procs {spec.procs} must be equal: each process uses one GPU"
    limits = {"nodes": (spec.nodes, 1), "procs": (spec.procs, 1), "retries": (spec.retries, 0), "grace": (spec.grace_s, 1)}
    limits |= {"deadline": (spec.deadline_s, 1)} if spec.deadline_s is not None else {}
    for flag, (number, minimum) in limits.items():
        if number < minimum:
            yield f"--{flag} {number} must be at least {minimum}"


def _amount(text: str) -> Fraction | None:
    """The quantity; None if it is invalid or negative."""
    try:
        amount = quantity(text)
    except ValueError:
        return None
    return amount if amount >= 0 else None


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems as one `UserError`; do nothing if there are none."""
    found = list(problems)
    if found:
        raise UserError("this job cannot run:\n" + "\n".join(f"  {problem}" for problem in found))
