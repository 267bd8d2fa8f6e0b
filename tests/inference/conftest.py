"""A trained run and its export."""

from __future__ import annotations

from pathlib import Path

import pytest

import worldsize
from exporting import QUICK, Exported
from processes import worldsize as command
from worldsize.cli import main
from worldsize.inference.predict.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    done = command("train", "digits", *QUICK, "--out", folder / "runs", "--name", "Digits_1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "Digits_1"


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return worldsize.load(run, device="cpu")


@pytest.fixture(scope="module")
def exported(run: Path, folder: Path) -> Exported:
    """exported(*arguments): the folder of such an export, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def export(*arguments: str) -> Path:
        if arguments not in made:
            out = folder / f"out-{len(made)}"
            before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
            assert main(["export", str(run), "--to", *arguments, "--parity", "60", "--out", str(out)]) == 0
            assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
            made[arguments] = out
        return made[arguments]

    return export
