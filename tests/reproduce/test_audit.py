"""What an audit finds in evaluations and averaged weights that were changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eight_steps import EIGHT_STEPS
from forging import rewrite_metrics, seal
from processes import records
from worldsize import checkpoint, cli
from worldsize.reproduce import audit, evaluations
from worldsize.reproduce.promise import Promise
from worldsize.reproduce.scratch_runs import Steps

# Eight steps of digits per epoch; evaluations and checkpoints after steps 8 and 16.
SETTINGS = (
    *(*EIGHT_STEPS, "--average.name", "ema"),
    *("--epochs", "2", "--checkpoint.every-epochs", "1", "--checkpoint.history", "all"),
)


@pytest.fixture(scope="module")
def finished(ranks) -> Path:
    """A finished run with averaged weights; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "finished")
    return ranks.cwd / "runs" / "finished"


def edit_accuracies(run: Path) -> str:
    change = {"val_top1": 0.999}
    rewrite_metrics(run, lambda line: line | change if line["kind"] == "epoch" else line)
    return edit_result(run, top1=0.999, best_top1=0.999) or "val_top1 after step 16 is 0.999 in metrics.jsonl and"


def edit_result(run: Path, **changes: float) -> str:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | changes))
    return ""


def edit_top5(run: Path) -> str:
    edit_result(run, top5=0.999)
    return "val_top5 after step 16 is"


def edit_best(run: Path) -> str:
    edit_result(run, best_top1=0.999)
    return "the best top1 up to step 16 is"


def edit_best_epoch(run: Path) -> str:
    edit_result(run, best_epoch=7)
    return "best_epoch is 7 in result.json and"


def drop_evaluations(run: Path) -> str:
    rewrite_metrics(run, lambda line: line if line["kind"] == "step" else None)
    return "step-00000016 has an evaluation after step 16, which is missing in metrics.jsonl"


def drop_the_last_evaluation(run: Path) -> str:
    """Of whose step only result.json is left."""
    rewrite_metrics(run, lambda line: line if line["kind"] == "step" or line["step"] < 16 else None)
    shutil.rmtree(run / "checkpoints" / "step-00000016")
    return "result.json has an evaluation after step 16, which is missing in metrics.jsonl"


FORGERIES = (edit_accuracies, edit_top5, edit_best, edit_best_epoch, drop_evaluations, drop_the_last_evaluation)


@pytest.mark.parametrize("forge", FORGERIES)
def test_an_audit_compares_the_evaluations_that_a_run_recorded(run, capsys, forge):
    expected = forge(run)
    assert cli.main(["audit", str(run), "--windows", "0"]) == 1
    assert f"INCONSISTENT: {expected}" in capsys.readouterr().out


def test_a_higher_accuracy_than_the_best_one_is_found():
    epochs = [{"step": 8, "val_top1": 0.99}, {"step": 16, "val_top1": 0.5}]
    state = {"evaluation": {"top1": 0.5}, "evaluated_step": 16, "best_top1": 0.5}
    assert evaluations.contradiction(epochs, {"step-16": state}, None) == (
        "the best top1 up to step 16 is 0.99 in metrics.jsonl and 0.5 in step-16", 16,
    )  # fmt: skip
    assert evaluations.contradiction(epochs[1:], {"step-16": state}, None) is None


def test_what_older_runs_did_not_record_is_not_compared():
    epochs = [{"step": 8, "val_top1": 0.5}, {"step": 8, "val_top1": 0.25}]  # the second one after a crash
    states = {"step-8": {}, "step-16": {"evaluation": None, "evaluated_step": -1, "best_top1": -1.0}}
    assert evaluations.contradiction(epochs, states, {"steps": 8, "top1": 0.25}) is None


def test_an_audit_without_windows_claims_nothing_about_bits_and_names_the_average(run, capsys, tmp_path):
    assert cli.main(["audit", str(run), "--windows", "0", "--out", str(tmp_path / "certificate.json")]) == 0
    output = capsys.readouterr().out
    assert "CONSISTENT: the records agree; no window was computed again." in output
    assert "every window" not in output
    certified = json.loads((tmp_path / "certificate.json").read_text())["checkpoints"]
    average = run / "checkpoints" / "step-00000016" / "average.safetensors"
    assert certified["step-00000016"] == checkpoint.sha256(average)


def zeros(average: Path) -> None:
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(average).items()}, average)


@pytest.mark.parametrize(
    ("forge", "message"), [(zeros, "average.safetensors is not what"), (Path.unlink, "has averaged weights, or lacks them")]
)
def test_an_audit_compares_averaged_weights(finished, run, forge, message):
    steps = Steps(records(finished, "step"), finished / "checkpoints" / "step-00000016")
    forged = run / "checkpoints" / "step-00000016"
    audit._compare(steps.records, steps, forged, Promise())
    assert audit._measured(audit.Window(9, 16, 1, ""), ROUNDED, steps.records[-1], steps, forged).weights == 0
    forge(forged / "average.safetensors")
    seal(forged)
    with pytest.raises(audit.Inconsistent, match=message):
        audit._compare(steps.records, steps, forged, Promise())


ROUNDED = Promise("of a GPU", 0.01)


def test_where_bits_are_not_promised_the_distance_includes_averaged_weights(finished, run):
    steps = Steps(records(finished, "step"), finished / "checkpoints" / "step-00000016")
    forged = run / "checkpoints" / "step-00000016"
    zeros(forged / "average.safetensors")
    assert audit._measured(audit.Window(9, 16, 1, ""), ROUNDED, steps.records[-1], steps, forged).weights > 0.1
