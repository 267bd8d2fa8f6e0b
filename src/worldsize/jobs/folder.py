"""The files of a job of Slurm or ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldsize.errors import UserError
from worldsize.jobs.progress import TAIL
from worldsize.jobs.targets import JOBS_FOLDER


class JobFolder:
    """The files of a job in ``OUT/.jobs/NAME``.

    ``scheduler`` names the scheduler, ``log.txt`` has the output of all ranks (``log-TASK.txt`` of an array), ``exit`` the
    exit code once the job has ended. Slurm: ``job.sh`` is the batch script, ``ids`` has the ids of its Slurm jobs, one per
    line; ``stop`` exists while a stop is requested; arrays keep ``exit`` and ``stop`` in a folder per task. ssh:
    ``launcher`` has the host and the process id of the launcher.
    """

    def __init__(self, out: Path, name: str) -> None:
        self.out = out
        self.name = name
        self.path = out / JOBS_FOLDER / name
        self.script = self.path / "job.sh"
        self.scheduler = self.path / "scheduler"
        self.launcher = self.path / "launcher"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Writes into the folder within.

        Raises:
            UserError: it cannot be written.
        """
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; choose another folder with --out") from None

    def ids(self) -> list[str]:
        """The ids of its Slurm jobs, oldest first."""
        return text(self.path / "ids").split()

    def add_id(self, job_id: str) -> None:
        """Record a Slurm job."""
        with open(self.path / "ids", "a") as file:
            file.write(f"{job_id}\n")

    def tasks(self) -> list[str]:
        """The tasks of a job array, by number; [""] for other jobs."""
        for line in text(self.script).splitlines():
            if line.startswith("#SBATCH --array="):
                return line.partition("--array=")[2].split(",")
        return [""]

    def of_task(self, task: str) -> Path:
        """The folder with the task's ``exit`` and ``stop``."""
        return self.path / task

    def log(self, task: str) -> Path:
        """The output of the task's ranks."""
        return self.path / (f"log-{task}.txt" if task else "log.txt")

    def run(self, task: str) -> Path:
        """The run folder of the task."""
        return self.out / (f"{self.name}-seed{task}" if task else self.name)

    def log_sizes(self) -> dict[str, int]:
        """The sizes of the tasks' logs, in bytes."""
        return {task: path.stat().st_size for task in self.tasks() if (path := self.log(task)).exists()}

    def metrics(self) -> str:
        """The end of metrics.jsonl of the run, of an array the first; empty without one."""
        return tail(self.run(self.tasks()[0]) / "metrics.jsonl", TAIL)

    def recipe(self) -> str:
        """The recipe of the run, as YAML; empty without one."""
        return text(self.run(self.tasks()[0]) / "recipe.yaml")

    def exit_code(self, task: str) -> int | None:
        """The exit code that the job has left; None while it has not ended."""
        found = text(self.of_task(task) / "exit").strip()
        return int(found) if found.isdigit() else None

    @property
    def submitted(self) -> float:
        """When it was last submitted, seconds since 1970."""
        return self.script.stat().st_mtime


def text(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def tail(path: Path, count: int) -> str:
    """The last ``count`` bytes of a file as text; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
