"""Consecutive broken images: a rank that looks for a replacement finds those of others, and each counts once."""

from __future__ import annotations

import pytest

from paths import SMALL_NETWORK
from processes import records
from trees import put

BROKEN = range(4, 12)
RECIPE = f"""
base: digits
epochs: 2
global_batch: 8
micro_batch: 2
precision: fp32
data: {{name: folder, root: images, max_broken: 0.2, train_crop_size: 8, val_crop_size: 8}}
model: {{name: {SMALL_NETWORK}}}
schedule: {{warmup_epochs: 0}}
track: {{every_seconds: 0}}
"""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_at_the_limit_does_not_end_at_any_world_size(ranks, size):
    (ranks.cwd / "r.yaml").write_text(RECIPE)
    for i in range(40):
        put(ranks.cwd / f"images/train/{'cat' if i < 20 else 'dog'}/{i:02}.png", b"no image" if i in BROKEN else None)
    for i in range(8):
        put(ranks.cwd / f"images/val/{'cat' if i < 4 else 'dog'}/{i:02}.png")
    ranks(size).run("train", "r.yaml", "--name", f"w{size}")
    run = ranks.cwd / f"runs/w{size}"
    assert [step["broken"] for step in records(run, "step")][-1] == len(BROKEN)
    assert max(step["broken"] for step in records(run, "step")) == len(BROKEN)
    log = (run / "log.txt").read_text()
    assert [log.count(f"/{i:02}.png: ") for i in BROKEN] == [1] * len(BROKEN)
