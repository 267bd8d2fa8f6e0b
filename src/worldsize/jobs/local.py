"""``--on local``: this machine."""

from __future__ import annotations

from worldsize import parallel
from worldsize.config import command_line, recipe_files
from worldsize.errors import SUCCESS, UserError
from worldsize.jobs.commands import recipe_argument
from worldsize.jobs.naming import run_name
from worldsize.launch import shell_script
from worldsize.launch.distribute import check_procs
from worldsize.runs.run_folder import name_problem


def render(argv: list[str]) -> int:
    """``worldsize render RECIPE --on local``."""
    stem, recipe, rest = recipe_argument(command_line.without("--on", argv), "render")
    asked = command_line.parse(command_line.Train, rest, command_line.Train(recipe), f"render {stem} --on local")
    if asked.resume or asked.allow_changes or asked.stop_after is not None:
        raise UserError("render --on local describes a new job: omit --resume, --allow-changes and --stop-after")
    parallel.validate(asked.settings)
    asked.settings.data.check_crop_sizes()
    parallel.check_size(asked.settings, check_procs(asked.procs))
    if asked.retries < 0:
        raise UserError(f"--retries {asked.retries} must be at least 0")
    if asked.name and (problem := name_problem(asked.name)):
        raise UserError(f"--name {problem}")
    name = asked.name or run_name(stem, asked.settings, "local", 1, asked.procs, [])
    print(shell_script.render(recipe_files.to_yaml(asked.settings), name, asked.procs, asked.out, asked.retries), end="")
    return SUCCESS
