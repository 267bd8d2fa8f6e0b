"""Metrics: what is written, and that a failing tracker does not stop training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from full_disk import files_up_to
from paths import SMALL_NETWORK
from processes import records, worldsize
from worldsize.config.recipe import Recipe, Track
from worldsize.runs.run_folder import RunFolder
from worldsize.track import Trackers, console, jsonl
from worldsize.track.base import Step, Summary, Tracker

QUICK = (
    *("--model.name", SMALL_NETWORK, "--global-batch", "144", "--micro-batch", "36", "--name", "a"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
)


def step(number: int) -> Step:
    return Step(number, number / 10, 2.0, 0.1, 0.01, 1.0, 100.0, [50.0, 50.0], 10.0, 1.0, 8.0, 1.0, 1000, 0)


class Failing(Tracker):
    def __init__(self, settings, folder, resumed_step):
        pass

    def steps(self, steps):
        raise RuntimeError("the service is down")


def test_a_tracker_that_fails_is_disabled_and_the_others_continue(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    trackers = Trackers([Failing(Track(), folder, 0), jsonl.Tracker(Track(), folder, 0)])
    trackers.steps([step(1)])
    trackers.steps([step(2)])
    assert [r["step"] for r in records(tmp_path, "step")] == [1, 2]
    assert caplog.text.count("the service is down") == 1


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    first = jsonl.Tracker(Track(), RunFolder(tmp_path), 0)
    first.steps([step(n) for n in range(1, 6)])
    first.end(None)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    jsonl.Tracker(Track(), RunFolder(tmp_path), 3).steps([step(4)])
    assert [r["step"] for r in records(tmp_path, "step")] == [1, 2, 3, 4]


def test_steps_that_are_missing_before_the_resumed_one_are_a_warning(tmp_path, caplog):
    """Two states of the run were mixed: its newest checkpoint is of a later one than its metrics."""
    first = jsonl.Tracker(Track(), RunFolder(tmp_path), 0)
    first.steps([replace(step(n), chain=f"{n:064}") for n in range(1, 6)])
    first.end(None)
    jsonl.Tracker(Track(), RunFolder(tmp_path), 5)
    assert not caplog.records
    jsonl.Tracker(Track(), RunFolder(tmp_path), 7)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl ends at step 5 although the run continues after step 7: the steps between are lost, and "
        "`worldsize audit` will find the run inconsistent"
    ]


LARGEST = 1 << 20


@pytest.fixture
def nearly_full(tmp_path):
    """A tracker whose file has no room for a second line within `LARGEST` bytes, but for a part of it."""
    first = json.dumps({"kind": "step", "step": 1, "loss": "x" * (LARGEST - 100)})
    (tmp_path / "metrics.jsonl").write_text(f"{first}\n")
    return jsonl.Tracker(Track(), RunFolder(tmp_path), 1)


def recorded(run):
    return [record["step"] for record in records(run, "step")]


def test_while_the_disk_is_full_lines_wait_and_the_file_has_whole_lines(nearly_full, tmp_path, caplog):
    with files_up_to(LARGEST):
        nearly_full.steps([step(2)])
        nearly_full.steps([step(3), step(4)])
        assert recorded(tmp_path) == [1]
    nearly_full.steps([step(5)])
    nearly_full.end(None)
    assert recorded(tmp_path) == [1, 2, 3, 4, 5]
    assert caplog.text.count("(File too large): new lines wait in memory") == 1
    assert caplog.text.count("metrics.jsonl is complete again") == 1 and "lacks" not in caplog.text


def test_lines_that_are_never_written_are_counted(nearly_full, tmp_path, caplog):
    with files_up_to(LARGEST):
        nearly_full.steps([step(2), step(3)])
        nearly_full.end(None)
    assert recorded(tmp_path) == [1]
    assert "metrics.jsonl lacks the last 2 lines" in caplog.text


def test_a_tracker_does_not_fill_the_memory(nearly_full, monkeypatch):
    monkeypatch.setattr(jsonl, "_MOST_WAITING", 1000)
    with files_up_to(LARGEST):
        nearly_full.steps([step(2)])
        with pytest.raises(OSError, match="File too large"):
            nearly_full.steps([step(n) for n in range(3, 10)])


@pytest.fixture(scope="module")
def two_ranks(ranks):
    """The folder of a run of two processes, and what it printed."""
    wandb = {"MODE": "offline", "API_KEY": "canary-0123456789012345678901234567890123456789", "SILENT": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wandb.items():
            patch.setenv(f"WANDB_{name}", value)
        printed = ranks(2).run("train", "digits", *QUICK, "--epochs", "3", "--track.trackers", "tensorboard", "wandb")
    return ranks.cwd / "runs" / "a", printed


def test_every_step_is_recorded_with_global_numbers_that_add_up(two_ranks):
    run, _ = two_ranks
    steps = records(run, "step")
    assert [s["step"] for s in steps] == list(range(1, 28))
    for s in steps:
        assert len(s["rank_images_per_s"]) == 2
        assert s["images_per_s"] == pytest.approx(144 / s["step_ms"] * 1000, rel=1e-3)
        parts = s["data_ms"] + s["copy_ms"] + s["compute_ms"] + s["communication_ms"] + s["overhead_ms"]
        assert parts == pytest.approx(s["step_ms"], rel=1e-3)
        assert s["communication_ms"] >= s["straggler_ms"] >= 0 and s["communication_ms"] > 0
        assert s["top1"] * 144 == pytest.approx(round(s["top1"] * 144), abs=1e-3)
    epoch = records(run, "epoch")[0]
    assert epoch["train_loss"] == pytest.approx(sum(s["loss"] for s in steps[:9]) / 9, rel=1e-5)


def test_tensorboard_has_the_curves(two_ranks):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two_ranks[0] / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 28))
    assert len(events.Scalars("val/top1")) == 3


def test_tensorboard_shows_a_run_that_starts_again_once(tmp_path):
    """A run that was killed before its first checkpoint begins with step 1 again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from worldsize.track import tensorboard

    for last in (5, 3):
        tracker = tensorboard.Tracker(Track(), RunFolder(tmp_path), 0)
        tracker.steps([step(n) for n in range(1, last + 1)])
        tracker.end(None)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert all([e.step for e in events.Scalars(name)] == [1, 2, 3] for name in events.Tags()["scalars"])


def test_wandb_is_one_offline_run_and_its_key_is_nowhere(two_ranks):
    run, printed = two_ranks
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert "canary" not in printed
    for path in run.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            assert b"canary" not in path.read_bytes(), path


def test_the_run_folder_is_complete(two_ranks):
    run, printed = two_ranks
    recipe = (run / "recipe.yaml").read_text()
    assert "small_network.py:residual" in recipe
    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["versions"]["torch"] == environment["packages"]["torch"]
    assert environment["command"].startswith("worldsize train ")
    result = json.loads((run / "result.json").read_text())
    assert Path(result["checkpoint"]).name == "step-00000027"
    assert f"top-1 {result['top1']:.2%}" in printed
    assert "runs/a contains" in printed


def test_a_resolved_recipe_is_a_valid_input(two_ranks, tmp_path):
    from worldsize.config import recipe_files

    path = two_ranks[0] / "recipe.yaml"
    assert isinstance(recipe_files.load(str(path)), Recipe)
    assert recipe_files.to_yaml(recipe_files.load(str(path))) == path.read_text()


@pytest.mark.parametrize("recipe", ["digits", "cifar10", "imagenet"])
def test_each_recipe_trains_a_step_and_its_checkpoint_holds_every_parameter(recipe, tmp_path):
    import torch

    from processes import weights
    from worldsize.config import recipe_files
    from worldsize.models import factory

    small = ("--data.name", "synthetic", "--data.samples", "16", "--data.classes", "4", "--global-batch", "8")
    size = ("--data.train-crop-size", "32", "--data.val-resize-size", "32", "--data.val-crop-size", "32")
    fast = ("--micro-batch", "4", "--max-steps", "1", "--name", "a", "--precision", "fp32", "--schedule.warmup-start", "1")
    done = worldsize("train", recipe, *small, *size, *fast, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fresh = factory.build(recipe_files.load(str(tmp_path / "runs/a/recipe.yaml")), 4, torch.device("cpu"), torch.float32)
    saved = weights(tmp_path / "runs" / "a")
    assert saved.keys() == fresh.state_dict().keys()
    changed = [name for name, p in fresh.named_parameters() if not torch.equal(p, saved[name])]
    # Layers before norms that start at zero get no gradient in the first step; all other weights change.
    assert {"conv1.weight", "fc.weight", "layer4.2.bn3.weight"} <= set(changed)
    fresh.load_state_dict(saved, strict=True)


def test_the_last_lines_of_a_run_that_ended_within_its_first_epoch():
    one = Summary(0.5, 1.0, 0.7, 0.5, 1, 1, 0.333, 36.4, 65.0, None)
    assert console._result_lines(one, 0) == [
        "top-1 50.00%, top-5 100.00% after 1 step (0.333 epochs); best 50.00% in epoch 1",
        "36 images/s on average during training, 1:05 in total",
    ]
    whole = Summary(0.5, 1.0, 0.7, 0.5, 1, 3, 1.0, 36.4, 65.0, None)
    assert console._result_lines(whole, 0)[0].endswith(" after 3 steps (1 epoch); best 50.00% after epoch 1")
    assert console._result_lines(whole, 2)[1] == "36 images/s on average during training, 1:05 since step 2"
