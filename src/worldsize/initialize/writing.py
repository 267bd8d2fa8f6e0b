"""Write the recipe of `worldsize init`, with comments that explain it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from worldsize.config.recipe import Recipe
from worldsize.config.wording import count, printable
from worldsize.initialize import fine_tuning
from worldsize.initialize.survey import Survey

_TINY_IMAGE = 64  # pixels: an ImageNet stem leaves too little of it
_SMALLEST_CROP = 8  # pixels, of a recipe
_SMALL_IMAGE = 96  # pixels; BiT-HyperRule has another size for images of fewer than 96 x 96


@dataclass(frozen=True)
class Choice:
    """The network, its initial weights (None: random), the number of GPUs, and the only size of images that it accepts.

    ``stem`` and ``blurpool`` are those of the run that the weights are from.
    """

    model: str
    weights: str | None
    gpus: int
    side: int | None  # pixels; None: any
    stem: str = "imagenet"
    blurpool: bool = False


def text(survey: Survey, choice: Choice, root: Path, flip: bool = True) -> str:
    """The recipe as YAML with comments; ``flip``: whether training may mirror images."""
    images, classes = len(survey.dataset.train), len(survey.dataset.classes)
    resize, size = _sizes(survey.side, choice)
    lines = [
        *(f"# {printable(sentence)}" for sentence in survey.sentences),
        f"about: {_quoted(f'{choice.model} on {root.resolve().name}, {classes} classes, {images:,} training images')}",
        *(_finetuned(images, choice) if choice.weights else _from_scratch(images, choice, survey.side < _TINY_IMAGE)),
        *(["loss:", "  name: bce  # an image may have several labels"] if survey.dataset.multilabel else []),
        "data:",
        f"  name: {'multilabel' if survey.dataset.multilabel else 'folder'}",
        f"  root: {_quoted(root.resolve())}",
        *_listed(survey),
        *_allowance(survey),
        f"  # The median image has a shorter side of {survey.side} pixels.",
        f"  train_crop_size: {size}",
        f"  val_resize_size: {resize}",
        f"  val_crop_size: {size}",
        "  # Milder than ImageNet's 8 %: with few images, small crops lose what the class depends on.",
        "  crop_area: [0.25, 1.0]",
        *([] if flip else ["  flip: false  # a mirror image is not of the same class"]),
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    """A YAML string, whatever characters it contains: JSON leaves some in place that YAML refuses, such as DEL."""
    text = json.dumps(str(value), ensure_ascii=False)
    return "".join(character if character.isprintable() else f"\\U{ord(character):08x}" for character in text)


def _sizes(side: int, choice: Choice) -> tuple[int, int]:
    """(size after resizing, size of the crop): those of the pretrained networks, or less on a CPU and for small images."""
    if (choice.weights is None or choice.stem == "cifar") and side < _SMALL_IMAGE:
        resize = size = max(_SMALLEST_CROP, side)
    else:
        resize, size = (256, 224) if choice.gpus and side >= _SMALL_IMAGE else (146, 128)
    return (resize, size) if choice.side is None else (round(resize * choice.side / size), choice.side)


def _listed(survey: Survey) -> list[str]:
    if survey.setting is None:
        return []
    what = "the names of the validation images" if survey.setting == "val_list" else "each image with its labels and split"
    return [f"  {survey.setting}: {_quoted(survey.listing.resolve())}  # {what}"]


def _allowance(survey: Survey) -> list[str]:
    """The setting with which training accepts the broken images; it checks each split on its own."""
    default, splits = Recipe().data.max_broken, (survey.dataset.train, survey.dataset.val)
    share = max(sum(one.name(i) in survey.broken for i in range(len(one))) / len(one) for one in splits)
    if share <= default:
        return []
    return [f"  max_broken: {math.ceil(share * 100) / 100:g}  # {count(len(survey.broken), 'broken image')}"]


def _is_resnet(model: str) -> bool:
    """Whether it is one of torchvision's; a name with a colon is another library's, or a file of the user's."""
    return model.startswith("resnet") and ":" not in model


def _micro_batch(global_batch: int) -> str:
    size = fine_tuning.micro_batch(global_batch)
    shares = global_batch // size
    return f"micro_batch: {size}  # BatchNorm's statistics are of so many images; --procs can be up to {shares}"


def _finetuned(images: int, choice: Choice) -> list[str]:
    plan = fine_tuning.plan(images, fine_tuning.REFERENCE_BATCH if choice.gpus else 64)
    return [
        "source: BiT-HyperRule, Kolesnikov et al. 2020, arXiv 1912.11370, section 3.3",
        f"epochs: {plan.epochs}  # 500 steps below 20,000 images, 10,000 below 500,000, else 20,000",
        f"global_batch: {plan.global_batch}  # 512, or less for a small dataset and on a CPU",
        _micro_batch(plan.global_batch),
        f"evaluate_every: {max(1, plan.epochs // 20)}  # epochs",
        "model:",
        f"  name: {_quoted(choice.model)}",
        *([f"  stem: {choice.stem}  # as in the run that the weights are from"] if choice.stem != "imagenet" else []),
        *(["  blurpool: true  # as in the run that the weights are from"] if choice.blurpool else []),
        f"  weights: {_quoted(choice.weights)}",
        "  zero_head: true  # the classifier is new: zeros do not disturb the pretrained features at first",
        "optimizer:",
        f"  lr: {fine_tuning.LR}",
        f"  lr_reference_batch: {fine_tuning.REFERENCE_BATCH}  # smaller batches get a proportionally smaller lr",
        "  nesterov: false",
        "  weight_decay: 0",
        "schedule:",
        f"  name: step  # a tenth after {fine_tuning.drops(images)} % of the steps",
        f"  milestones: [{', '.join(f'{milestone:g}' for milestone in plan.milestones)}]",
        f"  warmup_epochs: {plan.warmup_epochs:g}",
        *([f"augment:\n  mixup: {plan.mixup:g}  # from 20,000 images on"] if plan.mixup else []),
    ]


def _from_scratch(images: int, choice: Choice, tiny: bool) -> list[str]:
    batch = fine_tuning.plan(images, 256 if choice.gpus else 64).global_batch
    epochs = 90 if choice.gpus else 30
    return [
        "source: the values of the recipe imagenet (Goyal et al. 2017, arXiv 1706.02677) for a smaller dataset",
        f"epochs: {epochs}",
        f"global_batch: {batch}",
        _micro_batch(batch),
        "label_smoothing: 0.1",
        "model:",
        f"  name: {_quoted(choice.model)}  # from random weights",
        *(["  stem: cifar  # for tiny images"] if tiny and _is_resnet(choice.model) else []),
        "optimizer:",
        "  lr: 0.1  # for batches of 256; smaller batches get a proportionally smaller lr",
        "  weight_decay: 5.0e-4",
        "schedule:",
        "  name: cosine",
        "  warmup_epochs: 3",
    ]
