"""The jobs on hosts whose launchers run, or ran, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence

from worldsize.errors import SUCCESS, Stopped, UserError
from worldsize.hosts.launch import elsewhere, launcher_pid, refuse_elsewhere
from worldsize.jobs.base import Job, Part
from worldsize.jobs.folder import JobFolder, text
from worldsize.jobs.in_folder import InFolder
from worldsize.jobs.log_file import LogFile, last_lines
from worldsize.jobs.state import Follower, JobState, Line, Note

_POLL_S = 0.3


class HostsJob(Job):
    """A job on hosts, as its folder and its launcher's process show it."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str:
        return "ssh job"

    @property
    def age_s(self) -> float:
        return time.time() - self.folder.launcher.stat().st_mtime

    @property
    def state(self) -> JobState:
        return state_of(self.folder)

    def parts(self) -> Sequence[Part]:
        host, pid, _ = (*text(self.folder.launcher).split(), "", "", "")[:3]
        return [Part(f"launcher {pid}", self.state.phase, 0, host, self.state.reason)]

    def metrics(self) -> str:
        return self.folder.metrics()

    def recipe(self) -> str:
        return self.folder.recipe()

    def follower(self, logs: bool) -> Follower:
        return HostsFollower(self.folder, logs)

    def stop(self) -> None:
        pid = launcher_pid(self.folder)
        refuse_elsewhere(self.folder, f"run worldsize stop {self.name}")
        if pid is None:
            raise UserError(f"{self.name} does not run on this machine: {self.state.phase}")
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # if it was suspended with Ctrl-Z
        while launcher_pid(self.folder) == pid:
            time.sleep(_POLL_S)

    def delete(self) -> None:
        if launcher_pid(self.folder) is not None:
            self.stop()
        refuse_elsewhere(self.folder, f"run worldsize delete {self.name}")
        shutil.rmtree(self.folder.path)


class HostsFollower:
    """Follows a job on hosts."""

    def __init__(self, folder: JobFolder, logs: bool) -> None:
        self._folder = folder
        self._log = LogFile(folder.log(""), "ssh") if logs else None
        self.state = JobState("Created")

    def events(self) -> Iterator[Line | Note | None]:
        """Everything that happens until the job has ended. Yields None at least twice a second."""
        while True:
            before, self.state = self.state, state_of(self._folder)
            if self.state != before:
                yield Note(f"ssh job {self._folder.name}: {self.state.phase}")
            if self._log is not None:
                yield from self._log.new()
            if self.state.phase != "Running":
                return
            yield None
            time.sleep(_POLL_S)

    def failures(self) -> list[str]:
        """The last lines of the log, if the job failed."""
        log = self._folder.log("")
        return [f"{log} ends with\n{last_lines(log)}"] if self.state.phase == "Failed" else []


class Jobs(InFolder):
    """The jobs on hosts in a folder of runs."""

    name = "ssh"
    part = "launcher"

    def job(self, folder: JobFolder) -> Job | None:
        return HostsJob(folder) if folder.launcher.exists() else None


def state_of(folder: JobFolder) -> JobState:
    """The state of a job on hosts."""
    if launcher_pid(folder) is not None:
        return JobState("Running")
    if (host := elsewhere(folder)) is not None:
        return JobState("Running", f"as far as can be seen from here: it was started from {host}")
    code = folder.exit_code("")
    if code == SUCCESS:
        return JobState("Succeeded")
    if code == Stopped.exit_code:
        return JobState("Suspended", "stopped; the same command resumes it")
    return JobState(
        "Failed", "its launcher was killed; the same command resumes it" if code is None else f"exit code {code}"
    )
