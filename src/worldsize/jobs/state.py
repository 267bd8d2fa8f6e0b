"""The state of a job, and what following it reports (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["Created", "Pending", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]


@dataclass(frozen=True)
class JobState:
    """The phase of a job, and the scheduler's message about it."""

    phase: Phase
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether the phase is final."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Line:
    """A log line, with the short name of the pod, node or task that wrote it, and its rank if known."""

    source: str
    rank: int | None
    text: str


@dataclass(frozen=True)
class Note:
    """A change of the job's state, or a reason or warning about it."""

    text: str


class Follower(Protocol):
    """Follows one job until it ends."""

    @property
    def state(self) -> JobState:
        """The newest known state; final after `events` has ended."""

    def events(self) -> Iterator[Line | Note | None]:
        """Everything that happens until the job has ended. Yields None at least twice a second."""

    def failures(self) -> list[str]:
        """What failed, worst first: one text of one or more lines each."""
