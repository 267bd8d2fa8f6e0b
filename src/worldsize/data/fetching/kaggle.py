"""Downloading a competition's archive with Kaggle's own program, and saying what its refusals mean."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from worldsize.data.fetching import Interrupted
from worldsize.data.fetching.download import length
from worldsize.data.fetching.progress import Meter
from worldsize.errors import UserError, WorldsizeError

SECRET, TOKEN = "kaggle", "kaggle.json"
_LOOK_EVERY_S = 0.5
# Its output differs from version to version, and is sometimes the server's own words alone.
_UNKNOWN = re.compile(r"\b401\b|Unauth|Authentication required|Could not find kaggle\.json|Missing username")
_FORBIDDEN = re.compile(r"\b403\b|Forbidden|accept this competition's rules|Permission '.*' was denied")
_NOT_FOUND = re.compile(r"\b404\b|Not Found|resource was not found")
_BROKEN = re.compile(r"ModuleNotFoundError|ImportError|SyntaxError")
_running: list[subprocess.Popen[bytes]] = []


def archive_in(folder: Path, competition: str) -> Path:
    """The file that the program downloads into ``folder``."""
    return folder / f"{competition}.zip"


def download(competition: str, folder: Path, lock: int, meter: Meter) -> Path:
    """The whole archive, in ``folder``, where what an interrupted call has left there is gone on with.

    The token never passes through here: the program reads it from its file. It inherits the descriptor ``lock``, so that
    it keeps the folder to itself even when it outlives this process.

    Raises:
        UserError: there is no such program, token or competition, or the rules are not accepted.
        Interrupted: the connection failed.
    """
    archive = archive_in(folder, competition)
    marker = archive.with_name(f"{archive.name}.kaggle-partial")
    command = [_program(), "competitions", "download", "-c", competition, "-p", str(folder), "--quiet"]
    meter.start_at(length(archive))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(lock,)) as program:
            _running.append(program)
            while program.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    program.wait(_LOOK_EVERY_S)
                meter.total = _whole(marker) or meter.total
                meter.at(length(archive))
            _running.clear()
        output.seek(0)
        said = output.read().strip()
    if program.returncode or not archive.is_file():
        raise explain(said, competition, _has_token())
    return archive


def stop() -> None:
    """Ask the program to end, if it runs: this process is about to."""
    for program in _running:
        program.terminate()


def explain(said: str, competition: str, has_token: bool) -> WorldsizeError:
    """What the program's output means for the user (pure)."""
    page = f"https://www.kaggle.com/competitions/{competition}"
    last = "\n".join(f"  {line}" for line in said.splitlines()[-3:]) or "  nothing"
    if _UNKNOWN.search(said) and not has_token:
        return UserError(
            f"Kaggle wants to know who you are: make a token at https://www.kaggle.com/settings/api and leave it as "
            f"~/.kaggle/{TOKEN}; on a cluster: worldsize cluster secret create {SECRET} --from ~/.kaggle/{TOKEN}"
        )
    if _UNKNOWN.search(said):
        return UserError(
            f"Kaggle does not accept the token in {_token_file()}: make a new one at https://www.kaggle.com/settings/api; "
            f"on a cluster, then: worldsize cluster secret create {SECRET} --from ~/.kaggle/{TOKEN}"
        )
    if _FORBIDDEN.search(said):
        return UserError(
            f"Kaggle gives the data only to those who have accepted the competition's rules: log in, open {page}/rules, "
            f"accept them, and run the same command again. Kaggle's program said:\n{last}"
        )
    if _NOT_FOUND.search(said):
        return UserError(f"Kaggle knows no competition {competition!r}: see {page}")
    if _BROKEN.search(said):
        return UserError(f"Kaggle's program does not run; pip install --upgrade kaggle may mend it:\n{last}")
    return Interrupted(f"Kaggle's program failed, and the same command goes on where it stopped:\n{last}")


def _program() -> str:
    own = str(Path(sys.executable).parent)
    found = shutil.which("kaggle") or shutil.which("kaggle", path=own)
    if found is None:
        raise UserError("Kaggle's program is not installed: pip install kaggle; or name another source with --from")
    return found


def _whole(marker: Path) -> int | None:
    """The archive's size, which the program notes while it downloads (since version 2)."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(marker.read_text("utf-8"))["size"])
    return None


def _token_file() -> Path:
    configured = os.environ.get("KAGGLE_CONFIG_DIR")
    home = Path.home() / ".kaggle"
    return Path(configured) / TOKEN if configured else home / TOKEN


def _has_token() -> bool:
    files = (_token_file(), Path.home() / ".kaggle" / "access_token")
    return any(file.is_file() for file in files) or any(name in os.environ for name in ("KAGGLE_KEY", "KAGGLE_API_TOKEN"))
