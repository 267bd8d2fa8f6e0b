"""Fine-tuning against training from scratch: ``python benchmarks/finetune.py CIFAR10``, 20 minutes on two CPU cores.

CIFAR10 contains train/CLASS/IMAGE and test/CLASS/IMAGE. A ResNet-18 is trained on five of the classes. Then the other five,
with only 40 images each, are trained for as many steps from random weights and from that run, with seeds 0, 1 and 2. Prints
a Markdown table of the top-1 accuracy on the test images of these five classes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from small_runs import of_seeds, row, top1, tree

FIRST = ("airplane", "automobile", "bird", "cat", "deer")
SECOND = ("dog", "frog", "horse", "ship", "truck")
IMAGES = 40
COMMON = (
    *("--data.name", "folder", "--model.name", "resnet18", "--model.no-zero-init", "--optimizer.lr-scaling", "none"),
    *("--checkpoint.no-best", "--evaluate-every", "30"),
)
MANY = (
    *("--epochs", "3", "--schedule.warmup-epochs", "0.5", "--optimizer.lr", "0.05"),
    *("--global-batch", "200", "--micro-batch", "100"),
)
FEW = ("--epochs", "30", "--schedule.warmup-epochs", "3", "--global-batch", "40", "--micro-batch", "40")
TUNED = ("--model.weights", "first", "--model.zero-head")
ROWS = {
    "from random weights, lr 0.03": ("--optimizer.lr", "0.03"),
    "from random weights, lr 0.1": ("--optimizer.lr", "0.1"),
    "fine-tuned, lr 0.01": (*TUNED, "--optimizer.lr", "0.01"),
    "fine-tuned, lr 0.03": (*TUNED, "--optimizer.lr", "0.03"),
    "fine-tuned, only the classifier, lr 0.03": (*TUNED, "--model.freeze", "backbone", "--optimizer.lr", "0.03"),
}


def main(cifar: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        tree(cifar, out / "one", FIRST, None)
        tree(cifar, out / "two", SECOND, IMAGES)
        first = top1(out, "first", *COMMON, "--data.root", str(out / "one"), *MANY)
        print(f"ResNet-18 on {len(FIRST)} classes, 25,000 images, 3 epochs: {first:.1%}\n")
        print(f"| {len(SECOND)} other classes, {IMAGES} images each, 30 epochs | top-1 of seeds 0, 1, 2 | mean |")
        print("| --- | --- | ---: |")
        for number, (label, settings) in enumerate(ROWS.items()):
            root = ("--data.root", str(out / "two"))
            print(row(label, of_seeds(out, str(number), *COMMON, *root, *FEW, *settings)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
