"""Programs that call worldsize: whatever they do with signals, streams and names, their runs tell how they ended."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import worldsize
from worldsize.api import training
from worldsize.errors import Diverged, UserError, WorldsizeError
from worldsize.runs.run_folder import RunFolder

# What a program does instead of training the run `runs/a`.
FAILS = """
import os
from worldsize.launch.failure import fail
raise SystemExit(fail("the loss is nan", 76))
"""
FINISHES = "open('runs/a/history.jsonl', 'a').write('{\"event\": \"finished\"}\\n')"


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """instead(program): calls run this program in place of the training of `runs/a`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training.run_folder, "check_name", lambda *_: None)
    made = RunFolder(tmp_path / "runs" / "a")
    made.path.mkdir(parents=True)
    made.recipe.write_text("base: digits\n")

    def use(program: str) -> None:
        monkeypatch.setattr(training.entry_point, "command", lambda python: [python, "-c", program])

    return use


def train() -> worldsize.Run:
    return worldsize.train("digits", name="a", quiet=True)


def in_a_thread() -> worldsize.Run:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train).result()


@pytest.fixture(params=["ignored", "waited for"])
def no_exit_codes(request):
    """The program ignores SIGCHLD, or waits for each child that ends."""

    def wait(*_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    handler = signal.SIG_IGN if request.param == "ignored" else wait
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    assert signal.signal(signal.SIGCHLD, before) is handler


@pytest.mark.parametrize("call", [train, in_a_thread])
def test_a_failure_is_raised_though_exit_codes_are_lost(instead, no_exit_codes, call):
    instead(FAILS)
    with pytest.raises(Diverged, match=r"^the loss is nan$") as raised:
        call()
    assert raised.value.exit_code == 76


@pytest.mark.parametrize("call", [train, in_a_thread])
def test_a_training_that_is_killed_has_not_finished(instead, no_exit_codes, call):
    instead("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorldsizeError, match=r"killed by SIGKILL|an exit code that is not known"):
        call()


@pytest.mark.parametrize("call", [train, in_a_thread])
def test_a_run_that_finishes_has_finished_though_exit_codes_are_lost(instead, no_exit_codes, call):
    instead(FINISHES)
    assert call().name == "a"


def test_no_stream_is_left_open(instead):
    instead(FINISHES)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        train()
        gc.collect()
    assert [str(one.message) for one in found] == []


def test_a_line_that_the_stream_cannot_encode_is_shown_with_escapes(instead, monkeypatch):
    instead("print('caf\\u00e9 \\u2603'); print('after')")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    worldsize.train("digits", name="a")
    assert written.getvalue().decode("latin-1") == "caf\u00e9 \\u2603\nafter\n"


class Unprintable(io.StringIO):
    """A stream that raises an error of its own."""

    def write(self, text: str) -> int:
        raise RuntimeError("no kernel")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_are_read_to_their_end_when_they_cannot_be_shown(instead, monkeypatch):
    instead("import sys; sys.stderr.write('much\\n' * 100_000); " + FINISHES)
    monkeypatch.setattr(sys, "stderr", Unprintable())
    assert worldsize.train("digits", name="a").name == "a"


def test_paths_that_begin_with_a_dash_are_no_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = {"data.name": "synthetic", "data.samples": 8, "data.classes": 2, "global_batch": 8, "micro_batch": 8}
    tiny |= {"data.train_crop_size": 32, "data.val_crop_size": 32, "max_steps": 1, "model.name": "shufflenet_v2_x0_5"}
    run = worldsize.train(worldsize.load_recipe("digits", tiny), out="-out", quiet=True)
    assert str(run.path) == "-out/run-1"
    assert worldsize.resume(run, quiet=True).result == run.result
    with pytest.raises(UserError, match="already exists"):
        worldsize.train(run.recipe, out="-out", name="run-1", quiet=True)
