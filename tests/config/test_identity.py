"""Which settings are part of a run's identity."""

from __future__ import annotations

import json

import pytest

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe


def nested(dotted: str, value: object) -> dict:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def identity_with(dotted: str, value: object) -> dict:
    return parallel.identity(recipe_files.validate(nested(dotted, value), "test"))


OPERATIONAL = [
    ("data.root", "/elsewhere"),
    ("data.workers", 7),
    ("data.prefetch", 9),
    ("data.max_broken", 0.5),
    ("data.download", True),
    ("checkpoint.keep", 9),
    ("checkpoint.every_steps", 9),
    ("track.trackers", ["wandb"]),
    ("parallel.bucket_mb", 3),
    ("parallel.predivide", 2),
    ("parallel.strategy", "single"),
    ("model.channels_last", False),
    ("model.compile", True),
    ("device", "cpu"),
    ("deterministic", True),
    ("max_steps", 3),
    ("evaluate_every", 3),
    ("about", "another text"),
]
ESSENTIAL = [
    ("epochs", 91),
    ("seed", 1),
    ("global_batch", 512),
    ("micro_batch", 64),
    ("per_process_batch", 64),
    ("precision", "fp32"),
    ("label_smoothing", 0.2),
    ("data.name", "cifar10"),
    ("data.train_crop", "pad"),
    ("data.crop_area", [0.2, 1.0]),
    ("data.flip", False),
    ("data.val_crop_size", 200),
    ("data.mean", [0.5, 0.5, 0.5]),
    ("model.name", "resnet18"),
    ("model.weights", "/weights.pth"),
    ("optimizer.lr", 0.2),
    ("optimizer.clip_norm", 1.0),
    ("schedule.name", "linear"),
    ("schedule.milestones", [10.0]),
]


@pytest.mark.parametrize(("dotted", "value"), OPERATIONAL)
def test_operational_settings_do_not_change_the_identity(dotted, value):
    assert recipe_files.validate(nested(dotted, value), "test") != Recipe()
    assert identity_with(dotted, value) == parallel.identity(Recipe())


@pytest.mark.parametrize(("dotted", "value"), ESSENTIAL)
def test_every_other_setting_changes_the_identity(dotted, value):
    assert identity_with(dotted, value) != parallel.identity(Recipe())


@pytest.mark.parametrize(
    ("strategy", "setting", "value"),
    [
        ({}, "compression", "fp16"),
        ({"compression": "powersgd"}, "powersgd_rank", 4),
        ({"compression": "powersgd"}, "powersgd_start", 4),
        ({}, "sync_batchnorm", True),
        ({"strategy": "horovod"}, "op", "adasum"),
        ({"strategy": "adasum"}, "hierarchical", True),
        ({"strategy": "localsgd"}, "local_steps", 4),
        ({"strategy": "localsgd"}, "local_after", 1.5),
        ({"strategy": "localsgd"}, "average_momentum", True),
        ({"strategy": "async"}, "max_staleness", 3),
    ],
)
def test_what_a_strategy_reads_is_part_of_the_identity(strategy, setting, value):
    assert identity_with("parallel", strategy | {setting: value}) != identity_with("parallel", strategy)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"strategy": "single"}, None),
        ({"strategy": "horovod", "predivide": 2.0}, None),
        (
            {"compression": "fp16"},
            {"strategy": "ddp", "compression": "fp16", "powersgd_rank": 2, "powersgd_start": 100, "sync_batchnorm": False},
        ),
        ({"strategy": "horovod", "op": "adasum"}, {"strategy": "horovod", "compression": "none", "op": "adasum"}),
        ({"strategy": "adasum"}, {"strategy": "adasum", "hierarchical": False}),
        (
            {"strategy": "localsgd"},
            {"strategy": "localsgd", "local_steps": 8, "local_after": 0.0, "average_momentum": False},
        ),
        ({"strategy": "async"}, {"strategy": "async", "max_staleness": None}),
    ],
)
def test_the_identity_of_a_strategy_is_that_of_older_checkpoints(settings, expected):
    assert identity_with("parallel", settings).get("parallel") == expected


@pytest.mark.parametrize(
    ("dotted", "value"), [("epochs", 3), ("model.weights", "/weights.pth"), ("data.crop_area", [0.2, 1.0])]
)
def test_an_identity_survives_json(dotted, value):
    identity = identity_with(dotted, value)
    assert json.loads(json.dumps(identity)) == identity
