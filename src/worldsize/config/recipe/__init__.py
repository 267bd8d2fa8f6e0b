"""The recipe: every setting of a run, declared once.

These models are the only source of the YAML format, the command line (``--data.root``), ``--help`` and
``docs/recipe.md``. A recipe is frozen and rejects unknown keys. Fields marked *operational* define where and how a run
executes and cannot change its numbers beyond float rounding; all others are the run's identity, which must not change on
resume.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import tyro
from pydantic import Field, model_validator

from worldsize.config.recipe.base import Section, operational
from worldsize.config.recipe.execution import Checkpoint, Parallel, StrategyName, Track, TrackerName
from worldsize.config.recipe.images import Augment, Data, DatasetName, PolicyName
from worldsize.config.recipe.learning import Average, Loss, Model, Optimizer, Schedule

__all__ = [
    "Augment",
    "Average",
    "Checkpoint",
    "Data",
    "DatasetName",
    "Loss",
    "Model",
    "Optimizer",
    "Parallel",
    "PolicyName",
    "Recipe",
    "Schedule",
    "Section",
    "StrategyName",
    "Track",
    "TrackerName",
]

# Text about the recipe: for its YAML file, not for the command line.
Prose = Annotated[str, tyro.conf.Suppress]
Claim = Annotated[float | None, tyro.conf.Suppress]


class Recipe(Section):
    """Everything that determines a run, except the data and the machines."""

    about: Prose = operational("", description="what this recipe is for")
    claimed_top1: Claim = operational(None, description="top-1 accuracy that its source reports, percent")
    reaches: Prose = operational("", description="the accuracy that its source reports, and for what")
    source: Prose = operational("", description="where its values come from")
    differs: Prose = operational("", description="what differs from the source")
    reproduced: Prose = operational("", description="the accuracy that this recipe reached with worldsize, and how")
    seed: int = Field(0, ge=0, lt=2**64, description="seed of the initial weights, the order and every random draw")
    epochs: int = Field(90, ge=1, description="passes over the training data")
    max_steps: int | None = operational(
        None, ge=0, description="stop after this many steps (schedules still span all epochs); 0: only evaluate"
    )
    global_batch: int = Field(256, ge=1, description="samples per optimizer step, over all processes")
    micro_batch: int = Field(32, ge=1, description="samples that share BatchNorm statistics")
    forward_batch: int | None = operational(
        None,
        ge=1,
        description="samples per device and forward pass, a multiple of micro_batch; None: up to 256 on GPUs",
    )
    per_process_batch: int | None = Field(
        None, ge=1, description="instead of global_batch: samples per process, so the batch and lr grow with the world size"
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = Field(
        "auto",
        description="auto: bf16, on GPUs also fp16, if the hardware has units for it, else fp32; tf32, fp16: for GPUs",
    )
    device: Literal["auto", "cpu", "cuda"] = operational("auto", description="auto: GPUs if available")
    deterministic: bool = operational(False, description="use only deterministic algorithms")
    cuda_graphs: Literal["auto", True, False] = operational(
        "auto",
        description="GPUs, strategy single: replay the kernels of a step as CUDA graphs, which uses less host time; auto: "
        "in bf16 or fp16 with a network that is compiled or worldsize's own, unless the run is deterministic; "
        "--no-cuda-graphs: never",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the target spread over all classes")
    evaluate_every: int = operational(1, ge=1, description="evaluate every this many epochs, and after the last")
    data: Data = Data()
    augment: Augment = Augment()
    model: Model = Model()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    average: Average = Average()
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
            below = batch // self.micro_batch * self.micro_batch
            above = below + self.micro_batch
            nearest = f"nearest are {below} and {above}" if below else f"the least is {above}"
            raise ValueError(f"{name} {batch} is not a multiple of micro_batch {self.micro_batch}: {nearest}")
        return self

    @model_validator(mode="after")
    def _mixes(self) -> Recipe:
        if self.augment.mixes and self.micro_batch < 2:
            raise ValueError(
                "augment.mixup and augment.cutmix mix the images of a micro-batch: set micro_batch to at least 2, "
                "or both to 0"
            )
        most = (self.per_process_batch or self.global_batch) // self.micro_batch
        if self.augment.repeats > max(1, most):
            raise ValueError(
                f"augment.repeats {self.augment.repeats}: a step has {most} micro-batches (global_batch / micro_batch), and "
                f"each copy of an image needs its own: lower it to at most {most}"
            )
        if self.augment.cutout > self.data.train_crop_size:
            raise ValueError(
                f"augment.cutout {self.augment.cutout} is larger than the images: "
                f"lower it to at most data.train_crop_size {self.data.train_crop_size}"
            )
        return self

    @model_validator(mode="after")
    def _several_labels(self) -> Recipe:
        if not self.data.multilabel:
            return self
        if self.loss.name != "bce":
            raise ValueError(f"data.name multilabel: {self.loss.name} is for one label per image: set loss.name to bce")
        if self.loss.balanced:
            raise ValueError("data.name multilabel: leave out loss.balanced; loss.class_weights weighs the classes")
        if self.loss.teacher is not None:
            raise ValueError("data.name multilabel: leave out loss.teacher, whose probabilities are those of one label")
        return self

    @model_validator(mode="after")
    def _balances_once(self) -> Recipe:
        if self.data.sampling == "balanced" and self.loss.balanced:
            raise ValueError("data.sampling balanced and loss.balanced correct for unequal classes twice: leave out one")
        return self

    @model_validator(mode="after")
    def _captured(self) -> Recipe:
        if self.cuda_graphs is True and (reason := self.not_captured):
            raise ValueError(f"cuda_graphs {reason}")
        return self

    @property
    def not_captured(self) -> str | None:
        """Why CUDA graphs cannot contain its steps, after "cuda_graphs"; None if they can."""
        if self.data.train_crop_sizes:
            return "needs images of one size: leave out data.train_crop_sizes or cuda_graphs"
        if self.optimizer.sam_rho:
            return "does not work with optimizer.sam_rho: leave out one of them"
        if self.optimizer.name not in ("sgd", "adamw"):
            return f"works with the optimizers sgd and adamw, not with {self.optimizer.name}"
        return None

    @model_validator(mode="after")
    def _averages(self) -> Recipe:
        if self.average.name != "none" and self.average.start_epoch >= self.epochs:
            raise ValueError(
                f"average.start_epoch {self.average.start_epoch:g} must be less than epochs {self.epochs}: "
                "nothing would be averaged"
            )
        return self

    @model_validator(mode="after")
    def _unfreezes(self) -> Recipe:
        epoch = self.model.unfreeze_epoch
        if epoch is None:
            return self
        if not self.model.freeze:
            raise ValueError(
                f"model.unfreeze_epoch {epoch}: no part is frozen; set model.freeze, for example to backbone, or leave out "
                "model.unfreeze_epoch"
            )
        if not 0 < epoch < self.epochs:
            raise ValueError(
                f"model.unfreeze_epoch {epoch} must be at least 1 and less than epochs {self.epochs}: leave out "
                "model.freeze to train everything from the start, or model.unfreeze_epoch to keep parts frozen to the end"
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
        if schedule.name in ("step", "piecewise"):
            if list(schedule.milestones) != sorted(set(schedule.milestones)):
                raise ValueError(f"schedule.milestones {schedule.milestones} must be increasing")
            if schedule.name == "step" and schedule.milestones and schedule.milestones[-1] >= self.epochs:
                raise ValueError(
                    f"schedule.milestones {schedule.milestones} must be less than epochs {self.epochs}: "
                    "later ones would have no effect"
                )
        return self
