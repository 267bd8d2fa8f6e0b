"""The parameter server in one process: which worker gets which step and when; the workers' images and statistics."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from worldsize.data.images.crops import PadCrop
from worldsize.data.loading.loader import Loader, Stream
from worldsize.data.samples import ArraySamples
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.tree_sum import fold
from worldsize.models.factory import RunningStatistics
from worldsize.parallel.async_sgd.server import Report, Server
from worldsize.parallel.async_sgd.step_ledger import Ledger

TIMEOUT_S = 120.0  # for events that must happen


def report(step: int, version: int, gradient: bool = True, leaving: bool = False) -> Report:
    return Report(step, version, torch.ones(1) if gradient else None, torch.zeros(3), 0.0, 0.0, 0.0, leaving)


class Applied(list):
    """The gradients that a server applied, as (worker, step, age)."""

    def __call__(self, worker: int, report: Report, age: int) -> None:
        self.append((worker, report.step, age))


def serve(total: int, workers: int = 3, bound: int = 4) -> tuple[Server, Applied]:
    applied = Applied()
    return Server(Ledger(total, bound), workers, applied, lambda: torch.zeros(1)), applied


def background(work, *arguments) -> Future:
    result: Future = Future()

    def run():
        try:
            result.set_result(work(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def waiting_pull(server: Server, worker: int) -> Future:
    """The pending result of a worker's pull() that found no step and now waits."""
    asked, hold = threading.Event(), server.hold
    server.hold = lambda: asked.set() or hold()  # called with the lock held, which only waiting releases
    answer = background(server.pull, worker)
    assert asked.wait(TIMEOUT_S)
    with server.lock:
        server.hold = hold
        assert not answer.done()
    return answer


def got(answer: Future) -> list[int]:
    return answer.result(TIMEOUT_S).steps


@pytest.mark.parametrize("how", ["lost", "left", "dropped", "overflow"])
def test_a_waiting_worker_gets_the_steps_that_another_does_not_complete(how):
    server, applied = serve(total=4, bound=1)
    old = server.pull(1)
    for _ in range(2):
        grant = server.pull(0)
        server.push(0, report(grant.steps[0], grant.version))
    assert (old.steps, server.pull(2, 0.01)) == ([0, 1], None)
    answer = waiting_pull(server, 2)
    if how == "lost":
        server.lose(1, RuntimeError("gone"))
    elif how == "left":
        server.push(1, report(0, 2, leaving=True))
    elif how == "dropped":
        server.push(1, report(0, old.version))
    else:
        server.push(1, report(0, 2, gradient=False))
    assert got(answer) == {"lost": [0, 1], "left": [1]}.get(how, [0])
    assert [step for _, step, _ in applied] == [2, 3] + [0] * (how == "left")
    assert server.workers == ({0, 2} if how in ("lost", "left") else {0, 1, 2})


def test_waiting_ends_with_the_last_step():
    server, _ = serve(total=1, workers=2)
    grant = server.pull(0)
    answer = waiting_pull(server, 1)
    server.push(0, report(*grant.steps, grant.version))
    assert got(answer) == []
    assert server.ledger.finished


def test_gradients_that_are_too_old_are_not_applied_and_reported_once(caplog):
    server, applied = serve(total=100, bound=1)
    for _ in range(12):
        old = server.pull(1)
        for _ in range(2):
            grant = server.pull(0)
            server.push(0, report(grant.steps[0], grant.version))
        server.push(1, report(old.steps[0], old.version))
    assert {worker for worker, _, _ in applied} == {0}
    assert server.ledger.dropped == {1: 12}
    assert caplog.text.count("worker 1: 10 gradients were more than 1 updates old and were dropped") == 1


def test_stop_waits_for_running_steps_and_assigns_no_more():
    server, applied = serve(total=10)
    grants = {worker: server.pull(worker) for worker in range(3)}
    server.push(2, report(grants[2].steps[0], 0))
    server.hold = lambda: True
    idle = waiting_pull(server, 2)
    stopping = background(server.stop, TIMEOUT_S)
    assert got(idle) == []
    assert not stopping.done()
    server.push(1, report(grants[1].steps[0], 0))
    assert server.pull(1).steps == []
    stopping.result(TIMEOUT_S)
    assert applied == [(2, 4, 0), (1, 2, 1)]
    assert server.workers == set()
    assert server.ledger.missing == [0, 1, 3, 5]  # 6 was never assigned


def test_stop_does_not_wait_forever(caplog):
    server, _ = serve(total=10)
    server.pull(1)
    background(server.stop, 0.01).result(TIMEOUT_S)
    assert (server.workers, server.silent) == (set(), {1, 2})
    assert caplog.text.count("; the run ends without it") == 2


def test_a_silent_worker_is_given_up_and_others_take_over_its_steps(caplog):
    server, applied = serve(total=2, workers=3)
    grant = server.pull(1)
    answer = waiting_pull(server, 2)
    server.give_up(TIMEOUT_S)
    assert server.workers == {0, 1, 2}
    server.give_up(-1)
    assert got(answer) == [0, 1]
    assert server.workers == {0, 2}  # not the one that waited for work
    server.push(1, report(grant.steps[0], grant.version))  # it wakes up
    assert (applied, server.pull(1).steps) == ([], [])
    assert "lost worker 1 (it has sent nothing for 0 s); 2 workers continue and take over its batches" in caplog.text


def test_a_failure_on_rank_0_ends_all_workers():
    server, _ = serve(total=2)
    server.check()
    grant = server.pull(0)
    answers = [waiting_pull(server, worker) for worker in (1, 2)]
    server.fail(MemoryError("first"))
    server.fail(KeyError("second"))
    assert [got(answer) for answer in answers] == [[], []]
    assert server.pull(0).steps == [] != grant.steps
    with pytest.raises(MemoryError, match="first"):
        server.check()


def test_hold_blocks_other_workers_but_not_rank_0():
    server, _ = serve(total=10)
    server.hold = lambda: True
    answer = waiting_pull(server, 1)
    assert server.pull(0, 0.01).steps == [0, 1]
    with server.lock:
        server.hold = lambda: False
        server.lock.notify_all()
    assert got(answer) == [2, 3]


def test_a_lost_worker_is_named_once_with_the_reason(caplog):
    server, _ = serve(total=10)
    error = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer\nmore")
    server.lose(2, error)
    server.lose(2, error)
    assert caplog.messages == ["lost worker 2 (Connection closed by peer); 2 workers continue and take over its batches"]


def test_many_threads_apply_each_step_once_and_one_at_a_time():
    total, bound, inside = 400, 3, threading.Lock()
    applied: list[tuple[int, int]] = []

    def apply(worker, report, age):
        assert inside.acquire(blocking=False) and report.gradient is not None
        applied.append((report.step, age))
        inside.release()

    server = Server(Ledger(total, bound), 6, apply, lambda: torch.zeros(1))

    def work(worker):
        rng = random.Random(worker)
        while (grant := server.pull(worker)).steps:
            what = rng.random()
            if what < 0.01 and worker > 2:
                server.lose(worker, RuntimeError("gone"))
                break
            server.push(worker, report(grant.steps[0], grant.version, gradient=what > 0.1))

    workers = [background(work, worker) for worker in range(6)]
    for worker in workers:
        worker.result(60)
    assert Counter(step for step, _ in applied) == Counter(range(total))
    assert max(age for _, age in applied) <= bound


# The images of any step


def noise_samples(n: int) -> ArraySamples:
    pixels = np.random.default_rng(0).integers(0, 256, (n, 12, 12, 3), dtype=np.uint8)
    return ArraySamples("noise", pixels, (np.sort(np.arange(n) % 3)).astype(np.int32), tuple("abc"))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_worker_sees_the_images_that_one_process_would(accumulation):
    plan = BatchPlan(4 * accumulation, 4, 1)
    loader = Loader(noise_samples(50), PadCrop(12, flip=True, padding=3), seed=7, workers=2, prefetch=2, pin=False)
    order = [(0, 3), (1, 0), (0, 1), (2, 2)]
    try:
        stream, several = loader.steps(), []
        for epoch, step in order[:2]:
            loader.add_step(stream, plan, epoch, step)
        for epoch, step in order[2:]:  # as a worker does: add the next step before using the current one
            several += [next(stream) for _ in range(accumulation)]
            loader.add_step(stream, plan, epoch, step)
        several += list(stream)
        streams = [loader.training(plan, 0, epoch, step) for epoch, step in order]
        expected = [next(batches) for batches in streams for _ in range(accumulation)]
    finally:
        loader.close()
    assert len(several) == len(expected) == len(order) * accumulation
    for a, b in zip(several, expected, strict=True):
        assert torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels)


def test_no_more_batches_are_started_than_the_prefetch_allows():
    started: list[int] = []

    def source(first: int, n: int):
        for i in range(first, first + n):
            started.append(i)
            yield SimpleNamespace(result=lambda i=i: i)

    stream = Stream(2, source(0, 1))
    stream.add(source(1, 3))
    stream.add(source(4, 3))
    assert started == []
    for i in range(7):
        assert next(stream) == i
        assert started == list(range(min(i + 3, 7)))  # the current one and two ahead
    assert next(stream, None) is None
    stream.add(source(7, 1))
    assert next(stream) == 7


# Running statistics


@pytest.mark.parametrize("accumulation", [1, 3])
def test_statistics_sent_by_workers_equal_those_of_ordinary_batchnorm(accumulation):
    """With accumulation, they equal the mean over BatchNorm layers that each see one micro-batch of every step."""
    torch.manual_seed(0)

    def network() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(3, momentum=0.3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()

    served, worker = network(), network()
    worker.load_state_dict(served.state_dict())
    averages, at_worker = RunningStatistics(served), RunningStatistics(worker)
    plain = [network() for _ in range(accumulation)]
    for own in plain:
        own.load_state_dict(served.state_dict())
    for _ in range(6):
        for micro, own in enumerate(plain):
            images = torch.randn(5, 3, 4, 4).double() * 3 + 1
            worker(images)
            at_worker.collect(micro)
            own(images)
        averages.advance(fold(at_worker.take(), torch.add) / accumulation)
    assert len(averages.tensors()) == 4
    for name, tensor in averages.tensors().items():
        mean = torch.stack([RunningStatistics(own).tensors()[name] for own in plain]).mean(0)
        torch.testing.assert_close(tensor, mean, rtol=1e-12, atol=1e-12)
