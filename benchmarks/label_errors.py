"""Finding planted label errors: ``python benchmarks/label_errors.py CIFAR10 [SEEDS]``.

With 3 seeds, the default, it runs for 40 minutes on two CPU cores. Needs cleanlab and timm (``pip install cleanlab timm``).
CIFAR10 contains train/CLASS/IMAGE and test/CLASS/IMAGE. In scikit-learn's digits and in 3,000 images of CIFAR-10, 2 % and
10 % of the training images get a wrong label, drawn uniformly. One run per seed ranks them: by the mean margin and by the
mean loss over its epochs, by the loss of the trained network, and by cleanlab from the trained network's probabilities.
`worldsize labels` then corrects labels, and the same recipe trains with them. Prints two Markdown tables; validation labels
are always right.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from cleanlab.rank import get_label_quality_scores
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from small_runs import SEEDS, top1, tree

import worldsize
from worldsize.config import recipe_files
from worldsize.data import open_dataset
from worldsize.data.samples import Dataset, Samples

SHARES = (0.02, 0.10)
IMAGES, TEST = 300, 200
SMALL = (
    "--model.name",
    "timm:resnet10t",
    "--precision",
    "fp32",
    "--procs",
    "2",
    "--checkpoint.keep",
    "1",
    "--checkpoint.no-best",
)
DIGITS = (
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
    *("--epochs", "10", "--evaluate-every", "10"),
)
CIFAR10 = (
    *("--data.name", "folder", "--data.train-crop-size", "32", "--data.val-crop-size", "32", "--data.val-resize-size", "32"),
    *("--data.train-crop", "pad", "--data.padding", "4", "--data.flip"),
    *("--epochs", "10", "--schedule.warmup-epochs", "2", "--evaluate-every", "10"),
    *("--global-batch", "100", "--micro-batch", "50", "--optimizer.lr", "0.05", "--optimizer.lr-scaling", "none"),
)
METHODS = ("mean margin", "mean loss", "loss at the end", "cleanlab")


@dataclass
class Found:
    """Of one dataset and share, a value for each seed: AUROC by method, counts of corrections, and top-1 accuracies."""

    areas: dict[str, list[float]] = field(default_factory=lambda: {method: [] for method in METHODS})
    fixed: list[int] = field(default_factory=list)
    falsely: list[int] = field(default_factory=list)
    wrong_top1: list[float] = field(default_factory=list)
    corrected_top1: list[float] = field(default_factory=list)


def main(cifar: Path, seeds: Sequence[int]) -> None:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        tree(cifar, out / "data", sorted(path.name for path in (cifar / "train").iterdir()), IMAGES, TEST)
        sets = {"digits": (*SMALL, *DIGITS), "CIFAR-10": (*SMALL, *CIFAR10, "--data.root", str(out / "data"))}
        first, second = [], []
        for title, settings in sets.items():
            clean = [top1(out, f"{title}-{seed}", *settings, "--seed", str(seed)) for seed in seeds]
            right = dataset(out / f"{title}-{seeds[0]}")
            for share in SHARES:
                count = round(share * len(right.train))
                name = f"{title}, {count:,} of {len(right.train):,} wrong"
                found = of_share(out, f"{title}-{count}", settings, right.train, count, seeds)
                first.append(" | ".join([f"| {name}", *(spread(found.areas[method]) for method in METHODS)]) + " |")
                second.append(
                    f"| {name} | {mean(found.fixed):.0f} | {mean(found.falsely):.0f} | {points(found.wrong_top1)} | "
                    f"{points(found.corrected_top1)} | {points(clean)} |"
                )
        print("| AUROC | " + " | ".join(METHODS) + " |\n| --- |" + " ---: |" * len(METHODS))
        print("\n".join(first))
        print("\n| labels | corrected | made wrong | top-1: wrong labels | corrected by `labels` | right labels |")
        print("| --- |" + " ---: |" * 5)
        print("\n".join(second))


def of_share(out: Path, name: str, settings: Sequence[str], right: Samples, count: int, seeds: Sequence[int]) -> Found:
    """Plant ``count`` wrong labels, and for each seed find them, correct them and train again."""
    found, planted = Found(), out / f"{name}.csv"
    wrong = plant(planted, right, count)
    for seed in seeds:
        run, corrected = f"{name}-{seed}", out / f"{name}-{seed}.csv"
        common = (*settings, "--seed", str(seed))
        found.wrong_top1.append(top1(out, run, *common, "--data.labels", str(planted)))
        for method, suspicion in suspicions(out / run).items():
            found.areas[method].append(float(roc_auc_score(wrong, suspicion)))
        words = ("labels", str(out / run), "--top", str(2 * count), "--out", str(corrected))
        subprocess.run([sys.executable, "-m", "worldsize", *words], check=True, stdout=sys.stderr)
        now = dataset(out / run, corrected).train.labels
        found.fixed.append(int(((now == right.labels) & wrong).sum()))
        found.falsely.append(int(((now != right.labels) & ~wrong).sum()))
        found.corrected_top1.append(top1(out, f"{run}-corrected", *common, "--data.labels", str(corrected)))
    return found


def dataset(run: Path, labels: Path | None = None) -> Dataset:
    """The dataset of a run, with the labels of this file instead of its own."""
    recipe = recipe_files.load(str(run / "recipe.yaml"))
    return open_dataset(recipe.data.model_copy(update={"labels": labels}), run / ".cache")


def plant(path: Path, samples: Samples, count: int) -> NDArray[np.bool_]:
    """Write ``count`` wrong labels as a file for ``--data.labels``. Returns which samples have one, bool (n,)."""
    dice, wrong = np.random.default_rng(0), np.zeros(len(samples), bool)
    wrong[dice.choice(len(samples), count, replace=False)] = True
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["index", "image", "given", "label"])
        for i in map(int, np.flatnonzero(wrong)):
            label = int(samples.labels[i])
            other = (label + 1 + dice.integers(len(samples.classes) - 1)) % len(samples.classes)
            table.writerow([i, samples.key(i), samples.classes[label], samples.classes[other]])
    return wrong


def suspicions(run: Path) -> dict[str, NDArray[np.float64]]:
    """For each of `METHODS`, a number for each training sample that is higher for more suspicious ones, float64 (n,)."""
    recipe = recipe_files.load(str(run / "recipe.yaml"))
    train = dataset(run, recipe.data.labels).train
    model = worldsize.load(run, device="cpu")
    labels = np.asarray(train.labels, np.int64)
    logits = model.logits([np.asarray(train.image(i)) for i in range(len(train))]).double()
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none").numpy()
    quality = get_label_quality_scores(labels, logits.softmax(1).numpy(), method="normalized_margin")
    sums = load_file(max((run / "checkpoints").glob("step-*")) / "samples.safetensors")
    visits = sums["visits"].numpy()
    margins, losses = (sums[name].numpy() / visits for name in ("margin", "loss"))
    return dict(zip(METHODS, (-margins, losses, loss, -quality), strict=True))


def mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def points(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1%}"
    return f"{mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


if __name__ == "__main__":
    main(Path(sys.argv[1]), SEEDS[: int(sys.argv[2])] if len(sys.argv) > 2 else SEEDS)
