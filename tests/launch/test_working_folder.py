"""Code in the working folder must not run: neither in a command, nor in the processes that it starts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import worldsize
from processes import environment
from worldsize.bench import launching
from worldsize.bench.scaling.jobs import Jobs
from worldsize.launch import entry_point, local, local_async
from worldsize.parallel.base import Variant
from worldsize.reproduce import training_process

SOURCE = Path(worldsize.__file__).parent
PLANTED = ("torchvision", "statistics", "traceback", "json", "yaml", "socket", "worldsize")


@pytest.fixture
def planted(tmp_path, monkeypatch) -> Path:
    """The working folder: it has modules with the names of others. Each writes a file when it is imported."""
    for name in PLANTED:
        (tmp_path / name).mkdir()
        ran = tmp_path / f"{name}.ran"
        (tmp_path / name / "__init__.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ImportError('planted')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.ran")]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("worldsize.cli", ["recipes"]),
        ("worldsize.launch.lifeline", ["1", "true"]),
        ("worldsize.launch.wait_for_hosts", ["none", "1", "true"]),
        ("worldsize.hosts.probe", []),
    ],
)
def test_every_program_of_the_package(planted, module, words):
    command = entry_point.command(sys.executable, module)
    done = subprocess.run([*command, *words], env=environment(), capture_output=True, text=True, input="null", timeout=240)
    assert ran(planted) == [], done.stderr
    assert "planted" not in done.stderr


def test_every_launcher_on_this_machine(planted):
    assert local_async.launch(["recipes"], 1).code == 0
    assert training_process.run(["recipes"], planted / "metrics.jsonl", 1)[0] == 0
    launching.train_here(Variant("ddp", ()), 1, 1, ["--help"], planted / "metrics.jsonl", 1)
    assert Jobs._start(None, "recipes").returncode == 0
    assert ran(planted) == []


@pytest.mark.slow
def test_two_processes_import_what_one_process_imports(planted):
    small = (
        "--data.name",
        "synthetic",
        "--data.samples",
        "8",
        "--global-batch",
        "8",
        "--micro-batch",
        "4",
        "--max-steps",
        "1",
        "--model.name",
        "shufflenet_v2_x0_5",
    )
    assert local.launch(["train", "digits", *small], 2).code == 0
    assert ran(planted) == []


def test_a_command_started_by_torchrun_drops_the_folder_too(planted):
    """``python -m worldsize``: a folder named worldsize in the working folder cannot be helped."""
    (planted / "worldsize" / "__init__.py").unlink()
    (planted / "worldsize").rmdir()
    command = [sys.executable, "-m", "worldsize", "recipes"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert (done.returncode, ran(planted)) == (0, []), done.stderr


def test_a_folder_that_the_user_puts_on_the_path_stays_there(planted):
    for path in (str(planted), "."):
        for command in (entry_point.command(sys.executable), [sys.executable, "-m", "worldsize"]):
            words = [*command, "recipes"]
            subprocess.run(words, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=240)
            assert ran(planted), words
            for file in planted.glob("*.ran"):
                file.unlink()


def test_every_program_is_started_through_entry():
    """``python -m worldsize`` would put the working folder first on the path of the new process."""
    for path in SOURCE.rglob("*.py"):
        words = [[getattr(e, "value", None) for e in node.elts] for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, (ast.List, ast.Tuple))]  # fmt: skip
        assert not any("-m" in elements for elements in words), path
        if path.name not in ("usage.py", "__main__.py", "entry_point.py", "allreduce.py"):  # documented for torchrun
            assert "-m worldsize" not in path.read_text(), path
