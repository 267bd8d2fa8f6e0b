"""The recipe: every setting of a run, declared once.

These models are the only source for the YAML files, the command line (``--data.root``), ``--help``
and ``docs/recipe.md``. A recipe is frozen and refuses keys it does not know. Fields marked
*operational* say where and how a run happens and cannot change its numbers beyond float rounding;
all others make up the run's identity, which must not change on resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field, model_validator

DatasetName = Literal["digits", "cifar10", "imagenet", "folder", "synthetic"]
StrategyName = Literal["auto", "single", "dataparallel", "ddp", "adasum", "horovod", "localsgd", "async"]
TrackerName = Literal["tensorboard", "wandb"]

# What a recipe says of itself: for its YAML, not for the command line.
_Prose = Annotated[str, tyro.conf.Suppress]


def _operational(default: Any, **kwargs: Any) -> Any:
    """A field that does not belong to the run's identity."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def _of(strategies: str, default: Any, operational: bool = False, **kwargs: Any) -> Any:
    """A setting that only these ``strategies`` (names with spaces between) read."""
    return Field(default, json_schema_extra={"of": strategies, "operational": operational}, **kwargs)


class Settings(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def identity(self) -> dict[str, Any]:
        """All settings that determine the run's numbers, as nested values that JSON can hold."""
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
    """Where the pictures come from and how they are cut."""

    name: DatasetName = Field("folder", description="which data set; `folder` is any ROOT/train/CLASS/picture tree")
    root: Path | None = _operational(None, description="folder of the pictures (not needed for digits and synthetic)")
    download: bool = _operational(False, description="cifar10: download the official files into ROOT and verify them")
    train_crop: Literal["random_resized", "pad", "none"] = Field(
        "random_resized", description="random_resized: a random part, resized; pad: pad and shift; none: centre crop"
    )
    train_crop_size: int = Field(224, ge=8, description="side of the training pictures, pixels")
    crop_area: tuple[float, float] = Field((0.08, 1.0), description="random_resized: range of the part's area (0 to 1)")
    crop_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="random_resized: range of width/height")
    padding: int = Field(4, ge=0, description="pad: black pixels added on each side before the shift")
    flip: bool = Field(True, description="mirror half of the training pictures left to right")
    val_resize_size: int = Field(256, ge=8, description="evaluation: shorter side after resizing, pixels")
    val_crop_size: int = Field(224, ge=8, description="evaluation: side of the centre crop, pixels")
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="subtracted per channel (range 0 to 1)")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="divided by per channel (range 0 to 1)")
    samples: int = Field(1024, ge=2, description="synthetic: how many training pictures there are")
    classes: int = Field(1000, ge=2, description="synthetic: how many classes there are")
    shuffle: Literal["full", "block"] = Field(
        "full", description="full: any order of an epoch; block: one that reads shards in blocks, and mixes less"
    )
    block: int = Field(32, ge=1, description="shuffle block: consecutive pictures that are read at once")
    pool: int = Field(16384, ge=1, description="shuffle block: pictures that all processes together mix at a time")
    max_broken: float = _operational(0.001, ge=0, le=1, description="stop when more than this share cannot be decoded")
    workers: int | None = _operational(None, ge=1, description="decoding threads per process; None: this process's cores")
    readers: int = _operational(16, ge=1, description="reads in flight per process, each of 8 to 32 pictures")
    dct_scaling: bool = Field(
        False, description="random_resized, native decoder: decode large pictures at 1/2 or 1/4; faster, and other pixels"
    )
    prefetch: int = _operational(4, ge=1, description="micro-batches prepared ahead")

    @model_validator(mode="after")
    def _ranges(self) -> Data:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError(f"crop_area {self.crop_area} must be two rising numbers between 0 and 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio {self.crop_ratio} must be two rising positive numbers")
        if self.val_crop_size > self.val_resize_size:
            raise ValueError(
                f"val_crop_size {self.val_crop_size} is larger than val_resize_size {self.val_resize_size}: "
                f"the crop would not fit; raise val_resize_size to at least {self.val_crop_size}"
            )
        if self.shuffle == "block" and self.pool < self.block:
            raise ValueError(f"pool {self.pool} is smaller than block {self.block}: it mixes whole blocks")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive")
        return self


class Model(Settings):
    """Which network, and how it begins."""

    name: str = Field("resnet50", description="any classification model of torchvision")
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet", description="ResNets: 7x7 stride 2 and pooling, or 3x3 stride 1 without pooling for tiny pictures"
    )
    zero_init: bool = Field(True, description="ResNets: start the last norm of each block at zero (Goyal et al. 2017, 5.1)")
    weights: Path | None = Field(None, description="start from these weights: a local .safetensors or .pth state dict")
    channels_last: bool = _operational(True, description="NHWC memory layout")
    compile: bool = _operational(False, description="torch.compile the model")


class Optimizer(Settings):
    """How a gradient becomes a step."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="optimiser")
    lr: float = Field(0.1, gt=0, description="peak learning rate at lr_reference_batch")
    lr_reference_batch: int = Field(256, ge=1, description="the global batch that lr is meant for")
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="how lr grows with global_batch / lr_reference_batch"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd: momentum")
    nesterov: bool = Field(True, description="sgd: Nesterov momentum")
    betas: tuple[float, float] = Field((0.9, 0.999), description="adamw: decay of the two moments")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay of weight matrices and filters")
    norm_weight_decay: float = Field(0.0, ge=0, description="weight decay of norm layers and biases")
    clip_norm: float | None = Field(None, gt=0, description="scale gradients down to this global L2 norm")

    @model_validator(mode="after")
    def _nesterov(self) -> Optimizer:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set --optimizer.no-nesterov or a momentum")
        return self


class Schedule(Settings):
    """The learning rate over the run, set before every step."""

    name: Literal["cosine", "linear", "step", "constant", "onecycle"] = Field("cosine", description="shape after warmup")
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warmup, by step")
    warmup_start: float = Field(0.0, ge=0, le=1, description="warmup begins at this fraction of the peak")
    end: float = Field(0.0, ge=0, le=1, description="cosine, linear, onecycle: the last step's fraction of the peak")
    milestones: tuple[float, ...] = Field((30.0, 60.0, 80.0), description="step: multiply by gamma at these epochs")
    gamma: float = Field(0.1, gt=0, le=1, description="step: the factor")


class Parallel(Settings):
    """How replicas agree on one model; docs/strategies.md says which to choose when."""

    strategy: StrategyName = _operational(
        "auto", description="`worldsize strategies` explains them; auto: single for one process, ddp for more"
    )
    bucket_mb: float = _of("ddp", 25.0, operational=True, gt=0, description="ddp: size of a gradient bucket, MiB")
    gradient_as_bucket_view: bool = _of(
        "ddp", True, operational=True, description="ddp: gradients live in the buckets, saving one copy"
    )
    static_graph: bool = _of("ddp", False, operational=True, description="ddp: promise that the graph never changes")
    predivide: float | None = _of(
        "ddp horovod",
        None,
        operational=True,
        gt=0,
        description="ddp, horovod: divide gradients by this before they are summed, and by the rest after",
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = _of(
        "ddp horovod", "none", description="ddp, horovod: how gradients travel (horovod: none or fp16)"
    )
    powersgd_rank: int = _of("ddp", 2, ge=1, description="powersgd: rank of the approximation of each weight gradient")
    powersgd_start: int = _of("ddp", 100, ge=2, description="powersgd: steps that are averaged whole before it begins")
    sync_batchnorm: bool = _of("ddp", False, description="ddp on GPUs: BatchNorm over all processes' micro-batches together")
    op: Literal["average", "adasum"] = _of("horovod", "average", description="horovod: how it combines")
    hierarchical: bool = _of("adasum", False, description="adasum: average inside a machine, Adasum between machines")
    local_steps: int = _of("localsgd", 8, ge=1, description="localsgd: steps each process takes alone between averagings")
    local_after: float = _of(
        "localsgd", 0.0, ge=0, description="localsgd: epochs of synchronous steps first (post-local SGD)"
    )
    average_momentum: bool = _of("localsgd", False, description="localsgd: average the optimiser's state too")
    max_staleness: int | None = _of(
        "async", None, ge=0, description="async: drop and redo a gradient more updates old than this; None: 4 per process"
    )
    timeout_s: float = _operational(600.0, gt=0, description="a process that waits longer for another one gives up")

    @property
    def exact(self) -> bool:
        """Whether a run has the numbers of `single`, up to rounding, at every world size."""
        averaging = self.strategy in ("auto", "single", "dataparallel", "ddp", "horovod")
        return averaging and self.compression == "none" and self.op == "average" and not self.sync_batchnorm

    def identity(self) -> dict[str, Any]:
        """Nothing where the numbers are those of `single`; else the strategy and the settings that it reads."""
        if self.exact:
            return {}
        name = "ddp" if self.strategy == "auto" else self.strategy
        read = (field for field, of, operational in self._readers() if name in of and not operational)
        return {"strategy": name} | {field: getattr(self, field) for field in read}

    @classmethod
    def _readers(cls) -> list[tuple[str, list[str], bool]]:
        """(setting, the strategies that read it, whether it is operational) for those that not all read."""
        extras = ((name, field.json_schema_extra) for name, field in cls.model_fields.items())
        own = [(name, extra) for name, extra in extras if isinstance(extra, dict) and "of" in extra]
        return [(name, str(extra["of"]).split(), bool(extra["operational"])) for name, extra in own]

    def check(self) -> None:
        """Raise a ValueError where a setting means nothing to the strategy."""
        strategy = "ddp" if self.strategy == "auto" else self.strategy
        for name, of, _ in self._readers():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and strategy not in of:
                raise ValueError(
                    f"{name} {value} means nothing to strategy {strategy}: use --parallel.strategy {' or '.join(of)}, "
                    f"or leave it at {default}"
                )
        if self.strategy == "horovod" and self.compression not in ("none", "fp16"):
            raise ValueError(
                f"Horovod cannot send gradients as {self.compression}: use --parallel.compression fp16, "
                "or --parallel.strategy ddp"
            )


class Checkpoint(Settings):
    """When the state is saved, and how much of it is kept."""

    every_steps: int | None = _operational(None, ge=1, description="save every this many steps")
    every_seconds: float | None = _operational(300.0, gt=0, description="save every this many seconds")
    keep: int = _operational(2, ge=1, description="how many of the newest checkpoints stay")
    best: bool = _operational(True, description="also keep the one with the highest validation top-1")


class Track(Settings):
    """Where the metrics go, besides the terminal and metrics.jsonl."""

    trackers: tuple[TrackerName, ...] = _operational((), description="any of: tensorboard, wandb (install the extra first)")
    every_seconds: float = _operational(1.0, ge=0, description="collect the metrics of all processes this often")
    wandb_project: str = _operational("worldsize", description="wandb: project")
    wandb_entity: str | None = _operational(None, description="wandb: team or user")


class Recipe(Settings):
    """Everything that determines a run, apart from the data and the machines."""

    about: _Prose = _operational("", description="what this recipe is for")
    reaches: _Prose = _operational("", description="the accuracy it claims or has shown, and where")
    source: _Prose = _operational("", description="where its values come from")
    seed: int = Field(0, ge=0, lt=2**64, description="of the initial weights, the order and every random draw")
    epochs: int = Field(90, ge=1, description="passes over the training data")
    max_steps: int | None = _operational(None, ge=1, description="end after this many steps (schedules still span epochs)")
    global_batch: int = Field(256, ge=1, description="samples per optimiser step, over all processes")
    micro_batch: int = Field(32, ge=1, description="samples per forward pass, and per BatchNorm group")
    per_process_batch: int | None = Field(
        None, ge=1, description="instead of global_batch: samples per process, so batch and lr grow with the world"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto", description="auto: bf16 where the hardware computes in it, else fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = _operational("auto", description="auto: GPUs where there are any")
    deterministic: bool = _operational(False, description="only algorithms that give the same bits every time")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over all classes")
    evaluate_every: int = _operational(1, ge=1, description="evaluate after every this many epochs, and after the last")
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
    def _parallel_fits(self) -> Recipe:
        self.parallel.check()
        if self.parallel.compression == "powersgd" and self.precision == "fp16":
            raise ValueError(
                "parallel.compression powersgd carries its error from step to step, which fp16's changing loss scale would "
                "spoil: use --precision bf16 or fp32"
            )
        if self.parallel.strategy == "async" and self.data.shuffle == "block":
            raise ValueError("data.shuffle block gives each process its own blocks, and async any step to any: use full")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Recipe:
        schedule = self.schedule
        if schedule.warmup_epochs >= self.epochs and schedule.warmup_epochs > 0:
            raise ValueError(
                f"schedule.warmup_epochs {schedule.warmup_epochs:g} leaves nothing of epochs {self.epochs}: "
                "lower the one or raise the other"
            )
        if schedule.name == "step":
            if list(schedule.milestones) != sorted(set(schedule.milestones)):
                raise ValueError(f"schedule.milestones {schedule.milestones} must rise")
            if schedule.milestones and schedule.milestones[-1] >= self.epochs:
                raise ValueError(
                    f"schedule.milestones {schedule.milestones} reach past epochs {self.epochs}: "
                    "the last drops would never happen"
                )
        return self
