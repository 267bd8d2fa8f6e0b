"""Schedulers whose jobs have a folder OUT/.jobs/NAME each."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from worldsize.errors import UserError
from worldsize.jobs import targets
from worldsize.jobs.base import Job, Scheduler, Where
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.targets import JOBS_FOLDER


class InFolder(Scheduler):
    """The jobs of one scheduler in a folder of runs. ``name`` is the scheduler's, as in `targets.SCHEDULERS`."""

    name: ClassVar[str]

    def __init__(self, where: Where) -> None:
        self._out = where.out

    @abstractmethod
    def job(self, folder: JobFolder) -> Job | None:
        """The job of this folder; None if it was never submitted."""

    @property
    def place(self) -> str:
        return f"in {self._out / JOBS_FOLDER}"

    def jobs(self) -> list[Job]:
        files = (self._out / JOBS_FOLDER).glob("*/scheduler")
        ours = [JobFolder(self._out, path.parent.name) for path in files if path.read_text().strip() == self.name]
        return sorted((job for folder in ours if (job := self.job(folder)) is not None), key=lambda job: job.age_s)

    def command(self, *words: str) -> str:
        given = [] if self._out == Path("runs") else ["--out", str(self._out)]
        return shlex.join(["worldsize", *words, *given])


def check_free(folder: JobFolder, own: str) -> None:
    """Raise UserError if another scheduler than ``own`` runs the job of this folder."""
    other = targets.recorded(folder.out, folder.name)
    if other is None or other == own:
        return
    for job in targets.scheduler(other, Where(out=folder.out)).jobs():
        if job.name == folder.name and not job.inactive:
            raise UserError(
                f"{folder.name} is {job.state.phase} as a {job.kind}: end it first, with worldsize stop {folder.name}"
            )
