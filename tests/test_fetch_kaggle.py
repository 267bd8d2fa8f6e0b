"""Fetching with Kaggle's program: what it is asked, what it leaves behind, and its refusals in our words."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fetching import COMMAND, contents, pack, until
from trees import put
from worldsize.data import fetch
from worldsize.data.fetching import Interrupted, kaggle
from worldsize.data.fetching.state import FOLDER, locked
from worldsize.errors import DataError, UserError

COMPETITION = "imagenet-object-localization-challenge"

# What Kaggle's program prints: 2.2 run against a server that answers so, and as others have reported it.
FORBIDDEN = """403 Client Error: Forbidden for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles

You don't have access to this resource.
If this is a competition, you may need to accept its rules first at
  https://www.kaggle.com/competitions/<competition>/rules"""
FORBIDDEN_JSON = "You must accept this competition's rules before you'll be able to download files."
FORBIDDEN_1 = "403 - Forbidden - You must accept this competition's rules before you'll be able to download files."
DENIED = "403 - Forbidden - Permission 'competitions.get' was denied"
UNKNOWN = "Authentication required to call the Kaggle API.\n\nFirst, you will need a Kaggle account."
UNKNOWN_2 = (
    "401 Client Error: Unauthorized for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles"
)
UNKNOWN_1 = "401 - Unauthorized - Unauthenticated"
MISSING_1 = "OSError: Could not find kaggle.json. Make sure it's located in /root/.kaggle. Or use the environment method."
NOT_FOUND = "404 Client Error: Not Found for url: https://api.kaggle.com/v1/x\n\nThe resource was not found."
BROKEN = "Traceback (most recent call last):\n    import six\nModuleNotFoundError: No module named 'six'"
LOST = "ConnectionError: HTTPSConnectionPool(host='api.kaggle.com', port=443): Max retries exceeded"

PROGRAM = """#!{python}
import json, os, pathlib, sys, time
notes = pathlib.Path({notes!r})
plan = json.loads((notes / "plan").read_text())
(notes / "calls").open("a").write(json.dumps([sys.argv[1:], os.environ.get("KAGGLE_CONFIG_DIR")]) + "\\n")
if plan["says"]:
    print(plan["says"], file=sys.stderr)
    sys.exit(1)
data = (notes / "archive").read_bytes()
out = pathlib.Path(sys.argv[sys.argv.index("-p") + 1]) / (sys.argv[sys.argv.index("-c") + 1] + ".zip")
marker = out.with_name(out.name + ".kaggle-partial")
have = out.stat().st_size if marker.exists() else 0
marker.write_text(json.dumps({{"validator": "x", "size": len(data)}}))
with out.open("ab") as file:
    file.write(data[have : len(data) // 2])
    file.flush()
    time.sleep(plan["waits"])
    file.write(data[max(have, len(data) // 2) :])
marker.unlink()
"""


@pytest.fixture
def program(tmp_path, monkeypatch, challenge):
    """A stand-in for Kaggle's program, first on PATH. program(says=..., waits=...) tells it what to do."""
    notes = tmp_path / "notes"
    put(notes / "archive", pack(challenge, tmp_path / "kaggle.zip").read_bytes())
    path = put(tmp_path / "bin" / "kaggle", PROGRAM.format(python=sys.executable, notes=str(notes)).encode())
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    put(tmp_path / "secret" / "kaggle.json", b'{"username": "me", "key": "canary-in-a-mine"}')
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(tmp_path / "secret"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _, usage=fetch.shutil.disk_usage: Plenty)

    def plan(says: str = "", waits: float = 0.0) -> Path:
        put(notes / "plan", json.dumps({"says": says, "waits": waits}).encode())
        return notes

    plan()
    return plan


class Plenty:
    free = 10**12


def test_from_kaggle(program, tmp_path, challenge):
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0
    [[argv, folder]] = [json.loads(line) for line in (program() / "calls").read_text().splitlines()]
    assert argv[:4] == ["competitions", "download", "-c", COMPETITION]
    assert folder == str(tmp_path / "secret")
    assert contents(tmp_path / "there") == contents(challenge)
    left = [path.name for path in (tmp_path / "there" / FOLDER).rglob("*") if path.is_file()]
    assert sorted(left) == ["lock", "state.json"]


def start_with_kaggle(to: Path) -> subprocess.Popen:
    """A fetch of ImageNet in a process of its own, on a machine that has room for it or not."""
    command = COMMAND.replace("try:", "fetch._require = lambda *_: None\ntry:", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", command, "imagenet", "--to", str(to), "--subset"], stderr=-1, text=True
    )
    archive = kaggle.archive_in(to / FOLDER, COMPETITION)
    until(lambda: archive.exists() and archive.stat().st_size, "half of the archive")
    return process


def test_kaggles_program_is_stopped_with_us_and_goes_on(program, tmp_path):
    program(waits=60.0)
    process = start_with_kaggle(tmp_path / "there")
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 75, said
    with locked(tmp_path / "there"):  # nobody holds the folder any more
        half = kaggle.archive_in(tmp_path / "there" / FOLDER, COMPETITION).stat().st_size
    assert half == (program() / "archive").stat().st_size // 2
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0


def test_kaggles_program_keeps_the_folder_to_itself_when_it_outlives_us(program, tmp_path):
    program(waits=3.0)
    process = start_with_kaggle(tmp_path / "there")
    process.kill()
    process.communicate()
    with pytest.raises(Interrupted, match="another fetch is at work"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True))
    program()

    def goes_on() -> bool:
        with suppress(Interrupted):
            return fetch.run(fetch.Fetch("imagenet", tmp_path / "there", subset=True)) == 0
        return False

    until(goes_on, "the program's end")


def test_kaggles_archive_with_a_wrong_checksum_is_not_downloaded_again(program, tmp_path):
    right = hashlib.sha256((program() / "archive").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"is {right}, but"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there", sha256="0" * 64, subset=True))
    assert fetch.run(fetch.Fetch("imagenet", tmp_path / "there", sha256=right, subset=True)) == 0
    assert len((program() / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize("says", [FORBIDDEN, FORBIDDEN_JSON, FORBIDDEN_1, DENIED])
def test_kaggles_rules_are_not_accepted(program, tmp_path, says):
    program(says)
    with pytest.raises(UserError, match=rf"accepted the .*rules.*https://www.kaggle.com/competitions/{COMPETITION}/rules"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


@pytest.mark.parametrize("says", [UNKNOWN, UNKNOWN_2, UNKNOWN_1])
def test_kaggle_does_not_know_the_token(program, tmp_path, says):
    program(says)
    with pytest.raises(UserError, match=r"does not accept the token in .*secret/kaggle.json: make a new one at https://"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


@pytest.mark.parametrize("says", [UNKNOWN, MISSING_1])
def test_there_is_no_token(program, tmp_path, says):
    program(says)
    (tmp_path / "secret" / "kaggle.json").unlink()
    with pytest.raises(
        UserError, match=r"wants to know who you are.*worldsize cluster secret create kaggle --from ~/.kaggle/kaggle.json"
    ):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_other_failures_of_kaggles_program(program, tmp_path):
    program(NOT_FOUND)
    with pytest.raises(UserError, match=f"knows no competition '{COMPETITION}'"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))
    program(BROKEN)
    with pytest.raises(UserError, match=r"does not run; pip install --upgrade kaggle(.|\n)*No module named 'six'"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))
    program(LOST)
    with pytest.raises(Interrupted, match=r"same command goes on.*\n  ConnectionError: HTTPSConnectionPool"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_kaggles_program_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kaggle.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Plenty)
    with pytest.raises(UserError, match="pip install kaggle"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))


def test_no_room_for_imagenet(tmp_path, monkeypatch):
    class Little:
        free = 200 * 10**9

    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Little)
    with pytest.raises(UserError, match=r"200.0 GB free, but 326.0 GB are needed \(168.0 GB still .*, 158.0 GB to unpack\)"):
        fetch.run(fetch.Fetch("imagenet", tmp_path / "there"))
