"""The state of a Slurm job, from Slurm and from the files of the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from worldsize.errors import Stopped
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.state import JobState
from worldsize.slurm import api
from worldsize.slurm.api import SlurmJob

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"})
ACTIVE = WAITING | {"RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
# How the states that Slurm sets by itself are reported.
_REASONS = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "cancelled",
    "DEADLINE": "its deadline passed",
    "NODE_FAIL": "a node was lost, and the job may not be requeued",
    "OUT_OF_MEMORY": "out of memory: raise --memory",
    "PREEMPTED": "preempted, and the job may not be requeued",
    "TIMEOUT": "the time limit passed before the state was saved: raise --grace",
}


class Seen:
    """What is known about a job at one moment."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        # By task; "" for a job that is no array.
        self.jobs = {one.array_task: one for found in _oldest_first(folder) for one in _tasks(found)}

    @property
    def state(self) -> JobState:
        """Of an array: the worst state of a task that has ended, once all have."""
        states = [self.state_of(task) for task in self.folder.tasks()]
        for phase in ("Running", "Restarting", "Pending", "Failed", "Suspended"):
            for state in states:
                if state.phase == phase:
                    return state
        return states[0]

    def state_of(self, task: str) -> JobState:
        """The state of one task."""
        known, code = self.known(task), self.folder.exit_code(task)
        if known is not None and known.state in ACTIVE:
            if known.state in WAITING:
                return JobState("Restarting" if known.restarts else "Pending", _waits(known))
            return JobState("Running", "suspended by Slurm" if known.state == "SUSPENDED" else "")
        if code == 0 or (code is None and known is not None and known.state == "COMPLETED"):
            return JobState("Succeeded")
        if known is not None and known.state == "CANCELLED" and code in (None, Stopped.exit_code):
            return JobState("Suspended", "cancelled; submit it again to resume")
        if code == Stopped.exit_code:
            return JobState("Suspended", "stopped; submit it again to resume")
        if known is not None and known.state in _REASONS:
            return JobState("Failed", _REASONS[known.state])
        if code is not None:
            return JobState("Failed", f"exit code {code}")
        if known is None:
            return JobState("Failed", "it ended without an exit code, and Slurm no longer knows it")
        return JobState("Failed", f"{known.state.lower()} with exit code {known.exit_code}; see {self.folder.log(task)}")

    def known(self, task: str) -> SlurmJob | None:
        """What Slurm knows of the task, of its newest job."""
        return self.jobs.get(task)


def _oldest_first(folder: JobFolder) -> list[SlurmJob]:
    ids = folder.ids()
    return sorted(api.jobs(ids), key=lambda one: ids.index(one.job_id.partition("_")[0])) if ids else []


def _tasks(one: SlurmJob) -> Iterator[SlurmJob]:
    """The tasks of an entry: those of an array that have not started are one entry, such as 12_[3-5,8,10-30:10%2]."""
    if not one.array_task.startswith("["):
        yield one
        return
    base = one.job_id.partition("_")[0]
    for part in one.array_task.strip("[]").partition("%")[0].split(","):
        tasks, _, stride = part.partition(":")
        first, _, last = tasks.partition("-")
        for task in range(int(first), int(last or first) + 1, int(stride or 1)):
            yield replace(one, job_id=f"{base}_{task}")


def _waits(known: SlurmJob) -> str:
    return "" if known.reason in ("", "None") else f"Slurm's reason: {known.reason}"
