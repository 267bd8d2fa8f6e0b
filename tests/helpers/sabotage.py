"""Breaks one rule of worldsize in this process, then runs it: ``python sabotage.py RULE train ...``.

The exactness tests use it to show that they detect the error. Some functions break nothing: they record what happens,
add delays, or remove a limit.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import itertools
import math
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from async_rules import (  # noqa: F401 they are rules, too
    evaluations_of_an_hour,
    lost_while_connecting,
    others_first,
    recording_steps,
    standing_still,
)
from stalls import dead_storage, endless_step, slow_computer, slow_storage  # noqa: F401 they are rules, too
from waiting import until
from worldsize import cli
from worldsize.checkpoint import format, writer
from worldsize.data.loading import loader
from worldsize.distributed import stop_signals, tree_sum
from worldsize.models import factory
from worldsize.parallel import base
from worldsize.parallel.bitwise import strategy as bitwise
from worldsize.parallel.ddp import compression
from worldsize.parallel.ddp import strategy as ddp
from worldsize.training import early_signs, lost_peers, replicas, state, step
from worldsize.training.asynchronous import trainer, worker
from worldsize.watchdog import watched


def no_synchronization() -> None:
    """Each rank keeps its own gradient, and does not notice that the replicas differ."""
    ddp.Strategy.gradients = lambda self, last: self._ddp.no_sync()
    replicas.Replicas.compare = lambda self, step: None


def last_statistics() -> None:
    """BatchNorm's running statistics of the last micro-batch of each rank instead of all of them."""
    take = factory.RunningStatistics.take

    def last(self):
        take(self)
        self.collect(0)
        return take(self)

    factory.RunningStatistics.take = last


def own_statistics() -> None:
    """Rank 0's running statistics instead of the mean over ranks."""
    factory.average = lambda tensors, world: None


def order_by_rank() -> None:
    """Each rank shuffles with its own seed."""
    training = loader.Loader.training

    def own(self, plan, rank, epoch, first_step=0):
        self._order = loader.FullShuffle(self._seed + rank, len(self.samples))
        return training(self, plan, rank, epoch, first_step)

    loader.Loader.training = own


def from_left_to_right() -> None:
    """The strategy bitwise adds micro-batches one after the other instead of along a tree."""

    def push(self, value, index, level=0):
        self._nodes = [(level, index, self._add(self._nodes[0][2], value) if self._nodes else value)]

    tree_sum.TreeSum.push = push


def mean_before_sum() -> None:
    """The strategy bitwise divides each loss by the micro-batches of its rank."""
    begin, mean = bitwise.Strategy.__init__, bitwise.Strategy.mean

    def divided(self, parts):
        begin(self, parts)
        self.loss_divisor = parts.accumulation
        self._reducer._tree_mean._scale = 1 / parts.world.size

    bitwise.Strategy.__init__ = divided
    bitwise.Strategy.mean = lambda self, nodes: mean(self, nodes) / self._accumulation


def statistics_averaged_when_saved() -> None:
    """The strategy bitwise keeps a moving average per rank, as the other strategies do."""
    bitwise.Strategy.mean = base.Strategy.mean
    state.TrainState.consensus = lambda self, world, step: self.statistics.averaged(world, step)


def separate_disks() -> None:
    """The other ranks do not see rank 0's folder."""
    writer._opens = lambda path: os.environ["RANK"] == "0"


def full_rank() -> None:
    """Use PowerSGD even if the two factors are larger than the matrix."""
    compression.PowerSGD.min_compression = 0.0


def full_gpu_of_rank_1() -> None:
    """Rank 1 runs out of the memory of its GPU in the second step."""
    run = step.StepRunner.run

    def failing(self, batches, number, *arguments):
        if number == 1 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return run(self, batches, number, *arguments)

    step.StepRunner.run = failing


def unreadable_on_rank_1() -> None:
    """Rank 1 cannot read checkpoints: its disk fails."""
    if os.environ["RANK"] == "1":

        def failing(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        format.sha256 = failing


def counting() -> None:
    """Write to sent-RANK.txt, one line per step, the bytes that this rank actually passes to collectives and other ranks."""
    sent = 0
    all_reduce, batch_isend_irecv, take = dist.all_reduce, dist.batch_isend_irecv, base.Exchange.take

    def count(tensor):
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()

    def counted_all_reduce(tensor, *arguments, group=None, **options):
        if group is None:  # excludes control messages, which use another group
            count(tensor)
        return all_reduce(tensor, *arguments, group=group, **options)

    def counted_batch(operations):
        for operation in operations:
            if operation.op is dist.isend:
                count(operation.tensor)
        return batch_isend_irecv(operations)

    def recorded_take(self):
        nonlocal sent
        with Path(f"sent-{os.environ['RANK']}.txt").open("a") as file:
            print(sent, file=file)
        sent = 0
        return take(self)

    dist.all_reduce, dist.batch_isend_irecv, base.Exchange.take = counted_all_reduce, counted_batch, recorded_take


def one_slow_worker() -> None:
    """From update 40 on, a step of rank 2 takes as long as 12 updates of the others; also `recording_steps`."""
    work, evaluate = worker.Worker.work, trainer.AsyncTrainer._evaluate

    def slowly(self, grant):
        begin = time.perf_counter()
        report = work(self, grant)
        if os.environ["RANK"] == "2" and grant.version >= 40:
            _wait_for_updates(12)
        else:
            time.sleep(0.03)  # whoever computes alone must not do all the work
        self._submitted_at = time.perf_counter()
        return replace(report, seconds=self._submitted_at - begin)

    def slowly_evaluate(self, due):
        time.sleep(0.3)  # others update the weights meanwhile
        return evaluate(self, due)

    worker.Worker.work, trainer.AsyncTrainer._evaluate = slowly, slowly_evaluate
    recording_steps()


def _wait_for_updates(more: int) -> None:
    """Wait until the server has applied this many more of its 130 updates, or 120 in all: some are this rank's own."""
    log = Path("applied.txt")
    target = min(len(log.read_text().split()) + more, 120)
    deadline = time.monotonic() + 120
    while len(log.read_text().split()) < target:
        assert time.monotonic() < deadline, "the others wait for this rank"
        time.sleep(0.01)


def stopping() -> None:
    """Simulate a signal after update 2, and after the last update of the first epoch."""
    apply = trainer.AsyncTrainer._apply

    def stopped(self, worker, report, age):
        apply(self, worker, report, age)
        if self.progress.step in (2, self.steps_per_epoch):
            self.stop._handle(signal.SIGTERM)

    trainer.AsyncTrainer._apply = stopped


def failing_update() -> None:
    """The parameter server fails when it applies a gradient of worker 1."""
    apply = trainer.AsyncTrainer._apply

    def failed(self, worker, report, age):
        if worker == 1:
            raise RuntimeError("an update failed")
        apply(self, worker, report, age)

    trainer.AsyncTrainer._apply = failed


def long_last_update() -> None:
    """The last update is worker 1's and takes long, and rank 0 checks during it whether the run is finished."""
    apply, housekeeping, work = trainer.AsyncTrainer._apply, trainer.AsyncTrainer._housekeeping, worker.Worker.work

    def slowly(self, worker, report, age):
        if self.progress.step == self.total_steps - 1:
            time.sleep(0.3)
        apply(self, worker, report, age)

    def waiting(self):
        result, ledger = housekeeping(self), self._server.ledger
        while ledger.version == self.total_steps - 1 and not ledger.claims.get(0):
            time.sleep(0.01)
        return result

    def late(self, grant):
        report = work(self, grant)
        time.sleep(0.3 * int(os.environ["RANK"]))
        return report

    trainer.AsyncTrainer._apply, trainer.AsyncTrainer._housekeeping = slowly, waiting
    worker.Worker.work = late


def unhurried() -> None:
    """After UNHURRIED_AFTER steps, each step takes half a second longer, until there is a file named go."""
    run, after = step.StepRunner.run, int(os.environ["UNHURRIED_AFTER"])

    def pausing(self, batches, number, *arguments):
        if number >= after and not Path("go").exists():
            time.sleep(0.5)
        return run(self, batches, number, *arguments)

    step.StepRunner.run = pausing


def flipped_bit() -> None:
    """In the sixth step, once in a folder, rank 1 changes a bit of a weight. With OTHER_HARDWARE, it has another CPU."""
    run, steps = step.StepRunner.run, itertools.count(1)

    def flipping(self, *arguments):
        result = run(self, *arguments)
        if os.environ["RANK"] == "1" and next(steps) == 6 and not Path("flipped").exists():
            Path("flipped").touch()
            self.compute.state.model.fc.weight.detach().view(torch.int32)[0, 0] ^= 1
        return result

    step.StepRunner.run = flipping
    if "OTHER_HARDWARE" in os.environ:
        replicas.device_name = lambda kind: os.environ["RANK"]


def nan_on_rank_1() -> None:
    """Before the third step, a weight of rank 1 becomes NaN."""
    run, steps = step.StepRunner.run, itertools.count(1)

    def damaged(self, *arguments):
        if os.environ["RANK"] == "1" and next(steps) == 3:
            self.compute.state.model.fc.weight.data[0, 0] = math.nan
        return run(self, *arguments)

    step.StepRunner.run = damaged


def no_heartbeat() -> None:
    """The disk has no room for the heartbeat."""

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watched.tempfile = SimpleNamespace(TemporaryFile=full)


def deadlock() -> None:
    """In rank 1's sixth step, a lock is taken twice."""
    update = base.Strategy.update

    def locked(self, *arguments):
        if os.environ["RANK"] == "1" and next(steps) == 5:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return update(self, *arguments)

    steps = itertools.count()
    base.Strategy.update = locked


def as_on_gpus() -> None:
    """Lost peers are noticed as with NCCL, and fast."""
    begin = lost_peers.LostPeers.__init__
    lost_peers.LostPeers.__init__ = lambda self, world: begin(self, replace(world, backend="nccl"), 0.1, 1.0)


def lost_while_gpus_wait() -> None:
    """Rank 1 is killed at a PLACE, such as worldsize.models.factory.build, where the others wait for their GPU forever."""
    as_on_gpus()
    module, _, name = os.environ["PLACE"].rpartition(".")

    def wait(*_, **__):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.SIGNALS)
        ctypes.CDLL(None).sleep(3600)

    setattr(pkgutil.resolve_name(module), name, wait)


def own_cgroup() -> None:
    """The processes are in the cgroup that the folder cgroup describes."""
    early_signs.ROOT, early_signs.MEMBERSHIP = Path("cgroup"), Path("cgroup/membership")


def long_echo() -> None:
    """However slow the machine is, a signal from the launcher is the echo of one that the process has got already."""
    stop_signals.ECHO_S = 3600.0


def small_gpu() -> None:
    """This process can use only 4 GiB of the GPU's memory."""
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)


def no_room_for_a_megabyte() -> None:
    """Files end at one megabyte, as on a disk that gets full. Python ignores the signal that comes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    raise SystemExit(cli.main(sys.argv[2:]))


def late_signal() -> None:
    """When all ranks have done their work, each sends the launcher the signal LATE_SIGNAL, which the launcher passes on."""
    if "LATE_SIGNAL" in os.environ and "RANK" in os.environ:
        atexit.register(_signal_together, getattr(signal, os.environ["LATE_SIGNAL"]))


def _signal_together(number: int) -> None:
    done = [Path(f"done-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    done[int(os.environ["RANK"])].touch()
    until(lambda: all(path.exists() for path in done), "the end of the other ranks' work")
    os.kill(os.getppid(), number)
