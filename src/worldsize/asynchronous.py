"""The loop of asynchronous SGD: workers that compute, and rank 0, which also keeps the weights.

`parallel.parameter_server` is the algorithm. No process waits for another here; rank 0 evaluates a copy of the weights
while the others go on.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from worldsize import parallel
from worldsize.checkpoint import Snapshot
from worldsize.errors import Stopped
from worldsize.evaluate import Result, evaluate
from worldsize.loop import Loop
from worldsize.optim import set_lr
from worldsize.parallel.ledger import Ledger
from worldsize.parallel.link import Link, Lost, connect
from worldsize.parallel.parameter_server import Grant, Report, Server
from worldsize.progress import Progress
from worldsize.track.base import Step
from worldsize.worker import Worker, flatten, replica

_LOOK_S = 0.2  # how often rank 0 looks around while it has no step to compute


@dataclass
class AsyncTrainer(Loop):
    """Rank 0 serves and works, the others work."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights = [p.detach() for p in self.state.model.parameters()]
        self._statistics = list(self.state.statistics.tensors().values())
        self._speeds = [0.0] * self.world.size
        self._new: list[Step] = []  # applied, and not yet told to the trackers
        self._boundaries: deque[tuple[Progress, Snapshot]] = deque()  # states to evaluate
        self._save_due = False
        self._applied_at = time.perf_counter()
        self._collected = time.monotonic()

    def fit(self) -> Result | None:
        weights = sum(w.numel() for w in self._weights)
        gradient = weights + sum(s.numel() for s in self._statistics)
        links = connect(self.world, gradient, weights, self._weights[0].dtype, self.recipe.parallel.timeout_s)
        if self.world.is_main:
            return self._serve(links)
        self._work(links[0])
        return None

    def _work(self, link: Link) -> None:
        """As any other rank: until rank 0 has no more steps for us."""
        worker = Worker(self.compute, self.training, self.steps_per_epoch)
        link.send_report(None)
        leaving = False
        while (grant := link.receive_grant()).steps:
            report = worker.work(grant)
            self.check_broken(len(self.training.broken.new), self.training)
            leaving = bool(self.stop)
            link.send_report(replace(report, leaving=leaving))
        if leaving or self.stop:
            raise Stopped("this worker has handed in its last step")

    def _serve(self, links: dict[int, Link]) -> Result:
        """As rank 0: serve the links from threads of their own, and work beside them."""
        self._server = Server(
            self._ledger(),
            self.world.size,
            self._apply,
            lambda: flatten(self._weights),
            lambda: len(self._boundaries) > 1,  # evaluation does not keep up
        )
        if self.progress.epoch_step == self.steps_per_epoch or self.progress.step >= self.total_steps:
            # It was saved at the end of an epoch.
            self._end_epoch()
        threads = [threading.Thread(target=self._answer, args=(w, link), daemon=True) for w, link in links.items()]
        for thread in threads:
            thread.start()
        try:
            result = self._work_beside()
        except BaseException as error:
            self._server.fail(error)
            raise
        finally:
            for thread in threads:
                thread.join(self.recipe.parallel.timeout_s)
        return result

    def _ledger(self) -> Ledger:
        at = self.progress
        bound = parallel.max_staleness(self.recipe.parallel, self.world.size)
        return Ledger.resume(self.total_steps, bound, at.step, at.step + len(at.missing), at.missing)

    def _answer(self, worker: int, link: Link) -> None:
        """A worker's thread on rank 0."""
        try:
            while True:
                if (report := link.receive_report()) is not None:
                    self._server.push(worker, report)
                grant = self._server.pull(worker)
                assert grant is not None  # without a limit it waits
                link.send_grant(grant)
                if not grant.steps:
                    return
        except Lost as error:
            self._server.lose(worker, error)
        except Exception as error:
            self._server.fail(error)

    def _work_beside(self) -> Result:
        """Rank 0's own work, and what is to be done between its steps."""
        worker = Worker(replica(self.compute, self.state.strategy), self.training, self.steps_per_epoch)
        grant: Grant | None = None
        result = None
        while True:
            if grant is not None and grant.steps:
                self._server.push(0, worker.work(grant))
            result = self._look_after() or result
            with self._server.lock:  # in which an update and what follows from it are one
                over = self._server.ledger.finished and not self._boundaries
            if over:
                break
            grant = self._server.pull(0, _LOOK_S)
        assert result is not None  # the last step ends in an evaluation
        return result

    def _look_after(self) -> Result | None:
        """Metrics, stop, evaluation, checkpoints. Returns the last evaluation made here."""
        self._server.check()
        self._collect()
        if self.stop:
            self._stop("stopped")
        result = None
        while self._boundaries:
            self._collect(everything=True)
            result = self._evaluate(*self._boundaries[0])
            with self._server.lock:
                self._boundaries.popleft()
                self._server.lock.notify_all()
        if self._save_due or self.saver.due():
            self._save_due = False
            with self._server.lock:
                snapshot = self._snapshot()
            self._collect(everything=True)  # what is saved will not be computed again
            self.saver.write(snapshot)
        return result

    def _stop(self, how: str) -> None:
        self._server.stop(self.recipe.parallel.timeout_s)
        self._collect(everything=True)
        at_boundary = bool(self._boundaries) and self._boundaries[-1][0].step == self.progress.step
        # So that its evaluation is made when the run goes on. One that others have left behind is not made.
        self.saver.write(self._boundaries[-1][1] if at_boundary else self._snapshot(), wait=True)
        raise Stopped(f"{how} after step {self.progress.step:,} of {self.total_steps:,}")

    def _apply(self, worker: int, report: Report, age: int) -> None:
        """The server moves the weights by one gradient; its lock is held."""
        at = self.progress
        lr = self.lr(at.step)
        set_lr(self.state.optimizer, lr)
        assert report.gradient is not None
        gradient = report.gradient.to(self.world.device)
        parameters = list(self.state.model.parameters())
        sizes = [t.numel() for t in self._weights + self._statistics]
        parts = gradient.split(sizes)
        for parameter, part in zip(parameters, parts, strict=False):
            parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))
        statistics = [p.view(s.shape) for p, s in zip(parts[len(parameters) :], self._statistics, strict=True)]
        self.state.statistics.advance(statistics)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        at.step += 1
        at.epoch_step += 1
        at.missing = self._server.ledger.missing
        self._record(worker, report, age, lr, gradient.numel() * gradient.element_size())
        every = self.recipe.checkpoint.every_steps
        self._save_due |= every is not None and at.step % every == 0
        if at.epoch_step == self.steps_per_epoch or at.step == self.total_steps:
            self._end_epoch()

    def _end_epoch(self) -> None:
        at = self.progress
        due = at.step >= self.total_steps or (at.epoch + 1) % self.recipe.evaluate_every == 0
        if due and at.evaluated_step != at.step:
            self._boundaries.append(self._boundary())
        if at.step < self.total_steps:
            at.next_epoch()

    def _boundary(self) -> tuple[Progress, Snapshot]:
        return replace(self.progress), self._snapshot()

    def _snapshot(self) -> Snapshot:
        snapshot = self.saver.snapshot(self.progress)
        assert snapshot is not None
        return snapshot

    def _record(self, worker: int, report: Report, age: int, lr: float, sent_bytes: int) -> None:
        now = time.perf_counter()
        step_ms, self._applied_at = (now - self._applied_at) * 1000, now
        batch = self.plan.global_batch
        live = self._server.workers
        self._speeds[worker] = batch / max(report.seconds + report.waited_s, 1e-9)
        self._speeds = [speed if rank in live else 0.0 for rank, speed in enumerate(self._speeds)]
        loss, hits, norm = report.values.tolist()
        at = self.progress
        step = Step(
            step=at.step,
            epoch=at.epoch + at.epoch_step / self.steps_per_epoch,
            loss=loss / batch,
            top1=hits / batch,
            lr=lr,
            grad_norm=norm,
            images_per_s=sum(self._speeds),
            rank_images_per_s=self._speeds,
            step_ms=step_ms,
            data_ms=report.data_s * 1000,
            compute_ms=(report.seconds - report.data_s) * 1000,
            communication_ms=report.waited_s * 1000,
            sent_bytes=sent_bytes,
            broken=len(self.training.broken.known) + len(self.training.broken.new),
            details={"worker": worker, "staleness": age, "workers": len(live)},
        )
        at.add([step])
        self._new.append(step)

    def _collect(self, everything: bool = False) -> None:
        if not everything and time.monotonic() - self._collected < self.recipe.track.every_seconds:
            return
        self._collected = time.monotonic()
        with self._server.lock:
            steps, self._new = self._new, []
        self.trackers.steps(steps)
        self.check_finite(steps)
        self.check_broken(len(self.training.broken.new), self.training)

    def _evaluate(self, at: Progress, snapshot: Snapshot) -> Result:
        """Evaluate a state of the past, and keep what came out with it."""
        begun = time.monotonic()
        judged = copy.deepcopy(self.state.model)
        judged.load_state_dict(snapshot.model)
        result = evaluate(
            judged,
            self.validation,
            self.compute.normalise,
            self.compute.precision,
            self.world.alone(),
            self.plan.micro_batch,
            lambda: bool(self.stop),
            lambda samples: self.trackers.evaluating(samples, len(self.validation.samples)),
        )
        if result is None:
            self._stop("stopped while evaluating,")
        assert result is not None
        self.check_broken(result.broken, self.validation)
        if not math.isfinite(result.loss):
            self.diverged(f"the validation loss is {result.loss}", at.step, self.peak_lr)
        with self._server.lock:
            best = self.progress.evaluated(result, at)
            known = ("best_top1", "best_epoch", "evaluation", "evaluated_step")  # more than when the snapshot was taken
            at = replace(at, **{name: getattr(self.progress, name) for name in known})
        ledger = self._server.ledger
        details = {"staleness": list(ledger.staleness), "dropped": sum(ledger.dropped.values()), "speeds": self._speeds}
        self.trackers.epoch(replace(at.report(result, self.plan.global_batch, time.monotonic() - begun), details=details))
        last = at.step >= self.total_steps
        if last or (best and self.recipe.checkpoint.best):
            self.saver.write(replace(snapshot, state=snapshot.state | at.as_dict()), wait=last)
        return result
