"""Run folders on a volume: one state of a run never mixes with another one, in either direction."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from trees import snapshot
from two_ends import download, upload
from worldsize.cluster.storage import placing, transfer
from worldsize.runs import resumable
from worldsize.runs.run_folder import RunFolder


def make_run(path: Path, *checkpoints: int, metrics: int | None = None, note: str = "") -> Path:
    """A run with checkpoints after these steps; its metrics end at the last one if not told otherwise."""
    for step in checkpoints:
        (path / f"checkpoints/step-{step:08}").mkdir(parents=True)
        (path / f"checkpoints/step-{step:08}/state.json").write_text(json.dumps({"step": step}))
    path.mkdir(parents=True, exist_ok=True)
    (path / "recipe.yaml").write_text("epochs: 1\n")
    (path / "history.jsonl").write_text("{}\n")
    last = max(checkpoints, default=0) if metrics is None else metrics
    lines = [json.dumps({"kind": "step", "step": step}) for step in range(1, last + 1)]
    (path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "st']))  # a crash cut the last line
    (path / "log.txt").write_text(note)
    return path


def copy_from(source: Path, target: Path, way: str, force: bool = True) -> None:
    """Copy the folder into the folder ``target``."""
    if way == "put":
        upload(source, target.parent, f"/{target.name}/", force)
    else:
        state = placing.run_state(source)
        place = placing.destination(target, source.name, state)
        placing.check(place, state, force)
        download(source.parent, f"/{source.name}", place, force)


WAYS = pytest.mark.parametrize("way", ["put", "get"])


@WAYS
def test_a_run_is_replaced_as_a_whole(tmp_path, way):
    source = make_run(tmp_path / "a/e1", 48, 72, note="new")
    old = make_run(tmp_path / "b/e1", 24, 48, note="old")
    (old / "result.json").write_text("{}")
    copy_from(source, tmp_path / "b", way)
    assert snapshot(old) == snapshot(source)
    assert os.listdir(tmp_path / "b") == ["e1"]


@WAYS
@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (
            (72, 78),
            {},
            "the newest checkpoint is of step 78 and metrics.jsonl ends at step 78, in the run to copy the newest",
        ),
        (
            (72,),
            {"metrics": 75},
            "the newest checkpoint is of step 72 and metrics.jsonl ends at step 75, in the run to copy",
        ),
        (
            (78,),
            {"metrics": 72},
            "the newest checkpoint is of step 78 and metrics.jsonl ends at step 72, in the run to copy",
        ),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_later_steps_are_not_replaced_by_earlier_ones(tmp_path, way, theirs, ours, expected, force):
    source = make_run(tmp_path / "a/e1", 48, 72)
    old = make_run(tmp_path / "b/e1", *theirs, **ours)
    before = snapshot(old)
    with pytest.raises(transfer.Failed, match=expected) as caught:
        copy_from(source, tmp_path / "b", way, force)
    assert caught.value.user_error
    assert "Copy in the other direction, or to another name; or rename or delete" in str(caught.value)
    assert snapshot(old) == before and os.listdir(tmp_path / "b") == ["e1"]


def test_a_step_done_during_the_transfer_is_not_lost(tmp_path):
    """What was checked before it began is checked again before anything is moved."""
    make_run(tmp_path / "a/e1", 72)
    old = make_run(tmp_path / "b/e1", 78)
    before = snapshot(old)
    with pytest.raises(transfer.Failed, match="has steps that the run to copy lacks"):
        download(tmp_path / "a", "/e1", old, force=True)
    assert snapshot(old) == before and os.listdir(tmp_path / "b") == ["e1"]


@WAYS
def test_runs_inside_a_tree_are_replaced_as_wholes_and_other_files_stay(tmp_path, way):
    first, second = make_run(tmp_path / "a/runs/e1", 72), make_run(tmp_path / "a/runs/e2", 5)
    (tmp_path / "a/runs/plan.md").write_text("new")
    old = make_run(tmp_path / "b/runs/e1", 24, 48)
    mine = make_run(tmp_path / "b/runs/mine", 99)
    before = snapshot(mine)
    copy_from(tmp_path / "a/runs", tmp_path / "b", way)
    assert snapshot(old) == snapshot(first) and snapshot(tmp_path / "b/runs/e2") == snapshot(second)
    assert snapshot(mine) == before
    assert (tmp_path / "b/runs/plan.md").read_text() == "new"

    make_run(old, 100)
    (tmp_path / "a/runs/plan.md").write_text("newer")
    with pytest.raises(transfer.Failed, match="e1 has steps that the run to copy lacks"):
        copy_from(tmp_path / "a/runs", tmp_path / "b", way)
    assert (tmp_path / "b/runs/plan.md").read_text() == "new"


def test_the_path_of_an_existing_run_means_that_run(tmp_path):
    volume, run = tmp_path / "volume", make_run(tmp_path / "runs/relay", 10)
    volume.mkdir()
    assert upload(run, volume, "/runs/relay") == {"path": "/runs/relay"}
    for step, path in enumerate(["/runs/relay", "/runs/relay/", "/runs", "/runs/"], start=11):
        make_run(run, step)
        with pytest.raises(transfer.Failed, match=r"^/runs/relay already exists; pass --force to replace the whole run"):
            upload(run, volume, path)
        assert upload(run, volume, path, force=True) == {"path": "/runs/relay"}
        assert snapshot(volume / "runs/relay") == snapshot(run)
        assert os.listdir(volume / "runs") == ["relay"]
    with pytest.raises(transfer.Failed, match=r"^/runs/relay has steps .*delete /runs/relay first$"):
        upload(make_run(tmp_path / "older/relay", 10), volume, "/runs/relay", force=True)


def test_a_run_never_lands_inside_another_one(tmp_path, monkeypatch):
    volume, run = tmp_path / "volume", make_run(tmp_path / "runs/relay", 10)
    other = make_run(volume / "runs/other", 10)
    before = snapshot(volume)
    for path in ("/runs/other", "/runs/other/", "/runs/other/relay", "/runs/other/checkpoints/new/"):
        with pytest.raises(transfer.Failed, match=r"inside the folder of another run, /runs/other; .* such as /runs, or"):
            upload(run, volume, path, force=True)
    assert snapshot(volume) == before
    monkeypatch.chdir(other)
    with pytest.raises(transfer.Failed, match="inside the folder of another run"):
        placing.destination(Path(), "relay", placing.run_state(run))
    assert placing.destination(Path(), "other", placing.run_state(run)) == other
    # Its files go where they always went.
    assert upload(run / "log.txt", volume, "/runs/other", force=True) == {"path": "/runs/other/log.txt"}


def test_an_interrupted_exchange_leaves_the_old_run(tmp_path, monkeypatch):
    make_run(tmp_path / "a/e1", 72)
    old = make_run(tmp_path / "b/e1", 24)
    before = snapshot(old)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if target == old and path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download(tmp_path / "a", "/e1", old, force=True)
    assert snapshot(old) == before and os.listdir(tmp_path / "b") == ["e1"]


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["recipe.yaml"],
        ["recipe.yaml", "log.txt"],
        ["recipe.yaml", "log.txt", "lock", ".nfs01"],
        ["recipe.yaml", "log.txt", "train.py"],
        ["recipe.yaml", "metrics.jsonl"],
        ["recipe.yaml", "environment.json"],
        ["recipe.yaml", "checkpoints/step-00000012/state.json"],
        ["recipe.yaml", "checkpoints/step-00000012.tmp-old-x/state.json"],
        ["recipe.yaml", "checkpoints/best.txt"],
        ["history.jsonl", "metrics.jsonl"],
    ],
)
def test_both_ends_know_a_run_as_the_rest_of_the_program_does(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert placing.is_run(tmp_path) == resumable.has_begun(RunFolder(tmp_path))


def test_an_export_and_a_checkpoint_are_no_runs(tmp_path):
    run = make_run(tmp_path / "run", 12)
    shutil.copy(run / "recipe.yaml", run / "checkpoints/step-00000012")
    assert not placing.is_run(run / "checkpoints/step-00000012")
    (run / "export.json").write_text("{}")
    assert not placing.is_run(run)
    assert placing.run_state(tmp_path / "no") is None
    (run / "export.json").unlink()
    assert placing.run_state(run) == {"checkpoint": 12, "metrics": 12}
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    assert placing.run_state(run) == {"checkpoint": 0, "metrics": 0}
