"""`worldsize bench scaling` with jobs on a real cluster."""

from __future__ import annotations

import pytest

from processes import worldsize
from worldsize.bench.scaling import measured

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TINY = (
    *("digits", "--synthetic", "--model.name", "resnet18", "--global-batch", "8", "--micro-batch", "8"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
    # In bf16, so few values in the last layers may have no variance, and the gradient overflows.
    *("--precision", "fp32", "--steps", "3", "--warmup", "1", "--rounds", "1", "--nodes", "1,2", "--procs", "1"),
)
POD = ("--gpus", "0", "--cpu", "850m", "--memory", "3Gi", "--shm", "256Mi")


def test_jobs_are_measured_and_deleted(cluster, image, tmp_path):
    where = ("--namespace", cluster.namespace)
    assert worldsize("cluster", "volume", "create", "data", "--size", "1Gi", *where, cwd=tmp_path).returncode == 0
    options = ("--on", "pytorchjob", "--", "--image", image, "--volume", "data", *where, *POD)
    done = worldsize("bench", "scaling", *TINY, *options, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = measured.read(tmp_path / "runs" / "bench-scaling-1" / "results.jsonl")
    assert [(r.kind_of_job, r.nodes, r.global_batch) for r in results] == [("pytorchjob", 1, 8), ("pytorchjob", 2, 16)]
    assert results[1].sent_mb > 40 and results[1].efficiency is not None
    assert cluster.list("PyTorchJob") == []
