"""Short training runs on parts of CIFAR-10, for benchmarks that compare accuracies.

The dataset is a folder with train/CLASS/IMAGE and test/CLASS/IMAGE.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SEEDS = (0, 1, 2)


def tree(cifar: Path, out: Path, classes: Sequence[str], train: int | None, test: int | None = None) -> None:
    """Links to the images of these classes as train and val of ``out``; at most ``train`` and ``test`` of each class."""
    for split, ours, images in (("train", "train", train), ("test", "val", test)):
        for name in classes:
            folder = out / ours / name
            folder.mkdir(parents=True)
            for path in sorted((cifar / split / name).iterdir())[:images]:
                (folder / path.name).symlink_to(path.resolve())


def top1(out: Path, name: str, *settings: str) -> float:
    """Train the recipe digits with these settings as the run ``out``/``name``. Returns its top-1 accuracy, 0 to 1."""
    command = [sys.executable, "-m", "worldsize", "train", "digits", *settings, "--name", name, "--out", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=out)
    return float(json.loads((out / name / "result.json").read_text())["top1"])


def of_seeds(out: Path, name: str, *settings: str) -> list[float]:
    """The top-1 accuracies of `SEEDS`."""
    return [top1(out, f"{name}-{seed}", *settings, "--seed", str(seed)) for seed in SEEDS]


def row(label: str, results: Iterable[float], reference: float | None = None) -> str:
    """A row of a Markdown table: each seed's accuracy, their mean, and the difference to ``reference`` in points."""
    values = list(results)
    mean = statistics.mean(values)
    cells = [label, ", ".join(f"{value:.1%}" for value in values), f"{mean:.1%}"]
    return " | ".join(["|", *cells, *([f"{100 * (mean - reference):+.1f}"] if reference is not None else []), "|"]).strip()
