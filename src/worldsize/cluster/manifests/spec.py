"""The specification of a job in pods: the input from which every kind of job renders its objects."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from worldsize.cluster.manifests import syntax
from worldsize.config import job_pod
from worldsize.jobs.quantities import quantity
from worldsize.jobs.spec import JobSpec, Resources, shape_problems

VOLUMES, RECIPE = job_pod.VOLUMES, job_pod.RECIPE

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Set by the operators, the launchers, worldsize and the container image.
_RESERVED = re.compile(
    r"(PET|WORLDSIZE|OMPI_COMM_WORLD)_.*|K_MPI_JOB_ROLE"
    r"|OMPI_MCA_(orte_(keep_fqdn_hostnames|default_hostfile|set_default_slots)|plm_rsh_args|ess_.*|orte_ess_.*)"
    r"|PRTE_MCA_(plm_ssh_args|prte_(default_hostfile|set_default_slots))"
    r"|(HOROVOD_|LOCAL_)?RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|HOROVOD_SIZE|MASTER_ADDR|HOME|PATH|USER"
)


@dataclass(frozen=True, kw_only=True)
class PodResources(Resources):
    """Resources of one node's pod; requests equal limits.

    All amounts are Kubernetes quantities ("8", "500m", "64Gi"). ``shm`` is the size of /dev/shm, which counts toward the
    memory; ``disk`` is node-local. ``devices`` are additional resources by name, such as ``rdma/ib``.
    """

    gpu_resource: str = "nvidia.com/gpu"
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


@dataclass(frozen=True, kw_only=True)
class PodJobSpec(JobSpec):
    """One training job in pods.

    ``name`` is also the name of all objects created for the job. ``command`` are the arguments of ``worldsize`` on every
    rank. ``volumes`` are volume names; volume V is mounted at
    /mnt/V. ``secrets`` are passed to the processes only as environment variables. ``deadline_s`` ends the job (None: no
    limit). ``elastic`` is (minimum, maximum) number of nodes. ``runtime`` is a ClusterTrainingRuntime.
    ``fixed_user``: the pods' user and groups are those of the container image; otherwise the cluster chooses them.
    """

    namespace: str
    image: str
    command: tuple[str, ...]
    resources: PodResources = field(default_factory=PodResources)
    volumes: tuple[str, ...] = ()
    secrets: tuple[SecretKey, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    deadline_s: int | None = None
    elastic: tuple[int, int] | None = None
    runtime: str | None = None
    fixed_user: bool = True

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return self.elastic or (self.nodes, self.nodes)


def general_problems(spec: PodJobSpec) -> Iterable[str]:
    """Problems of the spec for every kind of job on any cluster: one sentence each, with the remedy."""
    yield from _names(spec)
    yield from reference_problems(spec)
    yield from amount_problems(spec)
    if not spec.volumes:
        yield "--volume is required, or the run is lost with its pods (worldsize cluster volume create creates a volume)"
    if not syntax.is_image(spec.image):
        yield (
            f"--image {spec.image!r} is not a container image: expected REGISTRY/PATH:TAG or REGISTRY/PATH@sha256:DIGEST, "
            "the path in lowercase, without https://"
        )
    elif re.fullmatch(r"[^@]*:latest", spec.image) or not re.search(r":[^/]+$", spec.image):
        yield f"--image {spec.image}: use a digest or a tag other than latest, so that every pod runs the same code"
    variables = [name for name, _ in spec.env] + [secret.variable for secret in spec.secrets]
    reserved = {name for name in variables if _RESERVED.fullmatch(name)}
    if reserved:
        yield f"--env or --secret {', '.join(sorted(reserved))}: reserved, set by the launcher"
    duplicates = {name for name in variables if variables.count(name) > 1}
    if duplicates:
        yield f"--env or --secret {', '.join(sorted(duplicates))}: set more than once"


def elastic_problems(elastic: tuple[int, int] | None, nodes: int) -> Iterable[str]:
    """The problem of a range that does not include the number of nodes."""
    if elastic is not None and not 1 <= elastic[0] <= nodes <= elastic[1]:
        yield f"--elastic {elastic[0]}:{elastic[1]} must start at 1 or more and include --nodes {nodes}"


def _names(spec: PodJobSpec) -> Iterable[str]:
    if not _NAME.fullmatch(spec.name):
        yield f"--name {spec.name!r}: use lowercase letters, digits and '-'; start with a letter, do not end with '-'"
    if not syntax.is_label(spec.namespace):
        yield f"--namespace {spec.namespace!r}: use at most 63 lowercase letters, digits and '-'"
    for volume in spec.volumes:
        if not syntax.is_name(volume):
            yield f"--volume {volume!r} is not a valid volume name: use lowercase letters, digits and '-'"
    duplicates = {volume for volume in spec.volumes if spec.volumes.count(volume) > 1}
    if duplicates:
        yield f"--volume {', '.join(sorted(duplicates))}: given more than once"


def reference_problems(spec: PodJobSpec) -> Iterable[str]:
    """The subset of `general_problems` that concerns the names of objects, labels, resources and variables."""
    place = spec.placement
    named = (("queue", place.queue), ("volcano-queue", place.volcano_queue), ("priority", place.priority))
    others = [("pull-secret", name) for name in spec.pull_secrets] + [("secret", one.secret) for one in spec.secrets]
    for flag, name in (*named, ("runtime", spec.runtime), *others):
        # A Kueue queue is also the value of a label.
        if name is not None and not (syntax.is_name(name) and (flag != "queue" or len(name) <= 63)):
            yield f"--{flag} {name!r} is not a valid name: use lowercase letters, digits and '-'"
    for secret in spec.secrets:
        if not syntax.is_secret_key(secret.key):
            yield f"--secret {secret.secret}/{secret.key}: a key has only letters, digits, '-', '_' and '.'"
    for variable in [name for name, _ in spec.env] + [secret.variable for secret in spec.secrets]:
        if not syntax.is_variable(variable):
            yield f"--env or --secret {variable!r} cannot be an environment variable: use letters, digits and '_'"
    for key, value in place.node_selector:
        if not syntax.is_label_key(key) or not syntax.is_label_value(value):
            yield f"--node-selector {key}={value} is not a label: expected KEY=VALUE with letters, digits, '-', '_' and '.'"
    for one in place.tolerations:
        if not syntax.is_label_key(one.key) or not syntax.is_label_value(one.value):
            text = f"{one.key}={one.value}" if one.value else one.key
            yield f"--toleration {text!r} is not a taint: expected KEY, KEY=VALUE or KEY=VALUE:EFFECT"
    yield from _repeated("--node-selector", [key for key, _ in place.node_selector])
    yield from _repeated("--pull-secret", list(spec.pull_secrets))


def _repeated(flag: str, keys: list[str]) -> Iterable[str]:
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        yield f"{flag} {key}: given more than once"


def _devices(spec: PodJobSpec) -> Iterable[str]:
    r = spec.resources
    options = {"cpu": "--cpu", "memory": "--memory", "ephemeral-storage": "--disk"} | {r.gpu_resource: "--gpus"}
    for name, _ in r.devices:
        if name in options:
            yield f"--resource {name}: use {options[name]} instead"
        elif not syntax.is_device(name):
            yield f"--resource {name} is not the name of a resource: expected DOMAIN/NAME, such as rdma/ib"
    if not syntax.is_device(r.gpu_resource):
        yield f"--gpu-resource {r.gpu_resource!r} is not the name of a resource: expected DOMAIN/NAME, such as amd.com/gpu"
    if "/mig-" in r.gpu_resource and spec.procs > 1:
        yield (
            f"--gpu-resource {r.gpu_resource} with --procs {spec.procs}: CUDA shows one MIG slice to a process, "
            "whatever the pod has; use --procs 1 and more --nodes"
        )
    yield from _repeated("--resource", [name for name, _ in r.devices])


def amount_problems(spec: PodJobSpec) -> Iterable[str]:
    """The subset of `general_problems` that concerns amounts and resources."""
    requested = {flag: getattr(spec.resources, flag) for flag in ("cpu", "memory", "shm", "disk")}
    amounts = {flag: _amount(text) for flag, text in requested.items() if text is not None}
    for flag, amount in amounts.items():
        if amount is None:
            yield f"--{flag} {requested[flag]!r}: expected a quantity such as 8, 500m or 16Gi"
    memory, shm = amounts.get("memory"), amounts["shm"]
    if memory is not None and shm is not None and shm >= memory:
        yield f"--shm {spec.resources.shm} must be less than --memory {spec.resources.memory}, which includes /dev/shm"
    yield from shape_problems(spec)
    yield from _devices(spec)
    limited = {"nodes": spec.nodes, "procs": spec.procs, "retries": spec.retries * spec.nodes, "grace": spec.grace_s}
    limited |= {"deadline": spec.deadline_s or 0, "elastic": spec.bounds[1]}
    limited |= {f"resource {name}": count for name, count in spec.resources.devices}
    for flag, number in limited.items():
        if number > syntax.MAX_INT32:
            total = " (times --nodes)" if flag == "retries" else ""
            yield f"--{flag} {number}{total} must be at most {syntax.MAX_INT32}"
    if spec.deadline_s is not None and spec.deadline_s < 1:
        yield f"--deadline {spec.deadline_s} must be at least 1"


def _amount(text: str) -> Fraction | None:
    """The quantity; None if it is invalid or negative."""
    try:
        amount = quantity(text)
    except ValueError:
        return None
    return amount if amount >= 0 else None
