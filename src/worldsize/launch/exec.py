"""A command in a container, by way of the API server: bytes to its stdin, bytes from its stdout.

Over a websocket, every frame of which begins with the number of its channel. This protocol cannot say that stdin has
ended, so the command must know how much to read. What was written and not yet read when the command ends may be lost.
"""

from __future__ import annotations

import json
import select
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import websocket

from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.transfer import Answered

PROTOCOL = "v4.channel.k8s.io"

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_FRAME = 1 << 15  # bytes
_CONNECT_S = 10.0
_SILENCE_S = 300.0  # of the other end, with something to be read or written


class Session:
    """One command that runs; single-threaded, because a TLS connection is.

    Args:
        connect: opens the websocket.

    Raises:
        ClusterError: the API server refuses.
        Unreachable: it does not answer.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        websocket.setdefaulttimeout(_CONNECT_S)
        with _in_words():
            self._socket = connect()
        self._socket.settimeout(_SILENCE_S)
        self._out = bytearray()
        self._err = bytearray()
        self._status: dict[str, Any] | None = None
        self._ended = False

    def write(self, content: bytes) -> None:
        """Send to the command's stdin.

        Raises:
            Answered: it is not listening any more, or wants to be heard first.
        """
        for start in range(0, len(content), _FRAME):
            while self._arrived():
                self._take()
            if self._out or self._ended:
                raise Answered
            with _in_words():
                self._socket.send(bytes([_STDIN]) + content[start : start + _FRAME], websocket.ABNF.OPCODE_BINARY)

    def read(self, count: int) -> bytes:
        """Exactly so many bytes of the command's stdout.

        Raises:
            ClusterError: it ended before.
            Unreachable: the connection did.
        """
        while len(self._out) < count:
            if self._status is not None:
                raise ClusterError(self._why(self._status))
            if self._ended:
                raise Unreachable("the connection to the pod was closed")
            self._take()
        content = bytes(self._out[:count])
        del self._out[:count]
        return content

    def close(self) -> None:
        """Leave the command; its stdin ends."""
        self._socket.shutdown()

    def _arrived(self) -> bool:
        """Whether there is a frame to be read."""
        if self._ended:
            return False
        inner = self._socket.sock
        if isinstance(inner, ssl.SSLSocket) and inner.pending():
            return True
        poll = select.poll()
        poll.register(inner, select.POLLIN)
        return bool(poll.poll(0))

    def _take(self) -> None:
        """Wait for a frame and sort it in."""
        with _in_words():
            kind, frame = self._socket.recv_data_frame(True)
        if kind == websocket.ABNF.OPCODE_CLOSE:
            self._ended = True
        elif kind in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) and frame.data:
            channel, content = frame.data[0], frame.data[1:]
            if channel == _STDOUT:
                self._out += content
            elif channel == _STDERR:
                self._err += content
            elif channel == _STATUS:
                self._status = json.loads(content)
                self._ended = True

    def _why(self, status: dict[str, Any]) -> str:
        """What is known about the command's end: the server's words, and the command's last ones."""
        message = status.get("message") or "the command in the pod ended early"
        last_words = self._err.decode("utf-8", "replace").strip()[-2000:]
        return f"{message}\n{last_words}".strip()


@contextmanager
def _in_words() -> Iterator[None]:
    """Errors of the websocket as ours."""
    try:
        yield
    except websocket.WebSocketBadStatusException as error:
        raise ClusterError(_refusal(error), error.status_code) from None
    except (websocket.WebSocketException, OSError) as error:
        raise Unreachable(f"the connection to the pod broke off: {str(error) or type(error).__name__}") from None


def _refusal(error: Any) -> str:
    """Why the API server did not open the connection."""
    body = getattr(error, "resp_body", None) or b""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:2000] or str(error)
