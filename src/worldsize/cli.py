"""The front door: one function per command, no logic of its own. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize import __version__
from worldsize.errors import UserError, WorldsizeError
from worldsize.signals import StopFlag, end_with_parent

if TYPE_CHECKING:
    from worldsize.place import Place

_HELP = f"""worldsize {__version__}: train image classifiers at any world size

  worldsize train RECIPE [--procs N] [--SETTING VALUE ...]    train; RECIPE is a name or a YAML file
  worldsize train --resume RUN [--procs N]                    go on exactly where a run stopped
  worldsize eval RUN|CHECKPOINT [--SETTING VALUE ...]         evaluate what was trained
  worldsize recipes [NAME]                                    the named recipes; NAME prints its YAML
  worldsize strategies                                        how processes can agree, and which ways work here
  worldsize bench strategies [--procs N]                      how fast each of them is here
  worldsize bench loader --root FOLDER [--against NAMES]      how fast pictures come, and what the limit is
  worldsize data fetch DATASET --to FOLDER                    download, verify and lay out a data set
  worldsize data verify --root FOLDER                         every picture decoded once: broken, odd, duplicate ones
  worldsize data info FOLDER|SHARDS                           classes, sizes, a page of pictures
  worldsize data pack --root FOLDER --out SHARDS              a data set in a few large files, which train as well
  worldsize env                                               what this machine is and what will be used

On a Kubernetes cluster with Kubeflow (docs/kubernetes.md):
  worldsize cluster check|volume|secret|data|files ...        what it offers; volumes, secrets, data sets, files on it
  worldsize image build --push REPOSITORY                     the image that its pods run
  worldsize train RECIPE --on pytorchjob|mpijob|trainjob ...  train there, and follow the job to its end
  worldsize render RECIPE --on ...                            print what that would send; --on local: a shell script
  worldsize jobs, status|logs|wait|stop|delete NAME           the jobs that are there

Every command explains itself: worldsize train --help
Under torchrun, mpirun or srun the world is found: torchrun --nproc-per-node 8 -m worldsize train RECIPE

Exit codes: 0 done, 64 your input, 65 broken pictures, 66 damaged checkpoints, 69 a process or a store is missing,
70 a defect, 71 no progress, 74 not saved, 75 stopped and saved (--resume goes on), 76 the loss is not finite,
130 and 143 left at once.
Following a job on a cluster: 0 succeeded, 1 failed, 2 refused by preflight, 3 timed out, 130 detached.
"""

_ON_CLUSTERS = ("render", "jobs", "status", "logs", "wait", "stop", "delete", "cluster", "image")
_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code, see `worldsize.errors`."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "agent": _agent,
        "eval": _eval,
        "recipes": _recipes,
        "strategies": _strategies,
        "bench": _bench,
        "data": _data,
        "env": _env,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    try:
        if words[0] in _ON_CLUSTERS:
            from worldsize import cli_cluster

            return cli_cluster.COMMANDS[words[0]](words[1:])
        if words[0] not in commands:
            raise UserError(f"there is no command {words[0]!r}; there are: {', '.join([*commands, *_ON_CLUSTERS])}")
        return commands[words[0]](words[1:])
    except WorldsizeError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left (`worldsize recipes | head`): as any filter, end by SIGPIPE's code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        return _defect(traceback.format_exc())


def _train(argv: list[str]) -> int:
    """``worldsize train``."""
    from worldsize import arguments, catalog, run

    on = arguments.value_of("--on", argv)
    if on == "local":
        argv = arguments.without("--on", argv)
    elif on is not None:
        from worldsize import cli_cluster

        return cli_cluster.train_on(argv)
    from worldsize.place import discover, here
    from worldsize.recipe import Recipe
    from worldsize.request import TrainJob, preflight

    resume = arguments.value_of("--resume", argv)
    folder = run.open_existing(Path(resume)) if resume else None
    source = None if argv[:1] == [] or argv[0].startswith("-") else argv[0]
    if folder is not None and source is not None:
        raise UserError(f"--resume goes on with the recipe of {folder.path}: leave out {source!r}")
    if folder is None and source is None and not _asks_help(argv):
        raise UserError(f"which recipe? worldsize train RECIPE; there are: {', '.join(catalog.names())}; or a YAML file")
    origin = str(folder.recipe) if folder is not None else source
    base = catalog.load(origin) if origin is not None else Recipe()
    parsed = arguments.parse(
        arguments.Train, argv[1:] if source else argv, arguments.Train(base), f"train {source or 'RECIPE'}"
    )
    job = TrainJob(
        recipe=parsed.settings,
        stem=Path(source or "run").stem,
        out=parsed.out,
        name=parsed.name,
        resume=folder,
        allow_changes=parsed.allow_changes,
        autoresume=parsed.autoresume,
        retries=parsed.retries,
    )
    place = discover()
    preflight(job, place if place.size > 1 else here(_positive(parsed.procs)))

    def work(stop: StopFlag) -> int:
        from worldsize.job import train

        if train(job, place, stop) is None and place.rank == 0:
            print(f"{folder.path if folder else job.out / str(job.name)} has reached its last step already; nothing to do")
        return 0

    return _distribute(["train", *argv], parsed.procs, place, work, lenient=job.recipe.parallel.strategy == "async")


def _agent(argv: list[str]) -> int:
    """``worldsize agent``."""
    if argv[:1] != ["--id"] or argv[2:3] != ["--"] or len(argv) < 4:
        print(
            "usage: worldsize agent --id RUN -- train RECIPE ...\n\n"
            "What a pod of a PyTorchJob or TrainJob runs: starts this node's processes, together with those of the other\n"
            "nodes, by the PET_* variables that the operator sets; starts them again when a node was lost. Ends with 143\n"
            "where it was asked to leave (try again), with the run's own exit code where trying again is useless."
        )
        return 0 if _asks_help(argv) else 64
    from worldsize.launch import agent

    outcome = agent.run(argv[3:], agent.discover(argv[1]))
    agent.leave_last_words(outcome.message)
    return _fail(outcome.message, outcome.code) if outcome.code else 0


def _eval(argv: list[str]) -> int:
    """``worldsize eval``."""
    from worldsize import arguments, catalog
    from worldsize.place import discover
    from worldsize.recipe import Recipe

    if (not argv or argv[0].startswith("-")) and not _asks_help(argv):
        raise UserError("what to evaluate? worldsize eval RUN|CHECKPOINT")
    target = None if _asks_help(argv[:1]) else Path(argv[0])
    checkpoint = _checkpoint(target) if target else None
    base = catalog.load(str(checkpoint / "recipe.yaml")) if checkpoint else Recipe()
    parsed = arguments.parse(
        arguments.Evaluate, argv[1:] if target else argv, arguments.Evaluate(base), "eval RUN|CHECKPOINT"
    )
    assert checkpoint is not None
    place = discover()

    def work(_: StopFlag) -> int:
        from worldsize.recheck import evaluate_checkpoint

        # RUN/checkpoints/step-N: listings are cached beside the run.
        cache = checkpoint.absolute().parents[2] / ".cache"
        result = evaluate_checkpoint(checkpoint, parsed.settings, cache, place)
        if place.rank == 0:
            print(f"{checkpoint}")
            print(f"top-1 {result.top1:.2%}, top-5 {result.top5:.2%}, loss {result.loss:.4f} on {result.samples:,} pictures")
            if result.broken:
                print(f"{result.broken} more could not be decoded")
        return 0

    return _distribute(["eval", *argv], parsed.procs, place, work)


def _recipes(argv: list[str]) -> int:
    """``worldsize recipes``."""
    from rich.console import Console
    from rich.table import Table

    from worldsize import catalog

    if _asks_help(argv) or len(argv) > 1:
        print("usage: worldsize recipes [NAME]\n\nWithout a name, the recipes; with one, its YAML with every setting.")
        return 0 if _asks_help(argv) else 64
    if argv:
        print(catalog.to_yaml(catalog.load(argv[0])), end="")
        return 0
    table = Table("recipe", "what it trains", "what it reaches", box=None, header_style="bold", padding=(0, 2, 1, 0))
    for name in catalog.names():
        recipe = catalog.load(name)
        table.add_row(name, recipe.about, recipe.reaches)
    Console().print(table)
    print("worldsize recipes NAME prints one as YAML; worldsize train NAME --help lists what can be changed.")
    return 0


def _strategies(argv: list[str]) -> int:
    """``worldsize strategies``."""
    if argv:
        print("usage: worldsize strategies\n\nHow processes can agree on one model, and what of it works on this machine.")
        return 0 if _asks_help(argv) else 64
    from worldsize.parallel import usable

    usable.show()
    return 0


def _bench(argv: list[str]) -> int:
    """``worldsize bench``."""
    from worldsize import arguments

    def tell(line: str) -> None:
        print(line, flush=True)

    if argv[:1] == ["strategies"]:
        asked = arguments.parse(arguments.BenchStrategies, argv[1:], arguments.BenchStrategies(), "bench strategies")
        from worldsize.bench import strategies

        folder = strategies.run(asked, tell)
    elif argv[:1] == ["loader"]:
        pictures = arguments.parse(arguments.BenchLoader, argv[1:], None, "bench loader")
        from worldsize.bench import loader

        folder = loader.run(pictures, tell)
    else:
        print("usage: worldsize bench strategies|loader ...\n\nMeasures on this machine; --help says what.")
        return 0 if _asks_help(argv) else 64
    print(f"\n{(folder.path / 'table.md').read_text('utf-8')}\nAll figures: {folder.path / 'results.jsonl'}")
    return 0


def _data(argv: list[str]) -> int:
    """``worldsize data``."""
    from worldsize import cli_data

    if argv[:1] == [] or argv[0] not in cli_data.VERBS:
        print(f"usage: worldsize data {'|'.join(cli_data.VERBS)} ...\n\n--help after a verb says more of it.")
        return 0 if _asks_help(argv) else 64
    return cli_data.VERBS[argv[0]](argv[1:])


def _env(argv: list[str]) -> int:
    """``worldsize env``."""
    if argv:
        print("usage: worldsize env\n\nWhat this machine is, and what a run on it will use.")
        return 0 if _asks_help(argv) else 64
    from worldsize.environment import table

    rows = table()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _distribute(argv: list[str], procs: int, place: Place, work: Callable[[StopFlag], int], lenient: bool = False) -> int:
    """Do ``work`` in this process, or have ``procs`` of them started that do; ``lenient``: all but the first may die."""
    if place.size == 1 and _positive(procs) > 1:
        from worldsize.launch import lenient as leniently
        from worldsize.launch import local

        outcome = (leniently if lenient else local).launch(argv, procs)
        return _fail(outcome.message, outcome.code) if outcome.code else 0
    if place.size > 1 and procs not in (1, place.local_size):
        raise UserError(
            f"--procs {procs}, but {place.launcher} started {place.local_size} processes on this machine: leave --procs out"
        )
    _set_threads(place)
    stop = StopFlag(launched=place.size > 1, speak=place.rank == 0)
    stop.install()
    if _is_worker():
        end_with_parent()
    _log_to_terminal(place)
    return work(stop)


def _set_threads(place: Place) -> None:
    """OpenMP reads its number of threads when torch is imported, so it must be there before."""
    from worldsize.place import threads_per_process

    os.environ["OMP_NUM_THREADS"] = str(threads_per_process(place))


def _checkpoint(target: Path) -> Path:
    """The checkpoint that a path means: itself, or a run's newest valid one."""
    from worldsize import checkpoint, run
    from worldsize.errors import CheckpointError

    if (target / "manifest.json").is_file():
        checkpoint.check(target)
        return target
    folder = run.open_existing(target)
    newest = checkpoint.newest_valid(folder.checkpoints)
    if newest is None:
        raise CheckpointError(f"{target} has no checkpoint yet")
    return newest


def _asks_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _positive(procs: int) -> int:
    if procs < 1:
        raise UserError(f"--procs {procs}: at least 1")
    return procs


def _is_worker() -> bool:
    from worldsize.place import LOCAL_LAUNCH

    return LOCAL_LAUNCH in os.environ


def _log_to_terminal(place: Place) -> None:
    class ToStderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # sys.stderr is looked up anew: the live display puts its own there.
            with suppress(OSError):
                print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)

    logger = logging.getLogger("worldsize")
    logger.setLevel(logging.INFO)
    if place.rank == 0:
        logger.addHandler(ToStderr(logging.WARNING))


def _fail(message: str, code: int) -> int:
    """Tell the user what all processes agree on, once, and return the code."""
    from worldsize.launch.agent import retried, worker_exit_code
    from worldsize.launch.local import report

    report(message, code)
    local_rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    if message and local_rank == "0" and (not _is_worker() or retried(code)):
        print(f"worldsize: {message}", file=sys.stderr)
    return worker_exit_code(code)


def _defect(trace: str) -> int:
    """An unexpected exception: this process alone knows of it, so it tells, whatever its rank."""
    from worldsize.launch.agent import retried
    from worldsize.launch.local import report

    message = f"a defect in worldsize or below it; please report this:\n{trace}"
    report(message, 70)
    if not _is_worker() or retried(70):
        print(f"worldsize: {message}", file=sys.stderr)
    launched = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID")
    if os.environ.get("WORLD_SIZE", "1") != "1" or any(name in os.environ for name in launched):
        # Leaving in good order would wait for the other ranks, which wait for this one.
        sys.stderr.flush()
        os._exit(70)
    return 70
