"""A trained run and its export."""

from __future__ import annotations

from pathlib import Path

import pytest

import worldsize
from exporting import QUICK, Exported
from paths import SMALL_NETWORK
from processes import worldsize as command
from worldsize.cli import main
from worldsize.inference.predict.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return trained(folder, "Digits_1", "resnet18", steps=3)


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return worldsize.load(run, device="cpu")


@pytest.fixture(scope="module")
def exported(run: Path, folder: Path) -> Exported:
    """exported(*arguments): the folder of such an export, made once."""
    return exports(run, folder)


@pytest.fixture(scope="module")
def small_run(folder: Path) -> Path:
    """For formats that hold a program, which take as long as the network has layers."""
    return trained(folder, "Digits_2", SMALL_NETWORK, steps=24)


@pytest.fixture(scope="module")
def small_model(small_run: Path) -> Model:
    return worldsize.load(small_run, device="cpu")


@pytest.fixture(scope="module")
def small_exported(small_run: Path, folder: Path) -> Exported:
    return exports(small_run, folder)


def trained(folder: Path, name: str, network: str, steps: int) -> Path:
    words = ("--model.name", network, "--max-steps", str(steps), *QUICK, "--out", folder / "runs", "--name", name)
    done = command("train", "digits", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def exports(run: Path, folder: Path) -> Exported:
    made: dict[tuple[str, ...], Path] = {}

    def export(*arguments: str) -> Path:
        if arguments not in made:
            out = folder / f"{run.name}-{len(made)}"
            before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
            assert main(["export", str(run), "--to", *arguments, "--parity", "60", "--out", str(out)]) == 0
            assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
            made[arguments] = out
        return made[arguments]

    return export
