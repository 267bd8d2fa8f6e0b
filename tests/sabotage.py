"""Breaks one rule of worldsize in this process, then runs it: ``python sabotage.py RULE train ...``.

The exactness tests use it to show that they would notice. Others break nothing: they look, or take a limit away.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from worldsize import asynchronous, cli, model, worker
from worldsize.data import loader
from worldsize.parallel import base, ddp, hooks


def no_synchronisation() -> None:
    """Every rank keeps its own gradient."""
    ddp.Strategy.gradients = lambda self, last: self._ddp.no_sync()


def plain_momentum() -> None:
    """BatchNorm's usual moving average, micro-batch after micro-batch."""
    model.micro_momentum = lambda momentum, a, accumulation: momentum


def own_statistics() -> None:
    """Rank 0's running statistics instead of everybody's."""
    model.average = lambda tensors, world: None


def order_by_rank() -> None:
    """Each rank shuffles for itself."""
    training = loader.Loader.training

    def own(self, plan, rank, epoch, first_step=0):
        self._order = loader.FullShuffle(self._seed + rank, len(self.samples))
        return training(self, plan, rank, epoch, first_step)

    loader.Loader.training = own


def full_rank() -> None:
    """PowerSGD also where the two factors are larger than the matrix."""
    hooks.PowerSGD.min_compression = 0.0


def counting() -> None:
    """Note in sent-RANK.txt, a line a step, the bytes that this rank really hands to collectives and to other ranks."""
    sent = 0
    all_reduce, batch_isend_irecv, take = dist.all_reduce, dist.batch_isend_irecv, base.Exchange.take

    def count(tensor):
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()

    def counted_all_reduce(tensor, *arguments, group=None, **options):
        if group is None:  # not the control messages, which have a group of their own
            count(tensor)
        return all_reduce(tensor, *arguments, group=group, **options)

    def counted_batch(operations):
        for operation in operations:
            if operation.op is dist.isend:
                count(operation.tensor)
        return batch_isend_irecv(operations)

    def noted_take(self):
        nonlocal sent
        with Path(f"sent-{os.environ['RANK']}.txt").open("a") as file:
            print(sent, file=file)
        sent = 0
        return take(self)

    dist.all_reduce, dist.batch_isend_irecv, base.Exchange.take = counted_all_reduce, counted_batch, noted_take


def noting_steps() -> None:
    """Note in applied.txt, a line an update, which step's gradient the parameter server applied."""
    apply = asynchronous.AsyncTrainer._apply

    def noted(self, worker, report, age):
        apply(self, worker, report, age)
        with Path("applied.txt").open("a") as file:
            print(report.step, file=file)

    asynchronous.AsyncTrainer._apply = noted


def one_slow_worker() -> None:
    """A step takes every worker 80 ms more, and rank 2, from update 40 on, 600 ms; an evaluation 300; and `noting_steps`."""
    work, evaluate = worker.Worker.work, asynchronous.AsyncTrainer._evaluate

    def slowly(self, grant):
        begun = time.perf_counter()
        report = work(self, grant)
        time.sleep(0.6 if os.environ["RANK"] == "2" and grant.version >= 40 else 0.08)
        self._handed_in = time.perf_counter()
        return replace(report, seconds=self._handed_in - begun)

    def slowly_evaluate(self, at, snapshot):
        time.sleep(0.3)  # in which others move the weights on
        return evaluate(self, at, snapshot)

    worker.Worker.work, asynchronous.AsyncTrainer._evaluate = slowly, slowly_evaluate
    noting_steps()


def stopping() -> None:
    """As if a signal came after update 2, and after the last one of the first epoch."""
    apply = asynchronous.AsyncTrainer._apply

    def stopped(self, worker, report, age):
        apply(self, worker, report, age)
        if self.progress.step in (2, self.steps_per_epoch):
            self.stop._handle(signal.SIGTERM)

    asynchronous.AsyncTrainer._apply = stopped


def failing_update() -> None:
    """The parameter server cannot apply what worker 1 brings."""
    apply = asynchronous.AsyncTrainer._apply

    def failed(self, worker, report, age):
        if worker == 1:
            raise RuntimeError("an update failed")
        apply(self, worker, report, age)

    asynchronous.AsyncTrainer._apply = failed


def long_last_update() -> None:
    """The last update is worker 1's and takes long, and rank 0 looks just then whether all is done."""
    apply, look_after, work = asynchronous.AsyncTrainer._apply, asynchronous.AsyncTrainer._look_after, worker.Worker.work

    def slowly(self, worker, report, age):
        if self.progress.step == self.total_steps - 1:
            time.sleep(0.3)
        apply(self, worker, report, age)

    def looking(self):
        result, ledger = look_after(self), self._server.ledger
        while ledger.version == self.total_steps - 1 and not ledger.claims.get(0):
            time.sleep(0.01)
        return result

    def late(self, grant):
        report = work(self, grant)
        time.sleep(0.3 * int(os.environ["RANK"]))
        return report

    asynchronous.AsyncTrainer._apply, asynchronous.AsyncTrainer._look_after = slowly, looking
    worker.Worker.work = late


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    raise SystemExit(cli.main(sys.argv[2:]))
