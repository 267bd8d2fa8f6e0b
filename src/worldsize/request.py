"""What somebody asked for, and what can be refused of it before anything is started. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worldsize import parallel, run, track
from worldsize.recipe import Recipe
from worldsize.run import RunFolder
from worldsize.world import Place


@dataclass(frozen=True)
class TrainJob:
    """What to train and where it goes.

    ``stem`` begins the run's name if ``name`` is None; ``resume`` is the run to go on with, None for a new one;
    ``allow_changes`` goes on although the recipe or the data changed.
    """

    recipe: Recipe
    stem: str
    out: Path
    name: str | None
    resume: RunFolder | None
    allow_changes: bool

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
    if job.resume is None:
        run.check_name(job.out, job.name)
