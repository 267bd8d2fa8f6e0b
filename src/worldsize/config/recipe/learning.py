"""Sections of a recipe: the network, the optimizer and the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from worldsize.config.recipe import own_network
from worldsize.config.recipe.base import Section, operational


class Model(Section):
    """The network and its initial weights."""

    name: str = Field(
        "resnet50",
        description="a classification network of torchvision; timm:NAME; worldsize:cifarnet, for tiny images; or your own: "
        "FILE.py:FUNCTION",
    )
    source: str | None = operational(None, description="the code of your own network, taken from the file of model.name")
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet",
        description="ResNets: imagenet is 7x7 stride 2 and pooling; cifar is 3x3 stride 1 without pooling, for tiny images",
    )
    zero_init: bool = Field(True, description="ResNets: start the last norm of each block at zero (Goyal et al. 2017, 5.1)")
    blurpool: bool = Field(False, description="blur before convolutions with a stride (Zhang 2019, arXiv 1904.11486)")
    drop_path: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="stochastic depth: chance to drop the last block's residual (EfficientNets and MobileNetV3: that of a "
        "block that would follow it); None: the network's own",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="chance to drop each input of the classifier; None: the network's own"
    )
    weights: str | None = Field(
        None,
        description="initial weights: a .safetensors or .pth file, a run, torchvision:ResNet50_Weights.IMAGENET1K_V2, or "
        "timm:resnet50.a1_in1k",
    )
    freeze: tuple[str, ...] = Field(
        (), description="parts that are not trained, such as conv1 layer1; backbone: all but the classifier"
    )
    unfreeze_epoch: int | None = Field(
        None, ge=0, description="train the frozen parts, too, from this epoch on (the first is 0); None: never"
    )
    zero_head: bool = Field(False, description="start with a classifier of zeros instead of random or pretrained numbers")
    head_bias: float | None = Field(
        None,
        description="initial bias of the classifier, such as -6.9 (-log 1000) for bce with 1,000 classes; None: its own",
    )
    channels_last: bool = operational(True, description="NHWC memory layout")
    compile: Literal["auto", True, False] = operational(
        "auto",
        description="torch.compile normalization, network and loss as one function; auto: on GPUs where a compiler works, "
        "unless the run is deterministic or bitwise; --model.no-compile: never",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_in_own_network(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("name", "")
        own = own_network.settings(name, values.get("source")) if own_network.is_own(name) else {"source": None}
        return values | own


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adamw", "rmsprop", "lars", "lamb", "muon", "sgdw", "nadamw", "lion"] = Field(
        "sgd",
        description="optimizer; sgdw decouples the weight decay from the gradient; lars and lamb adapt the learning rate of "
        "each layer, for large batches; muon makes updates of matrices orthogonal and uses adamw for the rest; nadamw is "
        "adamw with Nesterov momentum, as in timm; lion takes the sign of its moment (Chen et al. 2023, arXiv 2302.06675)",
    )
    lr: float = Field(0.1, gt=0, description="peak learning rate at lr_reference_batch")
    lr_reference_batch: int = Field(256, ge=1, description="the global batch that lr is for")
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="how lr grows with global_batch / lr_reference_batch"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd, sgdw, rmsprop, lars, muon: momentum (muon: usually 0.95)")
    nesterov: bool = Field(True, description="sgd, sgdw, muon: Nesterov momentum")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="adamw, nadamw, lamb, muon: decay rates of the two moments; lion: usually 0.9 0.99"
    )
    alpha: float = Field(0.99, gt=0, lt=1, description="rmsprop: decay rate of the squared gradients")
    eps: float | None = Field(
        None, gt=0, description="adamw, nadamw, rmsprop, muon (1e-8), lamb (1e-6): added to the divisor"
    )
    trust: float = Field(0.001, gt=0, description="lars: a layer's step at learning rate 1, relative to its weights")
    head_lr: float = Field(1.0, gt=0, description="learning rate of the classifier, relative to lr")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="each block's learning rate, relative to that of the block after it (BEiT: 0.75)"
    )
    weight_decay: float = Field(
        1e-4,
        ge=0,
        description="weight decay of weight matrices and convolution filters; sgdw: the fraction by which a step at the "
        "peak learning rate shrinks them",
    )
    norm_weight_decay: float = Field(
        0.0, ge=0, description="weight decay of norm layers, and of embeddings and layer scales of transformers"
    )
    bias_weight_decay: float | None = Field(
        None, ge=0, description="weight decay of the biases of other layers; None: norm_weight_decay"
    )
    clip_norm: float | None = Field(None, gt=0, description="clip gradients to this global L2 norm")
    clip_value: float | None = Field(None, gt=0, description="clip each element of the gradients to this absolute value")
    clip_agc: float | None = Field(
        None,
        gt=0,
        description="clip each unit's gradient to this fraction of its weights' norm, except the classifier's (Brock et al. "
        "2021, arXiv 2102.06171: 0.01 for large batches)",
    )
    sam_rho: float = Field(
        0.0, ge=0, description="sharpness-aware minimization: how far to move along the gradient; 0: off (usually 0.05)"
    )
    sam_every: int = Field(
        1,
        ge=1,
        description="sharpness-aware minimization: once every this many steps; such a step costs as much as two",
    )

    @model_validator(mode="after")
    def _nesterov(self) -> Optimizer:
        if self.name in ("sgd", "sgdw") and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov requires momentum > 0: pass --optimizer.no-nesterov or set momentum")
        return self

    @model_validator(mode="after")
    def _clips_once(self) -> Optimizer:
        if len(self.clips) > 1:
            raise ValueError(f"{' and '.join(self.clips)} exclude each other: set one of them")
        return self

    @property
    def clips(self) -> list[str]:
        """The settings by which gradients are clipped, at most one."""
        return [name for name in ("clip_norm", "clip_value", "clip_agc") if getattr(self, name) is not None]


class Schedule(Section):
    """The learning rate over the run, set before every step."""

    name: Literal[
        "cosine", "linear", "polynomial", "exponential", "restarts", "step", "constant", "onecycle", "piecewise"
    ] = Field("cosine", description="shape after warmup")
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warmup, by step")
    warmup_start: float = Field(
        0.0, ge=0, le=1, description="initial learning rate of the warmup, as a fraction of the peak"
    )
    warmup_prefix: bool = Field(
        True,
        description="cosine, linear, polynomial, exponential, restarts: starts after the warmup; False: starts with the "
        "run, and the warmup replaces its first part (timm without --warmup-prefix)",
    )
    end: float = Field(
        0.0,
        ge=0,
        le=1,
        description="cosine, linear, polynomial, restarts, onecycle: final learning rate, as a fraction of the peak",
    )
    milestones: tuple[float, ...] = Field(
        (30.0, 60.0, 80.0), description="step: multiply by gamma at these epochs; piecewise: the epochs of the values"
    )
    gamma: float = Field(0.1, gt=0, le=1, description="step: factor at each milestone; exponential: factor per epoch")
    values: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (), description="piecewise: learning rates at the milestones, as fractions of the peak; linear between them"
    )
    power: float = Field(2.0, gt=0, description="polynomial: exponent")
    cycle_epochs: float = Field(10.0, gt=0, description="restarts: epochs of the first cycle")
    cycle_growth: int = Field(1, ge=1, description="restarts: each cycle is this many times as long as the one before it")

    @model_validator(mode="after")
    def _points(self) -> Schedule:
        if self.name == "piecewise" and not 2 <= len(self.values) == len(self.milestones):
            raise ValueError(
                f"piecewise needs as many values as milestones, at least two: {len(self.values)} values, "
                f"{len(self.milestones)} milestones. FFCV's triangle is --schedule.milestones 0 2 16 --schedule.values 0 1 0"
            )
        if self.name == "piecewise" and self.warmup_epochs:
            raise ValueError("piecewise has no warmup: pass --schedule.warmup-epochs 0 and start with a small value")
        return self


class Average(Section):
    """Weights averaged over the steps. Evaluations are then of the average; those of the raw weights are logged too."""

    name: Literal["none", "ema", "swa"] = Field(
        "none", description="ema: exponential moving average; swa: mean of the weights at the ends of the last epochs"
    )
    decay: float = Field(0.9999, gt=0, description="ema: how much of the average remains at an update")
    every_steps: int = Field(1, ge=1, description="ema: update it every this many steps")
    warmup: bool = Field(False, description="ema: start with a smaller decay, at most 1 - n**(-2/3) at the n-th update")
    start_epoch: float = Field(0.0, ge=0, description="until this epoch, the average is a copy of the weights")

    @model_validator(mode="after")
    def _moves(self) -> Average:
        if self.decay >= 1:
            raise ValueError(f"decay {self.decay:g}: the average would never change; set it below 1, such as to 0.9999")
        return self


class Loss(Section):
    """What training minimizes. `label_smoothing` is a setting of the run."""

    name: Literal["cross_entropy", "bce"] = Field(
        "cross_entropy", description="bce: binary cross-entropy of each class (Wightman et al. 2021, arXiv 2110.00476)"
    )
    bce_threshold: float | None = Field(
        None, ge=0, lt=1, description="bce: mixed targets above this become 1, others 0; None: they stay as they are"
    )
    bce_reduction: Literal["mean", "sum"] = Field("mean", description="bce: over the classes")
    class_weights: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="weight of each class in the training loss, in the order of the classes"
    )
    balanced: bool = Field(
        False, description="weigh classes by the inverse of their number of training images, 1 on average"
    )
    teacher: Path | None = Field(None, description="distillation: a run on the same classes whose network also teaches")
    teacher_share: float = Field(0.5, gt=0, le=1, description="distillation: the teacher's part of the loss")
    temperature: float = Field(
        2.0, gt=0, description="distillation: what logits are divided by (Hinton et al. 2015, arXiv 1503.02531)"
    )

    @model_validator(mode="after")
    def _weights(self) -> Loss:
        if self.balanced and self.class_weights:
            raise ValueError("balanced computes the class weights: leave out class_weights or balanced")
        if self.class_weights and not any(self.class_weights):
            raise ValueError("class_weights: at least one must be above 0")
        return self
