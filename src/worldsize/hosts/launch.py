"""Runs a job on its hosts: one connection to each, until the job ends or one of them is lost."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from worldsize.distributed.stop_signals import handled_by
from worldsize.errors import SIGNAL_BASE, SUCCESS, PeersUnreachable, Stopped, UserError
from worldsize.hosts.connection import LOST, Connection
from worldsize.hosts.spec import HostsSpec, remote
from worldsize.jobs import display
from worldsize.jobs.folder import JobFolder, text
from worldsize.jobs.in_folder import check_free
from worldsize.jobs.log_file import parsed
from worldsize.jobs.state import Line
from worldsize.jobs.terminal import note
from worldsize.launch.agent import RETRYABLE
from worldsize.launch.lifeline import BEAT_S

_END_S = 30.0  # for a connection to end, in addition to the grace
_POLL_S = 0.1
_ECHO_S = 2.0


class Launcher:
    """One start of a job on its hosts.

    Args:
        folder: where the output is logged on this machine.
        config: configuration file for ssh; None: the user's.
    """

    def __init__(self, spec: HostsSpec, folder: JobFolder, config: Path | None) -> None:
        self._spec = spec
        self._folder = folder
        self._config = config
        self._lines: queue.Queue[Line] = queue.Queue()
        self._signals = 0
        self._signal = (0, 0.0)  # the last one's number, and when it came
        self._stopping_since: float | None = None
        self._beat_at = 0.0

    def run(self) -> int:
        """Run to the end. Returns the exit code, see `worldsize.errors`."""
        with _recorded(self._folder) as log, handled_by(self._signalled):
            hosts = list(enumerate(self._spec.hosts))
            self._connections = [
                Connection(host, remote(self._spec, i), self._into(host), self._config) for i, host in hosts
            ]
            recipe = self._spec.recipe.encode()
            for one in self._connections:
                one.send(b"recipe %d\n%b" % (len(recipe), recipe))
            try:
                code, message = self._until_all_have_ended(log)
            except BaseException:
                self._let_go()
                raise
            (self._folder.path / "exit").write_text(f"{code}\n")
        if message:
            print(f"worldsize: {message}", file=sys.stderr)
        return code

    def _into(self, host: str) -> Callable[[str], None]:
        return lambda text: self._lines.put(parsed(text, host))

    def _signalled(self, number: int, _: object) -> None:
        # A closed terminal sends SIGHUP more than once.
        if time.monotonic() - self._signal[1] > _ECHO_S:
            self._signals += 1
        self._signal = (number, time.monotonic())

    def _until_all_have_ended(self, log: Callable[[str], None]) -> tuple[int, str]:
        """Print the output and forward stops, until every host has ended. Returns the exit code and a message."""
        ended: dict[int, int] = {}
        while len(ended) < len(self._connections):
            self._print(log)
            self._beat()
            for i, one in enumerate(self._connections):
                if i not in ended and (code := one.poll()) is not None:
                    one.wait()
                    ended[i] = code
                    if code != SUCCESS:
                        self._stop()
            if self._signals and self._stopping_since is None:
                self._stop()
                with suppress(OSError):  # the terminal may be gone
                    note("stopping after this step; send the signal again to exit immediately")
            if self._signals > 1 or self._late():
                self._let_go()
                self._print(log)
                return (
                    SIGNAL_BASE + self._signal[0] if self._signals > 1 else PeersUnreachable.exit_code
                ), self._unanswered(ended)
            time.sleep(_POLL_S)
        self._print(log)
        return self._outcome(ended)

    def _outcome(self, ended: dict[int, int]) -> tuple[int, str]:
        again = f"the same command resumes it from its last checkpoint, in {self._spec.out / self._spec.name}"
        lost = [i for i, code in ended.items() if code == LOST]
        if lost:
            return PeersUnreachable.exit_code, f"{self._connections[lost[0]].reason()}; {again}"
        failed = [(code, i) for i, code in ended.items() if code not in (SUCCESS, RETRYABLE)]
        if failed:
            # The processes have already printed why.
            return failed[0][0], ""
        if RETRYABLE in ended.values():
            if self._signals:
                return Stopped.exit_code, f"stopped; the state is saved. {again[0].upper()}{again[1:]}"
            host = self._connections[next(i for i, code in ended.items() if code == RETRYABLE)].host
            why = "was asked to stop, did not reach the other hosts, or lost contact with this launcher"
            return PeersUnreachable.exit_code, f"{host} {why}; {again}"
        return SUCCESS, ""

    def _unanswered(self, ended: dict[int, int]) -> str:
        left = [one.host for i, one in enumerate(self._connections) if i not in ended]
        return f"not confirmed by {', '.join(left)}; what runs there ends by itself"

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = time.monotonic()
            for one in self._connections:
                one.offer(b"beat\n")

    def _stop(self) -> None:
        """Ask every host to save and stop."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            for one in self._connections:
                one.send(b"stop\n")

    def _late(self) -> bool:
        since = self._stopping_since
        return since is not None and time.monotonic() - since > self._spec.grace_s + _END_S

    def _let_go(self) -> None:
        """Close the connections; each host then stops what it runs."""
        for one in self._connections:
            one.finish()
        for one in self._connections:
            with suppress(subprocess.TimeoutExpired):
                one.wait(1.0)
                continue
            one.kill()

    def _print(self, log: Callable[[str], None]) -> None:
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return
            log(f"[{line.rank}] {line.text}" if line.rank is not None else f"{line.source} | {line.text}")
            with suppress(OSError):
                display.show(line)


@contextmanager
def _recorded(folder: JobFolder) -> Iterator[Callable[[str], None]]:
    """Record the launcher in the job's folder, for the other commands; yields a function that logs a line.

    Raises:
        UserError: the job already runs, or the folder cannot be written.
    """
    if (running := launcher_pid(folder)) is not None:
        raise UserError(
            f"{folder.name} already runs: its launcher is process {running} here. Follow it with: worldsize logs "
            f"{folder.name}. End it with: worldsize stop {folder.name}"
        )
    refuse_elsewhere(folder, "stop it")
    check_free(folder, "ssh")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (folder.path / "exit").unlink()
        folder.scheduler.write_text("ssh\n")
        folder.launcher.write_text(f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}\n")
        file = open(folder.log(""), "a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another folder with --out") from None

    def log(text: str) -> None:
        with suppress(OSError):  # a full disk must not end the job
            file.write(text + "\n")
            file.flush()

    with file:
        yield log


def launcher_pid(folder: JobFolder) -> int | None:
    """The process id of the job's launcher, if it runs on this machine."""
    with suppress(OSError, ValueError):
        host, pid, started = folder.launcher.read_text().split()
        if host == socket.gethostname() and _started(int(pid)) == started:
            return int(pid)
    return None


def elsewhere(folder: JobFolder) -> str | None:
    """The other machine from which the job was started, if it has not ended."""
    host = next(iter(text(folder.launcher).split()), None)
    return None if host in (None, socket.gethostname()) or folder.exit_code("") is not None else host


def refuse_elsewhere(folder: JobFolder, remedy: str) -> None:
    """Raise UserError with the ``remedy`` (words before "there") if the job was started from another machine and runs."""
    if (host := elsewhere(folder)) is not None:
        raise UserError(
            f"{folder.name} was started from {host}, and has not ended: {remedy} there, or if {host} is gone, remove "
            f"{folder.launcher}"
        )


def _started(pid: int) -> str:
    """When the process started, in clock ticks since boot; empty if there is none. Ids are used again, these are not."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]  # a zombie has ended
