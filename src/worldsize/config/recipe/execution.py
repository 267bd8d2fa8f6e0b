"""Sections of a recipe: how replicas work together, what a run saves and where it reports."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from worldsize.config.recipe.base import Section, operational

StrategyName = Literal["auto", "single", "dataparallel", "ddp", "bitwise", "adasum", "horovod", "localsgd", "async"]
TrackerName = Literal["tensorboard", "wandb"]


class Parallel(Section):
    """How the processes combine their gradients; docs/strategies.md explains which strategy to choose."""

    strategy: StrategyName = operational(
        "auto", description="`worldsize strategies` explains them; auto: single for one process, ddp for more"
    )
    threads: int = Field(
        1, ge=1, description="bitwise: threads per process that compute on a CPU; another number gives other bits"
    )
    bucket_mb: float = operational(25.0, gt=0, description="ddp, bitwise: size of a gradient bucket, MiB")
    gradient_as_bucket_view: bool = operational(
        True, description="ddp: gradients are views of the buckets, which saves one copy"
    )
    static_graph: bool = operational(False, description="ddp: the graph never changes")
    predivide: float | None = operational(
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
        description="async: drop and recompute gradients that are more than this many updates old; None: 4 per process",
    )
    timeout_s: float = operational(
        600.0, gt=0, le=1e6, description="seconds after which a process stops waiting for another one"
    )
    stall_s: float = operational(
        30.0,
        ge=0,
        description="seconds without progress after which a process is reported and the run ends, to be resumed; raised to "
        "3 times the 99th percentile of the run's step times if that is longer; 0: never",
    )

    def identity(self) -> dict[str, Any]:
        """Nothing: which of these settings change a run's numbers depends on the strategy, see `parallel.identity`."""
        return {}


class Checkpoint(Section):
    """When checkpoints are saved, and how many are kept."""

    every_steps: int | None = operational(None, ge=1, description="save every this many steps")
    every_epochs: int | None = operational(None, ge=1, description="save at the end of every this many epochs")
    every_seconds: float | None = operational(
        300.0, gt=0, description="save every this many seconds, which include writing it to disk"
    )
    keep: int = operational(2, ge=1, description="number of newest checkpoints to keep")
    history: Literal["none", "thin", "all"] = operational(
        "none",
        description="older checkpoints, where `replay` and `audit` can start: keep none, all, or (thin) fewer the older "
        "they are",
    )
    best: bool = operational(
        True,
        description="also keep the checkpoint with the highest validation top-1, or mAP where images have several labels",
    )


class Track(Section):
    """Where metrics are sent, in addition to the terminal and metrics.jsonl."""

    trackers: tuple[TrackerName, ...] = operational((), description="any of: tensorboard, wandb (install the extra first)")
    every_seconds: float = operational(
        1.0, ge=0, description="seconds between two collections of the metrics of all processes"
    )
    deferred: bool = operational(
        True, description="GPUs: read the metrics one interval later, so that the host does not wait for the GPU"
    )
    every_rank: bool = operational(
        False,
        description="record each process's speed for every step; otherwise, with more than 16 processes, only the slowest "
        "four",
    )
    margins: bool = operational(
        True, description="sum the loss and margin of each sample in checkpoints (10 bytes each), for `worldsize labels`"
    )
    wandb_project: str = operational("worldsize", description="wandb: project")
    wandb_entity: str | None = operational(None, description="wandb: team or user")
