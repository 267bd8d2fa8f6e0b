"""Whether a launcher on this machine starts a run again that has ended early."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worldsize.errors import PERMANENT, SIGNAL_BASE, SUCCESS, Stopped
from worldsize.launch.local import Outcome

_PAUSE_S = 1.0
# What a user or a scheduler asked for.
_WANTED = (SUCCESS, Stopped.exit_code, *(SIGNAL_BASE + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


@dataclass
class Restarts:
    """Starts a run again after a failure that may not come again, ``most`` times in a row without progress.

    ``progress`` changes when the run has come further.
    """

    most: int
    progress: Callable[[], object]
    _in_vain: int = 0
    _seen: object = field(default=None, init=False)

    def again(self, outcome: Outcome) -> bool:
        """Whether to start again after ``outcome``; says so, and waits a moment."""
        if outcome.code in _WANTED or outcome.code in PERMANENT:
            return False
        progress = self.progress()
        self._in_vain = self._in_vain + 1 if progress == self._seen else 1
        self._seen = progress
        if self._in_vain > self.most:
            return False
        print(f"worldsize: {outcome.message or f'exit code {outcome.code}'}\nworldsize: starting again", file=sys.stderr)
        time.sleep(_PAUSE_S)
        return True
