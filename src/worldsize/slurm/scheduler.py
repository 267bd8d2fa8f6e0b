"""The Slurm jobs whose folders are in the folder of the runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence

from worldsize.errors import Stopped, UserError
from worldsize.jobs.base import Job, Part, Where
from worldsize.jobs.folder import JobFolder, text
from worldsize.jobs.in_folder import InFolder, check_free
from worldsize.jobs.state import Follower, JobState
from worldsize.runs.atomic import write_text
from worldsize.slurm import api
from worldsize.slurm.api import SlurmError, SlurmJob
from worldsize.slurm.follow import SlurmFollower
from worldsize.slurm.states import ACTIVE, WAITING, Seen

_POLL_S = 1.0


class BatchJob(Job):
    """A Slurm job of worldsize, as Slurm and its folder know it.

    Args:
        skip: bytes of each task's log that are not shown: of earlier submissions.
    """

    def __init__(self, folder: JobFolder, skip: Mapping[str, int] | None = None) -> None:
        self.folder = folder
        self._skip = skip or {}
        self._seen = Seen(folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str:
        return "Slurm job"

    @property
    def age_s(self) -> float:
        return time.time() - self.folder.submitted

    @property
    def state(self) -> JobState:
        return self._seen.state

    def parts(self) -> Sequence[Part]:
        found = []
        for task in self.folder.tasks():
            known, state = self._seen.known(task), self._seen.state_of(task)
            found.append(
                Part(
                    name=known.job_id if known else (self.folder.ids() or [""])[-1],
                    phase=known.state.capitalize() if known else state.phase,
                    restarts=known.restarts if known else 0,
                    machine=known.nodes if known else "",
                    reason=state.reason,
                )
            )
        return found

    def metrics(self) -> str:
        return self.folder.metrics()

    def recipe(self) -> str:
        return self.folder.recipe()

    def follower(self, logs: bool) -> Follower:
        return SlurmFollower(self.folder, logs, self._skip)

    def stop(self) -> None:
        if self.state.ended or self.state.phase == "Suspended":
            raise UserError(f"{self.name} has already ended: {self.state.phase}")
        self._request_stop()
        for task in self.folder.tasks():
            known = self._seen.known(task)
            if known is None or known.state not in ACTIVE:
                continue
            if known.state in WAITING:
                self._cancel_waiting(task, known)
            elif "--signal=B:" in text(self.folder.script):
                api.signal_shell(known.job_id, "USR1")
            else:
                api.signal_ranks(known.job_id, "TERM")
        self._wait()

    def delete(self) -> None:
        self._request_stop()
        for one in self._seen.jobs.values():
            if one.state in ACTIVE:
                api.cancel(one.job_id)
        self._wait()
        shutil.rmtree(self.folder.path)

    def _request_stop(self) -> None:
        """Let the batch script not continue, whatever it is doing."""
        for task in self.folder.tasks():
            self.folder.of_task(task).mkdir(parents=True, exist_ok=True)
            (self.folder.of_task(task) / "stop").touch()

    def _cancel_waiting(self, task: str, known: SlurmJob) -> None:
        api.cancel(known.job_id)
        (self.folder.of_task(task) / "exit").write_text(f"{Stopped.exit_code}\n")

    def _wait(self) -> None:
        """Return when Slurm no longer runs the job; what was requeued meanwhile is cancelled."""
        while True:
            active = {task: one for task, one in Seen(self.folder).jobs.items() if one.state in ACTIVE}
            if not active:
                return
            for task, one in active.items():
                if one.state in WAITING:
                    self._cancel_waiting(task, one)
            time.sleep(_POLL_S)


class Jobs(InFolder):
    """The Slurm jobs in a folder of runs."""

    name = "slurm"
    part = "task"

    def job(self, folder: JobFolder) -> Job | None:
        return BatchJob(folder) if folder.script.exists() and folder.ids() else None


def submit(folder: JobFolder, script: str) -> str:
    """Write the batch script, and submit exactly its bytes. Returns the Slurm job's id.

    Raises:
        UserError: a job of this name is active, or its run has finished.
        SlurmError: Slurm refuses it.
    """
    check_free(folder, Jobs.name)
    if folder.ids() and (state := Seen(folder).state).phase not in ("Failed", "Suspended"):
        raise UserError(_refusal(folder, state))
    marks = [folder.of_task(task) / mark for task in folder.tasks() for mark in ("exit", "stop")]
    before = {path: text(path) for path in marks if path.exists()}
    for path in before:
        path.unlink()
    _write(folder, script)
    try:
        job_id = api.submit(folder.script)
    except SlurmError:
        for path, content in before.items():
            path.write_text(content)
        raise
    folder.add_id(job_id)
    return job_id


def _refusal(folder: JobFolder, state: JobState) -> str:
    command = Jobs(Where(out=folder.out)).command
    if state.phase == "Succeeded":
        return (
            f"{folder.name} has already succeeded; its run is {folder.run(folder.tasks()[0])}. For another run, choose "
            f"another --name, or delete the job with: {command('delete', folder.name)}"
        )
    return (
        f"{folder.name} already exists and is {state.phase}. Follow it with: {command('logs', folder.name)}. "
        f"End it with: {command('stop', folder.name)}"
    )


def _write(folder: JobFolder, script: str) -> None:
    with folder.writing():
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.scheduler.write_text("slurm\n")
        write_text(folder.script, script)
