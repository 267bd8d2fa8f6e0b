"""The loop of asynchronous SGD: all ranks are workers, and rank 0 is also the parameter server.

See `parallel.async_sgd.server` for the algorithm. No process waits for another before the end; rank 0 evaluates a copy of
the weights while the others continue.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from worldsize.checkpoint import Snapshot
from worldsize.data.images.crops import five_crops
from worldsize.distributed import device_errors
from worldsize.distributed.batch_plan import evaluation_batch
from worldsize.errors import Stopped
from worldsize.launch import local_async
from worldsize.models import networks
from worldsize.optim.optimizers import set_lr
from worldsize.parallel.async_sgd.messages import Link, Lost, connect
from worldsize.parallel.async_sgd.server import Grant, Report, Server
from worldsize.parallel.async_sgd.step_ledger import Ledger
from worldsize.parallel.async_sgd.strategy import max_staleness
from worldsize.track.base import Step
from worldsize.training import out_of_memory
from worldsize.training.asynchronous.throughput import Throughput
from worldsize.training.asynchronous.worker import Worker, flatten, replica, unpack
from worldsize.training.base_trainer import BaseTrainer
from worldsize.training.evaluation import Result, evaluate
from worldsize.training.progress import Progress

log = logging.getLogger(__name__)

_POLL_S = 0.2  # how often an idle rank 0 checks for other work
_PATIENCE_S = 10.0  # at the end, with a worker that sends nothing, beyond the time that it may need
_WINDOW = 5  # updates per process over which images/s are measured


@dataclass(frozen=True)
class _Due:
    """A state to evaluate, and what the run had counted by then, as `track.base.Epoch.details`."""

    progress: Progress
    snapshot: Snapshot
    counted: dict[str, Any]


@dataclass
class AsyncTrainer(BaseTrainer):
    """Rank 0 is the parameter server and a worker, the other ranks are workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights = [p.detach() for p in self.state.model.parameters()]
        self._speeds = [0.0] * self.world.size
        self._unreported: list[Step] = []  # applied, but not yet passed to the trackers
        self._to_evaluate: deque[_Due] = deque()
        self._to_save: deque[Snapshot] = deque()
        self._collected = time.monotonic()

    def fit(self) -> Result | None:
        weights = sum(w.numel() for w in self._weights)
        gradient = weights + len(self._weights) + self.state.statistics.size
        links = connect(self.world, gradient, weights, self._weights[0].dtype, self.recipe.parallel.timeout_s)
        if self.world.is_main:
            local_async.training_begins()
            return self._serve(links)
        self._work(links[0])
        return None

    def _work(self, link: Link) -> None:
        """Run a worker on a rank other than 0, until rank 0 has no more steps for it."""
        worker = Worker(self.compute, self.train_loader, self.steps_per_epoch)
        link.send_report(None)
        leaving = False
        while (grant := link.receive_grant()).steps:
            report = worker.work(grant)
            leaving = bool(self.stop)
            link.send_report(replace(report, leaving=leaving))
        if leaving or self.stop:
            raise Stopped("this worker submitted its last step")

    def _serve(self, links: dict[int, Link]) -> Result:
        """Run rank 0: serve each link from its own thread, and work in this thread."""
        self._worker = Worker(replica(self.compute, self.state.strategy), self.train_loader, self.steps_per_epoch)
        self._throughput = Throughput(self.plan.global_batch, _WINDOW * self.world.size)
        self._server = Server(
            self._ledger(),
            self.world.size,
            self._apply,
            lambda: flatten(self._weights),
            # Evaluating or saving is too slow: hold back the workers.
            lambda: max(len(self._to_evaluate), len(self._to_save)) > 1,
            self._throughput.stand_still,
        )
        if self.progress.epoch_step == self.steps_per_epoch or self.progress.step >= self.total_steps:
            # The checkpoint was saved at the end of an epoch.
            self._end_epoch()
        threads = {w: threading.Thread(target=self._serve_worker, args=(w, link), daemon=True) for w, link in links.items()}
        for thread in threads.values():
            thread.start()
        try:
            return self._work_on_rank_0()
        except BaseException as error:
            self._server.fail(error)
            raise
        finally:
            self._server.stop(_PATIENCE_S)
            self._join(threads)

    def _join(self, threads: dict[int, threading.Thread]) -> None:
        """Wait until all workers that still answer have got their last message."""
        deadline = time.monotonic() + _PATIENCE_S
        for worker in threads.keys() - self._server.silent:
            threads[worker].join(max(0.0, deadline - time.monotonic()))
            if threads[worker].is_alive():
                log.warning("worker %d does not take its last message; the run ends without it", worker)

    def _ledger(self) -> Ledger:
        progress = self.progress
        bound = max_staleness(self.recipe.parallel, self.world.size)
        return Ledger.resume(self.total_steps, bound, progress.step, progress.step + len(progress.missing), progress.missing)

    def _serve_worker(self, worker: int, link: Link) -> None:
        """The thread on rank 0 that serves one worker."""
        try:
            while True:
                if (report := link.receive_report()) is not None:
                    self.train_loader.broken.merge(report.broken)
                    self._server.push(worker, report)
                grant = self._server.pull(worker)
                assert grant is not None  # without a timeout, pull() waits
                link.send_grant(grant)
                if not grant.steps:
                    return
        except Lost as error:
            self._server.lose(worker, error)
        except Exception as error:
            self._server.fail(error, worker)

    def _work_on_rank_0(self) -> Result:
        """Compute steps on rank 0, with housekeeping between them."""
        grant: Grant | None = None
        result = None
        while True:
            if grant is not None and grant.steps:
                self._server.push(0, self._worker.work(grant))
            result = self._housekeeping() or result
            with self._server.lock:  # makes an update and its consequences atomic
                finished = self._server.ledger.finished and not self._to_evaluate
            if finished:
                break
            grant = self._server.pull(0, _POLL_S)
            if grant is None:  # the last steps are with the others
                self._server.give_up(_PATIENCE_S)
        assert result is not None  # there is an evaluation after the last step
        return result

    def _housekeeping(self) -> Result | None:
        """Metrics, stop, evaluation, checkpoints. Returns the last evaluation made in this call."""
        self._server.check()
        self._collect()
        if self.stop or self.saver.lost:
            self._stop("stopped")
        result = None
        while self._to_evaluate:
            self._save()
            self._collect(everything=True)
            with self._away():
                result = self._evaluate(self._to_evaluate[0])
            with self._server.lock:
                self._to_evaluate.popleft()
                self._server.lock.notify_all()
        if self.saver.due():
            with self._server.lock:
                self._to_save.append(self._snapshot())
        self._save()
        return result

    def _save(self) -> None:
        """Write what waits to be saved, but nothing later than the next state to evaluate.

        That state may be written once more, as the best; what is then on disk of later ones is deleted.
        """
        while self._to_save:
            snapshot = self._to_save[0]
            if self._to_evaluate and self._to_evaluate[0].progress.step < snapshot.step:
                return
            self._collect(everything=True)  # resumed runs do not compute saved steps again, so report them now
            with self._away():
                self.saver.write(snapshot)
            with self._server.lock:
                self._to_save.popleft()
                self._server.lock.notify_all()

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Around what takes long on rank 0 and is no part of a step."""
        begin = time.perf_counter()
        with self._server.away():
            yield
        self._worker.was_away(time.perf_counter() - begin)

    def _stop(self, how: str) -> None:
        self._server.stop(_PATIENCE_S)
        self._collect(everything=True)
        for snapshot in self._to_save:
            self.saver.write(snapshot)
        pending = bool(self._to_evaluate) and self._to_evaluate[-1].progress.step == self.progress.step
        # Saving this snapshot makes a resumed run evaluate it. Evaluations of earlier states are skipped.
        self.saver.write(self._to_evaluate[-1].snapshot if pending else self._snapshot(), wait=True)
        raise Stopped(f"{how} after step {self.progress.step:,} of {self.total_steps:,}")

    def _apply(self, worker: int, report: Report, age: int) -> None:
        """Update the weights with one gradient. Called by the server with its lock held."""
        progress = self.progress
        lr = self.lr(progress.step)
        set_lr(self.state.optimizer, lr)
        assert report.gradient is not None
        gradient = report.gradient.to(self.world.device)
        self.state.statistics.advance(unpack(gradient, self.state.model))
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        progress.step += 1
        progress.epoch_step += 1
        progress.missing = self._server.ledger.missing
        self._record(worker, report, age, lr, gradient.numel() * gradient.element_size())
        every = self.recipe.checkpoint.every_steps
        save = (every is not None and progress.step % every == 0) or self.epoch_save_due()
        if progress.epoch_step == self.steps_per_epoch or progress.step == self.total_steps:
            self._end_epoch(save)
        elif save:
            self._to_save.append(self._snapshot())

    def _end_epoch(self, save: bool = False) -> None:
        progress = self.progress
        due = progress.step >= self.total_steps or (progress.epoch + 1) % self.recipe.evaluate_every == 0
        evaluate = due and progress.evaluated_step != progress.step
        if save or evaluate:
            snapshot = self._snapshot()
            self._to_save.extend([snapshot] * save)  # first: `_save` must not miss it before the evaluation
            self._to_evaluate.extend([_Due(replace(progress), snapshot, self._counted())] * evaluate)
        if progress.step < self.total_steps:
            progress.next_epoch()

    def _counted(self) -> dict[str, Any]:
        if not self.progress.step:
            return {}
        ledger = self._server.ledger
        return {"staleness": [*ledger.staleness], "dropped": sum(ledger.dropped.values()), "speeds": [*self._speeds]}

    def _snapshot(self) -> Snapshot:
        with self._server.away():
            snapshot = self.saver.snapshot(self.progress)
        assert snapshot is not None
        return snapshot

    def _record(self, worker: int, report: Report, age: int, lr: float, sent_bytes: int) -> None:
        seconds, speed = self._throughput.update()
        batch = self.plan.global_batch
        live = self._server.workers
        self._speeds[worker] = batch / max(report.seconds + report.waited_s, 1e-9)
        self._speeds = [speed if rank in live else 0.0 for rank, speed in enumerate(self._speeds)]
        loss, correct, norm = report.values.tolist()
        progress = self.progress
        step = Step(
            step=progress.step,
            epoch=progress.epoch + progress.epoch_step / self.steps_per_epoch,
            loss=loss / batch,
            top1=correct / batch,
            lr=lr,
            grad_norm=norm,
            images_per_s=speed,
            rank_images_per_s=self._speeds,
            step_ms=seconds * 1000,
            data_ms=report.data_s * 1000,
            compute_ms=(report.seconds - report.data_s) * 1000,
            communication_ms=report.waited_s * 1000,
            sent_bytes=sent_bytes,
            broken=self.train_loader.broken.count,
            details={"worker": worker, "staleness": age, "workers": len(live)},
        )
        progress.add([step])
        self._unreported.append(step)

    def _collect(self, everything: bool = False) -> None:
        if not everything and time.monotonic() - self._collected < self.recipe.track.every_seconds:
            return
        self._collected = time.monotonic()
        with self._server.lock:
            steps, self._unreported = self._unreported, []
        self.trackers.steps(steps)
        self.check_finite(steps)
        self.check_broken(self.train_loader.broken.count, self.train_loader)

    def _evaluate(self, due: _Due) -> Result:
        """Evaluate an earlier state, and save it if it is the best or the last one."""
        past, snapshot, begin = due.progress, due.snapshot, time.monotonic()
        model = copy.deepcopy(self.state.model)
        snapshot.wait()
        networks.load_state(model, snapshot.model)
        batch = evaluation_batch(self.recipe, self.world.device.type)
        remedy = partial(out_of_memory.of_evaluation, batch, self.recipe, self.plan)
        with device_errors.explained(self.world.rank, remedy):
            result = evaluate(
                model,
                self.val_loader,
                self.state.objective.normalise,
                self.state.objective.precision,
                self.world.alone(),
                batch,
                lambda: bool(self.stop),
                lambda samples: self.trackers.evaluating(samples, len(self.val_loader.samples)),
                self.recipe.data.val_mirror,
                five_crops(self.recipe.data),
                ahead=self.recipe.data.device_prefetch,
            )
        if result is None:
            self._stop("stopped while evaluating,")
        assert result is not None
        self.check_broken(result.broken, self.val_loader)
        if not math.isfinite(result.loss):
            self.diverged(f"the validation loss is {result.loss}", past.step, self.peak_lr)
        with self._server.lock:
            best = self.progress.evaluated(result, past)
            updated = ("best_top1", "best_map", "best_epoch", "evaluation", "evaluated_step")  # changed since the snapshot
            past = replace(past, **{name: getattr(self.progress, name) for name in updated})
        epoch = past.report(result, self.plan.global_batch, time.monotonic() - begin)
        self.trackers.epoch(replace(epoch, details=due.counted))
        last = past.step >= self.total_steps
        if last or (best and self.recipe.checkpoint.best):
            self.saver.write(replace(snapshot, state=snapshot.state | past.as_dict()), wait=last)
        return result
