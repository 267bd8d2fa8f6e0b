"""The recipe: every setting of a run, declared once.

These models are the only source of the YAML format, the command line (``--data.root``), ``--help`` and
``docs/recipe.md``. A recipe is frozen and rejects unknown keys. Fields marked *operational* define where and how a run
executes and cannot change its numbers beyond float rounding; all others are the run's identity, which must not change on
resume.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field, model_validator

DatasetName = Literal["digits", "cifar10", "imagenet", "folder", "synthetic"]
StrategyName = Literal["auto", "single", "dataparallel", "ddp", "bitwise", "adasum", "horovod", "localsgd", "async"]
TrackerName = Literal["tensorboard", "wandb"]

# Text about the recipe: for its YAML file, not for the command line.
_Prose = Annotated[str, tyro.conf.Suppress]


def _operational(default: Any, **kwargs: Any) -> Any:
    """A field that is not part of the run's identity."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


class Settings(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def identity(self) -> dict[str, Any]:
        """All settings that determine the run's numbers, as nested JSON values."""
        kept: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("operational"):
                continue
            value = getattr(self, name)
            if isinstance(value, Settings):
                if section := value.identity():
                    kept[name] = section
            elif isinstance(value, tuple):
                kept[name] = list(value)
            else:
                kept[name] = str(value) if isinstance(value, Path) else value
        return kept


class Data(Settings):
    """Where the images come from and how they are cropped."""

    name: DatasetName = Field("folder", description="which dataset; `folder` is any ROOT/train/CLASS/image tree")
    root: Path | None = _operational(None, description="folder of the dataset (not needed for digits and synthetic)")
    download: bool = _operational(False, description="cifar10: download the official files into ROOT and verify them")
    train_crop: Literal["random_resized", "pad", "none"] = Field(
        "random_resized",
        description="random_resized: a random part, resized; pad: pad, then a random crop; none: center crop",
    )
    train_crop_size: int = Field(224, ge=8, description="side of the training images, pixels")
    crop_area: tuple[float, float] = Field(
        (0.08, 1.0), description="random_resized: range of the area, as a fraction (0 to 1)"
    )
    crop_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="random_resized: range of width/height")
    padding: int = Field(4, ge=0, description="pad: black pixels added on each side before the random crop")
    flip: bool = Field(True, description="flip half of the training images left to right")
    val_resize_size: int = Field(256, ge=8, description="evaluation: shorter side after resizing, pixels")
    val_crop_size: int = Field(224, ge=8, description="evaluation: side of the center crop, pixels")
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="subtracted per channel (range 0 to 1)")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="divided by per channel (range 0 to 1)")
    samples: int = Field(1024, ge=2, description="synthetic: number of training images")
    classes: int = Field(1000, ge=2, description="synthetic: number of classes")
    shuffle: Literal["full", "block"] = Field(
        "full", description="full: shuffles all samples; block: reads shards in blocks and shuffles less"
    )
    block: int = Field(32, ge=1, description="shuffle block: consecutive images read at once")
    pool: int = Field(16384, ge=1, description="shuffle block: images that all processes together shuffle at a time")
    max_broken: float = _operational(
        0.001, ge=0, le=1, description="stop if more than this fraction of the images cannot be decoded"
    )
    workers: int | None = _operational(
        None, ge=1, description="decoding threads per process; None: one per core of the process"
    )
    readers: int = _operational(16, ge=1, description="reads in flight per process, each of 8 to 32 images")
    dct_scaling: bool = Field(
        False,
        description="random_resized, native decoder: decode large images at 1/2 or 1/4 size; faster, but different pixels",
    )
    prefetch: int = _operational(4, ge=1, description="micro-batches prepared ahead")

    @model_validator(mode="after")
    def _ranges(self) -> Data:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError(f"crop_area {self.crop_area} must be two increasing numbers between 0 and 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio {self.crop_ratio} must be two increasing positive numbers")
        if self.val_crop_size > self.val_resize_size:
            raise ValueError(
                f"val_crop_size {self.val_crop_size} is larger than val_resize_size {self.val_resize_size}: "
                f"raise val_resize_size to at least {self.val_crop_size}"
            )
        if self.shuffle == "block" and self.pool < self.block:
            raise ValueError(f"pool {self.pool} must be at least block {self.block}: it shuffles whole blocks")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive")
        return self


class Model(Settings):
    """The network and its initial weights."""

    name: str = Field("resnet50", description="any torchvision classification model")
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet",
        description="ResNets: imagenet is 7x7 stride 2 and pooling; cifar is 3x3 stride 1 without pooling, for tiny images",
    )
    zero_init: bool = Field(True, description="ResNets: start the last norm of each block at zero (Goyal et al. 2017, 5.1)")
    weights: Path | None = Field(None, description="initial weights: a local .safetensors or .pth state dict")
    channels_last: bool = _operational(True, description="NHWC memory layout")
    compile: bool = _operational(False, description="torch.compile the model")


class Optimizer(Settings):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="optimizer")
    lr: float = Field(0.1, gt=0, description="peak learning rate at lr_reference_batch")
    lr_reference_batch: int = Field(256, ge=1, description="the global batch that lr is for")
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="how lr grows with global_batch / lr_reference_batch"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd: momentum")
    nesterov: bool = Field(True, description="sgd: Nesterov momentum")
    betas: tuple[float, float] = Field((0.9, 0.999), description="adamw: decay rates of the two moments")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay of weight matrices and convolution filters")
    norm_weight_decay: float = Field(0.0, ge=0, description="weight decay of norm layers and biases")
    clip_norm: float | None = Field(None, gt=0, description="clip gradients to this global L2 norm")

    @model_validator(mode="after")
    def _nesterov(self) -> Optimizer:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov requires momentum > 0: pass --optimizer.no-nesterov or set momentum")
        return self


class Schedule(Settings):
    """The learning rate over the run, set before every step."""

    name: Literal["cosine", "linear", "step", "constant", "onecycle"] = Field("cosine", description="shape after warmup")
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warmup, by step")
    warmup_start: float = Field(
        0.0, ge=0, le=1, description="initial learning rate of the warmup, as a fraction of the peak"
    )
    end: float = Field(
        0.0, ge=0, le=1, description="cosine, linear, onecycle: final learning rate, as a fraction of the peak"
    )
    milestones: tuple[float, ...] = Field((30.0, 60.0, 80.0), description="step: multiply by gamma at these epochs")
    gamma: float = Field(0.1, gt=0, le=1, description="step: factor at each milestone")


class Parallel(Settings):
    """How replicas agree on one model; docs/strategies.md explains which strategy to choose."""

    strategy: StrategyName = _operational(
        "auto", description="`worldsize strategies` explains them; auto: single for one process, ddp for more"
    )
    threads: int = Field(
        1, ge=1, description="bitwise: threads per process that compute on a CPU; another number gives other bits"
    )
    bucket_mb: float = _operational(25.0, gt=0, description="ddp, bitwise: size of a gradient bucket, MiB")
    gradient_as_bucket_view: bool = _operational(
        True, description="ddp: gradients are views of the buckets, which saves one copy"
    )
    static_graph: bool = _operational(False, description="ddp: the graph never changes")
    predivide: float | None = _operational(
        None,
        gt=0,
        description="ddp, horovod: divide gradients by this before the sum, and by world_size / this after it",
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none", description="ddp, horovod: format in which gradients are sent (horovod: none or fp16)"
    )
    powersgd_rank: int = Field(2, ge=1, description="powersgd: rank of the approximation of each weight gradient")
    powersgd_start: int = Field(100, ge=2, description="powersgd: steps with uncompressed gradients before it starts")
    sync_batchnorm: bool = Field(
        False, description="ddp on GPUs: BatchNorm statistics over the micro-batches of all processes"
    )
    op: Literal["average", "adasum"] = Field("average", description="horovod: how gradients are combined")
    hierarchical: bool = Field(False, description="adasum: average inside a machine, Adasum between machines")
    local_steps: int = Field(8, ge=1, description="localsgd: local steps between two averagings")
    local_after: float = Field(0.0, ge=0, description="localsgd: epochs of synchronous steps first (post-local SGD)")
    average_momentum: bool = Field(False, description="localsgd: also average the optimizer state")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="async: drop and recompute gradients that are more updates old than this; None: 4 per process",
    )
    timeout_s: float = _operational(600.0, gt=0, description="seconds after which a process stops waiting for another one")

    def identity(self) -> dict[str, Any]:
        """Nothing: which of these settings change a run's numbers depends on the strategy, see `parallel.identity`."""
        return {}


class Checkpoint(Settings):
    """When checkpoints are saved, and how many are kept."""

    every_steps: int | None = _operational(None, ge=1, description="save every this many steps")
    every_epochs: int | None = _operational(None, ge=1, description="save at the end of every this many epochs")
    every_seconds: float | None = _operational(300.0, gt=0, description="save every this many seconds")
    keep: int = _operational(2, ge=1, description="number of newest checkpoints to keep")
    history: Literal["none", "thin", "all"] = _operational(
        "none",
        description="older checkpoints, where `replay` and `audit` can start: keep none, all, or (thin) fewer of the older",
    )
    best: bool = _operational(True, description="also keep the checkpoint with the highest validation top-1")


class Track(Settings):
    """Where metrics are sent, in addition to the terminal and metrics.jsonl."""

    trackers: tuple[TrackerName, ...] = _operational((), description="any of: tensorboard, wandb (install the extra first)")
    every_seconds: float = _operational(
        1.0, ge=0, description="seconds between two collections of the metrics of all processes"
    )
    every_rank: bool = _operational(
        False, description="record each process's speed for every step; else only of up to 16 processes, or the slowest four"
    )
    wandb_project: str = _operational("worldsize", description="wandb: project")
    wandb_entity: str | None = _operational(None, description="wandb: team or user")


class Recipe(Settings):
    """Everything that determines a run, except the data and the machines."""

    about: _Prose = _operational("", description="what this recipe is for")
    reaches: _Prose = _operational("", description="the accuracy it claims or has reached, and where")
    source: _Prose = _operational("", description="where its values come from")
    seed: int = Field(0, ge=0, lt=2**64, description="seed of the initial weights, the order and every random draw")
    epochs: int = Field(90, ge=1, description="passes over the training data")
    max_steps: int | None = _operational(
        None, ge=1, description="stop after this many steps (schedules still span all epochs)"
    )
    global_batch: int = Field(256, ge=1, description="samples per optimizer step, over all processes")
    micro_batch: int = Field(32, ge=1, description="samples that share BatchNorm statistics")
    forward_batch: int | None = _operational(
        None,
        ge=1,
        description="samples per device and forward pass, a multiple of micro_batch; None: up to 256 on GPUs",
    )
    per_process_batch: int | None = Field(
        None, ge=1, description="instead of global_batch: samples per process, so the batch and lr grow with the world size"
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = Field(
        "auto", description="auto: bf16 if the hardware has bf16 units, else fp32; tf32, fp16: for GPUs"
    )
    device: Literal["auto", "cpu", "cuda"] = _operational("auto", description="auto: GPUs if available")
    deterministic: bool = _operational(False, description="use only deterministic algorithms")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the target spread over all classes")
    evaluate_every: int = _operational(1, ge=1, description="evaluate every this many epochs, and after the last")
    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    @model_validator(mode="after")
    def _batches(self) -> Recipe:
        batch, name = (
            (self.global_batch, "global_batch")
            if self.per_process_batch is None
            else (self.per_process_batch, "per_process_batch")
        )
        if batch % self.micro_batch:
            raise ValueError(
                f"{name} {batch} is not a multiple of micro_batch {self.micro_batch}: "
                f"nearest are {max(1, batch // self.micro_batch) * self.micro_batch} "
                f"and {(batch // self.micro_batch + 1) * self.micro_batch}"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Recipe:
        schedule = self.schedule
        if schedule.warmup_epochs >= self.epochs and schedule.warmup_epochs > 0:
            raise ValueError(
                f"schedule.warmup_epochs {schedule.warmup_epochs:g} must be less than epochs {self.epochs}: "
                f"add --schedule.warmup-epochs 0, or set --epochs to at least {math.floor(schedule.warmup_epochs) + 1}"
            )
        if schedule.name == "step":
            if list(schedule.milestones) != sorted(set(schedule.milestones)):
                raise ValueError(f"schedule.milestones {schedule.milestones} must be increasing")
            if schedule.milestones and schedule.milestones[-1] >= self.epochs:
                raise ValueError(
                    f"schedule.milestones {schedule.milestones} must be less than epochs {self.epochs}: "
                    "later ones would have no effect"
                )
        return self
