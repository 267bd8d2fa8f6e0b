"""Commands that work for minutes or hours find out first whether they can write their result."""

from __future__ import annotations

from pathlib import Path

import pytest

from folders import images
from paths import SMALL_NETWORK
from processes import worldsize
from worldsize import cli

CLOSED = "/sys"  # even root cannot write there


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``run`` and the folder of images ``images``."""
    folder = tmp_path_factory.mktemp("place")
    images(folder / "images", {"cat": 4, "dog": 4}, {"cat": 2, "dog": 2})
    words = ("--model.name", SMALL_NETWORK, "--max-steps", "2", "--global-batch", "8", "--micro-batch", "8")
    done = worldsize("train", "digits", *words, "--out", folder, "--name", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "words",
    [
        f"tune digits --out {CLOSED}/tuned.yaml",
        f"data verify --root images --report {CLOSED}/report.json",
        f"data info images --sheet {CLOSED}/sheet.html",
        f"init images --out {CLOSED}/mine.yaml",
        f"report run --out {CLOSED}/report.html",
        f"report run --svg {CLOSED}/charts",
        f"predict run --format csv --results-file {CLOSED}/rows.csv",
        f"predict run --format csv --sheet {CLOSED}/sheet.html",
        f"labels run --out {CLOSED}/labels.csv",
        f"labels run --out labels.csv --sheet {CLOSED}/sheet.html",
        f"eval run --details {CLOSED}/details",
        f"replay run --step 2 --out {CLOSED}/step.html",
        f"audit run --out {CLOSED}/certificate.json",
    ],
)
def test_a_result_that_cannot_be_written_is_refused_first(
    place: Path, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir())
    assert cli.main(words.split()) == 64
    out, err = capfd.readouterr()
    assert f"{CLOSED}" in err and "cannot write" in err
    assert out == "" and len(err.splitlines()) == 1  # no progress of any work
    assert sorted(path.name for path in place.iterdir()) == before
