"""A worker of an asynchronous run: a replica of the model that computes gradients of complete global batches."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import torch
from torch import nn

from worldsize.data.loading.loader import Loader
from worldsize.models.factory import RunningStatistics
from worldsize.parallel.async_sgd.server import Grant, Report
from worldsize.parallel.base import Strategy
from worldsize.training.gradients import GradientComputer


class Worker:
    """Computes gradients with the replica in ``compute``.

    Args:
        steps_per_epoch: maps a step of the run to its epoch and samples.
    """

    def __init__(self, compute: GradientComputer, training: Loader, steps_per_epoch: int) -> None:
        self._compute = compute
        self._loader = training
        self._steps_per_epoch = steps_per_epoch
        self._stream = training.steps()
        self._fetching: list[int] = []
        self._submitted_at = time.perf_counter()

    def work(self, grant: Grant) -> Report:
        """Compute the gradient of the first granted step; images of the other steps are prefetched meanwhile."""
        waited_s = time.perf_counter() - self._submitted_at
        begin = time.perf_counter()
        compute, state = self._compute, self._compute.state
        step = self._fetch(grant.steps)
        unflatten(grant.weights, [p.detach() for p in state.model.parameters()])
        computed = compute.gradient(self._stream, step)
        statistics = state.strategy.mean(state.statistics.take())
        norm = compute.unscale_and_clip()
        overflow = state.scaler.is_enabled() and not torch.isfinite(norm)
        state.scaler.update()
        gradient = None if overflow else flatten([*pack(state.model), statistics])
        state.optimizer.zero_grad()
        values = torch.cat([computed.sums.sum(0), norm.double().view(1)]).cpu()
        self._submitted_at = time.perf_counter()
        times = (self._submitted_at - begin, waited_s, computed.data_s())
        return Report(step, grant.version, gradient, values, *times, broken=self._loader.broken.take())

    def was_away(self, seconds: float) -> None:
        """Since its last report, this process has done something else for this long: it did not wait for work."""
        self._submitted_at += seconds

    def _fetch(self, steps: list[int]) -> int:
        """Start loading the steps that are new to this worker. Returns the first step in the queue."""
        for step in steps:
            if step not in self._fetching:
                self._loader.add_step(self._stream, self._compute.plan, *divmod(step, self._steps_per_epoch))
                self._fetching.append(step)
        return self._fetching.pop(0)


def pack(model: nn.Module) -> list[torch.Tensor]:
    """The parameters' gradients, zeros where there is none, and for each parameter whether it has one."""
    gradients = [p.grad for p in model.parameters()]
    found = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(model.parameters(), gradients, strict=True)]
    return [*found, found[0].new_tensor([grad is not None for grad in gradients])]


def unpack(sent: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The inverse of `pack` on a flat tensor. Returns what follows in it.

    An optimizer leaves parameters without a gradient alone. With zeros, weight decay and momentum would move them.
    """
    parameters = list(model.parameters())
    sizes = [*(p.numel() for p in parameters), len(parameters)]
    *parts, marks, rest = sent.split([*sizes, sent.numel() - sum(sizes)])
    for parameter, part, mark in zip(parameters, parts, marks.tolist(), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape)) if mark else None
    return rest


def replica(compute: GradientComputer, strategy: Strategy) -> GradientComputer:
    """A copy of ``compute`` with its own copy of the model and an optimizer that never steps."""
    objective = copy.deepcopy(compute.state.objective)
    model = objective.network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # It collects a step's statistics; the moving averages are rank 0's.
    statistics = RunningStatistics(model, compute.state.statistics.own)
    own = copy.copy(strategy)
    own.module = objective
    return replace(
        compute, state=replace(compute.state, objective=objective, optimizer=optimizer, statistics=statistics, strategy=own)
    )


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All tensors concatenated, (n,)."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The inverse of `flatten`: copy the parts of ``flat`` into the tensors, with a single copy to their device."""
    flat = flat.to(tensors[0].device)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
