"""How far a job is, from the metrics of its run."""

from __future__ import annotations

import json

import pytest

from worldsize.jobs.progress import progress


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("epochs: 90", "epoch 0.10 of 90, step 100, 32 images/s, 24:58:20 left"),
        ("epochs: 90\nmax_steps: 160", "epoch 0.10 of 90, step 100, 32 images/s, 0:01:00 left"),
        ("epochs: 1\nmax_steps: 100000", "epoch 0.10 of 1, step 100, 32 images/s, 0:15:00 left"),
        ("epochs: 90\nmax_steps: null", "epoch 0.10 of 90, step 100, 32 images/s, 24:58:20 left"),
        ("[", "epoch 0.10, step 100, 32 images/s"),
        ("none", "epoch 0.10, step 100, 32 images/s"),
    ],
)
def test_the_time_left_is_that_to_the_last_step(recipe, said):
    steps = [{"kind": "step", "step": n, "epoch": n / 1000, "step_ms": 1000.0, "images_per_s": 32.0} for n in range(1, 101)]
    assert progress("".join(json.dumps(step) + "\n" for step in steps), recipe) == said


@pytest.mark.parametrize(
    ("scores", "said"),
    [({}, "top-1 25.00%"), ({"val_map": None}, "top-1 25.00%"), ({"val_map": 0.75, "val_f1": 0.5}, "mAP 75.00%")],
)
def test_the_newest_validation_is_by_what_the_run_is_judged(scores, said):
    step = {"kind": "step", "step": 8, "epoch": 2.0, "step_ms": 1000.0, "images_per_s": 32.0}
    epochs = [{"kind": "epoch", "epoch": n, "step": 4 * n, "val_top1": 0.5 / n} | scores for n in (1, 2)]
    metrics = "".join(json.dumps(line) + "\n" for line in (step, *epochs))
    assert (
        progress(metrics, "epochs: 2")
        == f"epoch 2.00 of 2, step 8, 32 images/s, 0:00:00 left, validation {said} after epoch 2"
    )
