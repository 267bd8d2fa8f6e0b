"""`worldsize explain` of runs that recorded no times: asynchronous ones, and damaged ones."""

from __future__ import annotations

import pytest

from processes import worldsize
from worldsize.attribution import evidence
from worldsize.errors import UserError
from worldsize.runs.run_folder import RunFolder

QUICK = (
    *("--model.name", "shufflenet_v2_x0_5", "--data.name", "synthetic", "--data.samples", "64", "--data.classes", "10"),
    *("--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8"),
    *("--epochs", "1", "--schedule.warmup-epochs", "0"),
)


@pytest.mark.parametrize("strategy", ["async", "auto"])
def test_an_asynchronous_run_has_no_times_and_says_so(tmp_path, strategy):
    done = worldsize("train", "digits", *QUICK, "--parallel.strategy", strategy, "--name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recorded = strategy != "async"
    assert ("timing.jsonl" in done.stdout, "metrics.jsonl" in done.stdout) == (recorded, True)
    explained = worldsize("explain", "runs/a", "--no-measure", cwd=tmp_path)
    assert explained.returncode == (0 if recorded else 64)
    if not recorded:
        assert "runs/a is asynchronous: no process waits for another" in explained.stderr
        assert "runs/a/metrics.jsonl: speeds (images/s) and staleness of each epoch" in explained.stderr


def test_a_run_whose_recipe_is_empty_is_named(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UserError, match=r"recipe\.yaml is damaged"):
        evidence.read(RunFolder(tmp_path))
