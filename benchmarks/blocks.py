"""What each building block contributes at equal budget: ``python benchmarks/blocks.py CIFAR10``, an hour on two CPU cores.

CIFAR10 contains train/CLASS/IMAGE and test/CLASS/IMAGE. A ResNet-18 is trained on 300 images of each class for 10 epochs,
with seeds 0, 1 and 2: with mirror and crop alone, and with one building block more. Prints a Markdown table of the top-1
accuracy on 2,000 test images.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from small_runs import of_seeds, row, tree

TRAIN, TEST, EPOCHS = 300, 200, 10
COMMON = (
    *("--data.name", "folder", "--data.train-crop-size", "32", "--data.val-crop-size", "32", "--data.val-resize-size", "32"),
    *("--data.train-crop", "pad", "--data.padding", "4", "--data.flip", "--model.name", "resnet18"),
    *("--epochs", str(EPOCHS), "--schedule.warmup-epochs", "2", "--evaluate-every", str(EPOCHS)),
    *("--label-smoothing", "0", "--global-batch", "100", "--micro-batch", "50"),
    *("--optimizer.lr", "0.05", "--optimizer.lr-scaling", "none"),
    "--checkpoint.no-best",
)
GROWING = ("--data.train-crop-sizes", "24", "32", "--data.train-crop-epochs", "0", str(EPOCHS - 4))
BLOCKS = {
    "label smoothing 0.1": ("--label-smoothing", "0.1"),
    "RandAugment, 2 operations, magnitude 9": ("--augment.policy", "randaugment"),
    "TrivialAugmentWide": ("--augment.policy", "trivialaugment"),
    "random erasing, 0.25": ("--augment.erasing", "0.25"),
    "cutout, 8 pixels": ("--augment.cutout", "8"),
    "mixup 0.2": ("--augment.mixup", "0.2"),
    "CutMix 1.0": ("--augment.cutmix", "1.0", "--augment.cutmix-share", "1.0"),
    "BlurPool": ("--model.blurpool",),
    "24 pixels, 32 in the last 4 epochs": (*GROWING, "--data.train-crop-step", "8"),
    "EMA 0.99": ("--average.name", "ema", "--average.decay", "0.99"),
    "mirror evaluation": ("--data.val-mirror",),
}


def main(cifar: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        classes = sorted(path.name for path in (cifar / "train").iterdir())
        tree(cifar, out / "data", classes, TRAIN, TEST)
        common = (*COMMON, "--data.root", str(out / "data"))
        print("| mirror, crop and | top-1 of seeds 0, 1, 2 | mean | difference, points |\n| --- | --- | ---: | ---: |")
        alone = of_seeds(out, "alone", *common)
        mean = statistics.mean(alone)
        print(row("nothing else", alone, mean), flush=True)
        for number, (label, settings) in enumerate(BLOCKS.items()):
            print(row(label, of_seeds(out, str(number), *common, *settings), mean), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
