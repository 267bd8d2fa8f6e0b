"""Deduplicates log lines after a reconnection (pure)."""

from __future__ import annotations

import re
from datetime import datetime, timezone

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) (.*)", re.DOTALL | re.ASCII)
_Moment = tuple[datetime, str]


class LogCursor:
    """Position in a log, by the server's timestamps; skips lines that the server sends again after a reconnection.

    The server resumes at a full second, and several lines may share one timestamp.
    """

    def __init__(self) -> None:
        self._time: _Moment | None = None
        self._count = 0  # lines seen with the timestamp self._time
        self._repeated = 0  # of these, lines sent again since the last reconnection
        self._unstamped = ""

    @property
    def since(self) -> dict[str, str]:
        """Query parameters for the lines that may be new."""
        self._repeated = 0
        return {"sinceTime": f"{self._time[0]:%Y-%m-%dT%H:%M:%SZ}"} if self._time else {}

    def new(self, line: str) -> str | None:
        """The line without its timestamp; None if it was seen before."""
        match = _STAMPED.fullmatch(line)
        if match is None:
            # A message of the kubelet itself, such as that it cannot read the log; it is repeated at each request.
            repeated, self._unstamped = line == self._unstamped, line
            return None if repeated else line
        time, text = _moment(match), match[4]
        if self._time is not None and time < self._time:
            return None
        if time != self._time:
            self._time, self._count, self._repeated = time, 1, 1
            return text
        self._repeated += 1
        if self._repeated <= self._count:
            return None
        self._count = self._repeated
        return text

    def last(self, rest: str, before: str) -> str | None:
        """The text after the last complete line of a log; None if it must not be shown.

        Args:
            rest: the incomplete line at the end of the last response; may be empty.
            before: the same of the response before it.
        """
        if _STAMPED.fullmatch(rest):
            return self.new(rest)
        if rest and _STAMPED.fullmatch(before):  # an incomplete line, then a message of the kubelet
            return self.new(before)
        # When a log that was read completely is requested again, the kubelet may report that the container is gone.
        complete = self._time is not None and rest != before
        return rest if rest and not complete else None


def _moment(match: re.Match[str]) -> _Moment:
    """Comparable time. Nodes write local time, which may go back by an hour, and nanoseconds without trailing zeros."""
    second = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    return second.astimezone(timezone.utc), (match[2] or "").rstrip("0")
