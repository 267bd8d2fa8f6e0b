"""state.json with values that no run has: errors that name the file and the key."""

from __future__ import annotations

import json
import re

import pytest

from forging import rewrite_state
from processes import worldsize
from three_steps import THREE_STEPS
from worldsize.checkpoint import read_state
from worldsize.errors import CheckpointError

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400
STATE = {
    **{"step": 30, "epoch": 1, "epoch_step": 8, "evaluated_step": 22, "best_epoch": 1, "world_size": 2, "global_batch": 64},
    **{"epoch_loss": 2.5, "epoch_top1": 0.5, "epoch_s": 1.5, "train_s": 4, "best_top1": 0.5, "best_map": None},
    **{"missing": [], "evaluation": {"top1": 0.5, "map": None}, "scaler": {"scale": 65536.0}},
}


@pytest.fixture
def written(tmp_path):
    """written(CHANGES): a checkpoint with this state."""

    def write(**changes: object):
        path = tmp_path / "step-00000030"
        path.mkdir()
        (path / "state.json").write_text(json.dumps(STATE | changes))
        return path

    return write


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epoch": 0, "epoch_step": 30},
        {"evaluation": None, "evaluated_step": -1, "best_top1": -1.0, "scaler": {}},
        {"missing": [29, 31]},
    ],
)
def test_states_of_runs_are_read(written, changes):
    assert read_state(written(**changes)) == STATE | changes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("step", "epoch", "epoch_step", "best_epoch") for value in (-1, HUGE)),
        *((key, value) for key in ("world_size", "global_batch") for value in (0, -3, HUGE)),
        *((key, value) for key in ("epoch_loss", "best_top1", "best_map") for value in (NAN, INFINITE, -INFINITE, HUGE)),
        *((key, value) for key in ("epoch_s", "train_s", "epoch_top1") for value in (NAN, HUGE)),
        *(("step", value) for value in (0, 29, 31)),  # of another folder
        *(("evaluated_step", value) for value in (-2, 31)),
        *(("missing", [value]) for value in (-1, 1.5, "1", None, True, HUGE)),
        *(("epoch", value) for value in (0, 23)),
        ("epoch_step", 30),
        *(("evaluation", {"top1": value}) for value in (NAN, "0.5", [], HUGE)),
        *(("scaler", {"scale": value}) for value in (NAN, None, "1")),
    ],
)
def test_values_that_no_run_has_are_named(written, key, value):
    path = written(**{key: value})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}/state\.json: .*\b{key}\b"):
        read_state(path)


def test_a_loss_scale_without_a_key_is_named(written):
    with pytest.raises(CheckpointError, match=r"state\.json: scaler\._growth_tracker is missing"):
        read_state(written())["scaler"]["_growth_tracker"]


def test_a_run_goes_back_to_an_older_checkpoint_or_ends_with_66(tmp_path):
    assert worldsize("train", "digits", *THREE_STEPS, "--name", "a", "--stop-after", "2", cwd=tmp_path).returncode == 75
    first, second = sorted((tmp_path / "runs" / "a" / "checkpoints").iterdir())
    rewrite_state(second, lambda state: state.update(step=-1))
    done = worldsize("eval", second, cwd=tmp_path)
    assert done.returncode == 66 and "step-00000002/state.json: step is -1" in done.stderr
    rewrite_state(first, lambda state: state.update(epoch=5))
    done = worldsize("train", "--resume", "runs/a", cwd=tmp_path)
    assert done.returncode == 66
    for name in ("step-00000001/state.json: step 1 is not step 1 (epoch_step) of epoch 5", "all 2 checkpoints"):
        assert name in done.stderr
    rewrite_state(first, lambda state: state.update(epoch=0))
    done = worldsize("train", "--resume", "runs/a", cwd=tmp_path)
    assert done.returncode == 0 and "skipping checkpoint" in done.stderr
