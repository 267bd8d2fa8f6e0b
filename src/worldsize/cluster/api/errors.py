"""Errors for rejected API requests and lost connections."""

from __future__ import annotations

import json
import ssl
import time
from contextlib import suppress
from typing import Any

from worldsize.errors import ServiceFailed, UserError, first_line

_MAX_OUTAGE_S = 300.0  # of the server, during a watch or while following a log


class ClusterError(ServiceFailed):
    """The API server rejected a request or could not be reached."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Unreachable(ClusterError):
    """No response from the API server."""


class Unauthenticated(ClusterError):
    """The API server does not know who the user is, so it refuses everything."""


class Answered(Exception):
    """The command of an exec session sent output or ended before it had received all input."""


class connection_errors:
    """Context manager that converts connection errors to `Unreachable`, and failed TLS verification to `UserError`."""

    def __init__(self, server: str) -> None:
        self._server = server

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from urllib3.exceptions import HTTPError

        # Only verification failures are permanent; other TLS errors are lost connections.
        causes = (error, *getattr(error, "args", ()))
        untrusted = next((one for one in causes if isinstance(one, ssl.SSLCertVerificationError)), None)
        if untrusted is not None:
            raise UserError(f"certificate verification failed for {self._server}: {first_line(untrusted)}") from None
        if isinstance(error, (HTTPError, OSError)):
            raise Unreachable(f"no response from the API server {self._server}: {first_line(error)}") from None


def refusal(method: str, path: str, status: int, body: bytes) -> ClusterError:
    """The error for a rejected request: the server's message, or method, path and status if it sent none."""
    message, reason = body.decode("utf-8", "replace").strip()[:2000], ""
    with suppress(ValueError, AttributeError):
        answer = json.loads(body)
        message, reason = answer.get("message") or message, answer.get("reason") or ""
    if status == 401:
        message = f"the API server rejected your credentials; log in again ({message})"
        return Unauthenticated(message, status, reason)
    if status == 403 and "system:anonymous" in message:
        message = (
            "the API server received no credentials of yours (it sees the user system:anonymous); log in again, or check "
            f"the user in your kubeconfig ({message})"
        )
        return Unauthenticated(message, status, reason)
    return ClusterError(message or f"{method} {path}: HTTP {status}", status, reason)


def wait_for_server(error: ClusterError, lost_since: float | None) -> float:
    """Wait a second for a server that is down or overloaded; raise other errors. Returns the start of the outage."""
    now = time.monotonic()
    if not isinstance(error, Unreachable) and error.status not in (429, 500, 502, 503, 504):
        raise error
    if lost_since is not None and now - lost_since > _MAX_OUTAGE_S:
        raise error
    time.sleep(1.0)
    return now if lost_since is None else lost_since
