"""The tensors of a run that checkpoints save and restore."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from worldsize import checkpoint, parallel
from worldsize.checkpoint import Snapshot, Tensors
from worldsize.config.recipe import Recipe
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError
from worldsize.models import networks
from worldsize.models.factory import RunningStatistics
from worldsize.optim import optimizers
from worldsize.optim.averaging import Averaging
from worldsize.parallel.base import Strategy
from worldsize.training.margins import Margins
from worldsize.training.objective import Objective


@dataclass(frozen=True)
class TrainState:
    """One rank's model and its objective, optimizer, loss scale, running statistics, strategy and averaged weights.

    ``margins`` is None if the losses and margins of the samples are not collected. ``compiled``: training calls the
    network through a compiled form. ``graphs``: a CUDA graph replays the kernels of its steps.
    """

    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    statistics: RunningStatistics
    strategy: Strategy
    averaging: Averaging | None = None
    margins: Margins | None = None
    compiled: bool = False
    graphs: bool = False

    @property
    def model(self) -> nn.Module:
        """The network itself."""
        return self.objective.network

    def advance_statistics(self) -> None:
        """Apply the statistics that this step's micro-batches left. With some strategies all ranks must call it."""
        nodes = self.statistics.take()
        if self.statistics.size:  # the model has BatchNorm
            self.statistics.advance(self.strategy.mean(nodes))

    @contextmanager
    def consensus(self, world: World, step: int) -> Iterator[None]:
        """Within this context the model combines all ranks after ``step``: it is the one to evaluate and save."""
        with self.strategy.consensus(), self.statistics.averaged(self._sharing(world), step):
            yield

    @contextmanager
    def averaged(self, world: World) -> Iterator[None]:
        """Within this context, inside `consensus`, the model has the averaged weights and statistics instead."""
        assert self.averaging is not None
        with self.averaging.applied(self._sharing(world)):
            yield

    def _sharing(self, world: World) -> World:
        """The ranks whose running statistics differ."""
        return world.alone() if self.strategy.same_bits else world

    def own(self) -> Tensors:
        """The tensors that only this rank has, as ``KIND/NAME``; references, not copies."""
        own = {f"norm/{k}": v for k, v in self.statistics.tensors().items()}
        if self.averaging is not None:
            own |= {f"average/{k}": v for k, v in self.averaging.own().items()}
        return own | {f"strategy/{k}": v for k, v in self.strategy.state().items()}

    def gather(self, world: World) -> dict[int, Tensors]:
        """Copies of each rank's own tensors on rank 0, empty elsewhere. All ranks must call it."""
        return dict(enumerate(gather(checkpoint.copy(self.own()), world)))

    def restore(self, snapshot: Snapshot, world: World, changed: Recipe | None = None) -> None:
        """Restore a snapshot.

        Args:
            changed: this run's recipe, if the snapshot may be of another one. If other layers were frozen, the running
                statistics of all begin with their averages over the ranks; with another strategy, the ranks' weights and
                optimizers do.

        Raises:
            CheckpointError: it belongs to another model.
        """
        if self.averaging is not None:
            self._load(snapshot.average or snapshot.model)
            self.averaging.restart(snapshot.state["step"])
        self._load(snapshot.model)
        if self.margins is not None and world.is_main:
            self.margins.load(snapshot.samples)
        same_optimizer = snapshot.state["optimizer"] == type(self.optimizer).__name__
        if same_optimizer:
            optimizers.load_state_tensors(self.optimizer, self.model, snapshot.optimizer)
        if self.scaler.is_enabled() and snapshot.state["scaler"]:
            self.scaler.load_state_dict(snapshot.state["scaler"])
        self.strategy.begin_step(snapshot.state["step"])
        if snapshot.state["world_size"] != world.size:
            # At another world size, each rank starts from the averages, which the model now has.
            return
        own = snapshot.ranks.get(world.rank, {})  # a rank without any state has no file
        if not self._follows_others(snapshot, own, changed):
            self._load_statistics(snapshot, own, world.rank)
        if changed is not None and _had_another_strategy(snapshot, changed):
            return
        state = {k.removeprefix("strategy/"): v for k, v in own.items() if k.startswith("strategy/")}
        if not same_optimizer and self.strategy.optimizer_names is not None:
            state = {k: v for k, v in state.items() if not k.startswith(self.strategy.optimizer_names)}
        self.strategy.load_state(state)

    def _follows_others(self, snapshot: Snapshot, own: Tensors, changed: Recipe | None) -> bool:
        """Whether the snapshot has running statistics of other layers than those that the run follows now.

        Their names are only the numbers of the layers that are not frozen.
        """
        before, now = ({name for name in names if name.startswith("norm/")} for names in (own, self.own()))
        if changed is None:
            return before > now  # of an older version, which also followed layers that the network itself freezes
        if snapshot.state["identity"]["model"].get("freeze", []) != list(changed.model.freeze):
            return True
        # With the same parts, the run has either all layers or those that are never frozen (model.unfreeze_epoch).
        return before != now

    def _load_statistics(self, snapshot: Snapshot, own: Tensors, rank: int) -> None:
        statistics = {name: tensor for name, tensor in self.own().items() if not name.startswith("strategy/")}
        if not snapshot.average:  # the run did not average until now
            statistics.pop("average/statistics", None)
        unlike = sorted(name for name, tensor in statistics.items() if name not in own or own[name].shape != tensor.shape)
        if unlike:
            raise CheckpointError(f"the checkpoint has no {unlike[0]} of rank {rank}")
        for name, tensor in statistics.items():
            tensor.copy_(own[name])

    def _load(self, state: Tensors) -> None:
        try:
            networks.load_state(self.model, state)
        except RuntimeError as error:
            reason = shorten((str(error).splitlines()[1:2] or [str(error)])[0], 200, placeholder=" ...")
            raise CheckpointError(
                f"the checkpoint belongs to another model: {reason} Undo the change, or start a new run with "
                "--model.weights CHECKPOINT/model.safetensors"
            ) from None
        self.statistics.load_from_model()


def _had_another_strategy(snapshot: Snapshot, recipe: Recipe) -> bool:
    before, now = snapshot.state["identity"].get("parallel", {}), parallel.identity(recipe).get("parallel", {})
    return bool(before.get("strategy") != now.get("strategy"))


def gather(tensors: Tensors, world: World) -> list[Tensors]:
    """Every rank's tensors on rank 0, in rank order; an empty list elsewhere. All ranks must call it.

    Args:
        tensors: on the CPU; of the same names, shapes and types on all ranks.

    Raises:
        AssertionError: they differ between ranks.
    """
    if world.control is None:
        return [tensors]
    tensors = dict(sorted(tensors.items()))
    _assert_equal_layouts(tensors, world)
    everyone: list[Tensors] = [{} for _ in range(world.size)] if world.is_main else []
    for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
        own = {name: t for name, t in tensors.items() if t.dtype == dtype}
        flat = torch.cat([t.reshape(-1) for t in own.values()])
        received = [torch.empty_like(flat) for _ in everyone] or None
        dist.gather(flat, received, dst=0, group=world.control)
        for theirs, part in zip(everyone, received or (), strict=True):
            pieces = part.split([t.numel() for t in own.values()])
            # Copies: safetensors does not save tensors that share memory.
            theirs |= {name: piece.clone().view(t.shape) for (name, t), piece in zip(own.items(), pieces, strict=True)}
    return everyone


def _assert_equal_layouts(tensors: Tensors, world: World) -> None:
    layout = [(name, str(t.dtype), list(t.shape)) for name, t in tensors.items()]
    digest = int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:7], "little")
    bounds = torch.tensor([digest, -digest])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=world.control)
    assert bounds.tolist() == [digest, -digest], "the state of two ranks has different tensors"
