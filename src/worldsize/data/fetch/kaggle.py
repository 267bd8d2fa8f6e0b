"""Download a competition's archive with the Kaggle CLI, and explain its errors."""

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

from worldsize.data.fetch import Interrupted
from worldsize.data.fetch.download import length
from worldsize.data.progress_bar import ByteProgress
from worldsize.errors import UserError, WorldsizeError

SECRET, TOKEN = "kaggle", "kaggle.json"
# Keys of the Secret, or files, with a token of the current kind.
ACCESS_TOKENS = ("access_token", "KAGGLE_API_TOKEN")
# Environment variables with a token of the older kind.
USER_AND_KEY = ("KAGGLE_USERNAME", "KAGGLE_KEY")
CREATE = (
    "create a token at https://www.kaggle.com/settings/api and save it as ~/.kaggle/access_token (or kaggle.json, for the "
    "older kind); on a cluster, then run: worldsize cluster secret create kaggle --from ~/.kaggle/access_token"
)
_POLL_S = 0.5
# The output differs between versions, and is sometimes only the server's message.
_UNAUTHENTICATED = re.compile(r"\b401\b|Unauth|Authentication required|Could not find kaggle\.json|Missing username")
_FORBIDDEN = re.compile(r"\b403\b|Forbidden|accept this competition's rules|Permission '.*' was denied")
_NOT_FOUND = re.compile(r"\b404\b|Not Found|resource was not found")
_NOT_RUNNABLE = re.compile(r"ModuleNotFoundError|ImportError|SyntaxError")
_running: list[subprocess.Popen[bytes]] = []


def archive_in(folder: Path, competition: str) -> Path:
    """The file that the Kaggle CLI downloads into ``folder``."""
    return folder / f"{competition}.zip"


def download(competition: str, folder: Path, lock: int, meter: ByteProgress) -> Path:
    """Download the complete archive into ``folder``, resuming an interrupted download.

    The token never passes through this process: the Kaggle CLI reads it from its file. The CLI inherits the descriptor
    ``lock``, so the folder stays locked even if the CLI outlives this process.

    Raises:
        UserError: the CLI, the token or the competition does not exist, or the rules are not accepted.
        Interrupted: the connection failed.
    """
    archive = archive_in(folder, competition)
    marker = archive.with_name(f"{archive.name}.kaggle-partial")
    command = [_program(), "competitions", "download", "-c", competition, "-p", str(folder), "--quiet"]
    meter.start_at(length(archive))
    with tempfile.TemporaryFile("w+", errors="replace") as output_file:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=output_file,
            pass_fds=(lock,),
            env=_environment(),
        ) as process:
            _running.append(process)
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                meter.total = _total_bytes(marker) or meter.total
                meter.at(length(archive))
            _running.clear()
        output_file.seek(0)
        text = output_file.read().strip()
    if process.returncode or not archive.is_file():
        raise explain(text, competition, _credentials())
    return archive


def stop() -> None:
    """Terminate the Kaggle CLI if it runs; called before this process exits."""
    for process in _running:
        process.terminate()


def explain(text: str, competition: str, credentials: str | None) -> WorldsizeError:
    """The error that the output of the Kaggle CLI stands for (pure).

    Args:
        credentials: the file or variable from which it read the user's credentials; None if there are none.
    """
    url = f"https://www.kaggle.com/competitions/{competition}"
    last_lines = "\n".join(f"  {line}" for line in text.splitlines()[-3:]) or "  (no output)"
    if _UNAUTHENTICATED.search(text) and credentials is None:
        return UserError(f"Kaggle requires a token: {CREATE}")
    if _UNAUTHENTICATED.search(text):
        return UserError(f"Kaggle rejected the token in {credentials}: {CREATE}, with --replace")
    if _FORBIDDEN.search(text):
        return UserError(
            f"Kaggle requires that you have accepted the competition's rules: log in, open {url}/rules, "
            f"accept them, and rerun this command. Output of the Kaggle CLI:\n{last_lines}"
        )
    if _NOT_FOUND.search(text):
        return UserError(f"Kaggle competition {competition!r} does not exist: see {url}")
    if _NOT_RUNNABLE.search(text):
        return UserError(f"the Kaggle CLI does not run; try pip install --upgrade kaggle:\n{last_lines}")
    return Interrupted(f"the Kaggle CLI failed; rerun this command to resume:\n{last_lines}")


def _program() -> str:
    scripts = str(Path(sys.executable).parent)
    path = shutil.which("kaggle") or shutil.which("kaggle", path=scripts)
    if path is None:
        raise UserError("the Kaggle CLI is not installed: run pip install kaggle, or pass another source with --from")
    return path


def _total_bytes(marker: Path) -> int | None:
    """Size of the archive, which the Kaggle CLI records during the download (since version 2)."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(marker.read_text("utf-8"))["size"])
    return None


def _config_folder() -> Path:
    configured = os.environ.get("KAGGLE_CONFIG_DIR")
    return Path(configured) if configured else Path.home() / ".kaggle"


def _credentials() -> str | None:
    """Where the Kaggle CLI finds the user's credentials, in the order in which it looks; None: nowhere."""
    if "KAGGLE_API_TOKEN" in _environment():
        given = os.environ.get("KAGGLE_API_TOKEN")
        return "KAGGLE_API_TOKEN" if given else _environment()["KAGGLE_API_TOKEN"]
    if os.environ.get("KAGGLE_USERNAME") and os.environ.get("KAGGLE_KEY"):
        return "KAGGLE_USERNAME and KAGGLE_KEY"
    files = (_config_folder() / TOKEN, _config_folder() / "credentials.json")
    return next((str(file) for file in files if file.is_file()), None)


def _environment() -> dict[str, str]:
    """The environment of the Kaggle CLI. It looks for an access token in ~/.kaggle only, not in KAGGLE_CONFIG_DIR, where a
    cluster mounts it; but its variable KAGGLE_API_TOKEN may name a file."""
    found = dict(os.environ)
    folders = (_config_folder(), Path.home() / ".kaggle")
    files = (folder / name for folder in folders for name in (*ACCESS_TOKENS, "access_token.txt"))
    token = next((file for file in files if file.is_file()), None)
    if token is not None and not found.get("KAGGLE_API_TOKEN"):
        found["KAGGLE_API_TOKEN"] = str(token)
    return found
