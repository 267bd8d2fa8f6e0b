"""The checkpoint format: complete or absent, and always verified before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from forging import rewrite_state, seal
from worldsize import checkpoint
from worldsize.checkpoint import retention, writer
from worldsize.config.recipe import Checkpoint
from worldsize.errors import CheckpointError
from worldsize.runs import resumable
from worldsize.runs.run_folder import RunFolder


def snapshot(step: int, top1: float | None = None) -> checkpoint.Snapshot:
    values = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4) + step, "b": torch.tensor(step)}
    state = {"step": step, "evaluation": None if top1 is None else {"top1": top1}}
    ranks = {0: {"norm/0.mean": torch.ones(2)}, 1: {"norm/0.mean": torch.zeros(2)}, 2: {}}
    return checkpoint.Snapshot(values, {"m/a": values["a"] * 2}, ranks, state, "epochs: 1\n")


def test_what_was_written_is_read_back(tmp_path):
    path = writer.write(tmp_path, snapshot(7))
    assert path == tmp_path / "step-00000007"
    back = checkpoint.read(path)
    assert back.state == snapshot(7).state
    assert back.recipe == "epochs: 1\n"
    assert_equal(back.model, snapshot(7).model)
    assert_equal(back.optimizer, snapshot(7).optimizer)
    assert back.ranks.keys() == {0, 1}  # rank 2 has no state of its own
    for rank in back.ranks:
        assert_equal(back.ranks[rank], snapshot(7).ranks[rank])


def assert_equal(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[k], expected[k]) for k in own)


def test_a_rank_reads_and_checks_its_own_state_only(tmp_path):
    path = writer.write(tmp_path, snapshot(7))
    whole = (path / "rank-00001.safetensors").read_bytes()
    (path / "rank-00001.safetensors").write_bytes(bytes(len(whole)))
    for rank, kept in ((0, {0}), (2, set())):
        assert checkpoint.read(path, rank).ranks.keys() == kept
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
        checkpoint.read(path, 1)
    (path / "rank-00001.safetensors").write_bytes(whole[:-1])
    checkpoint.check(path, 2)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors has .* bytes"):
        checkpoint.check(path, 0)


def test_a_checkpoint_of_format_1_is_read(tmp_path):
    path = writer.write(tmp_path, snapshot(7))
    for rank in (0, 1):
        (path / f"rank-0000{rank}.safetensors").unlink()
    save_file({"0/norm/0.mean": torch.ones(2), "11/norm/0.mean": torch.zeros(2)}, path / "ranks.safetensors")
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    entries = {f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))
    back = checkpoint.read(path, 11)
    assert_equal(back.model, snapshot(7).model)
    assert_equal(back.ranks[0], {"norm/0.mean": torch.ones(2)})
    assert_equal(back.ranks[11], {"norm/0.mean": torch.zeros(2)})
    _edit(path, lambda m: m["files"].pop("ranks.safetensors"))
    with pytest.raises(CheckpointError, match=r"does not list ranks\.safetensors"):
        checkpoint.read(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return writer.write(tmp_path_factory.mktemp("written"), snapshot(1))


@given(data=st.data())
def test_every_flipped_bit_and_every_truncation_is_found(written, data):
    file = data.draw(st.sampled_from(sorted(p for p in written.iterdir() if p.name != "manifest.json")))
    content = file.read_bytes()
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
    else:
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        file.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match=file.name):
            checkpoint.check(written)
    finally:
        file.write_bytes(content)
    checkpoint.check(written)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda c: (c / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda c: (c / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda c: (c / "state.json").unlink(), "state.json is missing"),
        (lambda c: _edit(c, lambda m: m["files"].pop("model.safetensors")), "does not list model.safetensors"),
        (lambda c: _edit(c, lambda m: m.update(format=99)), "format 99"),
        (
            lambda c: _edit(c, lambda m: m["files"].update({"../x": {"bytes": 0, "sha256": ""}})),
            "outside the checkpoint folder",
        ),
        (lambda c: _link(c / "model.safetensors"), "outside the checkpoint folder"),
    ],
)
def test_every_other_damage_is_named(tmp_path, spoil, reason):
    path = writer.write(tmp_path, snapshot(3))
    spoil(path)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.read(path)


def _edit(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def test_the_newest_valid_one_is_found_and_damaged_ones_are_named(tmp_path, caplog):
    for step in (1, 2, 3):
        writer.write(tmp_path, snapshot(step))
    (tmp_path / "step-00000009.tmp-1").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000003" / "state.json").write_text("")
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000002"
    assert "step-00000003" in caplog.text


def test_the_newest_one_with_finite_weights_is_found(tmp_path):
    for step, value in ((1, 1.0), (2, 2.0), (3, float("nan")), (4, float("inf"))):
        saved = snapshot(step)
        saved.model["a"][1, 2] = value
        writer.write(tmp_path, saved)
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000004"
    assert checkpoint.newest_finite(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    assert checkpoint.newest_finite(tmp_path) == tmp_path / "step-00000001"
    shutil.rmtree(tmp_path / "step-00000001")
    assert checkpoint.newest_finite(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "7"}, "step must be int, not '7'"),
        ({"step": True}, "step must be int, not True"),
        ({"train_s": None}, "train_s must be int or float, not None"),
        ({"identity": []}, r"identity must be dict, not \[\]"),
        ({"evaluation": 3}, "evaluation must be dict or null, not 3"),
        ({"classes": ["a", 1]}, "classes must be names"),
    ],
)
def test_a_state_of_another_type_is_named_with_its_file(tmp_path, change, message):
    """Of a checkpoint with a valid manifest: somebody else wrote it."""
    path = writer.write(tmp_path, snapshot(7))
    rewrite_state(path, lambda state: state.update(change))
    with pytest.raises(CheckpointError, match=rf"step-00000007/state\.json: {message}"):
        checkpoint.read(path)


def test_a_state_without_a_key_is_named_when_the_key_is_read(tmp_path):
    path = writer.write(tmp_path, snapshot(7))
    rewrite_state(path, lambda state: (state.pop("step"), state.update(data={})))
    back = checkpoint.read(path)
    assert back.state.get("step") is None
    with pytest.raises(CheckpointError, match=r"step-00000007/state\.json: data\.train is missing"):
        assert back.state["data"]["train"]
    with pytest.raises(CheckpointError, match=r"step-00000007/state\.json: step is missing"):
        assert back.step


@pytest.mark.parametrize("content", ["[1]", "3", '{"step": ', "\x00"])
def test_a_state_that_is_no_object_is_no_checkpoint_and_has_no_score(tmp_path, content):
    path = writer.write(tmp_path, snapshot(7, top1=0.5))
    (path / "state.json").write_text(content)
    seal(path)
    with pytest.raises(CheckpointError, match=r"step-00000007/state\.json"):
        checkpoint.read(path)
    assert checkpoint.score_of(path) is None


def test_a_name_that_a_flipped_bit_makes_equal_to_another_is_noticed(tmp_path):
    path = writer.write(tmp_path, snapshot(1))
    manifest = path / "manifest.json"
    flipped = bytearray(manifest.read_bytes())
    flipped[flipped.index(b"rank-00000") + len("rank-0000")] ^= 1
    manifest.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="a name twice"):
        checkpoint.read(path, 0)


def test_a_save_that_cannot_take_the_place_of_an_older_one_leaves_it(tmp_path, monkeypatch):
    writer.write(tmp_path, snapshot(7))
    renamed = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith("step-00000007.tmp-") and "-old-" not in self.name:
            raise OSError(5, "Input/output error")
        return renamed(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(tmp_path, snapshot(7, 0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert checkpoint.score_of(checkpoint.newest_valid(tmp_path)) is None


def test_what_a_killed_process_has_moved_out_of_the_way_is_a_checkpoint(tmp_path):
    """Killed between the two renames of a step that is saved again: both copies are complete, under temporary names."""
    run = tmp_path / "run"
    folder = run / "checkpoints"
    run.mkdir()
    writer.write(folder, snapshot(3))
    replaced = writer.write(folder, snapshot(7)).rename(folder / "step-00000007.tmp-old-99")
    (folder / "step-00000008").touch()  # no folder
    assert checkpoint.newest_valid(folder) == replaced
    assert resumable.newest(RunFolder(run)) == replaced.name
    retention.remove_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000007", "step-00000008"]
    assert checkpoint.read(folder / "step-00000007").step == 7
    shutil.copytree(folder / "step-00000007", folder / "step-00000007.tmp-old-99")
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000007", "step-00000003"]
    retention.remove_leftovers(folder)
    assert not list(folder.glob("*.tmp-*"))


def test_no_checkpoint_and_no_valid_checkpoint(tmp_path):
    assert checkpoint.newest_valid(tmp_path / "nothing") is None
    (writer.write(tmp_path, snapshot(1)) / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="all 1 checkpoints"):
        checkpoint.newest_valid(tmp_path)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, top1 in ((1, 0.5), (2, 0.9), (3, 0.7), (4, None), (5, 0.8)):
        writer.write(tmp_path, snapshot(step, top1))
    retention.prune(tmp_path, 5, Checkpoint(keep=2, best=True))
    assert [p.name[-1] for p in checkpoint.list_checkpoints(tmp_path)] == ["5", "4", "2"]
    retention.prune(tmp_path, 5, Checkpoint(keep=1, best=False))
    assert [p.name[-1] for p in checkpoint.list_checkpoints(tmp_path)] == ["5"]


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "save_file"])
def test_a_failure_at_any_point_keeps_the_older_one_and_leaves_no_temporary_files(tmp_path, monkeypatch, call):
    writer.write(tmp_path, snapshot(1))

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    target = {
        "mkdir": (Path, "mkdir"),
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
        "save_file": (writer, "save_file"),
    }
    monkeypatch.setattr(*target[call], fail)
    writing = writer.Writer(tmp_path, Checkpoint(keep=2))
    writing.save(snapshot(2))
    assert writing.wait() is None
    assert "No space left" in str(writing.failed)
    monkeypatch.undo()
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000001"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_is_not_whole_on_disk_does_not_replace_the_older_one(tmp_path, monkeypatch):
    writing = writer.Writer(tmp_path, Checkpoint(keep=1))
    writing.save(snapshot(1))
    writing.wait()
    write = writer.write

    def cut(*arguments, **options):
        path = write(*arguments, **options)
        os.truncate(path / "optimizer.safetensors", 8)
        return path

    monkeypatch.setattr(writer, "write", cut)
    writing.save(snapshot(2))
    assert writing.wait() == tmp_path / "step-00000001"
    assert "optimizer.safetensors has 8 bytes instead of" in str(writing.failed)
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000001"


def test_a_damaged_newer_checkpoint_does_not_cause_deletion_of_the_one_just_written(tmp_path):
    writer.write(tmp_path, snapshot(200))
    (tmp_path / "step-00000200" / "state.json").write_text("")
    writing = writer.Writer(tmp_path, Checkpoint(keep=1))
    writing.save(snapshot(150))
    assert writing.wait() == tmp_path / "step-00000150"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000150"]


def test_a_value_that_json_cannot_represent_is_a_reported_failure(tmp_path):
    bad = snapshot(1)
    bad.state["evaluation"] = {"top1": float("nan")}
    writing = writer.Writer(tmp_path, Checkpoint(keep=1))
    writing.save(bad)
    writing.wait()
    assert writing.failed
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_any_memory_layout_are_saved_by_their_values(tmp_path):
    one = snapshot(1)
    weights = {"w": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)}
    checkpoint_folder = writer.write(tmp_path, replace(one, model=weights))
    assert checkpoint.read(checkpoint_folder).model["w"].equal(weights["w"])
