"""Training from Python: the run of the command line, its errors as exceptions, and its results as values."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import worldsize
from paths import ROOT
from processes import environment, losses
from processes import worldsize as worldsize_command
from waiting import until
from worldsize.api import training
from worldsize.config import recipe_files
from worldsize.errors import Diverged, Stopped, UserError

PAGE = (ROOT / "docs" / "python.md").read_text()
CHANGES = {
    "data.name": "synthetic",
    "data.samples": 64,
    "data.classes": 4,
    "data.train_crop_size": 32,
    "data.val_crop_size": 32,
    "model.name": "shufflenet_v2_x0_5",
    "global_batch": 16,
    "micro_batch": 4,
    "epochs": 1,
    "precision": "fp64",
    "schedule.warmup_epochs": 0,
    "track.every_seconds": 0,
    "optimizer.lr": 0.01,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for runs. Each process has one thread, as those of the other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def run(folder):
    return worldsize.train(worldsize.load_recipe("digits", CHANGES), out=folder, quiet=True)


def test_the_names_are_shown_before_they_are_imported():
    assert dir(worldsize) == sorted(worldsize.__all__)


def test_a_run_is_that_of_the_command_line(folder, run):
    (folder / "same.yaml").write_text((run.path / "recipe.yaml").read_text())
    worldsize_command("train", "same.yaml", "--out", ".", "--name", "same", cwd=folder)
    assert losses(run.path) == losses(folder / "same")


@pytest.mark.slow
def test_two_processes_give_the_same_numbers(folder, run):
    two = worldsize.train(run.recipe, procs=2, name="two", out=folder, quiet=True)
    assert [step["loss"] for step in two.steps] == pytest.approx([step["loss"] for step in run.steps], rel=1e-6)
    assert json.loads((two.path / "environment.json").read_text())["world_size"] == 2


def test_a_run_as_values(run):
    assert run.name == "run-1"
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4]
    assert run.result == json.loads((run.path / "result.json").read_text())
    assert run.epochs[-1]["val_top1"] == run.result["top1"]
    assert run.recipe.model.name == "shufflenet_v2_x0_5"
    assert run.load(device="cpu").classes == worldsize.load(run.path).classes


def test_output_goes_through_the_streams_of_this_process(folder, capsys):
    worldsize.train(worldsize.load_recipe("digits", CHANGES | {"max_steps": 1}), name="shown", out=folder)
    assert "shown" in capsys.readouterr().out


class Failing(io.StringIO):
    """A stream that raises an error from the line of the first epoch on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        if text and "train loss" in self.getvalue():
            raise self._error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file.")])
def test_a_run_continues_when_nobody_reads_its_output(folder, monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Failing(error))
    name = f"unread-{type(error).__name__}"
    assert worldsize.train(worldsize.load_recipe("digits", CHANGES), name=name, out=folder).result is not None


def test_a_run_is_saved_when_its_output_cannot_be_shown(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Failing(RuntimeError("no kernel")))
    longer = worldsize.load_recipe("digits", CHANGES | {"epochs": 200})
    with pytest.raises(RuntimeError, match="no kernel"):
        worldsize.train(longer, name="unshown", out=folder)
    assert '"stopped"' in (folder / "unshown" / "history.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"global_batch": 17}, UserError, "global_batch"),
        ({"optimizer.lr": 1e30, "optimizer.clip_norm": None}, Diverged, "loss"),
    ],
)
def test_what_ends_a_run_is_an_exception_with_its_message(folder, changes, kind, message):
    with pytest.raises(kind, match=message) as raised:
        worldsize.train(worldsize.load_recipe("digits", CHANGES | changes), out=folder, quiet=True)
    assert "Traceback" not in str(raised.value)
    assert raised.value.exit_code == kind.exit_code


def test_unknown_settings_are_named():
    with pytest.raises(UserError, match=r"digits has no setting 'model\.nam'; did you mean 'model\.name'"):
        worldsize.load_recipe("digits", {"model.nam": "resnet18"})
    with pytest.raises(UserError, match="epochs"):
        worldsize.load_recipe("digits", {"epochs": "many"})


def test_nested_changes_leave_the_rest_of_their_section_alone():
    before = CHANGES | {"optimizer.momentum": 0.7}
    nested = worldsize.load_recipe("digits", before | {"optimizer": {"lr": 0.5}, "data": {"samples": 32}})
    assert nested == worldsize.load_recipe("digits", before | {"optimizer.lr": 0.5, "data.samples": 32})
    assert (nested.optimizer.lr, nested.optimizer.momentum) == (0.5, 0.7)
    with pytest.raises(UserError, match=r"unknown setting 'optimizer\.lrr'; did you mean 'optimizer\.lr'"):
        worldsize.load_recipe("digits", {"optimizer": {"lrr": 0.5}})


def test_a_name_is_not_used_twice_and_a_folder_is_no_run(folder, run):
    with pytest.raises(UserError, match="already exists"):
        worldsize.train(run.recipe, name=run.name, out=folder, quiet=True)
    with pytest.raises(UserError, match="name 5: must be text"):
        worldsize.train(run.recipe, name=5, out=folder, quiet=True)
    with pytest.raises(UserError, match="not a run folder"):
        worldsize.Run(folder)


def test_a_recipe_whose_file_no_run_can_be_named_after_trains(folder, run):
    file = folder / "my recipe.yaml"
    file.write_text((run.path / "recipe.yaml").read_text().replace("max_steps: null", "max_steps: 1"))
    assert worldsize.train(file, out=folder, quiet=True).name == "my-recipe-1"


def test_trainings_that_start_at_once_have_names_of_their_own(folder):
    out = folder / "at-once"
    seeds = [worldsize.load_recipe("digits", CHANGES | {"seed": seed, "max_steps": 1}) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda recipe: worldsize.train(recipe, out=out, quiet=True), seeds))
    assert {run.name for run in runs} == {"run-1", "run-2"}
    assert [run.recipe.seed for run in runs] == [0, 1]


def test_what_is_no_number_of_processes_is_named(folder, run):
    for procs in ("two", 1.5, True):
        for start in (worldsize.train, worldsize.resume):
            with pytest.raises(UserError, match=f"procs is {procs!r}: pass a whole number"):
                start(run.path, procs=procs, quiet=True)


def test_a_refused_command_line_is_said_without_its_box(folder):
    refused = worldsize_command("train", "digits", "--out", "-x", cwd=folder).stderr
    assert refused.splitlines()[-1].startswith("╰")
    assert re.fullmatch(r"Missing value for argument '--out'[^│─╰]*", training._reason(refused.splitlines()))


def test_under_a_launcher_it_refuses(folder, run, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match="starts its own processes"):
        worldsize.train(run.recipe, out=folder, quiet=True)


PROGRAM = """
import sys, worldsize
try:
    worldsize.train(worldsize.load_recipe(sys.argv[1]), name="stopped", out=sys.argv[2], quiet=True)
except worldsize.errors.Stopped as error:
    print(error)
"""


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_resume_continues_it(folder):
    longer = worldsize.load_recipe("digits", CHANGES | {"epochs": 20, "evaluate_every": 20})
    whole = worldsize.train(longer, name="whole", out=folder, quiet=True)
    command = [sys.executable, "-c", PROGRAM, whole.path / "recipe.yaml", folder]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    metrics = folder / "stopped" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count('"step", ') >= 4, "some steps are done", running=process)
    os.kill(process.pid, signal.SIGINT)
    assert "the state is saved" in process.communicate(timeout=240)[0]
    stopped = worldsize.Run(folder / "stopped")
    assert stopped.result is None
    assert len(stopped.steps) < len(whole.steps)
    assert worldsize.resume(stopped, quiet=True).result is not None
    assert losses(stopped.path) == losses(whole.path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_killed_leaves_no_training_behind(folder, number):
    name = f"left-{number.name}"
    longer = worldsize.load_recipe("digits", CHANGES | {"epochs": 2000, "evaluate_every": 2000})
    (folder / f"{name}.yaml").write_text(recipe_files.to_yaml(longer))
    command = [sys.executable, "-c", PROGRAM.replace("stopped", name), folder / f"{name}.yaml", folder]
    process = subprocess.Popen(command, env=environment())
    history = folder / name / "history.jsonl"
    until(lambda: history.exists() and '"started"' in history.read_text(), "training has started", running=process)
    process.send_signal(number)
    process.wait(timeout=60)
    until(lambda: '"stopped"' in history.read_text(), "the training has saved and stopped")


def test_the_stable_names_are_those_of_the_documentation():
    assert issubclass(Stopped, worldsize.errors.WorldsizeError)
    listed = re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted({*worldsize.__all__} - {"__version__"})
    for name in listed:
        assert getattr(worldsize, name).__doc__


@pytest.mark.slow
def test_the_examples_of_the_documentation_run(tmp_path):
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    # Few steps, one seed, and the first recipe in the last example too: whole runs would take minutes.
    small = program.replace('"epochs": 4', '"max_steps": 4').replace("range(3)", "range(1)")
    small = small.replace('train("digits", name="careful")', 'train(recipe, name="careful")')
    done = subprocess.run([sys.executable, "-c", small], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "runs").glob("[a-z]*")} == {"first", "seed-0", "careful"}
