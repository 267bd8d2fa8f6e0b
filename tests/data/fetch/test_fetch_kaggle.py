"""Fetching with the Kaggle CLI: its arguments, the files it leaves, and how its errors are explained."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fetching import COMMAND, contents, pack
from trees import put
from waiting import until
from worldsize.data.fetch import Interrupted, command, kaggle
from worldsize.data.fetch.state import FOLDER, locked
from worldsize.errors import DataError, UserError

COMPETITION = "imagenet-object-localization-challenge"

# Output of the Kaggle CLI: 2.2 against a server with these responses, and from bug reports.
FORBIDDEN = """403 Client Error: Forbidden for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles

You don't have access to this resource.
If this is a competition, you may need to accept its rules first at
  https://www.kaggle.com/competitions/<competition>/rules"""
FORBIDDEN_JSON = "You must accept this competition's rules before you'll be able to download files."
FORBIDDEN_1 = "403 - Forbidden - You must accept this competition's rules before you'll be able to download files."
DENIED = "403 - Forbidden - Permission 'competitions.get' was denied"
UNAUTHENTICATED = "Authentication required to call the Kaggle API.\n\nFirst, you will need a Kaggle account."
UNAUTHENTICATED_2 = (
    "401 Client Error: Unauthorized for url: https://api.kaggle.com/v1/competitions.CompetitionApiService/DownloadDataFiles"
)
UNAUTHENTICATED_1 = "401 - Unauthorized - Unauthenticated"
MISSING_1 = "OSError: Could not find kaggle.json. Make sure it's located in /root/.kaggle. Or use the environment method."
NOT_FOUND = "404 Client Error: Not Found for url: https://api.kaggle.com/v1/x\n\nThe resource was not found."
NOT_RUNNABLE = "Traceback (most recent call last):\n    import six\nModuleNotFoundError: No module named 'six'"
CONNECTION_ERROR = "ConnectionError: HTTPSConnectionPool(host='api.kaggle.com', port=443): Max retries exceeded"

PROGRAM = """#!{python}
import json, os, pathlib, sys, time
notes = pathlib.Path({notes!r})
plan = json.loads((notes / "plan").read_text())
(notes / "calls").open("a").write(json.dumps([sys.argv[1:], os.environ.get("KAGGLE_CONFIG_DIR")]) + "\\n")
(notes / "token").write_text(os.environ.get("KAGGLE_API_TOKEN", ""))
if plan["message"]:
    print(plan["message"], file=sys.stderr)
    sys.exit(1)
data = (notes / "archive").read_bytes()
out = pathlib.Path(sys.argv[sys.argv.index("-p") + 1]) / (sys.argv[sys.argv.index("-c") + 1] + ".zip")
marker = out.with_name(out.name + ".kaggle-partial")
have = out.stat().st_size if marker.exists() else 0
marker.write_text(json.dumps({{"validator": "x", "size": len(data)}}))
with out.open("ab") as file:
    file.write(data[have : len(data) // 2])
    file.flush()
    while plan["holds"] and not (notes / "goes-on").exists():
        time.sleep(0.01)
    file.write(data[max(have, len(data) // 2) :])
marker.unlink()
"""


@pytest.fixture
def program(tmp_path, monkeypatch, challenge):
    """A fake Kaggle CLI, first on PATH. program(message=..., holds=...) sets what it does;
    it holds after half of the archive until notes/goes-on exists."""
    notes = tmp_path / "notes"
    put(notes / "archive", pack(challenge, tmp_path / "kaggle.zip").read_bytes())
    path = put(tmp_path / "bin" / "kaggle", PROGRAM.format(python=sys.executable, notes=str(notes)).encode())
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    put(tmp_path / "secret" / "kaggle.json", b'{"username": "me", "key": "canary-in-a-mine"}')
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(tmp_path / "secret"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KAGGLE_API_TOKEN", "KAGGLE_USERNAME", "KAGGLE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _, usage=command.shutil.disk_usage: PlentyOfSpace)

    def plan(message: str = "", holds: bool = False) -> Path:
        put(notes / "plan", json.dumps({"message": message, "holds": holds}).encode())
        return notes

    plan()
    return plan


class PlentyOfSpace:
    free = 10**12


def test_from_kaggle(program, tmp_path, challenge):
    assert command.run(command.Fetch("imagenet", tmp_path / "dataset", subset=True)) == 0
    [[arguments, folder]] = [json.loads(line) for line in (program() / "calls").read_text().splitlines()]
    assert arguments[:4] == ["competitions", "download", "-c", COMPETITION]
    assert folder == str(tmp_path / "secret")
    assert contents(tmp_path / "dataset") == contents(challenge)
    left = [path.name for path in (tmp_path / "dataset" / FOLDER).rglob("*") if path.is_file()]
    assert sorted(left) == ["lock", "state.json"]


def start_with_kaggle(to: Path) -> subprocess.Popen:
    """Fetch ImageNet in a separate process, without the check of free space."""
    command = COMMAND.replace("try:", "command._require_space = lambda *_: None\ntry:", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", command, "imagenet", "--to", str(to), "--subset"], stderr=-1, text=True
    )
    archive = kaggle.archive_in(to / FOLDER, COMPETITION)
    until(lambda: archive.exists() and archive.stat().st_size, "half of the archive is there")
    return process


def test_the_kaggle_cli_is_stopped_with_us_and_resumes(program, tmp_path):
    program(holds=True)
    process = start_with_kaggle(tmp_path / "dataset")
    process.terminate()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, stderr
    with locked(tmp_path / "dataset"):  # the lock has been released
        half = kaggle.archive_in(tmp_path / "dataset" / FOLDER, COMPETITION).stat().st_size
    assert half == (program() / "archive").stat().st_size // 2
    assert command.run(command.Fetch("imagenet", tmp_path / "dataset", subset=True)) == 0


def test_the_kaggle_cli_keeps_the_lock_when_it_outlives_us(program, tmp_path):
    notes = program(holds=True)
    process = start_with_kaggle(tmp_path / "dataset")
    process.kill()
    process.communicate()
    with pytest.raises(Interrupted, match="another fetch is running"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset", subset=True))
    (notes / "goes-on").touch()
    program()

    def resumes() -> bool:
        with suppress(Interrupted):
            return command.run(command.Fetch("imagenet", tmp_path / "dataset", subset=True)) == 0
        return False

    until(resumes, "the Kaggle CLI has ended")


def test_an_archive_with_a_wrong_checksum_is_not_downloaded_again(program, tmp_path):
    correct = hashlib.sha256((program() / "archive").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"is {correct}, but"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset", sha256="0" * 64, subset=True))
    assert command.run(command.Fetch("imagenet", tmp_path / "dataset", sha256=correct, subset=True)) == 0
    assert len((program() / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize("message", [FORBIDDEN, FORBIDDEN_JSON, FORBIDDEN_1, DENIED])
def test_competition_rules_are_not_accepted(program, tmp_path, message):
    program(message)
    with pytest.raises(UserError, match=rf"accepted the .*rules.*https://www.kaggle.com/competitions/{COMPETITION}/rules"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


@pytest.mark.parametrize("message", [UNAUTHENTICATED, UNAUTHENTICATED_2, UNAUTHENTICATED_1])
def test_token_is_rejected(program, tmp_path, message):
    program(message)
    with pytest.raises(UserError, match=r"rejected the token in .*secret/kaggle.json: create a token at https://"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


@pytest.mark.parametrize("folder", ["secret", ".kaggle"])
@pytest.mark.parametrize("name", ["access_token", "KAGGLE_API_TOKEN", "access_token.txt"])
def test_a_token_of_the_current_kind_is_passed_by_its_file(program, tmp_path, folder, name):
    """The Kaggle CLI would not look into the folder where a cluster mounts a Secret."""
    token = put(tmp_path / folder / name, b"KGAT_canary\n")
    assert command.run(command.Fetch("imagenet", tmp_path / "dataset", subset=True)) == 0
    assert (program() / "token").read_text() == str(token)
    program(UNAUTHENTICATED_2)
    with pytest.raises(UserError, match=f"rejected the token in {token}: "):
        command.run(command.Fetch("imagenet", tmp_path / "another"))


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"KAGGLE_API_TOKEN": "KGAT_canary"}, "KAGGLE_API_TOKEN"),
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "canary"}, "KAGGLE_USERNAME and KAGGLE_KEY"),
    ],
)
def test_a_token_in_variables_is_named_if_it_is_rejected(program, tmp_path, monkeypatch, variables, source):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program(UNAUTHENTICATED_2)
    with pytest.raises(UserError, match=f"rejected the token in {source}: "):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


@pytest.mark.parametrize("message", [UNAUTHENTICATED, MISSING_1])
def test_no_token(program, tmp_path, message):
    program(message)
    (tmp_path / "secret" / "kaggle.json").unlink()
    with pytest.raises(
        UserError, match=r"requires a token.*worldsize cluster secret create kaggle --from ~/.kaggle/access_token"
    ):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


def test_other_errors_of_the_kaggle_cli(program, tmp_path):
    program(NOT_FOUND)
    with pytest.raises(UserError, match=f"competition '{COMPETITION}' does not exist"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))
    program(NOT_RUNNABLE)
    with pytest.raises(UserError, match=r"does not run; try pip install --upgrade kaggle(.|\n)*No module named 'six'"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))
    program(CONNECTION_ERROR)
    with pytest.raises(Interrupted, match=r"rerun this command to resume:\n  ConnectionError: HTTPSConnectionPool"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


def test_the_kaggle_cli_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kaggle.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: PlentyOfSpace)
    with pytest.raises(UserError, match="pip install kaggle"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))


def test_no_room_for_imagenet(tmp_path, monkeypatch):
    class LittleSpace:
        free = 200 * 10**9

    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: LittleSpace)
    with pytest.raises(UserError, match=r"200.0 GB free, 326.0 GB needed \(168.0 GB to download, 158.0 GB to unpack\)"):
        command.run(command.Fetch("imagenet", tmp_path / "dataset"))
