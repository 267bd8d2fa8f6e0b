"""The loss scale of fp16 where ranks have different gradients."""

from __future__ import annotations

import math

import pytest

from interruptions import SETTINGS
from processes import losses


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lion", "muon", "nadamw", "rmsprop", "sgd"])
def test_ranks_with_different_gradients_train_in_fp16_with_each_optimizer(ranks, optimizer):
    strategy = ("--parallel.strategy", "localsgd", "--parallel.local-steps", "2")
    more = ("--precision", "fp16", "--device", "cpu", "--max-steps", "6", "--optimizer.name", optimizer, "--name", optimizer)
    ranks(2).run("train", "digits", *SETTINGS, *strategy, *more)
    found = losses(ranks.cwd / "runs" / optimizer)
    assert len(found) == 6 and all(map(math.isfinite, found))
