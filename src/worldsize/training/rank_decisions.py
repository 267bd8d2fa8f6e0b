"""Decisions that ranks make together at the end of a step: stop, collect metrics, save."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from worldsize.distributed.world import World

# gloo's all-reduce is a ring: with W ranks, 2 (W - 1) messages one after the other. A tree has 4 log2 W.
_LARGEST_RING = 16
_CHILDREN = 2

_Queue = queue.SimpleQueue[tuple[torch.Tensor, Future[None]] | None]


@dataclass(frozen=True)
class Decision:
    """Identical on all ranks.

    ``new_broken`` is the number of broken images that ranks have found but not shared, summed over ranks: an image that
    several found, one of them as a replacement of another, counts several times.
    """

    stop: bool
    collect: bool
    save: bool
    new_broken: int


class RankDecisions:
    """One small sum over all ranks per step, between hosts, that overlaps with the devices' computation.

    ``propose`` sends this rank's proposal while the step is computed, ``decide`` returns the result after it. Only rank 0
    decides when to collect; any rank can request a stop or a checkpoint.

    A lost rank breaks the sum at once. `lost_peers` sees to hosts that wait for their GPU meanwhile.

    Args:
        largest_ring: world sizes above this use a tree.
    """

    def __init__(self, world: World, largest_ring: int = _LARGEST_RING) -> None:
        self._is_main = world.is_main
        self._message = torch.zeros(4, dtype=torch.int64)
        self._sum: _Sum | None = None
        if world.control is not None and world.size > largest_ring:
            self._sum = _Tree(world.control, world.rank, world.size)
        elif world.control is not None:
            self._sum = _Ring(world.control)

    def propose(self, stop: bool, collect: bool, save: bool, new_broken: int) -> None:
        self._message = torch.tensor([stop, collect and self._is_main, save, new_broken])
        if self._sum is not None:
            self._sum.start(self._message)

    def decide(self) -> Decision:
        if self._sum is not None:
            self._sum.wait()
        stop, collect, save, new_broken = self._message.tolist()
        return Decision(bool(stop), bool(collect), bool(save), new_broken)


class _Sum(Protocol):
    """Replaces a message by its sum over all ranks."""

    def start(self, message: torch.Tensor) -> None: ...

    def wait(self) -> None:
        """Wait until the message that `start` got is the sum; raises what went wrong."""


class _Ring:
    """gloo's all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._work: dist.Work | None = None

    def start(self, message: torch.Tensor) -> None:
        self._work = dist.all_reduce(message, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class _Tree:
    """Up a binary tree of the ranks and down again, in a thread: the cost for a rank does not depend on their number."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._running: Future[None] | None = None
        # A daemon: a process that fails must not wait for a message that never comes.
        thread = threading.Thread(target=_serve, args=(group, rank, size, self._queue), name="control", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def start(self, message: torch.Tensor) -> None:
        self._running = Future()
        self._queue.put((message, self._running))

    def wait(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()


def _end(messages: _Queue, thread: threading.Thread) -> None:
    messages.put(None)
    # Python aborts if it exits while the thread runs C++ code; but a lost rank can keep the thread waiting forever.
    thread.join(1.0)


def _serve(group: dist.ProcessGroup, rank: int, size: int, messages: _Queue) -> None:
    parent = (rank - 1) // _CHILDREN if rank else None
    children = [child for child in range(_CHILDREN * rank + 1, _CHILDREN * rank + 1 + _CHILDREN) if child < size]
    while (item := messages.get()) is not None:
        message, done = item
        try:
            part = torch.empty_like(message)
            for child in children:
                dist.recv(part, src=child, group=group)
                message += part
            if parent is not None:
                dist.send(message, dst=parent, group=group)
                dist.recv(message, src=parent, group=group)
            for child in children:
                dist.send(message, dst=child, group=group)
            done.set_result(None)
        except BaseException as error:  # raised in the thread that waits
            done.set_exception(error)
        del item, done
