"""``worldsize init``: look at a folder of images, choose how to train on it, and write a recipe."""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from worldsize import catalog, finetuning
from worldsize.data import folder, shards, split
from worldsize.data.samples import Dataset, FileSamples
from worldsize.data.survey import info, verify
from worldsize.data.survey.verify import Found
from worldsize.errors import UserError
from worldsize.place import cores
from worldsize.recipe import Recipe
from worldsize.wording import count

_LISTED = 5
_TINY_IMAGE = 64  # pixels: an ImageNet stem leaves too little of it
_SMALL_IMAGE = 96  # pixels; BiT-HyperRule has another size for images of fewer than 96 x 96


@dataclass
class Init:
    """Inspect a folder of images, and write a recipe that fine-tunes a pretrained network on it.

    Decodes every image once. If there is no validation folder, chooses validation images by their content, of each class
    the same share, and lists their names in a file; no image is moved. The settings follow BiT-HyperRule (Kolesnikov et
    al. 2020, arXiv 1912.11370) and this machine; the recipe explains them. Nothing is trained.
    """

    root: tyro.conf.Positional[Path]
    """FOLDER/train/CLASS/IMAGE with FOLDER/val (or valid, validation, test) or without it, or FOLDER/CLASS/IMAGE."""
    out: Path | None = None
    """The recipe (default: FOLDER.yaml in the current folder). The list of validation images is put next to it."""
    val_share: float = 0.1
    """Without a validation folder: the share of each class to validate with."""
    model: str | None = None
    """The network (default: resnet50 on a GPU, else resnet18)."""
    weights: str | None = None
    """Initial weights as in --model.weights, or none (default: those that torchvision publishes for the network)."""
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace existing files."""


@dataclass(frozen=True)
class Survey:
    """What is known about the folder: the dataset, its broken images (name: reason), and the median shorter side, pixels.

    ``chosen`` are the names of the images that were chosen for validation and belong into ``val_list``; none if they have a
    folder of their own.
    """

    dataset: Dataset
    broken: dict[str, str]
    side: int
    chosen: list[str]
    val_list: Path


@dataclass(frozen=True)
class Choice:
    """The network, its initial weights (None: random), and the number of GPUs."""

    model: str
    weights: str | None
    gpus: int


def run(options: Init) -> int:
    """Run the command; returns its exit code.

    Raises:
        UserError: the folder has no usable layout, or a file already exists.
    """
    root = options.root.expanduser()
    if not root.is_dir():
        raise UserError(f"{options.root}: no such folder")
    if not 0 < options.val_share < 1:
        raise UserError(f"--val-share {options.val_share:g} must be between 0 and 1")
    out = options.out or Path(f"{root.resolve().name}.yaml")
    val_list = out.with_suffix(".val.txt")
    _check_new(out, options.force)
    survey = _survey(root, val_list, options.val_share)
    if survey.chosen:
        _check_new(val_list, options.force)
    choice = _choose(options)
    if survey.chosen:
        val_list.write_bytes("".join(f"{name}\n" for name in survey.chosen).encode("utf-8", "surrogateescape"))
    out.write_text(text(survey, choice, root), "utf-8")
    recipe = catalog.load(str(out))
    print(f"\n{out} {'fine-tunes' if choice.weights else 'trains'} {choice.model} for {recipe.epochs} epochs.")
    print(f"Read it, then: {_command(out, recipe, choice.gpus)}")
    return 0


def _check_new(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise UserError(f"{path} already exists: pass --out NEW.yaml, or --force to replace it")


def _command(out: Path, recipe: Recipe, gpus: int) -> str:
    """The training command, on as many of the machine's GPUs as can share the micro-batches of a step evenly."""
    shares = recipe.global_batch // recipe.micro_batch
    procs = max((n for n in range(1, gpus + 1) if shares % n == 0), default=1)
    return shlex.join(["worldsize", "train", str(out), *(["--procs", str(procs)] if procs > 1 else [])])


# Looking ------------------------------------------------------------------------------------------------------------------


def _survey(root: Path, val_list: Path, share: float) -> Survey:
    if shards.is_packed(root):
        raise UserError(f"{root} contains shards; worldsize init works on image files")
    with tempfile.TemporaryDirectory() as cache:
        validation = folder.validation_folder(root)
        if validation is not None and (root / "train").is_dir():
            dataset = folder.two_splits(root / "train", validation, Path(cache))
            found = verify.verify(dataset, cores())
            broken, chosen = _broken(found["train"]) | _broken(found["val"]), []
        else:
            every = folder.training_split(folder.unsplit(root), Path(cache))
            found = verify.verify(split.split(every, np.zeros(len(every), bool)), cores())
            broken = _broken(found["train"])
            validation_images = _chosen(every, found["train"], share)
            chosen = [every.path(int(i)) for i in np.flatnonzero(validation_images)]
            dataset = split.split(every, validation_images)
    verify.require_read(found)
    survey = Survey(dataset, broken, _side(dataset), chosen, val_list)
    _report(survey, found)
    return survey


def _chosen(every: FileSamples, found: Found, share: float) -> NDArray[np.bool_]:
    """The images to validate with. Broken ones stay in the training split, where others take their places."""
    readable = np.array([i not in found.broken for i in range(len(every))])
    validation = np.zeros(len(every), bool)
    validation[readable] = split.stratified(every.labels[readable], found.digests[readable], share)
    if not validation.any():
        raise UserError(f"{every.root}: no class has two different images, so none can be set aside for validation")
    return validation


def _broken(found: Found) -> dict[str, str]:
    return {found.samples.name(index): reason for index, reason in found.broken.items()}


def _side(dataset: Dataset) -> int:
    sizes = info.dimensions(dataset.train, 0).sizes
    if not len(sizes):
        raise UserError("none of the training images can be read")
    return int(np.median(sizes.min(axis=1)))


def _report(survey: Survey, found: dict[str, Found]) -> None:
    train, val = survey.dataset.train, survey.dataset.val
    numbers = np.bincount(train.labels, minlength=len(train.classes))
    print(f"{len(train.classes):,} classes, {len(train):,} training and {count(len(val), 'validation image')}")
    print(f"training images per class: {numbers.min():,} to {numbers.max():,}; median shorter side {survey.side} pixels")
    if survey.chosen:
        print(f"no validation folder: {count(len(val))} chosen by their content and listed in {survey.val_list}")
    if survey.dataset.validates_on:
        print(f"validation images: {survey.dataset.validates_on}")
    for note in survey.dataset.notes:
        print(f"warning: {note}")
    if survey.broken:
        print(f"{count(len(survey.broken), 'broken image')}, not used:")
        for name, reason in list(survey.broken.items())[:_LISTED]:
            print(f"  {name}: {reason}")
    odd = sorted({kind for one in found.values() for kind in one.odd})
    if odd:
        print(f"also found, and usable: {', '.join(odd)}")
    groups = verify.duplicates(found)
    if groups:
        copies = sum(len(group) - 1 for group in groups)
        print(f"{copies:,} {'image is a copy' if copies == 1 else 'images are copies'} of another (the same bytes)")


# Choosing -----------------------------------------------------------------------------------------------------------------


def _choose(options: Init) -> Choice:
    import torch

    gpus = torch.cuda.device_count()
    model = options.model or ("resnet50" if gpus else "resnet18")
    if options.weights == "none":
        return Choice(model, None, gpus)
    weights = options.weights or _published(model)
    if weights is not None and Path(weights).exists():
        weights = str(Path(weights).resolve())  # the recipe may be used in another folder
    problem = f"torchvision publishes none for {model}" if weights is None else _problem(model, weights)
    if problem is None:
        return Choice(model, weights, gpus)
    if options.weights is not None:
        raise UserError(f"--weights {options.weights}: {problem}")
    print(f"no pretrained weights: {problem}")
    print("The recipe trains from random weights. --weights FILE, --weights RUN or --weights timm:NAME would be better.")
    return Choice(model, None, gpus)


def _published(model: str) -> str | None:
    """torchvision's newest weights for this network."""
    from torchvision import models

    if model not in models.list_models(module=models):
        return None
    best = models.get_model_weights(model).DEFAULT
    return f"torchvision:{best}"


def _problem(model: str, weights: str) -> str | None:
    """Why these weights cannot be loaded into the network; downloads them, so that training finds them in the cache."""
    import torch

    from worldsize import model as models
    from worldsize import pretrained
    from worldsize.errors import WorldsizeError

    recipe = Recipe.model_validate({"model": {"name": model, "weights": weights}})
    try:
        pretrained.load(models.build(recipe, 2, torch.device("cpu"), torch.float32), recipe)
    except WorldsizeError as error:
        return str(error)
    return None


# Writing ------------------------------------------------------------------------------------------------------------------


def text(survey: Survey, choice: Choice, root: Path) -> str:
    """The recipe as YAML with comments."""
    images, classes = len(survey.dataset.train), len(survey.dataset.classes)
    resize, size = _sizes(survey.side, choice)
    lines = [
        f"about: {_quoted(f'{choice.model} on {root.resolve().name}, {classes} classes, {images:,} training images')}",
        *(_finetuned(images, choice) if choice.weights else _from_scratch(images, choice, survey.side < _TINY_IMAGE)),
        "data:",
        "  name: folder",
        f"  root: {_quoted(root.resolve())}",
        *_listed(survey),
        *_allowance(survey),
        f"  # The median image has a shorter side of {survey.side} pixels.",
        f"  train_crop_size: {size}",
        f"  val_resize_size: {resize}",
        f"  val_crop_size: {size}",
        "  # Milder than ImageNet's 8 %: with few images, small crops lose what the class depends on.",
        "  crop_area: [0.25, 1.0]",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    """A YAML string, whatever characters it contains."""
    return json.dumps(str(value), ensure_ascii=False)


def _sizes(side: int, choice: Choice) -> tuple[int, int]:
    """(size after resizing, size of the crop): those of the pretrained networks, or less on a CPU and for small images."""
    if choice.weights is None and side < _SMALL_IMAGE:
        return side, side
    return (256, 224) if choice.gpus and side >= _SMALL_IMAGE else (146, 128)


def _listed(survey: Survey) -> list[str]:
    if not survey.chosen:
        return []
    return [f"  val_list: {_quoted(survey.val_list.resolve())}  # the names of the validation images"]


def _allowance(survey: Survey) -> list[str]:
    default = Recipe().data.max_broken
    share = len(survey.broken) / len(survey.dataset.train)
    if share <= default:
        return []
    return [f"  max_broken: {math.ceil(share * 100) / 100:g}  # {len(survey.broken)} images are broken"]


def _finetuned(images: int, choice: Choice) -> list[str]:
    plan = finetuning.plan(images, finetuning.REFERENCE_BATCH if choice.gpus else 64)
    return [
        "source: BiT-HyperRule, Kolesnikov et al. 2020, arXiv 1912.11370, section 3.3",
        f"epochs: {plan.epochs}  # 500 steps below 20,000 images, 10,000 below 500,000, else 20,000",
        f"global_batch: {plan.global_batch}  # 512, or less for a small dataset and on a CPU",
        f"micro_batch: {min(32, plan.global_batch)}",
        f"evaluate_every: {max(1, plan.epochs // 20)}  # epochs",
        "model:",
        f"  name: {choice.model}",
        f"  weights: {_quoted(choice.weights)}",
        "  zero_head: true  # the classifier is new: zeros do not disturb the pretrained features at first",
        "optimizer:",
        f"  lr: {finetuning.LR}",
        f"  lr_reference_batch: {finetuning.REFERENCE_BATCH}  # smaller batches get a proportionally smaller lr",
        "  nesterov: false",
        "  weight_decay: 0",
        "schedule:",
        f"  name: step  # a tenth after {finetuning.drops(images)} % of the steps",
        f"  milestones: [{', '.join(f'{milestone:g}' for milestone in plan.milestones)}]",
        f"  warmup_epochs: {plan.warmup_epochs:g}",
        *([f"augment:\n  mixup: {plan.mixup:g}  # from 20,000 images on"] if plan.mixup else []),
    ]


def _from_scratch(images: int, choice: Choice, tiny: bool) -> list[str]:
    batch = finetuning.plan(images, 256 if choice.gpus else 64).global_batch
    epochs = 90 if choice.gpus else 30
    return [
        "source: the values of the recipe imagenet (Goyal et al. 2017, arXiv 1706.02677) for a smaller dataset",
        f"epochs: {epochs}",
        f"global_batch: {batch}",
        f"micro_batch: {min(32, batch)}",
        "label_smoothing: 0.1",
        "model:",
        f"  name: {choice.model}  # from random weights",
        *(["  stem: cifar  # for tiny images"] if tiny and choice.model.startswith("resnet") else []),
        "optimizer:",
        "  lr: 0.1  # for batches of 256; smaller batches get a proportionally smaller lr",
        "  weight_decay: 5.0e-4",
        "schedule:",
        "  name: cosine",
        "  warmup_epochs: 3",
    ]
