"""Notices that another process of the run has ended, while this one waits for it on the GPU.

NCCL would wait until its timeout. On a CPU, and in messages between hosts, a closed connection is an error at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from worldsize.distributed.message_tags import LOST_PEERS
from worldsize.distributed.world import World
from worldsize.errors import PeersUnreachable, first_line
from worldsize.launch.failure import fail_alone

_EVERY_S = 0.5
# A process that knows of the loss ends by itself within this time, with a better message. With the time that the news
# takes through the tree, all processes end within 30 seconds.
_GRACE_S = 20.0
_ANSWER_S = 10.0  # a neighbour that is alive answers much faster; a frozen one never does
_HERE, _ENDS, _LEAVES = 0, 1, 2


class LostPeers:
    """Exchanges messages with the neighbours in a binary tree of the ranks all the time, and passes on that one is lost.

    Args:
        every_s: seconds between two messages.
        grace_s: seconds in which this process may end by itself, once another one has left.
    """

    def __init__(self, world: World, every_s: float = _EVERY_S, grace_s: float = _GRACE_S) -> None:
        self._group, self._rank = world.control, world.rank
        around = ((world.rank - 1) // 2, 2 * world.rank + 1, 2 * world.rank + 2)
        # Without NCCL, a broken connection is an error of the message that waits.
        watches = world.backend == "nccl"
        self._neighbours = [rank for rank in around if watches and 0 <= rank < world.size and rank != world.rank]
        self._every_s, self._grace_s = every_s, grace_s
        self._leaving = threading.Event()
        self._end: threading.Timer | None = None
        # A daemon: a process that fails must not wait for a message that never comes.
        self._thread = threading.Thread(target=self._ask, name="lost-peers", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """From now on this process waits for no other one on the GPU. Those that still do end soon, or leave too."""
        self._leaving.set()

    def close(self) -> None:
        """Leave, and wait until the group may be destroyed: the neighbours have answered, if they still can."""
        self.leave()
        self._thread.join(_ANSWER_S)
        if self._end is not None:
            self._end.cancel()

    def _ask(self) -> None:
        while self._neighbours:
            state = _LEAVES if self._leaving.wait(self._every_s) else _HERE if self._end is None else _ENDS
            for neighbour in list(self._neighbours):
                self._exchange(neighbour, state)
            if state == _LEAVES:
                break

    def _exchange(self, neighbour: int, state: int) -> None:
        theirs = torch.empty(1, dtype=torch.uint8)
        try:
            sent = dist.isend(torch.tensor([state], dtype=torch.uint8), neighbour, group=self._group, tag=LOST_PEERS)
            dist.recv(theirs, neighbour, group=self._group, tag=LOST_PEERS)
            if sent is not None:
                sent.wait()
        except RuntimeError as error:
            self._neighbours.remove(neighbour)
            self._lost(first_line(error))
            return
        if theirs.item() == _LEAVES:
            self._neighbours.remove(neighbour)
        if theirs.item() != _HERE:
            self._lost("it or its neighbour said so")

    def _lost(self, how: str) -> None:
        if self._end is None:
            self._end = threading.Timer(self._grace_s, self._end_process, (how,))
            self._end.daemon = True
            self._end.start()

    def _end_process(self, how: str) -> None:
        if self._leaving.is_set():
            return
        message = (
            f"rank {self._rank}: another process of this run ended ({how}), and this one waits for it on the GPU; look at "
            "the other's log first"
        )
        os._exit(fail_alone(message, PeersUnreachable.exit_code))


@contextmanager
def noticed(world: World) -> Iterator[LostPeers]:
    """Within this context, or until `LostPeers.leave`, this process ends if it waits on the GPU for one that is lost."""
    peers = LostPeers(world)
    try:
        yield peers
    finally:
        peers.close()
