"""The program that watches one process of a run: reads its heartbeat, tells rank 0's watcher, and ends it if need be.

It outlives nothing: when the process that it watches ends, so does the watcher. The first line of its input is a JSON
object, see `Task`; other users can see a program's arguments, but not its input.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worldsize.config import job_pod
from worldsize.distributed.stop_signals import SIGNALS
from worldsize.errors import Stalled
from worldsize.launch.local import report
from worldsize.watchdog import heartbeat, messages
from worldsize.watchdog.judgement import PATIENCE, Finding, Seen, judge, limit_s, unheard
from worldsize.watchdog.process import State, is_alive, state_of

# Shows the stacks of the process's threads; nothing else uses this signal.
STACKS = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else None
STALLS = "stalls"  # in the run folder
_POLL_S = 0.5
_BUSY = 0.1  # cores: more than this much computing since the last beat is not waiting
_KEPT = 1000  # newest steps that set the limit
_TOLD_S = 5.0  # so long the verdict travels to the other watchers
_EXIT_S = 5.0  # so long a process may take to end by itself
_STACKS_S = 4.0


@dataclass(frozen=True)
class Task:
    """``pid`` is watched as ``rank`` of ``size`` on ``host``; its heartbeat is in the file ``memory``, its stacks come to
    ``stacks``.

    ``least_s`` is the shortest limit. ``hub`` is the (host, port) of rank 0's watcher, which has the socket ``listens``
    itself; None for a single process. ``speaks``: it prints what the user should know. ``folder`` is the run's.
    """

    pid: int
    rank: int
    size: int
    host: str
    memory: int
    stacks: int
    least_s: float
    token: str
    speaks: bool
    launched: bool
    folder: str
    hub: tuple[str, int] | None = None
    listens: int | None = None


class _Watched:
    """What is seen of the process. Times count only while this watcher runs: a laptop or a pod that sleeps is no hang."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._memory = mmap.mmap(task.memory, heartbeat.SIZE, access=mmap.ACCESS_READ)
        self._beat = heartbeat.newest(self._memory)
        self._idle_s, self._cpu_s = 0.0, 0.0
        self._read: tuple[tuple[str, float], float] | None = None
        self._steps: deque[float] = deque(maxlen=_KEPT)

    def look(self, passed_s: float) -> Seen:
        """The process now, ``passed_s`` seconds after the last look."""
        beat, state = heartbeat.newest(self._memory), state_of(self._task.pid)
        if beat.beats != self._beat.beats:
            if beat.step != self._beat.step and beat.step_s:
                self._steps.append(beat.step_s)
            self._idle_s, self._cpu_s = 0.0, state.cpu_s if state else 0.0
        else:
            self._idle_s += passed_s
        self._beat = beat
        name, reading_s = self._reading(passed_s)
        return Seen(
            self._task.rank,
            self._task.host,
            self._task.pid,
            beat.place,
            heartbeat.STAGES.index(beat.stage),
            self._idle_s,
            limit_s(self._steps, self._task.least_s),
            len(self._steps),
            stopped=state is not None and state.stopped,
            busy=self._busy(state),
            reading=name,
            reading_s=reading_s,
        )

    def _busy(self, state: State | None) -> bool:
        return state is None or state.letter == "R" or state.cpu_s - self._cpu_s > _BUSY * self._idle_s

    def _reading(self, passed_s: float) -> tuple[str, float]:
        """What it has been reading through several looks, and for how long."""
        found = heartbeat.oldest_read(self._memory)
        same = found is not None and self._read is not None and found == self._read[0]
        self._read = None if found is None else (found, self._read[1] + passed_s if same and self._read else 0.0)
        return (found[0], self._read[1]) if found and self._read and same else ("", 0.0)


class _Hub:
    """Rank 0's watcher: what it heard of each rank, and what follows."""

    def __init__(self, task: Task, server: socket.socket) -> None:
        self._task, self._server = task, server
        self._seen: dict[int, Seen] = {}

    def exchange(self, own: Seen, passed_s: float, finding: Finding | None) -> Finding | None:
        """Take what has arrived, and answer each with the verdict; returns the verdict, or ``finding`` if there was one."""
        self._seen = {rank: replace(seen, silent_s=seen.silent_s + passed_s) for rank, seen in self._seen.items()}
        self._seen[own.rank] = own
        if own.at is heartbeat.ENDING:  # the others may have left
            self._seen = {own.rank: own}
        while (message := messages.receive(self._server, self._task.token)) is not None:
            seen, _, sender = message
            if seen is not None:
                self._seen[seen.rank] = seen
                with suppress(OSError):
                    self._server.sendto(messages.encode(self._task.token, finding=finding), sender)
        expected = [] if own.at is heartbeat.ENDING else range(self._task.size)
        return finding or judge(list(self._seen.values()), [rank for rank in expected if rank not in self._seen])


class _Spoke:
    """The watcher of another rank: tells the hub what it sees, and hears the verdict."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._client: socket.socket | None = None
        self._heard = False
        self._silent_s = 0.0  # since the hub was heard, or since the beginning

    def exchange(self, own: Seen, passed_s: float, finding: Finding | None) -> Finding | None:
        assert self._task.hub is not None
        if finding is not None:
            return finding
        self._silent_s += passed_s
        self._client = self._client or messages.connect(*self._task.hub)
        if self._client is not None:
            finding = self._ask(self._client, own)
        # A hub that was never heard of may be unreachable for watchers only.
        patience_s = 2 * own.limit_s * (1 if self._heard else PATIENCE)
        if finding is None and own.at is not heartbeat.ENDING and min(own.idle_s, self._silent_s) >= patience_s:
            return Finding(0, unheard(f"rank 0 ({self._task.hub[0]})", self._silent_s), True)
        return finding

    def _ask(self, client: socket.socket, own: Seen) -> Finding | None:
        with suppress(OSError):
            client.send(messages.encode(self._task.token, own))
        finding = None
        while (message := messages.receive(client, self._task.token)) is not None:
            self._heard, self._silent_s = True, 0.0
            finding = message[1] or finding
        return finding


class _Alone:
    """The watcher of the only process."""

    def exchange(self, own: Seen, passed_s: float, finding: Finding | None) -> Finding | None:
        return finding or judge([own])


def main(_words: Sequence[str]) -> int:
    """Watch until the process ends, or end it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    values = json.loads(sys.stdin.buffer.readline())
    hub = values.pop("hub")
    task = Task(**values, hub=None if hub is None else (hub[0], hub[1]))
    watched, voice = _Watched(task), _Voice(task)
    peers: _Hub | _Spoke | _Alone = _Alone() if task.hub is None else _Spoke(task)
    if task.listens is not None:
        peers = _Hub(task, socket.socket(fileno=task.listens))
    last = time.monotonic()
    finding: Finding | None = None
    while is_alive(task.pid) and not _closed(_POLL_S):
        now = time.monotonic()
        passed_s, last = min(now - last, 2 * _POLL_S), now
        seen = watched.look(passed_s)
        finding = peers.exchange(seen, passed_s, None)
        voice.warn(finding)
        if finding is not None and finding.ends:
            break
    if finding is not None and finding.ends:
        voice.tell(finding)
        if task.rank in (finding.rank, 0 if finding.rank else 1):
            _write_stacks(task)
        # The other watchers ask rank 0's, and the process that is stuck keeps the others waiting until they know.
        until = time.monotonic() + _TOLD_S
        while time.monotonic() < until and (task.listens is not None or finding.rank == task.rank):
            peers.exchange(watched.look(0.0), 0.0, finding)
            time.sleep(_POLL_S / 2)
        _end(task)
    return 0


def _closed(timeout_s: float) -> bool:
    """Whether the process has closed this watcher's input, which it keeps open as long as it wants to be watched."""
    return bool(select.select([0], [], [], timeout_s)[0]) and not os.read(0, 1)


class _Voice:
    """What this watcher says, and where it leaves the stacks."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._warned: int | None = None

    def warn(self, finding: Finding | None) -> None:
        """Say once that a process makes no progress, and once that it continues."""
        if self._task.listens is None and self._task.hub is not None:
            return
        rank = None if finding is None else finding.rank
        if rank == self._warned or (finding is not None and finding.ends):
            return
        self._warned = rank
        self._say(f"warning: {finding.message}" if finding else "all processes make progress again")

    def tell(self, finding: Finding) -> None:
        """Report why the run ends."""
        run = Path(self._task.folder)
        message = (
            f"{finding.message}. What its threads do is in {run / STALLS}. Resume the run with: {job_pod.continuing(run)}"
        )
        report(message, Stalled.exit_code)
        if not self._task.launched:
            self._say(message)

    def _say(self, text: str) -> None:
        if self._task.speaks:
            with suppress(OSError):
                os.write(2, f"worldsize: {text}\n".encode("utf-8", "backslashreplace"))


def _write_stacks(task: Task) -> None:
    """Write what the process's threads do into the run folder: those of the stuck one, and of one that waits for it."""
    if STACKS is None:
        return
    with suppress(OSError):
        os.kill(task.pid, STACKS)
        os.kill(task.pid, signal.SIGCONT)  # a stopped process shows them as soon as it continues
        content, until = b"", time.monotonic() + _STACKS_S
        while time.monotonic() < until:
            time.sleep(0.02)
            newest = os.pread(task.stacks, 1 << 20, 0)
            if newest and newest == content:
                break
            content = newest
        os.kill(task.pid, signal.SIGSTOP)  # it must not continue: the others know by now that the run ends
        if content:
            folder = Path(task.folder) / STALLS
            folder.mkdir(exist_ok=True)
            (folder / f"rank-{task.rank}.txt").write_bytes(content)


def _end(task: Task) -> None:
    """End the process with the exit code of a stall; kill it if it cannot."""
    with suppress(OSError):
        os.write(1, b"\n")
        os.kill(task.pid, signal.SIGCONT)
    until = time.monotonic() + _EXIT_S
    while time.monotonic() < until and is_alive(task.pid):
        time.sleep(0.05)
    with suppress(OSError):
        os.kill(task.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
