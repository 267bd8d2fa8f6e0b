"""A run of three steps on generated images, for tests of what a run leaves."""

from __future__ import annotations

from paths import SMALL_NETWORK

THREE_STEPS = (
    *("--data.name", "synthetic", "--data.samples", "32", "--data.classes", "4", "--model.name", SMALL_NETWORK),
    *("--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8"),
    *("--epochs", "2", "--schedule.warmup-epochs", "0", "--max-steps", "3", "--checkpoint.every-steps", "1"),
)
