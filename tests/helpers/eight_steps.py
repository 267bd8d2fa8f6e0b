"""A training of digits whose epochs have eight steps."""

from __future__ import annotations

from paths import SMALL_NETWORK

EIGHT_STEP_BATCHES = ("--global-batch", "160", "--micro-batch", "40", "--precision", "fp32")
EIGHT_STEPS = ("--model.name", SMALL_NETWORK, *EIGHT_STEP_BATCHES, "--schedule.warmup-epochs", "0")
