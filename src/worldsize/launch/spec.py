"""What to run on a cluster, without a word of Kubernetes: the input of every target's rendering."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePosixPath

from worldsize.errors import UserError
from worldsize.launch.quantities import quantity

# Where things are inside a pod; the image and the manifests agree on these.
VOLUMES = PurePosixPath("/mnt")
RECIPE = PurePosixPath("/run/worldsize/recipe.yaml")

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESERVED = re.compile(r"(PET|OMPI|PRTE|WORLDSIZE)_.*|POD_IP|MASTER_ADDR|HOME|PATH|USER")


@dataclass(frozen=True)
class Resources:
    """What one node's pod gets; requests equal limits.

    ``cpu``, ``memory``, ``shm`` (of /dev/shm, part of memory) and ``disk`` (node-local) are quantities ("8", "500m",
    "64Gi"); None: not asked for. ``devices`` are further resources by name, such as ``rdma/ib``.
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
    """A key of a Secret that becomes an environment variable."""

    secret: str
    key: str
    variable: str


@dataclass(frozen=True)
class Toleration:
    """A taint that may be on the node; an empty ``value`` or ``effect`` stands for any."""

    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class Placement:
    """Where the pods may go, and who decides when.

    ``queue`` is a Kueue LocalQueue, ``volcano_queue`` one of Volcano; ``spread`` keeps the pods on different hosts or
    in different zones as far as possible.
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

    ``name`` is the run's name and that of everything made for it. ``recipe`` is the recipe as YAML, ``command`` what
    follows ``worldsize`` on every rank. ``procs`` are the processes per node, each with one GPU where there are any.
    ``volumes`` are the names of volumes; volume V is at /mnt/V. ``secrets`` reach the processes as environment
    variables only. ``retries`` is how often the job is started again without a new checkpoint in between.
    ``deadline_s`` ends the job, None: never; ``grace_s`` is what saving a checkpoint may take when a pod is asked to
    leave. ``elastic`` is (fewest, most) nodes.
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
    horovod: bool = False
    runtime: str | None = None

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.procs

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most nodes."""
        return self.elastic or (self.nodes, self.nodes)


def general_problems(spec: JobSpec) -> Iterable[str]:
    """What no cluster would run, whatever the kind of job: one sentence each, with the remedy."""
    yield from _names(spec)
    yield from amount_problems(spec)
    if not spec.volumes:
        yield "without a volume the run would be lost with its pods: name one with --volume (cluster volume create)"
    if re.fullmatch(r"[^@]*:latest", spec.image) or not re.search(r":[^/]+$", spec.image):
        yield f"--image {spec.image}: name a tag other than latest, or a digest, so that every pod gets the same program"
    variables = [name for name, _ in spec.env] + [secret.variable for secret in spec.secrets]
    reserved = {name for name in variables if _RESERVED.fullmatch(name)}
    if reserved:
        yield f"--env or --secret {', '.join(sorted(reserved))}: the launcher sets these itself"
    twice = {name for name in variables if variables.count(name) > 1}
    if twice:
        yield f"--env or --secret {', '.join(sorted(twice))}: named twice"


def _names(spec: JobSpec) -> Iterable[str]:
    if not _NAME.fullmatch(spec.name):
        yield f"--name {spec.name!r}: use lower-case letters, digits and '-', beginning with a letter"
    for volume in spec.volumes:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", volume):
            yield f"--volume {volume!r} cannot be the name of a volume: use lower-case letters, digits and '-'"
    if len(set(spec.volumes)) < len(spec.volumes):
        yield "a --volume is named twice"


def amount_problems(spec: JobSpec) -> Iterable[str]:
    """Of `general_problems` those with how much is asked for."""
    asked = {flag: getattr(spec.resources, flag) for flag in ("cpu", "memory", "shm", "disk")}
    amounts = {flag: _amount(text) for flag, text in asked.items() if text is not None}
    for flag, amount in amounts.items():
        if amount is None:
            yield f"--{flag} {asked[flag]!r}: a quantity such as 8, 500m, 16Gi"
    memory, shm = amounts.get("memory"), amounts["shm"]
    if memory is not None and shm is not None and shm >= memory:
        yield f"--shm {spec.resources.shm} must be less than --memory {spec.resources.memory}, of which it is a part"
    if spec.resources.gpus not in (0, spec.procs):
        yield f"--gpus {spec.resources.gpus} and --procs {spec.procs}: each process takes one GPU, so make them equal"
    least = {"nodes": (spec.nodes, 1), "procs": (spec.procs, 1), "retries": (spec.retries, 0), "grace": (spec.grace_s, 1)}
    least |= {"deadline": (spec.deadline_s, 1)} if spec.deadline_s is not None else {}
    for flag, (number, limit) in least.items():
        if number < limit:
            yield f"--{flag} {number}: at least {limit}"


def _amount(text: str) -> Fraction | None:
    """None where it cannot be read, or is less than nothing."""
    try:
        amount = quantity(text)
    except ValueError:
        return None
    return amount if amount >= 0 else None


def refuse(problems: Iterable[str]) -> None:
    """Raise all of them as one `UserError`; do nothing where there are none."""
    found = list(problems)
    if found:
        raise UserError("this job cannot run:\n" + "\n".join(f"  {problem}" for problem in found))
