"""Resumable download of one file, from a web server or from any store that fsspec supports."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from worldsize import __version__
from worldsize.data.fetch import Interrupted
from worldsize.data.fetch.state import FetchState
from worldsize.data.progress_bar import ByteProgress, say
from worldsize.data.remote import faults_as_oserror, file_system
from worldsize.errors import DataError, UserError

GIVE_UP_AFTER_S = 120.0  # without any data from the source
FIRST_PAUSE_S = 1.0
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_RETRYABLE = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Remote:
    """An open source, positioned at byte ``start`` of ``total``; ``validator`` changes when the content does.

    ``read(n)`` returns at most n bytes, and no bytes at the end.
    """

    start: int
    total: int | None
    validator: str
    read: Callable[[int], bytes]
    close: Callable[[], None]


# Arguments: the next byte needed, and the validator of the bytes already downloaded. The source may still start at 0.
Opener = Callable[[int, str], Remote]


class ConnectionLost(Exception):
    """The connection broke, or the server is temporarily unavailable; a retry may succeed."""


def download(open_at: Opener, state: FetchState, require_space: Callable[[int], object], meter: ByteProgress) -> None:
    """Complete ``state.part``, resuming from its end.

    ``require_space`` is called with the number of remaining bytes once it is known, and raises if the disk is too small.

    Raises:
        Interrupted: no data for `GIVE_UP_AFTER_S`.
        UserError: the source rejects the request.
    """
    failing_since = None
    pause_s = FIRST_PAUSE_S
    while state.size is None or length(state.part) != state.size:
        length_before = length(state.part)
        try:
            _resume(open_at, state, require_space, meter)
        except ConnectionLost as error:
            if failing_since is None or length(state.part) > length_before:
                failing_since, pause_s = time.monotonic(), FIRST_PAUSE_S
            elif time.monotonic() - failing_since > GIVE_UP_AFTER_S:
                raise Interrupted(f"{state.source} does not respond ({error}); to resume, rerun the command later") from None
            say(f"{error}; retrying in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 30.0)


def _resume(open_at: Opener, state: FetchState, require_space: Callable[[int], object], meter: ByteProgress) -> None:
    remote = open_at(length(state.part), state.validator)
    if remote.start and (remote.total, remote.validator) != (state.size, state.validator):
        remote.close()
        remote = open_at(0, "")
    with closing(remote), open(state.part, "ab") as out:
        out.truncate(remote.start)
        state.size, state.validator = remote.total, remote.validator
        if not remote.start:
            state.checked, state.unpacked = "", 0
        state.save()
        meter.total = remote.total
        meter.start_at(remote.start)
        if remote.total is not None:
            require_space(remote.total - remote.start)
        while chunk := _read(remote):
            out.write(chunk)
            meter.add(len(chunk))
        if remote.total is None:
            state.size = out.tell()
        elif out.tell() < remote.total:
            raise ConnectionLost("the connection ended early")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects stay encrypted: without a checksum, only that tells that the archive is the server's."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        if urlsplit(req.full_url).scheme == "https" and urlsplit(newurl).scheme != "https":
            raise UserError(
                f"{redacted(req.full_url)} redirects to {redacted(newurl)}, which is not encrypted: to take what may "
                "have been changed on the way, pass that URL to --from"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def from_web(url: str) -> Opener:
    """Opener for an http or https URL."""
    opener = urllib.request.build_opener(_Redirects)

    def open_at(offset: int, validator: str) -> Remote:
        headers = {"Accept-Encoding": "identity", "User-Agent": f"worldsize/{__version__}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        try:
            response = opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the local part is longer than the file
                return open_at(0, "")
            if error.code in _RETRYABLE:
                raise ConnectionLost(f"the server responded {error.code} {error.reason}") from None
            raise UserError(
                f"{redacted(url)}: the server responded {error.code} {error.reason}; "
                "check the URL, and whether it must be signed"
            ) from None
        except (ValueError, http.client.InvalidURL) as error:
            raise UserError(f"{redacted(url)} is not a valid URL: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _connection_error(url, error) from None
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if response.status == 206 and content_range and int(content_range[1]) == offset:
            # The server has matched the validator and may omit it from the response.
            return Remote(
                offset, int(content_range[2]), validator or _validator(response.headers), response.read1, response.close
            )
        if response.status != 200:
            raise UserError(f"{redacted(url)}: the server responded with status {response.status} instead of a file")
        total = response.headers.get("Content-Length")
        return Remote(0, int(total) if total else None, _validator(response.headers), response.read1, response.close)

    return open_at


def from_store(url: str) -> Opener:
    """Opener for any URL that fsspec supports; s3, gs and others each need their own package."""

    def open_at(offset: int, validator: str) -> Remote:
        try:
            with faults_as_oserror():
                store, path = file_system(url)
                info = store.info(path)
                current = str(store.ukey(path))
                if info["type"] == "directory":
                    raise IsADirectoryError
                stream = store.open(path, "rb", cache_type="readahead", block_size=8 << 20)
                start = offset if validator == current else 0
                stream.seek(start)
        except FileNotFoundError:
            raise UserError(f"{redacted(url)} does not exist") from None
        except IsADirectoryError:
            raise UserError(f"{redacted(url)} is a folder; pass an archive in it (.zip, .tar, .tar.gz)") from None
        except PermissionError as error:
            raise UserError(f"{redacted(url)}: access denied ({error}); check your credentials") from None
        except ImportError as error:
            raise UserError(f"{redacted(url)} requires another package: {error}") from None
        except OSError as error:
            raise ConnectionLost(f"{redacted(url)}: {error}") from None
        except ValueError as error:
            raise UserError(f"{redacted(url)}: {error}") from None
        return Remote(start, info["size"], current, stream.read, stream.close)

    return open_at


def verify_checksum(path: Path, expected: str, meter: ByteProgress) -> None:
    """Verify the checksum of a file, given as ALGORITHM:DIGEST.

    Raises:
        DataError: the checksum differs.
    """
    algorithm, _, digest = expected.partition(":")
    hashed = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            meter.add(len(chunk))
    if hashed.hexdigest() != digest.lower():
        raise DataError(
            f"the {algorithm} of {path} is {hashed.hexdigest()}, but {digest} is expected: "
            f"delete the file to download it again, or correct the checksum"
        )


def length(path: Path) -> int:
    """Size of the file in bytes; 0 if it does not exist."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def redacted(url: str) -> str:
    """The URL without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


def _read(remote: Remote) -> bytes:
    try:
        return remote.read(_CHUNK)
    except Exception as error:  # every store raises its own exceptions
        raise ConnectionLost(f"the connection broke ({error or type(error).__name__})") from None


def _connection_error(url: str, error: Exception) -> Exception:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError(
            f"{redacted(url)}: certificate not trusted ({reason.verify_message}); set SSL_CERT_FILE to use your own CA"
        )
    return ConnectionLost(f"{urlsplit(url).hostname} cannot be reached ({reason or type(error).__name__})")


def _validator(headers: http.client.HTTPMessage) -> str:
    """The validator for If-Range: a strong ETag, or the modification date."""
    etag = str(headers.get("ETag", ""))
    return etag if etag and not etag.startswith("W/") else str(headers.get("Last-Modified", ""))
