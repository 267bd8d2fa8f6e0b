"""Downloading one file, in as many pieces as it takes: from a web server, or from a store that fsspec knows."""

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
from urllib.parse import urlsplit

from worldsize import __version__
from worldsize.data.fetching import Interrupted
from worldsize.data.fetching.progress import Meter, say
from worldsize.data.fetching.state import State
from worldsize.data.stores import faults_as_oserror
from worldsize.errors import DataError, UserError

PATIENCE_S = 120.0  # with a source from which nothing comes
FIRST_PAUSE_S = 1.0
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_AWAY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Remote:
    """An open source, read from byte ``start`` of ``total`` on; ``validator`` changes when its content does.

    ``read`` gives at most so many bytes, and none at the end.
    """

    start: int
    total: int | None
    validator: str
    read: Callable[[int], bytes]
    close: Callable[[], None]


# From the byte that is needed next, if what is there already has this validator; the source may start at 0 all the same.
Opener = Callable[[int, str], Remote]


class Lost(Exception):
    """The connection broke, or the server cannot answer now: trying again may help."""


def download(open_at: Opener, state: State, fits: Callable[[int], object], meter: Meter) -> None:
    """Complete ``state.part``; where it has begun already, go on from its end.

    ``fits`` gets the number of bytes that are still to come, once that is known, and raises where the disk is too small.

    Raises:
        Interrupted: nothing has come for `PATIENCE_S`.
        UserError: the source refuses.
    """
    lost_since = None
    pause = FIRST_PAUSE_S
    while state.size is None or length(state.part) != state.size:
        before = length(state.part)
        try:
            _go_on(open_at, state, fits, meter)
        except Lost as error:
            if lost_since is None or length(state.part) > before:
                lost_since, pause = time.monotonic(), FIRST_PAUSE_S
            elif time.monotonic() - lost_since > PATIENCE_S:
                raise Interrupted(f"{state.source} does not answer ({error}); the same command goes on later") from None
            say(f"{error}; trying again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def _go_on(open_at: Opener, state: State, fits: Callable[[int], object], meter: Meter) -> None:
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
            fits(remote.total - remote.start)
        while chunk := _read(remote):
            out.write(chunk)
            meter.add(len(chunk))
        if remote.total is None:
            state.size = out.tell()
        elif out.tell() < remote.total:
            raise Lost("the connection ended early")


def from_web(url: str) -> Opener:
    """The file at an http or https address."""

    def open_at(offset: int, validator: str) -> Remote:
        headers = {"Accept-Encoding": "identity", "User-Agent": f"worldsize/{__version__}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # what is there is longer than what is to be had
                return open_at(0, "")
            if error.code in _AWAY:
                raise Lost(f"the server says {error.code} {error.reason}") from None
            raise UserError(
                f"{shown(url)}: the server says {error.code} {error.reason}; "
                "check the address, and whether it needs a signature"
            ) from None
        except (ValueError, http.client.InvalidURL) as error:
            raise UserError(f"{shown(url)} is not a web address: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _lost(url, error) from None
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status == 206 and span and int(span[1]) == offset:
            # The server has compared the validator, and need not send it again.
            return Remote(offset, int(span[2]), validator or _validator(answer.headers), answer.read1, answer.close)
        if answer.status != 200:
            raise UserError(f"{shown(url)}: the server answers with status {answer.status} instead of a file")
        total = answer.headers.get("Content-Length")
        return Remote(0, int(total) if total else None, _validator(answer.headers), answer.read1, answer.close)

    return open_at


def from_store(url: str) -> Opener:
    """The file at any address that fsspec can open; its programs for s3, gs and others are installed one by one."""
    import fsspec  # type: ignore[import-untyped]

    def open_at(offset: int, validator: str) -> Remote:
        try:
            with faults_as_oserror():
                store, path = fsspec.core.url_to_fs(url)
                info = store.info(path)
                current = str(store.ukey(path))
                if info["type"] == "directory":
                    raise IsADirectoryError
                stream = store.open(path, "rb", cache_type="readahead", block_size=8 << 20)
                start = offset if validator == current else 0
                stream.seek(start)
        except FileNotFoundError:
            raise UserError(f"{shown(url)}: there is no such file") from None
        except IsADirectoryError:
            raise UserError(f"{shown(url)} is a folder: name an archive in it (.zip, .tar, .tar.gz)") from None
        except PermissionError as error:
            raise UserError(f"{shown(url)}: the store refuses ({error}); does it need credentials?") from None
        except ImportError as error:
            raise UserError(f"{shown(url)} needs another program: {error}") from None
        except OSError as error:
            raise Lost(f"{shown(url)}: {error}") from None
        except ValueError as error:
            raise UserError(f"{shown(url)}: {error}") from None
        return Remote(start, info["size"], current, stream.read, stream.close)

    return open_at


def check(path: Path, expected: str, meter: Meter) -> None:
    """Compare the file with a checksum, ALGORITHM:DIGEST.

    Raises:
        DataError: it is another one.
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
            f"remove the file to get it anew, or mend the checksum"
        )


def length(path: Path) -> int:
    """Bytes in the file; 0 where there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def shown(url: str) -> str:
    """The address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


def _read(remote: Remote) -> bytes:
    try:
        return remote.read(_CHUNK)
    except Exception as error:  # every store has its own
        raise Lost(f"the connection broke ({error or type(error).__name__})") from None


def _lost(url: str, error: Exception) -> Exception:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError(
            f"{shown(url)}: its certificate cannot be trusted ({reason.verify_message}); SSL_CERT_FILE may name yours"
        )
    return Lost(f"{urlsplit(url).hostname} cannot be reached ({reason or type(error).__name__})")


def _validator(headers: http.client.HTTPMessage) -> str:
    """What If-Range may be asked with: a strong ETag, or the date."""
    etag = str(headers.get("ETag", ""))
    return etag if etag and not etag.startswith("W/") else str(headers.get("Last-Modified", ""))
