"""Base class for the kinds of jobs: renders a `PodJobSpec` to API objects (pure) and interprets their status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.spec import PodJobSpec, general_problems
from worldsize.cluster.objects import Object
from worldsize.jobs.spec import refuse
from worldsize.jobs.state import JobState, Phase

# Conditions of a PyTorchJob or MPIJob, by precedence: several may be true at the same time.
KUBEFLOW_CONDITIONS: tuple[tuple[str, Phase], ...] = (
    ("Failed", "Failed"),
    ("Succeeded", "Succeeded"),
    ("Suspended", "Suspended"),
    ("Restarting", "Restarting"),
    ("Running", "Running"),
    ("Created", "Pending"),
)


# Conditions of a batch/v1 Job and of a TrainJob.
BATCH_CONDITIONS: tuple[tuple[str, Phase], ...] = (
    ("Failed", "Failed"),
    ("Complete", "Succeeded"),
    ("Suspended", "Suspended"),
)


class Target(ABC):
    """Base class of the targets. Rendering is deterministic: the same spec gives the same bytes."""

    kind: ClassVar[str]
    container: ClassVar[str]
    # Reasons of events with which the operator gives up on a job without setting a condition.
    dead_ends: ClassVar[frozenset[str]] = frozenset()
    # Reasons of events for retries, possibly endless, that the operator never reports as a condition.
    setbacks: ClassVar[frozenset[str]] = frozenset()

    # Objects that the operator creates for a job: by kind, a regular expression of what follows the job's name.
    parts: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # What this kind of job can do.
    elastic: ClassVar[bool] = False
    mpi: ClassVar[bool] = False
    runtimes: ClassVar[bool] = False

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        """Problems of the spec that are specific to this kind and not checked by the API server, each with a remedy."""
        longest = 63 - len(self.last_suffix(spec))
        # Operators derive host names from the job's name, and a host name has at most 63 characters.
        if len(spec.name) > longest:
            yield (
                f"--name {spec.name} has {len(spec.name)} characters; the limit for a {self.kind} of this size is {longest}"
            )
        if spec.elastic and not self.elastic:
            yield "--elastic is only supported with --on pytorchjob"
        if spec.needs_mpi and not self.mpi:
            yield "this strategy requires MPI: use --on mpijob"
        if spec.runtime and not self.runtimes:
            yield "--runtime is only supported with --on trainjob"

    @abstractmethod
    def last_suffix(self, spec: PodJobSpec) -> str:
        """What follows the job's name in the longest name of its pods."""

    @abstractmethod
    def job(self, spec: PodJobSpec) -> list[Object]:
        """The objects specific to this kind; the job object is the last."""

    @abstractmethod
    def state(self, job: Object, pods: list[Object]) -> JobState:
        """The job's state, from its status and its pods."""

    @abstractmethod
    def place(self, one: Object) -> tuple[int, str]:
        """A sort key for a pod of the job, and the pod's short name for display."""

    def suspension(self) -> Object:
        """The merge patch of the job that terminates all its pods."""
        return {"spec": {"suspend": True}}

    def created(self, spec: PodJobSpec) -> list[tuple[str, str]]:
        """(kind, name) of the objects, other than pods, that the operator creates for the job."""
        return []

    def selector(self, name: str) -> str:
        """Label selector for the job's pods."""
        return training_pods(name)

    def render(self, spec: PodJobSpec) -> list[Object]:
        """All objects of the job, in the order in which they must be created.

        Raises:
            UserError: the spec has problems; lists all of them.
        """
        refuse([*general_problems(spec), *self.problems(spec)])
        return [pod.config_map(spec), pod.network_policy(spec), *self.job(spec)]


class ReplicaTarget(Target):
    """Base class of the jobs whose spec has replicas and a run policy: PyTorchJob and MPIJob."""

    def state(self, job: Object, pods: list[Object]) -> JobState:
        return from_conditions(job, KUBEFLOW_CONDITIONS, "Created")

    def suspension(self) -> Object:
        return {"spec": {"runPolicy": {"suspend": True}}}

    def run_policy(self, spec: PodJobSpec, retries: int, gang: int) -> Object:
        """The run policy.

        Args:
            retries: its backoff limit.
            gang: how many pods Volcano must start together.
        """
        policy: Object = {"backoffLimit": retries, "cleanPodPolicy": "Running"}
        if spec.deadline_s is not None:
            policy["activeDeadlineSeconds"] = spec.deadline_s
        if spec.placement.volcano_queue:
            policy["schedulingPolicy"] = {"minAvailable": gang, "queue": spec.placement.volcano_queue}
        return policy


def training_pods(name: str) -> str:
    """Label selector for `pod.training_labels`."""
    return ",".join(f"{label}={value}" for label, value in pod.training_labels(name).items())


def agent_command(spec: PodJobSpec) -> list[str]:
    """The container command for kinds where the worldsize agent starts the node's processes."""
    return ["worldsize", "agent", "--id", spec.name, "--", *spec.command]


def conditions(job: Object) -> dict[str, Object]:
    """The conditions that are currently true, by type."""
    found = job.get("status", {}).get("conditions", [])
    return {condition["type"]: condition for condition in found if condition["status"] == "True"}


def from_conditions(job: Object, order: tuple[tuple[str, Phase], ...], otherwise: Phase) -> JobState:
    """The state for the first condition of ``order`` that is true."""
    true = conditions(job)
    for condition, phase in order:
        if condition in true:
            return JobState(phase, true[condition].get("message", ""))
    return JobState(otherwise)
