"""Progress of long operations: a bar on a terminal, a line every 15 s in a log."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LOG_EVERY_S = 15.0
_REFRESH_S = 0.2


class ByteProgress:
    """Counts bytes, from any thread, and shows progress on stderr inside a ``with`` block.

    Args:
        label: name of the operation, such as "downloading".
        total: total bytes; None: unknown; may be set later.
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._initial = 0
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._bar if sys.stderr.isatty() else self._lines, daemon=True)

    def add(self, amount: int) -> None:
        """Add bytes done."""
        with self._lock:
            self.done += amount

    def at(self, done: int) -> None:
        """Set the total of bytes done."""
        self.done = done

    def start_at(self, done: int) -> None:
        """Set the bytes done by an earlier call; they do not count towards the speed."""
        with self._lock:
            self._initial += done - self.done
            self.done = done

    def __enter__(self) -> ByteProgress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finished.set()
        self._thread.join()

    def _lines(self) -> None:
        start = last_time = time.monotonic()
        last_bytes = 0
        while not self._finished.wait(LOG_EVERY_S):
            now, new_bytes = time.monotonic(), self.done - self._initial
            say(line(self.label, self.done, self.total, (new_bytes - last_bytes) / (now - last_time)))
            last_time, last_bytes = now, new_bytes
        elapsed = time.monotonic() - start
        say(
            line(
                self.label,
                self.done,
                self.total,
                (self.done - self._initial) / elapsed if elapsed > 1 else None,
                finished=True,
            )
        )

    def _bar(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(self.label, total=self.total, completed=self.done)
            while not self._finished.wait(_REFRESH_S):
                bar.update(task, total=self.total, completed=self.done)
            bar.update(task, total=self.total, completed=self.done)


def line(label: str, done: int, total: int | None, rate: float | None, finished: bool = False) -> str:
    """One line for a log; ``rate`` in bytes per second, None: too short to measure."""
    parts = [f"{size(done)} of {size(total)} ({done / total:.0%})" if total else size(done)]
    if rate is not None:
        parts.append(f"{rate / 1e6:.1f} MB/s")
    if rate and total and not finished:
        parts.append(f"{_duration((total - done) / rate)} left")
    return f"{label}: {', '.join(parts)}"


def size(amount: float) -> str:
    """Human-readable size with decimal units: 1 kB is 1,000 bytes."""
    for unit in ("bytes", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def say(text: str) -> None:
    """Print a message to stderr."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "under a minute"
