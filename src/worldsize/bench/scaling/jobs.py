"""Runs of a scaling benchmark as jobs on a cluster, with the same commands that a user would type."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worldsize import parallel
from worldsize.bench.launching import RunFailed
from worldsize.bench.scaling.cases import Case
from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.config.wording import quoted
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError, WorldsizeError
from worldsize.jobs import targets
from worldsize.jobs.base import Job, Where
from worldsize.launch import entry_point
from worldsize.reproduce.training_process import finished


@dataclass(frozen=True)
class Jobs:
    """``kind`` is a value of ``--on``; ``options`` are those of ``worldsize train --on``, as words."""

    kind: str
    options: tuple[str, ...]

    def __post_init__(self) -> None:
        for flag in ("--image", "--volume"):
            if self._option(flag) is None:
                raise UserError(
                    f"jobs on a cluster need {flag}: pass the options of `worldsize train --on {self.kind}` after `--`"
                )

    def check(self, case: Case, recipe: Recipe) -> None:
        """Run the preflight checks of the case's job.

        Raises:
            UserError: it cannot run: the image or a volume is missing, or the cluster has no room.
        """
        with temporary_folder() as folder:
            path = folder / f"{case.name}.yaml"
            path.write_text(recipe_files.to_yaml(recipe), "utf-8")
            done = self._start("train", str(path), *self._where(case), *self.options, "--check-only")
        if done.returncode:
            raise UserError(f"{case}: its job cannot run:\n{_said(done)}")

    def run(self, case: Case, recipe: Recipe, folder: Path, name: str, steps: int) -> Path:
        """Train ``steps`` steps as the job ``name`` and delete it. Returns its metrics.jsonl, downloaded to ``folder``.

        Follows the job if it exists: an interrupted benchmark left it.

        Raises:
            RunFailed: the job failed, or its metrics cannot be downloaded.
            UserError: it cannot be deleted; or the connection was lost, then the job is left, to be followed again.
        """
        (folder / name).mkdir(exist_ok=True)
        path = folder / f"{name}.yaml"
        path.write_text(recipe_files.to_yaml(recipe.model_copy(update={"max_steps": steps})), "utf-8")
        try:
            if self.find(name) is None:
                done = self._start("train", str(path), *self._where(case), "--name", name, *self.options)
            else:
                done = self._start("wait", name, *self._access())
        except KeyboardInterrupt:
            self.delete(name)
            raise
        if done.returncode and self._active(name):
            raise UserError(
                f"job {name} still runs, but following it failed: {_said(done)}\nContinue with --resume {quoted(folder)}"
            )
        try:
            _check(done, "train")
            for file in ("environment.json", "metrics.jsonl"):
                self._download(f"/runs/{name}/{file}", folder / name / file)
        finally:
            self.delete(name)
        return folder / name / "metrics.jsonl"

    def _where(self, case: Case) -> list[str]:
        return ["--on", self.kind, "--nodes", str(case.nodes), "--procs", str(case.procs), *settings_of(case)]

    def find(self, name: str) -> Job | None:
        """The job of this name; None if there is none."""
        where = Where(self._option("--context"), self._option("--namespace"))
        return next((job for job in targets.scheduler("kubernetes", where).jobs() if job.name == name), None)

    def delete(self, name: str) -> None:
        """Delete the job if it exists.

        Raises:
            UserError: it cannot be deleted, so it may still run, and the next one would run beside it.
        """
        done = self._start("delete", name, *self._access())
        if done.returncode and self.find(name) is not None:
            raise UserError(f"job {name} may still run, because it cannot be deleted: {_said(done)}")

    def _active(self, name: str) -> bool:
        """Whether the job may still run; also if nobody knows."""
        try:
            job = self.find(name)
        except WorldsizeError:
            return True
        return job is not None and not job.inactive

    def _download(self, source: str, target: Path) -> None:
        volume = self._option("--volume")
        done = self._start("cluster", "files", "get", f"{volume}:{source}", str(target), "--force", *self._access(True))
        _check(done, "cluster files get")

    def _access(self, image: bool = False) -> list[str]:
        flags = ("--context", "--namespace", "--image") if image else ("--context", "--namespace")
        return [word for flag in flags if (value := self._option(flag)) is not None for word in (flag, value)]

    def _option(self, flag: str) -> str | None:
        return command_line.value_of(flag, list(self.options))

    def _start(self, *words: str) -> subprocess.CompletedProcess[str]:
        return finished([*entry_point.command(sys.executable), *words])


def _check(done: subprocess.CompletedProcess[str], command: str) -> None:
    if done.returncode:
        raise RunFailed(f"worldsize {command} ended with {done.returncode}:\n{_said(done)}")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip()


def settings_of(case: Case) -> Sequence[str]:
    """The settings of the case's variant, whether or not it works on this machine; none for one process."""
    known = [variant for name in parallel.STRATEGIES for variant in parallel.load(name).variants()]
    for variant in known:
        if case.means(variant):
            return variant.settings if case.world_size > 1 else ()
    raise UserError(f"--strategies {case.strategy!r} is unknown; available: {', '.join(v.name for v in known)}")
