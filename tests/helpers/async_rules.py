"""Rules of `sabotage` for asynchronous runs: they record what happens, or bring workers into an order."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from worldsize.launch import local_async
from worldsize.training import saver
from worldsize.training.asynchronous import throughput, trainer, worker


def recording_steps() -> None:
    """Write to applied.txt, one line per update, the step whose gradient the parameter server applied."""
    apply = trainer.AsyncTrainer._apply

    def recorded(self, worker, report, age):
        apply(self, worker, report, age)
        with Path("applied.txt").open("a") as file:
            print(report.step, file=file)

    trainer.AsyncTrainer._apply = recorded


def others_first() -> None:
    """Rank 0 computes no gradient while the others get work."""
    work = trainer.AsyncTrainer._work_on_rank_0

    def late(self):
        server = self._server
        while not (server.ledger.finished or server.hold() or server.workers == {0}):
            time.sleep(0.01)
        return work(self)

    trainer.AsyncTrainer._work_on_rank_0 = late


def lost_while_connecting() -> None:
    """Rank 1 is killed when the processes of an asynchronous run connect."""
    if os.environ.get("RANK") == "1":
        trainer.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def evaluations_of_an_hour() -> None:
    """On the clock of asynchronous training, each evaluation and each saving takes an hour more."""
    evaluate, write, skipped = trainer.AsyncTrainer._evaluate, saver.Saver.write, 0

    def late(work):
        def run(*arguments, **options):
            nonlocal skipped
            skipped += 3600
            return work(*arguments, **options)

        return run

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped, monotonic=time.monotonic)
    trainer.time = worker.time = throughput.time = clock
    trainer.AsyncTrainer._evaluate, saver.Saver.write = late(evaluate), late(write)


def standing_still() -> None:
    """Rank 1 stops in its second step. Rank 0 and the launcher do not wait long for it; also `recording_steps`."""
    work, calls = worker.Worker.work, itertools.count(1)

    def stopped(self, grant):
        if os.environ["RANK"] == "1" and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return work(self, grant)

    worker.Worker.work = stopped
    trainer._PATIENCE_S, local_async._EXIT_TIMEOUT_S = 1.0, 1
    recording_steps()
