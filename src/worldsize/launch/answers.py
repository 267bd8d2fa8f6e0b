"""What an API server's refusals and a lost connection mean, as errors in words."""

from __future__ import annotations

import json
import ssl
from contextlib import suppress
from typing import Any

from worldsize.errors import UserError, WorldsizeError


class ClusterError(WorldsizeError):
    """The API server refused or could not be reached."""

    exit_code = 1

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Unreachable(ClusterError):
    """No answer from the API server."""


class as_unreachable:
    """Errors of the connection, in words."""

    def __init__(self, server: str) -> None:
        self._server = server

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from urllib3.exceptions import HTTPError

        # Other errors of TLS are connections that broke off.
        inside = (error, *getattr(error, "args", ()))
        refused = next((one for one in inside if isinstance(one, ssl.SSLCertVerificationError)), None)
        if refused is not None:
            raise UserError(f"the certificate of {self._server} cannot be trusted: {first_line(refused)}") from None
        if isinstance(error, (HTTPError, OSError)):
            raise Unreachable(f"the API server {self._server} does not answer: {first_line(error)}") from None


def refusal(method: str, path: str, status: int, body: bytes) -> ClusterError:
    """The server's refusal in its own words, or ours where it has none."""
    message, reason = body.decode("utf-8", "replace").strip()[:2000], ""
    with suppress(ValueError, AttributeError):
        told = json.loads(body)
        message, reason = told.get("message") or message, told.get("reason") or ""
    if status == 401:
        message = f"the API server does not accept your credentials; log in again ({message})"
    return ClusterError(message or f"{method} {path}: HTTP {status}", status, reason)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its name."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
