"""Trainings from Python that are interrupted before their first step, or killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pytest

import worldsize
from processes import environment
from waiting import until
from worldsize.api import training
from worldsize.errors import Stopped, WorldsizeError
from worldsize.runs.run_folder import RunFolder

# What a program does instead of training. `signal.pause` would miss a signal that arrives just before it.
WAITS = "import time; print('begun', flush=True)\nwhile True: time.sleep(0.1)"
LEAVES = "import os, signal; signal.signal(15, lambda *_: os._exit({code})); " + WAITS
RECORDS = "open('runs/a/history.jsonl', 'a').write('{{\"event\": \"{event}\"}}\\n'); "


class Interrupting(io.StringIO):
    """A stream that Ctrl-C interrupts, once, when something is printed."""

    def write(self, text: str) -> int:
        first = not self.getvalue()
        super().write(text)
        if first:
            raise KeyboardInterrupt
        return len(text)


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """instead(program): run it in place of the training of `runs/a`, and interrupt it when it has printed something."""
    monkeypatch.chdir(tmp_path)

    def use(program: str) -> None:
        monkeypatch.setattr(sys, "stdout", Interrupting())  # here, because pytest sets it before each test
        monkeypatch.setattr(training.entry_point, "command", lambda python: [python, "-c", program])

    return use


@pytest.fixture
def folder(tmp_path):
    """The folder of the run `runs/a`."""
    made = RunFolder(tmp_path / "runs" / "a")
    made.path.mkdir(parents=True)
    made.recipe.write_text("base: digits\n")
    return made


@pytest.fixture
def new_names(monkeypatch):
    """The name of an existing run is taken for a new one: the program in place of the training makes no folder."""
    monkeypatch.setattr(training.run_folder, "check_name", lambda *_: None)


@pytest.mark.parametrize("program", [WAITS, *(LEAVES.format(code=code) for code in (143, 69, 70))])
def test_before_the_first_step_nothing_is_saved(instead, program):
    instead(program)
    with pytest.raises(Stopped, match=r"^interrupted before the first step: nothing was saved$") as raised:
        worldsize.train("digits", name="a")
    assert raised.value.exit_code == Stopped.exit_code


def test_a_signal_of_others_interrupts_too(instead):
    instead("import os; os.kill(os.getpid(), 15)")
    with pytest.raises(Stopped, match="before the first step"):
        worldsize.train("digits", name="a", quiet=True)


def test_a_run_to_resume_is_left_as_it_was(instead, folder):
    folder.history.write_text('{"event": "started"}\n{"event": "stopped"}\n')
    instead(WAITS)
    with pytest.raises(Stopped, match=r"^interrupted before the first step: runs/a is as it was$"):
        worldsize.resume("runs/a")


def test_what_a_run_that_had_begun_lost_is_not_called_nothing(instead, folder, new_names):
    instead(RECORDS.format(event="started") + LEAVES.format(code=143))
    with pytest.raises(WorldsizeError, match="the training ended with exit code 143") as raised:
        worldsize.train("digits", name="a")
    assert type(raised.value) is WorldsizeError and raised.value.exit_code == 143


def test_a_run_that_finished_before_its_launcher_was_interrupted_has_finished(instead, folder, new_names):
    instead(RECORDS.format(event="started") + RECORDS.format(event="finished") + LEAVES.format(code=143))
    assert worldsize.train("digits", name="a").name == "a"


def test_a_training_that_is_killed_has_the_exit_code_of_a_shell(instead):
    instead("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorldsizeError, match=r"^the training was killed by SIGKILL$") as raised:
        worldsize.train("digits", name="a", quiet=True)
    assert type(raised.value) is WorldsizeError and raised.value.exit_code == 137


# A network that never comes to be: its processes have not begun to train.
NETWORK = """
import os, time

def endless(classes):
    open(os.path.join({folder!r}, f"building-{{os.environ['RANK']}}"), "w").close()
    while True:
        time.sleep(0.1)
"""
PROGRAM = """
import sys, worldsize
changes = {"model.name": sys.argv[1], "global_batch": 144, "micro_batch": 36}
try:
    worldsize.train(worldsize.load_recipe("digits", changes), name="a", procs=2)
except worldsize.errors.Stopped as error:
    print(error.exit_code, error)
"""


@pytest.mark.slow
def test_two_processes_that_have_not_begun_end_at_once(tmp_path):
    (tmp_path / "network.py").write_text(NETWORK.format(folder=str(tmp_path)))
    command = [sys.executable, "-c", PROGRAM, f"{tmp_path}/network.py:endless"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until(lambda: len(list(tmp_path.glob("building-*"))) == 2, "both processes build the network", running=process)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=240)[0] == "75 interrupted before the first step: nothing was saved\n"
    assert not (tmp_path / "runs" / "a").exists()


# Trains with a program in place of the command.
KILLED = """
import sys, worldsize
from worldsize.api import training
training.entry_point.command = lambda python: [python, "-c", sys.argv[1]]
worldsize.train("digits", name="a")
"""


def test_a_program_that_a_signal_ends_leaves_no_temporary_folder(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", KILLED, WAITS]
    env = environment(TMPDIR=str(temporary), PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert len(list(temporary.glob("worldsize-*"))) == 1
        process.terminate()
        assert process.wait(480) == -signal.SIGTERM
    assert list(temporary.glob("worldsize-*")) == []
