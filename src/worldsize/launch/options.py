"""The command line of a job on a cluster, and how it becomes a `JobSpec` (pure)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import tyro

from worldsize import catalog
from worldsize.arguments import Flat
from worldsize.errors import UserError
from worldsize.launch.spec import RECIPE, VOLUMES, JobSpec, Placement, Resources, SecretKey, Toleration
from worldsize.recipe import Recipe

_DATA_WITHOUT_FILES = ("digits", "synthetic")


@dataclass(frozen=True)
class Where:
    """Which cluster, and where on it."""

    context: str | None = None
    """Context of the kubeconfig (default: its current one)."""
    namespace: str | None = None
    """Namespace (default: the context's)."""


@dataclass(frozen=True)
class Job:
    """What a job on a cluster gets, beside its recipe."""

    nodes: int = 1
    """Nodes; each has one pod."""
    procs: int = 1
    """Processes on each node; each takes one GPU."""
    image: str = ""
    """Container image, by tag or digest (worldsize image build)."""
    volume: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Volume with the data; V is at /mnt/V, and the run goes to the first one's runs/NAME. May be said again."""
    name: str | None = None
    """Name of the run and the job (default: the recipe's, with a hash of what is run: the same command, the same run)."""
    gpus: int | None = None
    """GPUs on each node (default: as many as processes; 0 for the CPU)."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    cpu: str | None = None
    """CPU cores on each node, such as 16 or 500m."""
    memory: str | None = None
    """Memory on each node, such as 64Gi."""
    shm: str = "1Gi"
    """Part of the memory that /dev/shm may take."""
    disk: str | None = None
    """Disk on each node itself, such as 20Gi."""
    resource: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further resource on each node, as NAME=COUNT, such as rdma/ib=1; adds the capability IPC_LOCK. RDMA locks memory, and
    the capability is of no use to the pods' user, who is not root: the nodes' container runtime must not limit that
    (LimitMEMLOCK=infinity)."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable, as NAME=VALUE; nothing secret."""
    secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A Secret's key as an environment variable: SECRET/KEY or SECRET/KEY=VARIABLE (worldsize cluster secret create)."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret that the image is pulled with."""
    node_selector: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only nodes with this label, as KEY=VALUE."""
    toleration: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also nodes with this taint: KEY, KEY=VALUE or KEY=VALUE:EFFECT."""
    spread: Literal["host", "zone"] | None = None
    """Keep the pods apart, as far as possible."""
    priority: str | None = None
    """PriorityClass."""
    queue: str | None = None
    """Kueue LocalQueue."""
    volcano_queue: str | None = None
    """Volcano queue."""
    runtime: str | None = None
    """trainjob: use this ClusterTrainingRuntime instead of one of the job's own."""
    elastic: str | None = None
    """pytorchjob: MIN:MAX nodes; the run goes on when their number changes."""
    retries: int = 3
    """Starts in a row without a new checkpoint before the job is given up."""
    deadline: int | None = None
    """End the job after this many seconds."""
    grace: int = 120
    """Seconds that saving may take when a pod must leave; with mpijob 15 at most where the launcher must leave too."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """Print the objects of a job, exactly as `worldsize train --on` sends them. Talks to no cluster.

    With `--on local` a shell script that trains the same on one machine; its options are those of `worldsize train`.
    Any setting of the recipe can be changed by its dotted name; the defaults shown are the recipe's.
    """

    on: Literal["pytorchjob", "mpijob", "trainjob"] = "pytorchjob"
    """What runs the job: PyTorchJob, MPIJob or TrainJob."""
    namespace: str = "default"
    """Namespace of the objects."""
    job: Flat[Job] = Job()
    settings: Annotated[Recipe, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Train RECIPE on a Kubernetes cluster with Kubeflow, and follow the job to its end.

    Any setting of the recipe can be changed by its dotted name; the defaults shown are the recipe's. Ctrl-C leaves the
    job running. Exit codes: 0 succeeded, 1 failed, 2 refused by preflight, 3 timed out, 130 detached.
    """

    on: Literal["pytorchjob", "mpijob", "trainjob"] = "pytorchjob"
    """What runs the job: PyTorchJob, MPIJob or TrainJob."""
    detach: bool = False
    """Return as soon as the job is there."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3); the job goes on."""
    preflight: bool = True
    """Look first whether the cluster can run it."""
    job: Flat[Job] = Job()
    where: Flat[Where] = Where()
    settings: Annotated[Recipe, tyro.conf.arg(name="")]


def to_spec(recipe: Recipe, stem: str, on: str, namespace: str, job: Job) -> JobSpec:
    """The job in full; a pure function of what was typed.

    Raises:
        UserError: an option that cannot be read.
    """
    if not job.image:
        raise UserError("--image: which image? build one with `worldsize image build --push REPOSITORY`")
    gpus = job.gpus if job.gpus is not None else 0 if recipe.device == "cpu" else job.procs
    home = VOLUMES / job.volume[0] if job.volume else VOLUMES
    recipe = _placed(recipe, home)
    name = job.name or run_name(stem, recipe, on, job)
    return JobSpec(
        name=name,
        namespace=namespace,
        image=job.image,
        recipe=catalog.to_yaml(recipe),
        command=_command(name, home, job.retries),
        nodes=job.nodes,
        procs=job.procs,
        resources=Resources(
            gpus=gpus,
            gpu_resource=job.gpu_resource,
            cpu=job.cpu,
            memory=job.memory,
            shm=job.shm,
            disk=job.disk,
            devices=tuple((key, _count(value)) for key, value in map(_pair("--resource"), job.resource)),
        ),
        volumes=tuple(job.volume),
        env=tuple(map(_pair("--env"), job.env)),
        secrets=tuple(map(_secret, job.secret)),
        pull_secrets=tuple(job.pull_secret),
        placement=Placement(
            node_selector=tuple(map(_pair("--node-selector"), job.node_selector)),
            tolerations=tuple(map(_toleration, job.toleration)),
            spread=job.spread,
            priority=job.priority,
            queue=job.queue,
            volcano_queue=job.volcano_queue,
        ),
        retries=job.retries,
        deadline_s=job.deadline,
        grace_s=job.grace,
        elastic=_range(job.elastic) if job.elastic else None,
        horovod=recipe.parallel.strategy == "horovod",
        runtime=job.runtime,
    )


def _command(name: str, home: PurePosixPath, retries: int) -> tuple[str, ...]:
    out = str(home / "runs")
    return ("train", str(RECIPE), "--out", out, "--name", name, "--autoresume", "--retries", str(retries))


def _placed(recipe: Recipe, home: PurePosixPath) -> Recipe:
    """The recipe with the data on the volume, where `worldsize cluster data fetch` puts them."""
    if recipe.data.name in _DATA_WITHOUT_FILES or recipe.data.root is not None:
        return recipe
    root = Path(home / "data" / recipe.data.name)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": root})})


def run_name(stem: str, recipe: Recipe, on: str, job: Job) -> str:
    """STEM-HASH: a run is a function of its recipe, so the same command means the same run."""
    what = [recipe.model_dump(mode="json"), on, job.nodes, job.procs, list(job.volume)]
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    slug = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:30].strip("-") or "run"
    return f"{slug if slug[0].isalpha() else 'run-' + slug}-{digest[:6]}"


def _pair(flag: str) -> Any:
    def read(text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"{flag} {text!r}: write it as NAME=VALUE")
        return key, value

    return read


def _count(text: str) -> int:
    if not text.isdigit():
        raise UserError(f"--resource ...={text}: a whole number")
    return int(text)


def _secret(text: str) -> SecretKey:
    path, _, variable = text.partition("=")
    secret, slash, key = path.partition("/")
    if not secret or not slash or not key:
        raise UserError(f"--secret {text!r}: write it as SECRET/KEY or SECRET/KEY=VARIABLE")
    return SecretKey(secret, key, variable or key)


def _toleration(text: str) -> Toleration:
    pair, _, effect = text.partition(":")
    key, _, value = pair.partition("=")
    if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise UserError(f"--toleration {text!r}: the effect is NoSchedule, PreferNoSchedule or NoExecute")
    return Toleration(key, value, effect)


def _range(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    if not fewest.isdigit() or not most.isdigit():
        raise UserError(f"--elastic {text!r}: write it as MIN:MAX")
    return int(fewest), int(most)
