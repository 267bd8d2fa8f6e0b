"""CIFAR-10: the official files (read by torchvision), a folder of class folders, or shards.

Krizhevsky 2009, "Learning multiple layers of features from tiny images": 50,000 + 10,000 images, 32 x 32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from worldsize.config.recipe import Data
from worldsize.data import shards
from worldsize.data.datasets import folder, missing
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.errors import UserError


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open CIFAR-10 in ``settings.root``.

    Raises:
        UserError: neither the official files nor class folders, or a checksum is wrong.
    """
    if settings.root is not None and (settings.root.expanduser() / "train").is_dir():
        return folder.open_dataset(settings, cache)
    folder.refuse_lists(settings, "CIFAR-10's files and shards")
    if settings.root is not None and shards.is_packed(settings.root.expanduser()):
        return shards.open_dataset(settings.root.expanduser())
    root = settings.root.expanduser() if settings.root and settings.download else folder.required_root(settings)
    return Dataset(_official(root, True, settings.download), _official(root, False, settings.download))


def _official(root: Path, train: bool, download: bool) -> ArraySamples:
    from torchvision.datasets import CIFAR10  # takes seconds to import, and only this dataset needs it

    try:
        # torchvision unpickles these files, but only if their MD5 is the published one.
        files = CIFAR10(str(root), train=train, download=download)
    except RuntimeError:
        raise UserError(
            f"{root} contains neither the official CIFAR-10 files (cifar-10-batches-py, with the published checksums) "
            f"nor {root}/train/CLASS/IMAGE"
            + (
                missing.on_volume(root)
                or "; download them with `worldsize data fetch cifar10 --to DIR`, or in training with --data.download"
            )
        ) from None
    except OSError as error:
        raise UserError(f"cannot download CIFAR-10 into {root}: {error}") from None
    title = "cifar10 train" if train else "cifar10 test"
    return ArraySamples(title, files.data, np.asarray(files.targets, np.int32), tuple(files.classes))
