"""CIFAR-10: torchvision's official files, a plain folder of its pictures, or shards.

Krizhevsky 2009, "Learning multiple layers of features from tiny images": 50,000 + 10,000 pictures, 32 x 32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from worldsize.data import folder, shards
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.errors import UserError
from worldsize.recipe import Data


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """CIFAR-10 in ``settings.root``.

    Raises:
        UserError: neither the official files nor a folder of classes, or their checksum is wrong.
    """
    if settings.root is not None and (settings.root.expanduser() / "train").is_dir():
        return folder.open_dataset(settings, cache)
    if settings.root is not None and shards.is_packed(settings.root.expanduser()):
        return shards.open_dataset(settings.root.expanduser())
    root = settings.root.expanduser() if settings.root and settings.download else folder.required_root(settings)
    return Dataset(_official(root, True, settings.download), _official(root, False, settings.download))


def _official(root: Path, train: bool, download: bool) -> ArraySamples:
    from torchvision.datasets import CIFAR10  # the import costs seconds, and only this data set needs it

    try:
        # torchvision unpickles these files, but only after their MD5 is the published one.
        files = CIFAR10(str(root), train=train, download=download)
    except RuntimeError:
        raise UserError(
            f"{root} holds neither the official CIFAR-10 files (cifar-10-batches-py, with the right checksums) "
            f"nor {root}/train/CLASS/PICTURE; --data.download fetches them into it"
        ) from None
    except OSError as error:
        raise UserError(f"cannot download CIFAR-10 into {root}: {error}") from None
    title = "cifar10 train" if train else "cifar10 test"
    return ArraySamples(title, files.data, np.asarray(files.targets, np.int32), tuple(files.classes))
