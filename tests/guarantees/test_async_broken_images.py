"""Broken images in asynchronous runs: those that any worker finds are counted, named and limited."""

from __future__ import annotations

import pytest

from paths import SMALL_NETWORK
from processes import records, start_sabotaged
from trees import put

BROKEN = range(0, 24, 4)
RECIPE = f"""
base: digits
epochs: 1
global_batch: 2
micro_batch: 2
precision: fp32
data: {{name: folder, root: images, max_broken: 0.25, train_crop_size: 8, val_crop_size: 8}}
model: {{name: {SMALL_NETWORK}}}
schedule: {{warmup_epochs: 0}}
"""
ASYNC = ("train", "r.yaml", "--name", "a", "--parallel.strategy", "async")


def prepare(folder) -> None:
    """A recipe for 24 training images, of which 6 are broken, 3 in each class."""
    (folder / "r.yaml").write_text(RECIPE)
    for i in range(32):
        split = "train" if i < 24 else "val"
        put(folder / f"images/{split}/{'cat' if i % 8 < 4 else 'dog'}/{i:02}.png", b"no image" if i in BROKEN else None)


def test_those_of_all_workers_are_counted_and_named_by_rank_0(ranks):
    prepare(ranks.cwd)
    ranks(3, sabotage="others_first").run(*ASYNC)
    run = ranks.cwd / "runs" / "a"
    assert records(run, "step")[-1]["broken"] == len(BROKEN)
    log = (run / "log.txt").read_text()
    assert [log.count(f"/{i:02}.png: ") for i in BROKEN] == [1] * len(BROKEN)


@pytest.mark.slow
def test_the_limit_holds_for_all_workers_together(tmp_path):
    prepare(tmp_path)
    process = start_sabotaged("others_first", *ASYNC, "--procs", "3", "--data.max-broken", "0.2", cwd=tmp_path)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 65, output
    assert "6 of 24 images cannot be decoded, more than the allowed 20.00%" in output
    assert "lost worker" not in output
