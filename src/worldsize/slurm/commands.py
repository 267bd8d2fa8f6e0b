"""``--on slurm``: one thin function per command. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from worldsize.config import command_line
from worldsize.distributed.stop_signals import interrupts_held, nothing_was, temporary_folder
from worldsize.errors import PREFLIGHT_FAILED, SUCCESS
from worldsize.jobs.base import Where
from worldsize.jobs.commands import detached, follow, recipe_argument
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.terminal import note
from worldsize.slurm import options, preflight, script
from worldsize.slurm.scheduler import BatchJob, Jobs, submit
from worldsize.slurm.spec import SlurmSpec


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on slurm``."""
    with nothing_was("submitted"):
        stem, recipe, rest = recipe_argument(argv, "train")
        asked = command_line.parse(options.Submit, rest, options.Submit(settings=recipe), f"train {stem} --on slurm")
        spec = options.to_spec(asked.settings, stem, asked.job)
        rendered = script.render(spec)
        folder = JobFolder(spec.out, spec.name)
        if asked.preflight and not _passes(spec, rendered, folder, asked.probe):
            return PREFLIGHT_FAILED
        earlier = folder.log_sizes()
    with interrupts_held() as held:  # Slurm would run a job whose id is not recorded
        job_id = submit(folder, rendered)
    scheduler = Jobs(Where(out=spec.out))
    note(f"Submitted Slurm job {job_id}, {spec.name}; its script and log are in {folder.path}")
    if asked.detach:
        note(f"Follow it with: {scheduler.command('logs', spec.name)}")
        return SUCCESS
    try:
        if held:
            raise KeyboardInterrupt
        code = follow(scheduler, BatchJob(folder, earlier), asked.timeout, None)
    except KeyboardInterrupt:
        return detached(scheduler, spec.name, "stop")
    if code == SUCCESS:
        runs = [str(folder.run(task)) for task in folder.tasks()]
        note(f"Next: worldsize eval {shlex.quote(runs[0])}" + (f" (and {len(runs) - 1} more)" if runs[1:] else ""))
    return code


def render(argv: list[str]) -> int:
    """``worldsize render RECIPE --on slurm``."""
    stem, recipe, rest = recipe_argument(argv, "render")
    asked = command_line.parse(options.Render, rest, options.Render(settings=recipe), f"render {stem} --on slurm")
    print(script.render(options.to_spec(asked.settings, stem, asked.job)), end="")
    return SUCCESS


def _passes(spec: SlurmSpec, rendered: str, folder: JobFolder, probe: bool) -> bool:
    """Run the preflight checks, and print what they find."""
    with temporary_folder() as temporary:
        path = Path(temporary, "job.sh")
        path.write_text(rendered)
        found = preflight.problems(spec, path)
    if probe and not found:
        found = preflight.probe(spec, folder)
    for problem in found:
        print(f"error  {problem}", file=sys.stderr)
    if found:
        print("nothing was submitted", file=sys.stderr)
    return not found
