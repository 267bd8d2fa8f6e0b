"""Log lines after a lost connection: which of them were seen before (pure)."""

from __future__ import annotations

import re
from datetime import datetime, timezone

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) (.*)", re.DOTALL | re.ASCII)
_Moment = tuple[datetime, str]


class LastLines:
    """Which log lines were seen, by the server's timestamps: what comes again after a reconnection is told apart.

    The server starts again at a whole second, and several lines may bear one timestamp.
    """

    def __init__(self) -> None:
        self._time: _Moment | None = None
        self._at_that_time = 0
        self._again = 0
        self._unstamped = ""

    @property
    def since(self) -> dict[str, str]:
        """The query that asks for what may be new."""
        self._again = 0
        return {"sinceTime": f"{self._time[0]:%Y-%m-%dT%H:%M:%SZ}"} if self._time else {}

    def new(self, line: str) -> str | None:
        """The line without its timestamp; None where it was seen before."""
        match = _STAMPED.fullmatch(line)
        if match is None:
            # The kubelet's own words, such as that it cannot read the log; asked again, it says them again.
            repeated, self._unstamped = line == self._unstamped, line
            return None if repeated else line
        time, text = _moment(match), match[4]
        if self._time is not None and time < self._time:
            return None
        if time != self._time:
            self._time, self._at_that_time, self._again = time, 1, 1
            return text
        self._again += 1
        if self._again <= self._at_that_time:
            return None
        self._at_that_time = self._again
        return text

    def last(self, rest: str, before: str) -> str | None:
        """What a log ended with after its last whole line, where it is to be shown.

        Args:
            rest: What the last answer ended with; may be empty.
            before: What the answer before it ended with.
        """
        if _STAMPED.fullmatch(rest):
            return self.new(rest)
        if rest and _STAMPED.fullmatch(before):  # a line without an end, and then the kubelet's own words
            return self.new(before)
        # Asked again for a log that was read whole, the kubelet may say that the container is gone by now.
        read_whole = self._time is not None and rest != before
        return rest if rest and not read_whole else None


def _moment(match: re.Match[str]) -> _Moment:
    """Nodes write their local time, which may go back by an hour; and nanoseconds, without trailing zeros."""
    second = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    return second.astimezone(timezone.utc), (match[2] or "").rstrip("0")
