"""``worldsize init``, ``train`` and ``agent``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.cli import stdout
from worldsize.config import command_line
from worldsize.errors import UserError
from worldsize.launch import garbage

if TYPE_CHECKING:
    from worldsize.distributed.stop_signals import StopFlag


def init(argv: list[str]) -> int:
    """``worldsize init``."""
    from worldsize.distributed.stop_signals import ends_at_once
    from worldsize.initialize import command

    with ends_at_once("nothing was changed"):
        return command.run(command_line.parse(command.Init, argv, None, "init"))


def train(argv: list[str]) -> int:
    """``worldsize train``."""
    on = command_line.value_of("--on", argv)
    if on not in (None, "local"):
        from worldsize.distributed.stop_signals import nothing_was

        with nothing_was("submitted"):
            from worldsize.jobs.commands import train_on
        return train_on(argv)
    with garbage.not_sought():
        from worldsize import parallel
        from worldsize.distributed.rank import discover_rank_info, local_rank_info
        from worldsize.launch.distribute import check_procs, distribute
        from worldsize.launch.restarts import Restarts
        from worldsize.runs import resumable
        from worldsize.runs.run_folder import RunFolder, step_of
        from worldsize.training.request import from_arguments, validate

        request = from_arguments(command_line.without("--on", argv))
    rank_info = discover_rank_info()
    validate(request, rank_info if rank_info.size > 1 else local_rank_info(check_procs(request.procs)))

    def work(stop: StopFlag) -> int:
        with garbage.not_sought():
            from worldsize.training.build import train

        if train(request, rank_info, stop) is None and rank_info.rank == 0:
            limit, newest = request.recipe.max_steps, resumable.newest(RunFolder(request.folder))
            limited = limit is not None and newest is not None and step_of(Path(newest)) >= limit
            further = f" (it ends at --max-steps {limit}; --max-steps None trains all epochs)" if limited else ""
            print(f"{request.folder} has already reached its last step{further}; nothing to do")
        return 0

    may_fail = parallel.strategy_class(request.recipe.parallel).asynchronous
    restarts = Restarts(request.retries, lambda: resumable.newest(RunFolder(request.folder))) if request.autoresume else None
    code = distribute(["train", *argv], request.procs, rank_info, work, may_fail, restarts)
    stdout.flush_or_drop()  # a run that has finished has succeeded, whoever reads about it
    return code


def agent(argv: list[str]) -> int:
    """``worldsize agent``."""
    if "--" not in argv and not command_line.asks_help(argv):
        raise UserError("expected: worldsize agent --id RUN [--procs N] -- train RECIPE ...")
    from worldsize.cluster.in_pod import write_termination_message
    from worldsize.launch import agent
    from worldsize.launch.distribute import check_procs
    from worldsize.launch.failure import fail

    at = argv.index("--") if "--" in argv else len(argv)
    asked = command_line.parse(command_line.Agent, argv[:at], None, "agent ... -- train RECIPE ...")
    procs = None if asked.procs is None else check_procs(asked.procs)
    outcome = agent.run(argv[at + 1 :], agent.discover(asked.id, procs=procs))
    write_termination_message(outcome.message)
    return fail(outcome.message, outcome.code) if outcome.code else 0
