"""What the user asked for, and what can be refused of it before anything starts. Imports nothing heavy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from worldsize import parallel, track
from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Model, Recipe
from worldsize.distributed.rank import RankInfo
from worldsize.errors import UserError
from worldsize.models import network_names, trusted_code
from worldsize.runs import resumable, run_folder
from worldsize.runs.run_folder import RunFolder


@dataclass(frozen=True)
class TrainRequest:
    """What to train and where the run goes.

    ``stem`` begins the run's name if ``name`` is None; ``resume`` is the run to continue, None for a new one;
    ``allow_changes`` continues although the recipe or the data changed. ``autoresume`` continues the run ``name`` if it
    exists, ``retries`` times in a row without a new checkpoint. ``procs`` is the number of processes to start here,
    ``stop_after`` a step after which the run saves and stops, ``command`` the command line.
    """

    recipe: Recipe
    stem: str
    out: Path
    name: str | None
    resume: RunFolder | None
    allow_changes: bool
    autoresume: bool = False
    retries: int = 3
    procs: int = 1
    stop_after: int | None = None
    command: str = ""

    @property
    def cache(self) -> Path:
        """Where directory listings are cached, next to the runs."""
        return (self.resume.path.parent if self.resume else self.out) / ".cache"

    @property
    def folder(self) -> Path:
        """The run folder, of a run that has a name."""
        return self.resume.path if self.resume else self.out / str(self.name)


def from_arguments(argv: list[str]) -> TrainRequest:
    """The command line of ``worldsize train``.

    Raises:
        UserError: no recipe, an unknown one, invalid settings, or ``--resume`` of something that is not a run.
        SystemExit: after ``--help``.
    """
    resume = command_line.value_of("--resume", argv)
    folder = resumable.opened(Path(resume)) if resume else None
    source = None if not argv or argv[0].startswith("-") else argv[0]
    if folder is not None and source is not None:
        raise UserError(f"--resume uses the recipe of {folder.path}: leave out {source!r}")
    if folder is None and source is None and not command_line.asks_help(argv):
        raise recipe_files.missing("train")
    origin = str(folder.recipe) if folder is not None else source
    base = recipe_files.load(origin) if origin is not None else Recipe()
    rest = argv[1:] if source else argv
    recorded = base if folder is not None or _autoresumes(argv) else None
    parsed = command_line.parse(command_line.Train, rest, command_line.Train(base), f"train {source or 'RECIPE'}", recorded)
    if folder is None or parsed.settings.model.name != base.model.name:
        trusted_code.trust(parsed.settings)
    if folder is not None and (parsed.name is not None or command_line.value_of("--out", argv) is not None):
        raise UserError(f"--resume continues in {folder.path}: leave out --name and --out")
    return TrainRequest(
        recipe=parsed.settings,
        stem=Path(source or "run").stem,
        out=parsed.out,
        name=parsed.name,
        resume=folder,
        allow_changes=parsed.allow_changes,
        autoresume=parsed.autoresume,
        retries=parsed.retries,
        procs=parsed.procs,
        stop_after=parsed.stop_after,
        command=shlex.join(["worldsize", "train", *argv]),
    )


def _autoresumes(argv: list[str]) -> bool:
    """Whether the command line continues an existing run by its name."""
    name, out = command_line.value_of("--name", argv), command_line.value_of("--out", argv) or str(command_line.Train.out)
    return "--autoresume" in argv and name is not None and RunFolder(Path(out) / name).recipe.is_file()


def validate(request: TrainRequest, rank_info: RankInfo) -> None:
    """Refuse what can be refused before any process starts or any file is touched.

    Raises:
        UserError: batches, strategy, names, trackers, a network whose library is not installed.
        CheckpointError: the run to resume has lost its checkpoints.
    """
    if request.resume is not None:
        resumable.check(request.resume)
    _check_libraries(request.recipe.model)
    parallel.check(request.recipe, rank_info)
    if request.resume is None:  # older runs may have such sizes
        request.recipe.data.check_crop_sizes()
    if request.stop_after is not None and (
        request.stop_after < 1 or parallel.strategy_class(request.recipe.parallel).asynchronous
    ):
        raise UserError(f"--stop-after {request.stop_after}: pass a step from 1, and a strategy other than async")
    track.check(request.recipe.track)
    if request.autoresume and (request.name is None or request.resume is not None):
        raise UserError("--autoresume requires --name NAME and excludes --resume")
    if request.resume is None:
        run_folder.check_name(request.out, request.name, may_exist=request.autoresume)


def _check_libraries(model: Model) -> None:
    network_names.check("--model.name", model.name)
    if model.weights is not None and model.weights.startswith("timm:"):
        network_names.check("--model.weights", model.weights)
