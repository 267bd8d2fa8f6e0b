"""Sections of a recipe: the images, and how they are augmented."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from worldsize.config.recipe.base import Section, operational
from worldsize.errors import UserError

DatasetName = Literal["digits", "cifar10", "imagenet", "folder", "multilabel", "synthetic"]
PolicyName = Literal[
    "randaugment", "randaugment-timm", "trivialaugment", "autoaugment-imagenet", "autoaugment-cifar10", "augmix", "3-augment"
]


class Data(Section):
    """Where the images come from and how they are cropped."""

    name: DatasetName = Field(
        "folder",
        description="which dataset; `folder` is any ROOT/train/CLASS/image tree, `multilabel` has several labels per image",
    )
    root: Path | None = operational(None, description="folder of the dataset (not needed for digits and synthetic)")
    val_list: Path | None = operational(
        None, description="folder: a file that names the validation images, CLASS/IMAGE, instead of a val folder"
    )
    label_list: Path | None = operational(
        None,
        description="folder and multilabel: a CSV file with each image's path, label and split (file,label,split) instead "
        "of the folders' names; `worldsize init` writes it",
    )
    labels: Path | None = operational(
        None, description="CSV file with corrected labels of some images, as `worldsize labels` writes it"
    )
    download: bool = operational(False, description="cifar10: download the official files into ROOT and verify them")
    train_crop: Literal["random_resized", "pad", "none"] = Field(
        "random_resized",
        description="random_resized: a random part, resized; pad: pad, then a random crop; none: center crop",
    )
    train_crop_size: int = Field(224, ge=8, description="side of the training images, pixels")
    train_crop_sizes: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (), description="progressive resizing: sizes at train_crop_epochs instead of train_crop_size; linear between them"
    )
    train_crop_epochs: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="progressive resizing: the epochs of train_crop_sizes; epoch 0 is the first"
    )
    train_crop_step: int = Field(32, ge=1, description="progressive resizing: sizes are rounded to multiples of this")
    crop_area: tuple[float, float] = Field(
        (0.08, 1.0), description="random_resized: range of the area, as a fraction (0 to 1)"
    )
    crop_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="random_resized: range of width/height")
    padding: int = Field(4, ge=0, description="pad: black pixels added on each side before the random crop")
    flip: bool = Field(True, description="flip half of the training images left to right")
    alternate_flips: bool = Field(
        False,
        description="flip: draw once for each image, then flip it in every other epoch (Jordan 2024, arXiv 2404.00498, 3.6)",
    )
    interpolation: Literal["bilinear", "bicubic"] = Field(
        "bilinear", description="of the crops for training and evaluation; both are antialiased"
    )
    val_resize_size: int = Field(256, ge=8, description="evaluation: shorter side after resizing, pixels")
    val_crop_size: int = Field(224, ge=8, description="evaluation: side of the center crop, pixels")
    val_mirror: bool = Field(False, description="evaluation: average the logits of each image and its mirror image")
    val_ten_crop: bool = Field(
        False, description="evaluation: average the logits of the four corners, the center and their mirror images"
    )
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="subtracted per channel (range 0 to 1)")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="divided by per channel (range 0 to 1)")
    samples: int = Field(1024, ge=2, le=100_000_000, description="synthetic: number of training images")
    classes: int = Field(1000, ge=2, le=1_000_000, description="synthetic: number of classes")
    shuffle: Literal["full", "block"] = Field(
        "full", description="full: shuffles all samples; block: reads shards in blocks and shuffles less"
    )
    block: int = Field(32, ge=1, description="shuffle block: consecutive images read at once")
    pool: int = Field(16384, ge=1, description="shuffle block: images that all processes together shuffle at a time")
    sampling: Literal["uniform", "balanced"] = Field(
        "uniform", description="uniform: an epoch contains each image once; balanced: it contains each class equally often"
    )
    sampling_weights: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="weight of each class, in the order of the classes: how often to draw its images, relative to others"
    )
    max_broken: float = operational(
        0.001, ge=0, le=1, description="stop if more than this fraction of the images cannot be decoded"
    )
    workers: int | None = operational(
        None, ge=1, description="decoding threads per process; None: one per core of the process"
    )
    readers: int = operational(16, ge=1, description="reads in flight per process")
    dct_scaling: bool = Field(
        False,
        description="random_resized, native decoder: decode large images at 1/2 or 1/4 size; faster, but different pixels",
    )
    prefetch: int = operational(4, ge=1, description="batches of a forward pass prepared ahead")
    device_prefetch: bool = operational(True, description="GPUs: copy the next images while the GPU computes")

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels, or none."""
        return self.name == "multilabel"

    @property
    def weighted(self) -> bool:
        """Whether some images appear more often than others."""
        return self.sampling == "balanced" or bool(self.sampling_weights)

    def scale_problem(self) -> str | None:
        """What is wrong if mean or std are on the scale of pixels, 0 to 255; None if they are on that of recipes, 0 to 1.

        Not a validator: recipes of older runs may have such values, and their networks are used with them.
        """
        wrong = [name for name in ("mean", "std") if max(map(abs, getattr(self, name))) > 1]
        if not wrong:
            return None
        scaled = {name: [value / 255 if name in wrong and abs(value) > 1 else value for value in getattr(self, name)]
                  for name in ("mean", "std")}  # fmt: skip
        if "mean" in wrong and set(self.std) == {1.0}:  # no division, also from 0 to 255
            scaled["std"] = [1 / 255] * 3
        flags = " ".join(f"--data.{name} {' '.join(f'{value:g}' for value in values)}" for name, values in scaled.items())
        given = " and ".join(f"data.{name} {' '.join(f'{value:g}' for value in getattr(self, name))}" for name in wrong)
        return f"{given}: these values are for pixels from 0 to 255, but pixels here are from 0 to 1: divide by 255: {flags}"

    @model_validator(mode="after")
    def _ranges(self) -> Data:
        if self.label_list is not None and (self.val_list is not None or self.name not in ("folder", "multilabel")):
            problem = "leave out val_list" if self.val_list is not None else "requires the name folder or multilabel"
            raise ValueError(f"label_list {self.label_list}: {problem}")
        if self.val_list is not None and self.name not in ("folder", "cifar10"):
            raise ValueError(f"val_list {self.val_list}: requires the name folder or cifar10, with images in class folders")
        if self.alternate_flips and not self.flip:
            raise ValueError("alternate_flips requires flip: turn both on, or alternate_flips off")
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError(f"crop_area {self.crop_area} must be two increasing numbers between 0 and 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio {self.crop_ratio} must be two increasing positive numbers")
        if len(self.train_crop_sizes) != len(self.train_crop_epochs) or len(self.train_crop_sizes) == 1:
            raise ValueError(
                f"train_crop_sizes {self.train_crop_sizes} and train_crop_epochs {self.train_crop_epochs} must have as many "
                "values, at least two, such as --data.train-crop-sizes 160 192 --data.train-crop-epochs 65 76"
            )
        if list(self.train_crop_epochs) != sorted(set(self.train_crop_epochs)):
            raise ValueError(f"train_crop_epochs {self.train_crop_epochs} must be increasing")
        if self.train_crop_sizes and self.train_crop_size != max(self.train_crop_sizes):
            raise ValueError(
                f"train_crop_size {self.train_crop_size} must be the largest of train_crop_sizes {self.train_crop_sizes}: "
                f"set it to {max(self.train_crop_sizes)}"
            )
        if self.val_crop_size > self.val_resize_size:
            raise ValueError(
                f"val_crop_size {self.val_crop_size} is larger than val_resize_size {self.val_resize_size}: "
                f"raise val_resize_size to at least {self.val_crop_size}"
            )
        if self.shuffle == "block" and self.pool < self.block:
            raise ValueError(f"pool {self.pool} must be at least block {self.block}: it shuffles complete blocks")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive")
        return self

    @model_validator(mode="after")
    def _samples_fit(self) -> Data:
        if self.sampling == "balanced" and self.sampling_weights:
            raise ValueError("sampling balanced computes the weights: leave out sampling_weights or sampling")
        if self.sampling_weights and not any(self.sampling_weights):
            raise ValueError("sampling_weights: at least one must be above 0")
        if not self.weighted:
            return self
        setting = "sampling balanced" if self.sampling == "balanced" else "sampling_weights"
        if self.shuffle == "block":
            raise ValueError(f"{setting}: shuffle block reads each image once per epoch: set shuffle to full")
        if self.multilabel:
            raise ValueError(f"name multilabel: leave out {setting}; loss.class_weights weighs the classes")
        return self

    def check_crop_sizes(self) -> None:
        """Refuse sizes of progressive resizing that rounding would change. Older runs may have such sizes.

        Raises:
            UserError: names the size and the nearest that works.
        """
        step, sizes = self.train_crop_step, self.train_crop_sizes
        if wrong := [size for size in sizes if size % step]:
            raise UserError(
                f"data.train_crop_sizes {wrong[0]} is not a multiple of data.train_crop_step {step}, to which sizes are "
                f"rounded: set it to {max(1, round(wrong[0] / step)) * step}, or set the step to {math.gcd(*sizes)}"
            )


class Augment(Section):
    """What happens to training images after the crop and the flip."""

    repeats: int = Field(
        1, ge=1, description="each step contains each of its images this many times, augmented differently (3 in DeiT)"
    )
    vflip: float = Field(0.0, ge=0, le=1, description="probability of flipping an image upside down; usually 0.5")
    rotate90: float = Field(
        0.0, ge=0, le=1, description="probability of turning an image by 0, 90, 180 or 270 degrees, each as likely"
    )
    policy: PolicyName | None = Field(
        None,
        description="random operations on colors and geometry; randaugment-timm is timm's form of RandAugment; augmix "
        "is a sum of copies with other operations; 3-augment makes images gray, solarizes or blurs them (DeiT III)",
    )
    operations: int = Field(2, ge=1, le=16, description="randaugment: operations per image")
    magnitude: float = Field(9.0, ge=0, le=30, description="randaugment: 0 to 30; randaugment-timm: 0 to 10")
    magnitude_std: float = Field(0.5, ge=0, description="randaugment-timm: standard deviation of the magnitude")
    augmix_severity: int = Field(3, ge=1, le=10, description="augmix: strength of the operations, 1 to 10")
    interpolation: Literal["nearest", "bilinear", "bicubic"] = Field(
        "nearest", description="of the policy's rotations, shears and translations"
    )
    fill: Literal["black", "mean"] = Field("black", description="what these bring in: black, or the color data.mean")
    color_jitter: tuple[float, float, float, float] = Field(
        (0.0, 0.0, 0.0, 0.0),
        description="largest change of brightness, contrast, saturation (factors) and hue (at most 0.5)",
    )
    lighting: float = Field(
        0.0,
        ge=0,
        description="AlexNet's color noise: standard deviation along the colors' principal components; usually 0.1",
    )
    erasing: float = Field(0.0, ge=0, le=1, description="probability of filling a random box with the color data.mean")
    erasing_area: tuple[float, float] = Field(
        (0.02, 0.33), description="erasing: range of the box's area, as a fraction of the image"
    )
    erasing_ratio: tuple[float, float] = Field((0.3, 3.3), description="erasing: range of the box's height/width")
    cutout: int = Field(0, ge=0, description="side of a square at a random place that is filled with data.mean; 0: none")
    mixup: float = Field(0.0, ge=0, description="mix each image with another of its micro-batch: alpha of mixup; 0: none")
    cutmix: float = Field(0.0, ge=0, description="replace a box of each image by another image's: alpha of CutMix; 0: none")
    cutmix_share: float = Field(0.5, ge=0, le=1, description="mixup and cutmix: part of the mixed micro-batches with CutMix")
    mix_chance: float = Field(1.0, ge=0, le=1, description="mixup, cutmix: part of the micro-batches that are mixed")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return bool(self.mixup or self.cutmix)

    @model_validator(mode="after")
    def _fits(self) -> Augment:
        if self.policy == "randaugment" and self.magnitude != int(self.magnitude):
            raise ValueError(f"magnitude {self.magnitude:g}: randaugment has the 31 magnitudes 0, 1, ..., 30")
        if self.policy == "randaugment-timm" and self.magnitude > 10:
            raise ValueError(f"magnitude {self.magnitude:g}: randaugment-timm has magnitudes from 0 to 10")
        if min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter {self.color_jitter} must not be negative, and the last, the hue, at most 0.5")
        if not 0 < self.erasing_area[0] <= self.erasing_area[1] < 1:
            raise ValueError(
                f"erasing_area {self.erasing_area} must be two increasing fractions of the image between 0 and 1"
            )
        if not 0 < self.erasing_ratio[0] <= self.erasing_ratio[1]:
            raise ValueError(f"erasing_ratio {self.erasing_ratio} must be two increasing positive numbers")
        return self
