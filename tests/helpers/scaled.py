"""What a scaling benchmark of tiny runs is asked for, and what such runs record."""

from __future__ import annotations

from worldsize.bench.scaling import measured
from worldsize.bench.scaling.cases import Case
from worldsize.bench.scaling.measured import Measured
from worldsize.config.recipe import Recipe

TINY = (
    *("digits", "--synthetic", "--model.name", "resnet18", "--global-batch", "8", "--micro-batch", "4"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
    *("--steps", "2", "--warmup", "1", "--rounds", "2", "--precision", "fp32"),
)
CONSTANT = Recipe.model_validate({"schedule": {"name": "constant", "warmup_epochs": 0}})


def record(step_ms: float, communication_ms: float, straggler_ms: float, speeds: list[float], images: int = 64) -> dict:
    """A step that waits 5 ms for images and spends 1 ms in the loop."""
    compute_ms = step_ms - communication_ms - 6
    return {
        **{"step_ms": step_ms, "data_ms": 5.0, "compute_ms": compute_ms, "communication_ms": communication_ms},
        **{"straggler_ms": straggler_ms, "overhead_ms": 1.0, "sent_bytes": 2_000_000, "rank_images_per_s": speeds},
        **{"step": 1, "epoch": 0.5, "lr": 0.1},
        "images_per_s": images / step_ms * 1000,
    }


def result(world_size: int, step_ms: float, communication_ms: float = 0.0, turn: int = 1, images: int = 32) -> Measured:
    records = [record(step_ms, communication_ms, communication_ms / 4, [100.0] * world_size, images * world_size)] * 3
    records = [one | {"lr": 0.1 * world_size} for one in records]
    return measured.of_steps(Case("ddp", "weak", 1, world_size), turn, CONSTANT, records, 1, 2)
