"""Other loaders that `worldsize bench loader` compares with, each used as its documentation recommends.

All produce batches of uint8 random resized crops of the same size, shuffled, randomly flipped and augmented as a recipe
says, on the CPU.
"""

from __future__ import annotations

import errno
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import InterpolationMode, v2

from worldsize.config.recipe import Augment, Recipe
from worldsize.data.augmentation import policies
from worldsize.data.samples import EncodedSamples
from worldsize.errors import UserError, first_line

_PLAIN = Augment()
_FILES_ONLY = "it requires image files, not packed images"
# torch's messages: a worker gets no room, or the system ends one that writes where there is none.
_NO_SHARED_MEMORY = ("shared memory", "Bus error")


class Unavailable(Exception):
    """This loader cannot run here; the message is the reason."""


class Peer(Protocol):
    """A loader to compare with."""

    def batches(self) -> Iterator[int]:
        """One pass: yields the number of images of each batch."""


class _Files(TorchDataset[tuple[torch.Tensor, int]]):
    """Equivalent to torchvision's ImageFolder, for a subset of its images."""

    def __init__(
        self, samples: EncodedSamples, read: Callable[[str], Any], transform: Callable[[Any], torch.Tensor]
    ) -> None:
        self._files = [samples.name(i) for i in range(len(samples))]
        self._labels = samples.labels.tolist()
        self._read, self._transform = read, transform
        if not Path(self._files[0]).is_file():
            raise Unavailable(_FILES_ONLY)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._read(self._files[index])), self._labels[index]


class _Shuffled(Sampler[int]):
    """A pass in a new random order, in which each image follows its repetitions, as in torchvision's and timm's recipes."""

    def __init__(self, samples: EncodedSamples, recipe: Recipe) -> None:
        self._length, self._repeats = len(samples), recipe.augment.repeats

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._length).repeat_interleave(self._repeats)[: self._length].tolist()


class _DataLoader:
    """PyTorch's DataLoader with persistent worker processes."""

    def __init__(self, data: Any, batch: int, workers: int, drop_last: bool = True, **options: Any) -> None:
        # The comparison deliberately includes more processes than cores.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        # Since Python 3.14, worker processes are not forked by default, and local functions cannot be sent to them.
        options |= {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": 4}
        self._loader: Any = DataLoader(data, batch, num_workers=workers, drop_last=drop_last, **options)

    def batches(self) -> Iterator[int]:
        try:
            # torch needs room for its locks first. Where there is none, its iterator prints a traceback when it is deleted.
            multiprocessing.get_context("fork").Lock()
            for _, labels in self._loader:
                yield len(labels)
        except (RuntimeError, OSError) as error:
            no_lock = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if not no_lock and not any(text in str(error) for text in _NO_SHARED_MEMORY):
                raise
            raise UserError(
                "/dev/shm is too small for the worker processes of other loaders, which send their batches through it: "
                "enlarge it (docker run --shm-size 8g), or lower --workers, --batch or --size"
            ) from None


def _crop_and_flip(recipe: Recipe) -> list[Any]:
    data = recipe.data
    interpolation = InterpolationMode(data.interpolation)
    crop = v2.RandomResizedCrop(
        data.train_crop_size, data.crop_area, data.crop_ratio, interpolation=interpolation, antialias=True
    )
    return [crop, *([v2.RandomHorizontalFlip()] if data.flip else [])]


def _transforms(recipe: Recipe) -> v2.Compose:
    """torchvision's transforms for the recipe's training images.

    Raises:
        Unavailable: torchvision has no such augmentation.
    """
    _refuse(recipe, "torchvision", "vflip", "rotate90", "lighting", "cutout")
    data, augment = recipe.data, recipe.augment
    steps = _crop_and_flip(recipe)
    fill = list(policies.fill_color(augment, data.mean))
    options: dict[str, Any] = {"interpolation": InterpolationMode(augment.interpolation), "fill": fill}
    match augment.policy:
        case "randaugment":
            steps.append(v2.RandAugment(augment.operations, int(augment.magnitude), **options))
        case "trivialaugment":
            steps.append(v2.TrivialAugmentWide(**options))
        case "autoaugment-imagenet" | "autoaugment-cifar10" as name:
            steps.append(v2.AutoAugment(v2.AutoAugmentPolicy(name.removeprefix("autoaugment-")), **options))
        case "augmix":
            steps.append(v2.AugMix(augment.augmix_severity, **options))
        case "randaugment-timm":
            raise Unavailable("torchvision does not have timm's RandAugment")
        case "3-augment":
            raise Unavailable("torchvision does not have 3-augment")
    if any(augment.color_jitter):
        steps.append(v2.ColorJitter(*augment.color_jitter))
    steps.append(v2.PILToTensor())
    if augment.erasing:
        value = list(policies.mean_color(data.mean))
        steps.append(v2.RandomErasing(augment.erasing, augment.erasing_area, augment.erasing_ratio, value))
    return v2.Compose(steps)


def _refuse(recipe: Recipe, name: str, *settings: str) -> None:
    """Refuse a recipe with settings of ``augment`` that the loader ``name`` lacks: it would do less work."""
    for setting in settings:
        if getattr(recipe.augment, setting) != getattr(_PLAIN, setting):
            raise Unavailable(f"{name} is compared without augment.{setting} only")


def _only_crops(recipe: Recipe, name: str) -> None:
    _refuse(recipe, name, "vflip", "rotate90", "policy", "erasing", "lighting", "color_jitter", "cutout")


def torchvision(samples: EncodedSamples, recipe: Recipe, batch: int, workers: int) -> Peer:
    """ImageFolder's Pillow reader and torchvision's transforms, in DataLoader."""
    from torchvision.datasets.folder import pil_loader

    return _DataLoader(_Files(samples, pil_loader, _transforms(recipe)), batch, workers, sampler=_Shuffled(samples, recipe))


def timm(samples: EncodedSamples, recipe: Recipe, batch: int, workers: int) -> Peer:
    """timm's transforms and collation, as its train.py uses them with the prefetcher (erasing is then on the device)."""
    try:
        from timm.data.loader import fast_collate
        from timm.data.transforms_factory import create_transform
    except ImportError as error:
        raise Unavailable(f"timm cannot be imported ({first_line(error)})") from None
    from torchvision.datasets.folder import pil_loader

    _refuse(recipe, "timm", "vflip", "rotate90", "lighting", "cutout")
    data, augment = recipe.data, recipe.augment
    rand = f"rand-m{augment.magnitude:g}-n{augment.operations}-mstd{augment.magnitude_std:g}-inc1"
    names = {None: None, "randaugment-timm": rand, "3-augment": "3a"}
    if augment.policy not in names:
        raise Unavailable(f"timm does not have {augment.policy} in torchvision's form")
    if augment.policy == "randaugment-timm":
        _refuse(recipe, "timm", "color_jitter")  # which it leaves out then
    transform = create_transform(
        data.train_crop_size,
        is_training=True,
        use_prefetcher=True,
        scale=data.crop_area,
        ratio=data.crop_ratio,
        hflip=0.5 if data.flip else 0.0,
        color_jitter=augment.color_jitter if any(augment.color_jitter) else cast(Any, None),  # None is not in its type
        auto_augment=names[augment.policy],
        interpolation=data.interpolation,
    )
    files, sampler = _Files(samples, pil_loader, transform), _Shuffled(samples, recipe)
    return _DataLoader(files, batch, workers, sampler=sampler, collate_fn=fast_collate)


def torchcodec(samples: EncodedSamples, recipe: Recipe, batch: int, workers: int) -> Peer:
    """TorchCodec's decoder and torchvision's transforms, in DataLoader."""
    try:
        from torchcodec.decoders import decode_image
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"torchcodec 0.16 or later cannot be imported ({first_line(error)})") from None

    def read(path: str) -> torch.Tensor:
        return decode_image(Path(path).read_bytes())[:3].expand(3, -1, -1)

    _only_crops(recipe, "torchcodec")
    transform = v2.Compose(_crop_and_flip(recipe))
    files, sampler = _Files(samples, read, transform), _Shuffled(samples, recipe)
    return _DataLoader(files, batch, workers, sampler=sampler)


class _Dali:
    """A DALI pipeline with its own threads, on the CPU."""

    def __init__(self, files: list[str], labels: list[int], recipe: Recipe, batch: int, workers: int) -> None:
        from nvidia.dali import fn, pipeline_def, types

        size, area, ratio = recipe.data.train_crop_size, list(recipe.data.crop_area), list(recipe.data.crop_ratio)
        kind = types.INTERP_CUBIC if recipe.data.interpolation == "bicubic" else types.INTERP_LINEAR

        def graph() -> Any:
            data, label = fn.readers.file(files=files, labels=labels, random_shuffle=True, name="files")
            pixels = fn.decoders.image_random_crop(data, random_area=area, random_aspect_ratio=ratio)
            pixels = fn.resize(pixels, size=[size, size], interp_type=kind, antialias=True)
            return (fn.flip(pixels, horizontal=fn.random.coin_flip()) if recipe.data.flip else pixels), label

        define = pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=4)
        self._graph = define(graph)()
        self._graph.build()
        self._batch, self._steps = batch, len(files) // batch

    def batches(self) -> Iterator[int]:
        for _ in range(self._steps):
            self._graph.run()
            yield self._batch


def dali(samples: EncodedSamples, recipe: Recipe, batch: int, workers: int) -> Peer:
    """NVIDIA DALI on the CPU."""
    _only_crops(recipe, "dali")
    _refuse(recipe, "dali", "repeats")
    files = [samples.name(i) for i in range(len(samples))]
    if not Path(files[0]).is_file():
        raise Unavailable(_FILES_ONLY)
    try:
        return _Dali(files, samples.labels.tolist(), recipe, batch, workers)
    except (ImportError, RuntimeError) as error:
        # DALI's message starts with the place of the error; the reason follows this word.
        reason = str(error).rpartition("encountered:")[2].strip().split("\n", 1)[0]
        raise Unavailable(f"nvidia.dali cannot be used ({reason})") from None


def webdataset(samples: EncodedSamples, recipe: Recipe, batch: int, workers: int) -> Peer:
    """WebDataset over packed shards, with Pillow and torchvision's transforms, in DataLoader."""
    try:
        import webdataset as wds
    except ImportError as error:
        raise Unavailable(f"webdataset cannot be imported ({first_line(error)})") from None
    shards = sorted({samples.name(i).partition(".tar")[0] + ".tar" for i in range(len(samples))})
    if not Path(shards[0]).is_file():
        raise Unavailable("it requires packed images; run `worldsize data pack`")
    if workers > len(shards):
        raise Unavailable(f"{workers} workers need at least as many shards, and there are {len(shards)}")
    transform = _transforms(recipe)
    _refuse(recipe, "webdataset", "repeats")
    data = wds.WebDataset(shards, shardshuffle=100).shuffle(1000).decode("pilrgb").to_tuple("jpg;png;ppm", "cls")
    # With drop_last, every worker would decode its last partial batch without counting it.
    return _DataLoader(data.map_tuple(transform, lambda label: label), batch, workers, drop_last=False)


PEERS: dict[str, Callable[[EncodedSamples, Recipe, int, int], Peer]] = {
    "torchvision": torchvision,
    "timm": timm,
    "torchcodec": torchcodec,
    "dali": dali,
    "webdataset": webdataset,
}
