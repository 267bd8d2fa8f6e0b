"""What a process is doing now, in memory that its watcher shares: a stopped process cannot answer questions.

A torn read of this memory is harmless: it shows a beat, which is what it is.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of a step or of the work between steps.

    ``peers``: it may wait for other processes. ``outside``: its time depends on disks, networks or compilers, so that it may
    be healthy and take many times as long as a step. ``long``: it usually does, so that this alone is not reported.
    """

    name: str
    peers: bool = False
    outside: bool = False
    long: bool = False


STARTING = Stage("starting", peers=True, outside=True)
COMPILING = Stage("compiling the network", peers=True, outside=True, long=True)
LOADING = Stage("waiting for images", outside=True)
COMPUTING = Stage("forward and backward")
REDUCING = Stage("backward and all-reduce", peers=True)
UPDATING = Stage("updating the weights", peers=True)
AGREEING = Stage("agreeing with the other processes", peers=True)
COLLECTING = Stage("collecting metrics", peers=True, outside=True)
EVALUATING = Stage("evaluating", outside=True)
SAVING = Stage("saving a checkpoint", peers=True, outside=True)
ENDING = Stage("ending", peers=True, outside=True)
# In the order of a step: of two processes in the same step, the one with the earlier stage is behind.
STAGES = (STARTING, COMPILING, LOADING, COMPUTING, REDUCING, UPDATING, AGREEING, COLLECTING, EVALUATING, SAVING, ENDING)

_HEAD = struct.Struct("<QqqId")  # beats, step, micro-batch, stage, seconds of the last step
_READ = struct.Struct("<Hd")  # bytes of the name, monotonic time of its begin; then the name
_NAME, _SLOTS = 240, 64
_SLOT = _READ.size + _NAME
SIZE = _HEAD.size + _SLOTS * _SLOT


@dataclass(frozen=True)
class Beat:
    """The newest beat. ``step_s`` is how long the last complete step took, 0 before the first."""

    beats: int
    step: int
    micro: int
    stage: Stage
    step_s: float

    @property
    def place(self) -> tuple[int, int, int]:
        """How far the process has come."""
        return self.step, self.micro, STAGES.index(self.stage)


class Heartbeat:
    """The writer. One per process; threads may call `reading` at the same time."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._beats, self._step, self._step_s = 0, 0, 0.0
        self._began: float | None = None
        self._slots = threading.local()
        self._taken = 0
        self._lock = threading.Lock()

    def beat(self, stage: Stage, micro: int = 0) -> None:
        """The process begins ``stage``, of micro-batch ``micro``; also the next part of the same stage."""
        self._beats += 1
        _HEAD.pack_into(self._memory, 0, self._beats, self._step, micro, STAGES.index(stage), self._step_s)

    def begin_step(self, step: int) -> None:
        """The process begins step ``step`` (0-based)."""
        self._step, self._began = step, time.monotonic()
        self.beat(LOADING)

    def end_step(self) -> None:
        """The step that was begun is complete, on all ranks."""
        if self._began is not None:
            self._step_s = time.monotonic() - self._began

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Around reading a file that may never answer."""
        at = _HEAD.size + self._slot() * _SLOT
        content = name.encode("utf-8", "backslashreplace")[-_NAME:]
        self._memory[at + _READ.size : at + _READ.size + len(content)] = content
        _READ.pack_into(self._memory, at, len(content), time.monotonic())
        try:
            yield
        finally:
            _READ.pack_into(self._memory, at, 0, 0.0)

    def _slot(self) -> int:
        """This thread's place for the name that it reads. More threads than places share them."""
        if not hasattr(self._slots, "mine"):
            with self._lock:
                self._slots.mine, self._taken = self._taken % _SLOTS, self._taken + 1
        mine: int = self._slots.mine
        return mine


def newest(memory: mmap.mmap) -> Beat:
    """The newest beat of the process that writes to ``memory``."""
    beats, step, micro, stage, step_s = _HEAD.unpack_from(memory)
    return Beat(beats, step, micro, STAGES[min(stage, len(STAGES) - 1)], step_s)


def oldest_read(memory: mmap.mmap) -> tuple[str, float] | None:
    """What the process has been reading for the longest time, and since when (`time.monotonic`); None if nothing."""
    found = None
    for at in range(_HEAD.size, SIZE, _SLOT):
        length, since = _READ.unpack_from(memory, at)
        if length and (found is None or since < found[1]):
            name = memory[at + _READ.size : at + _READ.size + min(length, _NAME)]
            found = name.decode("utf-8", "replace"), since
    return found


# A process has one heart; what beats (the loop, threads that read, evaluation) is far apart.
_current: Heartbeat | None = None


@contextmanager
def beating(memory: mmap.mmap) -> Iterator[Heartbeat]:
    """Within this context, `beat` and its siblings write to ``memory``."""
    global _current
    _current = Heartbeat(memory)
    try:
        yield _current
    finally:
        _current = None


def beat(stage: Stage, micro: int = 0) -> None:
    """`Heartbeat.beat`, if this process is watched."""
    if _current is not None:
        _current.beat(stage, micro)


def begin_step(step: int) -> None:
    """`Heartbeat.begin_step`, if this process is watched."""
    if _current is not None:
        _current.begin_step(step)


def end_step() -> None:
    """`Heartbeat.end_step`, if this process is watched."""
    if _current is not None:
        _current.end_step()


def reading(name: str) -> AbstractContextManager[None]:
    """`Heartbeat.reading`, if this process is watched."""
    return nullcontext() if _current is None else _current.reading(name)
