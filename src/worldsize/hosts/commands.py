"""``--on ssh``: one thin function per command. Imports no torch."""

from __future__ import annotations

import shlex
import sys

from worldsize.config import command_line
from worldsize.distributed.stop_signals import nothing_was
from worldsize.errors import PREFLIGHT_FAILED, SUCCESS
from worldsize.hosts import options, preflight, spec
from worldsize.hosts.launch import Launcher
from worldsize.jobs.commands import recipe_argument
from worldsize.jobs.folder import JobFolder
from worldsize.jobs.terminal import note


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on ssh``."""
    with nothing_was("started"):
        stem, recipe, rest = recipe_argument(argv, "train")
        asked = command_line.parse(options.Launch, rest, options.Launch(settings=recipe), f"train {stem} --on ssh")
        job = options.to_spec(asked.settings, stem, asked.job)
        if asked.print:
            print(spec.by_hand(job), end="")
            return SUCCESS
        if asked.preflight and (found := preflight.problems(job, asked.job.ssh_config)):
            for problem in found:
                print(f"error  {problem}", file=sys.stderr)
            print("nothing was started", file=sys.stderr)
            return PREFLIGHT_FAILED
    folder = JobFolder(job.out, job.name)
    note(f"Starting {job.name} on {', '.join(job.hosts)}; its log is {folder.log('')}")
    code = Launcher(job, folder, asked.job.ssh_config).run()
    if code == SUCCESS:
        note(f"Next, on {job.hosts[0]}: worldsize eval {shlex.quote(str(job.out / job.name))}")
    return code


def render(argv: list[str]) -> int:
    """``worldsize render RECIPE --on ssh``."""
    stem, recipe, rest = recipe_argument(argv, "render")
    asked = command_line.parse(options.Render, rest, options.Render(settings=recipe), f"render {stem} --on ssh")
    print(spec.by_hand(options.to_spec(asked.settings, stem, asked.job)), end="")
    return SUCCESS
