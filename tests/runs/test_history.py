"""history.jsonl: starts, checkpoints and ends of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from worldsize.cli import main
from worldsize.errors import Stopped, UserError
from worldsize.runs.history import History, steps_at_other_sizes

QUICK = (
    *("--data.name", "synthetic", "--data.samples", "32", "--data.classes", "4", "--model.name", SMALL_NETWORK),
    *("--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8"),
    *("--epochs", "2", "--schedule.warmup-epochs", "0"),
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stopped_and_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    words = ["train", "digits", *QUICK, "--out", str(tmp_path), "--name", "a"]
    assert main([*words, "--stop-after", "1"]) == 75
    assert main(["train", "--resume", str(tmp_path / "a")]) == 0
    history = lines(tmp_path / "a" / "history.jsonl")
    assert [(line["event"], line["step"]) for line in history] == [
        *(("started", 0), ("saved", 1), ("stopped", 1)),
        *(("started", 1), ("saved", 2), ("saved", 4), ("finished", 4)),
    ]
    assert history[0]["command"].startswith("worldsize train digits --data.name synthetic")
    assert history[0]["world_size"] == 1 and list(history[0]["hosts"].values()) == [1]
    assert history[2]["reason"].startswith("stopped after step 1 of 4")
    assert [line["time"] for line in history] == sorted(line["time"] for line in history)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [([], 0), ([(0, 4)], 0), ([(0, 4), (9, 4)], 0), ([(0, 32), (9, 64), (12, 64)], 9), ([(0, 1), (9, 2), (12, 1)], 12)],
)
def test_the_steps_at_other_world_sizes(tmp_path: Path, starts: list[tuple[int, int]], expected: int):
    assert steps_at_other_sizes(tmp_path / "h") == 0
    for step, size in starts:
        History(tmp_path / "h").add("started", step, world_size=size)
        History(tmp_path / "h").add("saved", step + 1)
    (tmp_path / "h").open("a").write('{"event": "started", "st')
    assert steps_at_other_sizes(tmp_path / "h") == expected


@pytest.mark.parametrize(("error", "event"), [(Stopped("at step 3"), "stopped"), (UserError("no\nway"), "failed")])
def test_the_end_of_a_run_has_its_reason(tmp_path: Path, error: Exception, event: str):
    history = History(tmp_path / "history.jsonl")
    with pytest.raises(type(error)), history.running(lambda: 3, "worldsize train", ["x", "x", "y"]):
        raise error
    started, ended = lines(tmp_path / "history.jsonl")
    assert started["hosts"] == {"x": 2, "y": 1} and "more_hosts" not in started
    assert (ended["event"], ended["step"], ended["reason"]) == (event, 3, str(error).split("\n")[0])


def test_many_machines_are_counted(tmp_path: Path):
    with History(tmp_path / "h").running(lambda: 0, "", [f"node-{i // 8}" for i in range(4096)]):
        pass
    started = lines(tmp_path / "h")[0]
    assert (started["world_size"], len(started["hosts"]), started["more_hosts"]) == (4096, 32, 480)


def test_a_history_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    History(tmp_path / "missing" / "h").add("saved", 1)
    assert "cannot write" in caplog.text
