"""The learning rates of converted timm files, step by step, against the scheduler that timm makes of the same arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from timm.scheduler import create_scheduler_v2

from worldsize.config.importing.convert import convert
from worldsize.optim import schedules

STEPS = 4  # per epoch
PEAK = 0.5
COMMON = {"model": "resnet50", "opt": "sgd", "lr": PEAK, "warmup_lr": 0.005, "min_lr": 0.0005}


def timms(given: dict[str, object]) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    names = {"epochs": "num_epochs", "decay_milestones": "decay_milestones"}
    passed = (
        "sched",
        "decay_epochs",
        "decay_milestones",
        "warmup_epochs",
        "warmup_prefix",
        "decay_rate",
        "warmup_lr",
        "min_lr",
    )
    words = {names.get(key, key): given[key] for key in ("epochs", *passed) if key in given}
    by_step = bool(given["sched_on_updates"])
    scheduler, epochs = create_scheduler_v2(optimizer, **words, step_on_epochs=not by_step, updates_per_epoch=STEPS)
    rates = []
    for step in range(epochs * STEPS):
        if by_step:
            scheduler.step_update(step)
        elif step % STEPS == 0:
            scheduler.step(step // STEPS)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    "given",
    [
        {"sched": "cosine", "warmup_epochs": 5},
        {"sched": "cosine", "warmup_epochs": 5, "warmup_prefix": False},
        {"sched": "cosine", "warmup_epochs": 5, "warmup_prefix": True},
        {"sched": "cosine", "warmup_epochs": 0},
        {"sched": "poly", "decay_rate": 2.0, "warmup_epochs": 5},
        {"sched": "poly", "decay_rate": 1.0, "warmup_epochs": 5, "warmup_prefix": True},
        {"sched": "step", "decay_epochs": 8, "decay_rate": 0.1, "warmup_epochs": 3},
        {"sched": "step", "decay_epochs": 8, "decay_rate": 0.1, "warmup_epochs": 0, "sched_on_updates": False},
        {"sched": "multistep", "decay_milestones": [7, 13], "warmup_epochs": 0, "sched_on_updates": False},
    ],
)
def test_every_step_has_timms_learning_rate(tmp_path: Path, given: dict[str, object]):
    given = COMMON | {"epochs": 20, "decay_rate": 0.1, "sched_on_updates": True} | given
    if given["sched"] in ("step", "multistep"):
        given["min_lr"] = 0.0
    file = tmp_path / "args.yaml"
    file.write_text(yaml.safe_dump(given))
    recipe = convert(file, 1).recipe()
    ours = [PEAK * schedules.factor(recipe.schedule, step, STEPS, recipe.epochs) for step in range(recipe.epochs * STEPS)]
    assert ours == pytest.approx(timms(given), abs=1e-9)
