"""How fast an asynchronous run applies updates, while it can."""

from __future__ import annotations

import time
from collections import deque


class Throughput:
    """Measures the time between updates, without the time in which training stands still.

    Args:
        images: of one update.
        window: updates over which a speed is measured. Those of several workers arrive at uneven times.
    """

    def __init__(self, images: int, window: int) -> None:
        self._images = images
        self._recent: deque[float] = deque(maxlen=window)
        self._updated_at = time.perf_counter()
        self._still_since: float | None = None

    def stand_still(self, still: bool) -> None:
        """From now on, training stands still or continues."""
        now = time.perf_counter()
        if self._still_since is not None:
            self._updated_at += now - self._still_since
        self._still_since = now if still else None

    def update(self) -> tuple[float, float]:
        """An update is applied. Returns the seconds since the one before, and images per second over the window."""
        self.stand_still(self._still_since is not None)
        now = time.perf_counter()
        seconds, self._updated_at = now - self._updated_at, now
        self._recent.append(seconds)
        return seconds, self._images * len(self._recent) / max(sum(self._recent), 1e-9)
