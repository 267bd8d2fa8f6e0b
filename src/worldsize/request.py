"""What somebody asked for, and what can be refused of it before anything is started. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worldsize import parallel, run, track
from worldsize.errors import UserError
from worldsize.place import Place
from worldsize.recipe import Recipe
from worldsize.run import RunFolder


@dataclass(frozen=True)
class TrainJob:
    """What to train and where it goes.

    ``stem`` begins the run's name if ``name`` is None; ``resume`` is the run to go on with, None for a new one;
    ``allow_changes`` goes on although the recipe or the data changed. ``autoresume`` goes on with the run ``name`` if
    there is one, ``retries`` times in a row without a new checkpoint.
    """

    recipe: Recipe
    stem: str
    out: Path
    name: str | None
    resume: RunFolder | None
    allow_changes: bool
    autoresume: bool = False
    retries: int = 3

    @property
    def cache(self) -> Path:
        """Where listings are kept, beside the runs."""
        return (self.resume.path.parent if self.resume else self.out) / ".cache"


def preflight(job: TrainJob, place: Place) -> None:
    """Refuse what can be refused before any process is started or any file is touched.

    Raises:
        UserError: batches, strategy, names, trackers.
    """
    parallel.check(job.recipe, place)
    track.check(job.recipe.track)
    if job.autoresume and (job.name is None or job.resume is not None):
        raise UserError("--autoresume needs --name NAME, and no --resume")
    if job.resume is None:
        run.check_name(job.out, job.name, may_exist=job.autoresume)
