"""Folders of runs and benchmarks for reports: runs are written by the real tracker."""

from __future__ import annotations

import json
from pathlib import Path

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base, jsonl

BENCH = {"kind_of_job": "pytorchjob", "strategy": "ddp", "scaling": "weak", "nodes": 1, "sent_mb": 1.0, "lr": 0.1}


def make(
    out: Path,
    name: str,
    top1: tuple[float, ...] = (0.3, 0.62, 0.91),
    finished: bool = True,
    **changes: object,
) -> Path:
    """A run folder with three steps per epoch of 64 images, 600 ms each, and an evaluation of 3 s after each epoch."""
    folder, ranks = RunFolder(out / name), 2
    folder.path.mkdir(parents=True)
    recipe = Recipe.model_validate(recipe_files.load("digits").model_dump() | {"epochs": len(top1) + 2} | changes)
    folder.recipe.write_text(recipe_files.to_yaml(recipe))
    folder.environment.write_text(json.dumps({"world_size": ranks, "data": {"train": "aa", "val": "bb"}}))
    tracker = jsonl.Tracker(recipe.track, folder, 0)
    for epoch, value in enumerate(top1, 1):
        for step in range(3 * epoch - 2, 3 * epoch + 1):
            speeds = [100.0 + rank for rank in range(ranks)]
            loss = 3.0 / step + recipe.seed
            one = base.Step(step, step / 3, loss, value, 0.1, 1.0, 106.6, speeds, 600.0, 100.0, 400.0, 100.0, 10**6, 0)
            tracker.steps([one])
        tracker.epoch(base.Epoch(epoch, 3 * epoch, 1.0, value, 1.0 / epoch, value, 1.0, 360, 0, 106.6, 1.8, 3.0))
    tracker.end(None)
    if finished:
        folder.result.write_text(json.dumps({"top1": top1[-1], "best_top1": max(top1), "chain": f"{recipe.seed:064}"}))
    return folder.path


def bench(out: Path) -> Path:
    """Scaling at world sizes 1, 2 and 4 in two rounds."""
    out.mkdir()
    (out / "bench.json").write_text(json.dumps({"kind": "scaling", "command": "worldsize bench scaling digits"}))
    rows = [
        BENCH
        | {
            "procs": w,
            "world_size": w,
            "round": r,
            "images_per_s": w * s,
            "images_per_s_per_process": s,
            "efficiency": s / 100,
        }
        | {"step_ms": 1e3 / s, "data_ms": 1.0, "compute_ms": 900 / s, "communication_ms": 100 / s, "slowest_rank": 0}
        for r in (1, 2)
        for w, s in ((1, 100.0), (2, 90.0 + r), (4, 80.0))
    ]
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def plan(path: Path) -> Path:
    """A file of `worldsize plan`, with predictions for 4 and 8 devices."""

    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": 0.9 * value, "high": 1.1 * value}

    forecasts = [
        {"devices": n, "images_per_s": around(n * s), "efficiency": around(s / 100), "step_s": around(0.1)}
        | {"duration_s": around(3600.0), "price": None, "bottleneck": "computing"}
        for n, s in ((4, 82.0), (8, 70.0))
    ]
    path.write_text(json.dumps({"format": "worldsize plan 1", "forecasts": forecasts}))
    return path


def messages(out: Path) -> Path:
    """A benchmark of all-reduce at three sizes."""
    out.mkdir()
    rows = [
        {"processes": 2, "through": "gloo", "bytes": size, "us": us, "low_us": 0.9 * us, "high_us": 1.2 * us}
        | {"bus_gb_per_s": size / us / 1000}
        for size, us in ((1024, 50.0), (2**20, 900.0), (2**26, 50000.0))
    ]
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def snapshot(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
