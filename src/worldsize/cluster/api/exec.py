"""Runs a command in a container through the API server: bytes to its stdin, bytes from its stdout.

Uses a websocket in which every frame starts with its channel number. The protocol cannot signal the end of stdin, so the
command must know how much to read. Data written but not yet read when the command ends may be lost.

The client's own `WSClient` is not used: it reads whatever has arrived, not a given number of bytes, and copies all that it
holds for each frame, so that a slow reader of a large file would need memory for all of it.
"""

from __future__ import annotations

import json
import select
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import websocket

from worldsize.cluster.api.errors import Answered, ClusterError, Unreachable

PROTOCOL = "v4.channel.k8s.io"

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_FRAME = 1 << 15  # bytes
_CONNECT_S = 10.0
_IO_TIMEOUT_S = 300.0  # for one read or write


class Session:
    """One running command. Not thread-safe, because a TLS connection is not.

    Args:
        connect: opens the websocket.

    Raises:
        ClusterError: the API server rejects the request.
        Unreachable: the API server does not respond.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        websocket.setdefaulttimeout(_CONNECT_S)
        with _translated_errors():
            self._socket = connect()
        self._socket.settimeout(_IO_TIMEOUT_S)
        self._out = bytearray()
        self._err = bytearray()
        self._status: dict[str, Any] | None = None
        self._ended = False

    def write(self, content: bytes) -> None:
        """Send to the command's stdin.

        Raises:
            Answered: the command has ended, or has sent output that must be read first.
        """
        for start in range(0, len(content), _FRAME):
            while self._readable():
                self._receive()
            if self._out or self._ended:
                raise Answered
            with _translated_errors():
                self._socket.send(bytes([_STDIN]) + content[start : start + _FRAME], websocket.ABNF.OPCODE_BINARY)

    def read(self, count: int) -> bytes:
        """Read exactly ``count`` bytes of the command's stdout.

        Raises:
            ClusterError: the command ended first.
            Unreachable: the connection was lost.
        """
        while len(self._out) < count:
            if self._status is not None:
                raise ClusterError(self._failure(self._status))
            if self._ended:
                raise Unreachable("the connection to the pod was closed")
            self._receive()
        content = bytes(self._out[:count])
        del self._out[:count]
        return content

    def rest(self) -> bytes:
        """What the command has not yet sent to stdout, until it ends.

        Raises:
            ClusterError: it failed.
            Unreachable: the connection was lost.
        """
        while not self._ended:
            self._receive()
        if self._status is None or self._status.get("status") != "Success":
            raise ClusterError(self._failure(self._status or {}))
        content = bytes(self._out)
        self._out.clear()
        return content

    def close(self) -> None:
        """Close the connection; the command's stdin ends."""
        self._socket.shutdown()

    def _readable(self) -> bool:
        """Whether a frame can be read without blocking."""
        if self._ended:
            return False
        raw = self._socket.sock
        if isinstance(raw, ssl.SSLSocket) and raw.pending():
            return True
        poll = select.poll()
        poll.register(raw, select.POLLIN)
        return bool(poll.poll(0))

    def _receive(self) -> None:
        """Wait for one frame and append its content to the buffer of its channel."""
        with _translated_errors():
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

    def _failure(self, status: dict[str, Any]) -> str:
        """The server's message and the end of the command's stderr."""
        message = status.get("message") or "the command in the pod ended early"
        stderr = self._err.decode("utf-8", "replace").strip()[-2000:]
        return f"{message}\n{stderr}".strip()


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Convert websocket errors to `ClusterError` and `Unreachable`."""
    try:
        yield
    except websocket.WebSocketBadStatusException as error:
        raise ClusterError(_refusal(error), error.status_code) from None
    except (websocket.WebSocketException, OSError) as error:
        raise Unreachable(f"the connection to the pod was lost: {str(error) or type(error).__name__}") from None


def _refusal(error: Any) -> str:
    """Why the API server did not open the connection."""
    body = getattr(error, "resp_body", None) or b""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:2000] or str(error)
