"""Follows a Slurm job: its state, and the output of all ranks as one stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from worldsize.jobs.folder import JobFolder
from worldsize.jobs.log_file import LogFile, last_lines
from worldsize.jobs.progress import progress
from worldsize.jobs.state import JobState, Line, Note
from worldsize.slurm.api import SlurmError
from worldsize.slurm.states import Seen

_STATE_S = 2.0  # between questions to Slurm, whose controller answers all users
_READ_S = 0.3
_LOST_S = 300.0  # without an answer from Slurm
_PROGRESS_S = 60.0
_DRAIN_S = 2.0  # for the last lines to appear on this machine


class SlurmFollower:
    """Follows a job that is submitted.

    Args:
        logs: whether to read the ranks' output.
        skip: bytes of each task's log that are not shown.
    """

    def __init__(self, folder: JobFolder, logs: bool, skip: Mapping[str, int]) -> None:
        self._folder = folder
        sources = {task: f"job {task}" if task else "job" for task in folder.tasks()}
        self._logs = [LogFile(folder.log(task), sources[task], skip.get(task, 0)) for task in sources] if logs else []
        self.state = JobState("Created")
        self._asked = self._noted = -_PROGRESS_S
        self._headline = ""
        self._ended_at: float | None = None
        self._lost_at: float | None = None

    def events(self) -> Iterator[Line | Note | None]:
        """Everything that happens until the job has ended. Yields None at least twice a second.

        Raises:
            SlurmError: Slurm has not answered for five minutes.
        """
        while self._ended_at is None or time.monotonic() - self._ended_at < _DRAIN_S:
            if self._ended_at is None and time.monotonic() - self._asked >= _STATE_S:
                self._asked = time.monotonic()
                yield from self._news()
            for log in self._logs:
                yield from log.new()
            yield None
            time.sleep(_READ_S)

    def _news(self) -> Iterator[Note]:
        """Ask Slurm; what is new about the job."""
        try:
            seen = Seen(self._folder)
        except SlurmError as error:  # slurmctld restarts, or fails over
            if self._lost_at is None:
                self._lost_at = self._asked
                yield Note(f"{error}; trying again")
            if self._asked - self._lost_at > _LOST_S:
                raise
            return
        self._lost_at, self.state = None, seen.state
        if (headline := _headline(seen)) != self._headline:
            self._headline = headline
            yield Note(headline)
        if self.state.ended or self.state.phase == "Suspended":
            self._ended_at = self._asked
        elif self._asked - self._noted >= _PROGRESS_S and self.state.phase == "Running":
            self._noted = self._asked
            if (line := progress(self._folder.metrics(), self._folder.recipe())) is not None:
                yield Note(line)

    def failures(self) -> list[str]:
        """The last lines of each task that failed."""
        job = Seen(self._folder)
        failed = [task for task in self._folder.tasks() if job.state_of(task).phase == "Failed"]
        return [f"{self._folder.log(task)} ends with\n{last_lines(self._folder.log(task))}" for task in failed]


def _headline(seen: Seen) -> str:
    state = seen.state
    nodes = sorted({one.nodes for one in seen.jobs.values() if one.nodes})
    where = f" on {', '.join(nodes)}" if nodes and state.phase == "Running" else ""
    ids = "".join(seen.folder.ids()[-1:])
    return f"Slurm job {ids} {seen.folder.name}: {state.phase}{where}" + (f": {state.reason}" if state.reason else "")
