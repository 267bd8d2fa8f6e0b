"""How far something that takes hours has come: a bar on a terminal, a line every 15 s in a log."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

EVERY_S = 15.0
_BAR_EVERY_S = 0.2


class Meter:
    """Counts bytes, from any thread, and shows them on stderr while it is entered.

    Args:
        what: is being done, such as "downloading".
        total: bytes in all, None: not known; may be set later.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._earlier = 0
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._bar if sys.stderr.isatty() else self._lines, daemon=True)

    def add(self, amount: int) -> None:
        """So many bytes more are done."""
        with self._counting:
            self.done += amount

    def at(self, done: int) -> None:
        """So many bytes are done in all."""
        self.done = done

    def start_at(self, done: int) -> None:
        """So many bytes were done before; they do not count for the speed."""
        with self._counting:
            self._earlier += done - self.done
            self.done = done

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _lines(self) -> None:
        began = since = time.monotonic()
        before = 0
        while not self._ended.wait(EVERY_S):
            now, fresh = time.monotonic(), self.done - self._earlier
            say(line(self.what, self.done, self.total, (fresh - before) / (now - since)))
            since, before = now, fresh
        took = time.monotonic() - began
        say(line(self.what, self.done, self.total, (self.done - self._earlier) / took if took > 1 else None, ended=True))

    def _bar(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(self.what, total=self.total, completed=self.done)
            while not self._ended.wait(_BAR_EVERY_S):
                bar.update(task, total=self.total, completed=self.done)
            bar.update(task, total=self.total, completed=self.done)


def line(what: str, done: int, total: int | None, rate: float | None, ended: bool = False) -> str:
    """One line for a log; ``rate`` in bytes per second, None: it went too fast to tell."""
    parts = [f"{size(done)} of {size(total)} ({done / total:.0%})" if total else size(done)]
    if rate is not None:
        parts.append(f"{rate / 1e6:.1f} MB/s")
    if rate and total and not ended:
        parts.append(f"{_duration((total - done) / rate)} left")
    return f"{what}: {', '.join(parts)}"


def size(amount: float) -> str:
    """Bytes as people read them: 1,000 bytes are 1 kB."""
    for unit in ("bytes", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def say(text: str) -> None:
    """Tell the user what is going on."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "under a minute"
