"""The command-line options of a job on a cluster, and their conversion to a `PodJobSpec` (pure)."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import tyro

from worldsize.cluster.manifests.spec import (
    RECIPE,
    VOLUMES,
    Placement,
    PodJobSpec,
    PodResources,
    SecretKey,
    Toleration,
    elastic_problems,
)
from worldsize.config.command_line import Flat, RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.jobs.naming import run_name
from worldsize.jobs.options import CommonOptions, check_recipe, gpus_per_node, pair, refuse_empty, shared
from worldsize.jobs.spec import MAX_NODES, refuse

# URLs (a path has lost one of their slashes), and the weights that packages offer.
_NOT_A_PATH = re.compile(r"[a-z][a-z0-9+.-]*:/|(torchvision|timm):")
_HOMES = ("home", "root", "Users", "Volumes")
_DATA_WITHOUT_FILES = ("digits", "synthetic")


@dataclass(frozen=True)
class Where:
    """Which cluster and namespace."""

    context: str | None = None
    """Context of the kubeconfig (default: the current context)."""
    namespace: str | None = None
    """Namespace (default: the context's)."""


@dataclass(frozen=True)
class JobOptions(CommonOptions):
    """Options of a job on a cluster, in addition to its recipe."""

    image: str = ""
    """Container image, by tag or digest (worldsize image build)."""
    volume: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Volume with the data; V is mounted at /mnt/V. The run is written to runs/NAME on the first volume."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of a GPU on the cluster."""
    shm: str = "1Gi"
    """Size limit of /dev/shm; it counts toward the memory."""
    disk: str | None = None
    """Local disk (ephemeral storage) per node, such as 20Gi."""
    resource: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Additional resource per node, as NAME=COUNT, such as rdma/ib=1; also adds the capability IPC_LOCK. RDMA locks memory,
    and the capability has no effect because the pods' user is not root: the nodes' container runtime must allow unlimited
    locked memory (LimitMEMLOCK=infinity)."""
    secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable from a Secret: SECRET/KEY or SECRET/KEY=VARIABLE (worldsize cluster secret create)."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret for pulling the container image."""
    node_selector: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Use only nodes with this label, as KEY=VALUE."""
    toleration: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also use nodes with this taint: KEY, KEY=VALUE or KEY=VALUE:EFFECT."""
    spread: Literal["host", "zone"] | None = None
    """Prefer to place the pods on different hosts or in different zones."""
    priority: str | None = None
    """PriorityClass of the pods."""
    queue: str | None = None
    """Kueue LocalQueue."""
    volcano_queue: str | None = None
    """Volcano queue."""
    runtime: str | None = None
    """trainjob: use this ClusterTrainingRuntime instead of a TrainingRuntime created for the job."""
    elastic: str | None = None
    """pytorchjob: MIN:MAX nodes; training continues when the number of nodes changes."""
    deadline: int | None = None
    """Fail the job after this many seconds."""
    fixed_user: bool = True
    """Run as user 1000 of the container image; --no-fixed-user leaves the user to the cluster, as OpenShift requires."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """Print a job's manifests, exactly as `worldsize train --on` submits them. Contacts no cluster.

    `--on local` prints a shell script that trains the same recipe on one machine, with the options of `worldsize train`.
    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's.
    """

    on: Literal["pytorchjob", "mpijob", "trainjob"] = "pytorchjob"
    """Kind of job: PyTorchJob, MPIJob or TrainJob."""
    namespace: str = "default"
    """Namespace of the manifests."""
    job: Flat[JobOptions] = JobOptions()
    settings: RecipeFlags


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Train RECIPE on a Kubernetes cluster with Kubeflow, and follow the job until it ends.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's. Ctrl-C detaches; the job
    keeps running. Exit codes: 0 succeeded, 1 failed, 2 preflight found an error, 3 timed out, 130 detached.
    """

    on: Literal["pytorchjob", "mpijob", "trainjob"] = "pytorchjob"
    """Kind of job: PyTorchJob, MPIJob or TrainJob."""
    detach: bool = False
    """Return as soon as the job is created."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3); the job keeps running."""
    preflight: bool = True
    """Run preflight checks before submitting the job."""
    check_only: bool = False
    """Run the preflight checks, print every finding, and submit nothing."""
    job: Flat[JobOptions] = JobOptions()
    where: Flat[Where] = Where()
    settings: RecipeFlags


def to_spec(recipe: Recipe, stem: str, on: str, namespace: str, job: JobOptions) -> PodJobSpec:
    """The complete job; a pure function of the command line.

    Raises:
        UserError: an invalid option, or a recipe that these processes cannot train.
    """
    if not job.image:
        raise UserError("--image is required; to build one: worldsize image build --push REPOSITORY")
    refuse_empty(job)
    # Before the recipe, which would be refused for numbers of nodes that nobody asked for.
    refuse(elastic_problems(_range(job.elastic) if job.elastic and on == "pytorchjob" else None, job.nodes))
    check_recipe(recipe, _node_counts(job) if on == "pytorchjob" else range(job.nodes, job.nodes + 1), job.procs)
    gpus = gpus_per_node(recipe, job.gpus, job.procs)
    home = VOLUMES / job.volume[0] if job.volume else VOLUMES
    refuse(_local_paths(recipe, job.volume))
    recipe = _with_data_root(recipe, home)
    name = job.name or run_name(stem, recipe, on, job.nodes, job.procs, list(job.volume))
    return PodJobSpec(
        **shared(recipe, name, job),
        namespace=namespace,
        image=job.image,
        command=_command(name, home, job.retries),
        resources=PodResources(
            gpus=gpus,
            gpu_resource=job.gpu_resource,
            cpu=job.cpu,
            memory=job.memory,
            shm=job.shm,
            disk=job.disk,
            devices=tuple((key, _count(value)) for key, value in map(pair("--resource"), job.resource)),
        ),
        volumes=tuple(job.volume),
        secrets=tuple(map(_secret, job.secret)),
        pull_secrets=tuple(job.pull_secret),
        placement=Placement(
            node_selector=tuple(map(pair("--node-selector"), job.node_selector)),
            tolerations=tuple(map(_toleration, job.toleration)),
            spread=job.spread,
            priority=job.priority,
            queue=job.queue,
            volcano_queue=job.volcano_queue,
        ),
        deadline_s=job.deadline,
        elastic=_range(job.elastic) if job.elastic is not None else None,
        runtime=job.runtime,
        fixed_user=job.fixed_user,
    )


def elastic_warning(recipe: Recipe, job: JobOptions) -> str | None:
    """Which numbers of nodes of an elastic job would end the run; None if all of them can train."""
    counts = _node_counts(job)
    reasons = check_recipe(recipe, counts, job.procs)
    if not reasons:
        return None
    fitting = ", ".join(str(n) for n in counts if n not in reasons)
    first, reason = next(iter(reasons.items()))
    return (
        f"warning: --elastic {job.elastic} includes numbers of nodes with which the run ends with an error: "
        f"{', '.join(map(str, reasons))} (with {first}: {reason.splitlines()[0]}). Numbers that fit: {fitting}"
    )


def _node_counts(job: JobOptions) -> range:
    minimum, maximum = _range(job.elastic) if job.elastic else (job.nodes, job.nodes)
    return range(minimum, maximum + 1)


def _local_paths(recipe: Recipe, volumes: tuple[str, ...]) -> Iterable[str]:
    """Problems with paths of the recipe that no pod has, such as those of the user's own machine."""
    paths = {"data.root": recipe.data.root, "data.val-list": recipe.data.val_list, "data.labels": recipe.data.labels}
    paths |= {"data.label-list": recipe.data.label_list, "loss.teacher": recipe.loss.teacher}
    if recipe.model.weights is not None and not _NOT_A_PATH.match(recipe.model.weights):
        paths["model.weights"] = Path(recipe.model.weights)
    for name, path in paths.items():
        if path is not None:
            yield from local_path(name, str(path), volumes)


def local_path(option: str, text: str, volumes: tuple[str, ...]) -> Iterable[str]:
    """The problem if the option's value is a path, and one that no pod has."""
    in_file_url = re.match(r"file:/+(?=/)|file:(?=/)", text)
    if _NOT_A_PATH.match(text) and not in_file_url:
        return
    path = PurePosixPath(posixpath.normpath(text[in_file_url.end() :] if in_file_url else text))
    inside = path.is_relative_to(VOLUMES)
    elsewhere = not path.is_absolute() or path.parts[1:2] in [(), *((home,) for home in _HOMES)]
    if elsewhere or (inside and path.parts[2:3] not in [(volume,) for volume in volumes]):
        have = " and ".join(str(VOLUMES / volume) for volume in volumes) or f"{VOLUMES}/V of --volume V"
        yield f"--{option} {text}: pods do not have this path; they have {have} (worldsize cluster files put copies files)"


def _command(name: str, home: PurePosixPath, retries: int) -> tuple[str, ...]:
    out = str(home / "runs")
    return ("train", str(RECIPE), "--out", out, "--name", name, "--autoresume", "--retries", str(retries))


def _with_data_root(recipe: Recipe, home: PurePosixPath) -> Recipe:
    """The recipe with ``data.root`` on the volume, where `worldsize cluster data fetch` stores the dataset."""
    if recipe.data.name in _DATA_WITHOUT_FILES or recipe.data.root is not None:
        return recipe
    root = Path(home / "data" / recipe.data.name)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": root})})


def _count(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--resource ...={text}: the count must be an integer")
    return int(text)


def _secret(text: str) -> SecretKey:
    path, _, variable = text.partition("=")
    secret, slash, key = path.partition("/")
    if not secret or not slash or not key:
        raise UserError(f"--secret {text!r}: expected SECRET/KEY or SECRET/KEY=VARIABLE")
    return SecretKey(secret, key, variable or key)


def _toleration(text: str) -> Toleration:
    pair, _, effect = text.partition(":")
    key, _, value = pair.partition("=")
    if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise UserError(f"--toleration {text!r}: the effect must be NoSchedule, PreferNoSchedule or NoExecute")
    return Toleration(key, value, effect)


def _range(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    if not minimum.isdecimal() or not maximum.isdecimal():
        raise UserError(f"--elastic {text!r}: expected MIN:MAX")
    if int(maximum) > MAX_NODES:
        raise UserError(f"--elastic {text}: the number of nodes must be at most {MAX_NODES}")
    return int(minimum), int(maximum)
