"""The interface of a scheduler: what the commands `jobs`, `status`, `logs`, `wait`, `stop` and `delete` need from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from worldsize.jobs.state import Follower, JobState


@dataclass(frozen=True)
class Where:
    """Where to look for jobs."""

    context: str | None = None
    """Kubernetes: context of the kubeconfig (default: the current context)."""
    namespace: str | None = None
    """Kubernetes: namespace (default: the context's)."""
    out: Path = Path("runs")
    """Slurm and ssh: the folder of the runs, as in `train --out`."""


@dataclass(frozen=True)
class Part:
    """A pod, node or host of a job: its name, phase, number of restarts, machine, and why it waits or how it ended."""

    name: str
    phase: str
    restarts: int
    machine: str
    reason: str


class Job(ABC):
    """A job that exists on a scheduler."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the job and of its run."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Kind of job, for display, such as ``PyTorchJob``."""

    @property
    @abstractmethod
    def state(self) -> JobState:
        """Its state when it was looked up."""

    @property
    @abstractmethod
    def age_s(self) -> float:
        """Seconds since it was created."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Its parts, in rank order."""

    def warnings(self) -> Sequence[str]:
        """What the scheduler warned of lately that concerns a job that has not ended, such as why a part is missing."""
        return ()

    @abstractmethod
    def metrics(self) -> str:
        """The end of its run's metrics.jsonl; empty if there is none, or it cannot be read from here."""

    @abstractmethod
    def recipe(self) -> str:
        """Its recipe as YAML; empty if it cannot be read from here."""

    @abstractmethod
    def follower(self, logs: bool) -> Follower:
        """Follows it; without ``logs``, only its state."""

    @abstractmethod
    def stop(self) -> None:
        """Let it save and end; training with the same command resumes the run.

        Raises:
            UserError: it has ended, or the scheduler would start it again.
        """

    @abstractmethod
    def delete(self) -> None:
        """End it and remove everything created for it, but not its run."""

    @property
    def inactive(self) -> bool:
        """Whether it has ended or is stopped."""
        return self.state.ended or self.state.phase == "Suspended"

    @property
    def end_command(self) -> str:
        """The worldsize command that ends it gracefully."""
        return "stop"


class Scheduler(ABC):
    """Finds jobs. ``part`` is what a job consists of, for display."""

    part: ClassVar[str]

    @abstractmethod
    def __init__(self, where: Where) -> None: ...

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it looks for jobs, for messages, such as ``in namespace ml``."""

    @abstractmethod
    def jobs(self) -> list[Job]:
        """All worldsize jobs, newest first."""

    @abstractmethod
    def command(self, *words: str) -> str:
        """A worldsize command line about this scheduler's jobs, to print."""
