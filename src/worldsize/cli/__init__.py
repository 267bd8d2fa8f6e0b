"""The command line: one function per command. Imports nothing heavy before a command needs it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize import __version__
from worldsize.config.wording import count
from worldsize.errors import UserError, WorldsizeError, did_you_mean
from worldsize.launch import entry_point

if TYPE_CHECKING:
    from worldsize.distributed.stop_signals import StopFlag

_HELP = f"""worldsize {__version__}: train image classifiers at any world size

  worldsize init FOLDER                                       look at your images and write a recipe for them
  worldsize train RECIPE [--procs N] [--SETTING VALUE ...]    train; RECIPE is a name or a YAML file
  worldsize train --resume RUN [--procs N]                    resume a run at the exact step where it stopped
  worldsize eval RUN|CHECKPOINT [--SETTING VALUE ...]         evaluate a trained model
  worldsize predict RUN|CHECKPOINT|EXPORT [PATHS ...]         classify images: files, folders, shards, standard input
  worldsize export RUN --to FORMAT --out DIR                  write it for timm, ONNX or torch.export; check its answers
  worldsize labels RUN [--sheet PAGE]                         find training images whose labels are probably wrong
  worldsize prove RECIPE [--procs 1,2,4]                      show that the number of processes does not change a run
  worldsize replay RUN --step N                               compute a past step again; show what the model saw
  worldsize audit RUN                                         verify a run and compute parts of it again
  worldsize runs [FOLDER]                                     list runs
  worldsize compare RUN OTHER                                 show where two runs differ
  worldsize report RUN|BENCH|PLAN ... [--out PAGE]            one page with charts, without network
  worldsize explain RUN                                       where a run's time went, and what would make it faster
  worldsize tune RECIPE                                       find a learning rate in a few short runs
  worldsize plan RECIPE --devices 8,64,512                    predict speed, time, price and the bottleneck at each size
  worldsize recipes [NAME [--against OTHER]]                  list the recipes; print one; compare two
  worldsize strategies                                        list the parallel strategies and what works here
  worldsize bench scaling RECIPE --procs 1,2,4                measure how a recipe scales, and where the time goes
  worldsize bench allreduce [--procs N]                       measure latency and bandwidth between processes
  worldsize bench step                                        measure a training step against bare loops
  worldsize bench strategies [--procs N]                      compare their speed on this machine
  worldsize bench loader --root FOLDER [--against NAMES]      measure the data loader and find its bottleneck
  worldsize data fetch DATASET --to FOLDER                    download, verify and unpack a dataset
  worldsize data verify --root FOLDER                         decode every image; list broken and duplicate ones
  worldsize data info FOLDER|SHARDS                           classes, sizes, a contact sheet
  worldsize data pack --root FOLDER --out SHARDS              pack a dataset into a few large files
  worldsize env                                               show this machine and what a run would use

On a Kubernetes cluster with Kubeflow (docs/kubernetes.md):
  worldsize cluster check|volume|secret|data|files ...        check the cluster; manage volumes, secrets, data, files
  worldsize image build --push REPOSITORY                     build the container image for its pods
  worldsize train RECIPE --on pytorchjob|mpijob|trainjob ...  train on the cluster and follow the job

On Slurm (docs/slurm.md) and on a list of hosts (docs/hosts.md):
  worldsize train RECIPE --on slurm --nodes 2 --procs 8 ...   submit a batch job and follow it
  worldsize train RECIPE --on ssh --hosts h1:8,h2:8           run on hosts that you reach by ssh

For all of them:
  worldsize render RECIPE --on TARGET                         print the job; --on local: a shell script
  worldsize jobs, status|logs|wait|stop|delete NAME           list and manage jobs

Help for each command: worldsize train --help
torchrun, mpirun and srun are detected: torchrun --nproc-per-node 8 -m worldsize train RECIPE

Exit codes: 0 success, 1 not verified (prove, replay, audit, export) or not equal (compare), 64 user error, 65 broken images,
66 damaged checkpoints, 69 a process, disk or store is missing, 70 internal error, 71 no progress, 74 not saved, 75 stopped
and saved (continue with --resume), 76 loss not finite, 130 and 143 exited immediately.
Following a job on a cluster or Slurm: 0 succeeded, 1 failed, 2 refused by preflight, 3 timed out, 130 detached.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code, see `worldsize.errors`."""
    if argv is None:
        entry_point.speak_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    from worldsize.launch.failure import fail, fail_alone, fail_internally

    try:
        return _command(words[0])(words[1:])
    except WorldsizeError as error:
        return (fail_alone if error.of_one_rank else fail)(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has exited (`worldsize recipes | head`): end as any filter does, with SIGPIPE's code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        return fail_internally(traceback.format_exc())


def _command(name: str) -> Callable[[list[str]], int]:
    own: dict[str, Callable[[list[str]], int]] = {
        "init": _init,
        "train": _train,
        "agent": _agent,
        "eval": _eval,
        "predict": _predict,
        "export": _export,
        "labels": _labels,
        "prove": _prove,
        "replay": _replay,
        "audit": _audit,
        "runs": _runs,
        "compare": _compare,
        "report": _report,
        "explain": _explain,
        "tune": _tune,
        "plan": _plan,
        "recipes": _recipes,
        "strategies": _strategies,
        "bench": _bench,
        "data": _data,
        "env": _env,
    }
    if name in own:
        return own[name]
    from worldsize.jobs import commands as jobs

    if name in jobs.COMMANDS:
        return jobs.COMMANDS[name]
    from worldsize.cluster.commands import COMMANDS

    if name not in COMMANDS:
        known = [*own, *jobs.COMMANDS, *COMMANDS]
        hint = did_you_mean(name, known) or f"; commands: {', '.join(known)}"
        raise UserError(f"unknown command {name!r}{hint}")
    return COMMANDS[name]


def _init(argv: list[str]) -> int:
    """``worldsize init``."""
    from worldsize.config import command_line
    from worldsize.distributed.stop_signals import ends_at_once
    from worldsize.initialize import command

    with ends_at_once("nothing was changed"):
        return command.run(command_line.parse(command.Init, argv, None, "init"))


def _train(argv: list[str]) -> int:
    """``worldsize train``."""
    from worldsize.config import command_line

    on = command_line.value_of("--on", argv)
    if on not in (None, "local"):
        from worldsize.jobs.commands import train_on

        return train_on(argv)
    from worldsize import parallel
    from worldsize.distributed.rank import discover, here
    from worldsize.launch.distribute import check_procs, distribute
    from worldsize.training.request import from_arguments, preflight

    request = from_arguments(command_line.without("--on", argv))
    place = discover()
    preflight(request, place if place.size > 1 else here(check_procs(request.procs)))

    def work(stop: StopFlag) -> int:
        from worldsize.training.build import train

        if train(request, place, stop) is None and place.rank == 0:
            print(f"{request.folder} has already reached its last step; nothing to do")
        return 0

    may_fail = parallel.named(request.recipe.parallel).asynchronous
    return distribute(["train", *argv], request.procs, place, work, workers_may_fail=may_fail)


def _agent(argv: list[str]) -> int:
    """``worldsize agent``."""
    from worldsize.config import command_line

    if "--" not in argv and not command_line.asks_help(argv):
        raise UserError("expected: worldsize agent --id RUN [--procs N] -- train RECIPE ...")
    from worldsize.cluster.in_pod import write_termination_message
    from worldsize.launch import agent
    from worldsize.launch.failure import fail

    at = argv.index("--") if "--" in argv else len(argv)
    asked = command_line.parse(command_line.Agent, argv[:at], None, "agent ... -- train RECIPE ...")
    outcome = agent.run(argv[at + 1 :], agent.discover(asked.id, procs=asked.procs))
    write_termination_message(outcome.message)
    return fail(outcome.message, outcome.code) if outcome.code else 0


def _eval(argv: list[str]) -> int:
    """``worldsize eval``."""
    from worldsize import checkpoint
    from worldsize.config import command_line, recipe_files
    from worldsize.config.recipe import Recipe
    from worldsize.distributed.rank import discover
    from worldsize.launch.distribute import distribute

    title = "eval RUN|CHECKPOINT"
    if not argv or argv[0].startswith("-"):
        if not command_line.asks_help(argv):
            raise UserError(f"RUN or CHECKPOINT is required: worldsize {title}")
        command_line.parse(command_line.Evaluate, argv, command_line.Evaluate(Recipe()), title)
    path = checkpoint.find(Path(argv[0]))
    recipe = recipe_files.load(str(path / "recipe.yaml"))
    parsed = command_line.parse(command_line.Evaluate, argv[1:], command_line.Evaluate(recipe), title, recorded=recipe)
    place = discover()

    def work(_: StopFlag) -> int:
        from worldsize.inference.evaluate_checkpoint import evaluate_checkpoint

        result = evaluate_checkpoint(path, parsed, place)
        if place.rank == 0:
            print(f"{path}")
            print(result if parsed.real_labels is None else f"ReaL top-1 {result.top1:.2%} on {count(result.samples)}")
            if result.broken:
                print(f"{count(result.broken)} not counted: could not be decoded")
        return 0

    return distribute(["eval", *argv], parsed.procs, place, work)


def _predict(argv: list[str]) -> int:
    """``worldsize predict``."""
    from worldsize.inference.predict import command

    return command.run(argv)


def _export(argv: list[str]) -> int:
    """``worldsize export``."""
    from worldsize.inference.export import command

    return command.run(argv)


def _labels(argv: list[str]) -> int:
    """``worldsize labels``."""
    from worldsize.inference.labels import command

    return command.run(argv)


def _prove(argv: list[str]) -> int:
    """``worldsize prove``."""
    from worldsize.reproduce.commands import prove

    return prove(argv)


def _replay(argv: list[str]) -> int:
    """``worldsize replay``."""
    from worldsize.reproduce.commands import replay

    return replay(argv)


def _audit(argv: list[str]) -> int:
    """``worldsize audit``."""
    from worldsize.reproduce.commands import audit

    return audit(argv)


def _runs(argv: list[str]) -> int:
    """``worldsize runs``."""
    from worldsize.report import commands

    return commands.runs(argv)


def _compare(argv: list[str]) -> int:
    """``worldsize compare``."""
    from worldsize.report import commands

    return commands.compare(argv)


def _report(argv: list[str]) -> int:
    """``worldsize report``."""
    from worldsize.report import commands

    return commands.report(argv)


def _explain(argv: list[str]) -> int:
    """``worldsize explain``."""
    from worldsize.bench import explain
    from worldsize.distributed.stop_signals import ends_at_once

    with ends_at_once("the run was not changed"):
        return explain.run(argv)


def _tune(argv: list[str]) -> int:
    """``worldsize tune``."""
    from worldsize.tune import command

    return command.run(argv)


def _plan(argv: list[str]) -> int:
    """``worldsize plan``."""
    from worldsize.plan import command

    return command.run(argv)


def _recipes(argv: list[str]) -> int:
    """``worldsize recipes``."""
    from worldsize.config import listing

    return listing.main(argv)


def _strategies(argv: list[str]) -> int:
    """``worldsize strategies``."""
    from worldsize.config.command_line import asks_help

    if argv:
        print("usage: worldsize strategies\n\nLists the parallel strategies, and which of them work on this machine.")
        return 0 if asks_help(argv) else UserError.exit_code
    from worldsize.parallel import availability

    availability.show()
    return 0


def _bench(argv: list[str]) -> int:
    """``worldsize bench``."""
    from worldsize.config import command_line

    def tell(line: str) -> None:
        print(line, flush=True)

    if argv[:1] == ["strategies"]:
        asked = command_line.parse(
            command_line.BenchStrategies, argv[1:], command_line.BenchStrategies(), "bench strategies"
        )
        from worldsize.bench import strategies

        folder = strategies.run(asked, tell)
    elif argv[:1] == ["loader"]:
        asked_loader = command_line.parse(command_line.BenchLoader, argv[1:], None, "bench loader")
        from worldsize.bench import loader

        folder = loader.run(asked_loader, tell)
    elif argv[:1] == ["step"]:
        asked_step = command_line.parse(command_line.BenchStep, argv[1:], None, "bench step")
        from worldsize.bench import step

        folder = step.run(asked_step, tell)
    elif argv[:1] == ["scaling"]:
        from worldsize.bench.scaling import command

        folder = command.run(argv[1:], tell)
    elif argv[:1] == ["allreduce"]:
        from worldsize.bench import allreduce

        return allreduce.main(argv[1:])
    else:
        print("usage: worldsize bench scaling|allreduce|step|strategies|loader ...\n\nBenchmarks; see --help of each.")
        return 0 if command_line.asks_help(argv) else UserError.exit_code
    print(f"\n{(folder.path / 'table.md').read_text('utf-8')}\nAll measurements: {folder.path / 'results.jsonl'}")
    return 0


def _data(argv: list[str]) -> int:
    """``worldsize data``."""
    from worldsize.cli.data import VERBS
    from worldsize.config.command_line import asks_help

    if not argv or argv[0] not in VERBS:
        print(f"usage: worldsize data {'|'.join(VERBS)} ...\n\nHelp for each: worldsize data verify --help")
        return 0 if asks_help(argv) else UserError.exit_code
    return VERBS[argv[0]](argv[1:])


def _env(argv: list[str]) -> int:
    """``worldsize env``."""
    from worldsize.config.command_line import asks_help

    if argv:
        print("usage: worldsize env\n\nShows this machine, and what a run on it would use.")
        return 0 if asks_help(argv) else UserError.exit_code
    from worldsize.training.environment import table

    rows = table()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0
