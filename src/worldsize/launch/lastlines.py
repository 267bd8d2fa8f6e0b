"""Log lines after a lost connection: which of them were seen before (pure)."""

from __future__ import annotations


class LastLines:
    """Which log lines were seen, by the server's timestamps: what comes again after a reconnection is told apart.

    The server starts again at a whole second, and several lines may bear one timestamp.
    """

    def __init__(self) -> None:
        self._time = ""
        self._at_that_time = 0
        self._again = 0

    @property
    def since(self) -> dict[str, str]:
        """The query that asks for what may be new."""
        self._again = 0
        return {"sinceTime": self._time[:19] + "Z"} if self._time else {}

    def new(self, line: str) -> str | None:
        """The line without its timestamp; None where it was seen before."""
        stamp, _, text = line.partition(" ")
        if _order(stamp) < _order(self._time):
            return None
        if stamp != self._time:
            self._time, self._at_that_time, self._again = stamp, 1, 1
            return text
        self._again += 1
        if self._again <= self._at_that_time:
            return None
        self._at_that_time = self._again
        return text


def _order(stamp: str) -> tuple[str, str]:
    """RFC 3339 with nanoseconds drops trailing zeros: 10:00:00.5Z is before 10:00:00.51Z, and 10:00:00Z before both."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return seconds, fraction.ljust(9, "0")
