"""A kind of job that a cluster runs: how a `JobSpec` becomes its objects (pure), and what their states mean."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from worldsize.launch import pod
from worldsize.launch.spec import JobSpec, general_problems, refuse

Object = dict[str, Any]
Phase = Literal["Created", "Pending", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]

# A target is a module of this package with a class `Target`.
TARGETS = ("pytorchjob", "mpijob", "trainjob")

# Of a PyTorchJob and an MPIJob: what counts first where several are true.
KUBEFLOW_CONDITIONS: tuple[tuple[str, Phase], ...] = (
    ("Failed", "Failed"),
    ("Succeeded", "Succeeded"),
    ("Suspended", "Suspended"),
    ("Restarting", "Restarting"),
    ("Running", "Running"),
    ("Created", "Pending"),
)


@dataclass(frozen=True)
class State:
    """Where a job is, and the cluster's own words for why."""

    phase: Phase
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.phase in ("Succeeded", "Failed")


class Target(ABC):
    """Base of the targets. Rendering is deterministic: the same spec gives the same bytes."""

    kind: ClassVar[str]
    container: ClassVar[str]
    # Events by which an operator gives a job up without setting a condition.
    dead_ends: ClassVar[frozenset[str]] = frozenset()
    # Events about what an operator tries again, maybe for ever, and never with a condition.
    setbacks: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def problems(self, spec: JobSpec) -> Iterable[str]:
        """What this kind cannot run though others may, and what no API server checks; with the remedy."""

    @abstractmethod
    def job(self, spec: JobSpec) -> list[Object]:
        """The job object, last, and what only this kind needs."""

    @abstractmethod
    def state(self, job: Object, pods: list[Object]) -> State:
        """Where the job is, from its own status and its pods."""

    @abstractmethod
    def place(self, one: Object) -> tuple[int, str]:
        """A pod's place among the job's pods, for sorting, and its short name for people."""

    @abstractmethod
    def suspension(self) -> Object:
        """The change of the job that ends all its pods."""

    def selector(self, name: str) -> str:
        """The label selector of a job's pods."""
        return training_pods(name)

    def render(self, spec: JobSpec) -> list[Object]:
        """Every object of the job, in the order in which they must be created.

        Raises:
            UserError: all that is wrong with the spec.
        """
        refuse([*general_problems(spec), *self.problems(spec)])
        return [pod.config_map(spec), pod.network_policy(spec), *self.job(spec)]


def training_pods(name: str) -> str:
    """The label selector of `pod.training_labels`."""
    return ",".join(f"{label}={value}" for label, value in pod.training_labels(name).items())


def load(name: str) -> Target:
    """The target of this name."""
    return importlib.import_module(f"worldsize.launch.{name}").Target()


def agent_command(spec: JobSpec) -> list[str]:
    """What a container runs where a node's processes are started by worldsize's own agent."""
    return ["worldsize", "agent", "--id", spec.name, "--", *spec.command]


def conditions(job: Object) -> dict[str, Object]:
    """The conditions that are true now, by type."""
    found = job.get("status", {}).get("conditions", [])
    return {condition["type"]: condition for condition in found if condition["status"] == "True"}


def from_conditions(job: Object, order: tuple[tuple[str, Phase], ...], otherwise: Phase) -> State:
    """The first phase of ``order`` whose condition is true."""
    true = conditions(job)
    for kind, phase in order:
        if kind in true:
            return State(phase, true[kind].get("message", ""))
    return State(otherwise)


def too_long(name: str, limit: int, kind: str) -> Iterable[str]:
    """The names that operators make from the job's must be host names, of 63 characters at most."""
    if len(name) > limit:
        yield f"--name {name}: {len(name)} characters, and a {kind} of this size can have {limit} at most"
