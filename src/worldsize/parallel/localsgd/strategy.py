"""Local SGD: each rank takes H steps alone, then all ranks average their weights.

Stich 2019, "Local SGD converges fast and communicates little" (arXiv 1805.09767). Starting synchronously and switching to
local steps after the first drop of the learning rate is post-local SGD (Lin et al. 2020, "Don't use large mini-batches,
use local SGD", arXiv 1808.07217). For SGD, H = 1 equals synchronous averaging: the mean of the steps is the step of the
mean gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.parallel import base

if TYPE_CHECKING:
    import torch


class Strategy(base.Strategy):
    """``local_steps`` (H) local steps, then the mean; the first ``local_after`` epochs average gradients instead."""

    name = "localsgd"
    about = "several local steps, then averages weights"
    identity_settings = ("local_steps", "local_after", "average_momentum")
    settings = identity_settings
    averages = False
    optimizer_names = "optimizer/"
    local_gradients = True

    def __init__(self, parts: base.StrategyInputs) -> None:
        super().__init__(parts)
        self._parts = parts
        self._step = 0
        self._every = parts.settings.local_steps
        self._begins = round(parts.settings.local_after * parts.steps_per_epoch)

    def describe(self) -> str:
        return f"{self.name}, averaging every {self._every} steps"

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        yield
        if last and self._step < self._begins:
            if self._parts.skips:
                self._add_missing_gradients()
            self._average([p.grad for p in self._parts.parameters if p.grad is not None])

    def update(self, step: Callable[[], None]) -> None:
        step()
        self._step += 1
        if self._agreed and self._step > self._begins:  # until then they are equal
            self._average([p.detach() for p in self._parts.parameters])
            if self._parts.settings.average_momentum:
                self._average(self._momentum())

    def parameters_added(self) -> None:
        super().parameters_added()
        self._parts = replace(self._parts, skips=self._parts.skips_later)

    def begin_step(self, step: int) -> None:
        self._step = step

    @property
    def _agreed(self) -> bool:
        """Whether the last step ended with all ranks at the same weights."""
        local = self._step - self._begins
        return local <= 0 or local % self._every == 0

    def _add_missing_gradients(self) -> None:
        """Zeros, on a rank that has skipped a layer in all its micro-batches while another has not."""
        import torch

        parameters = self._parts.parameters
        for parameter, ranks in zip(parameters, self._ranks([p.grad is not None for p in parameters]), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _momentum(self) -> list[torch.Tensor]:
        """The optimizer's state that is averaged: of parameters that all ranks have updated."""
        parameters = dict(self._parts.model.named_parameters())
        known = set(parameters)
        if self._parts.skips:
            ranks = self._ranks([bool(self.optimizer.state.get(p)) for p in parameters.values()])
            known = {name for name, n in zip(parameters, ranks, strict=True) if n == self._parts.world.size}
        state = self._optimizer_state().items()
        return [t for key, t in state if t.is_floating_point() and t.ndim and key.partition("/")[2] in known]

    def _ranks(self, here: list[bool]) -> list[int]:
        """Of how many ranks each is true."""
        import torch
        import torch.distributed as dist

        counts = torch.tensor(here, dtype=torch.int32, device=self._parts.world.device)
        if self._parts.world.size > 1:
            self.exchange.sends(counts)
            with self.exchange.waiting():
                dist.all_reduce(counts)
        return counts.tolist()

    def _average(self, tensors: list[torch.Tensor]) -> None:
        from worldsize.models.factory import average

        for tensor in tensors:
            self.exchange.sends(tensor)
        with self.exchange.waiting():
            average(tensors, self._parts.world)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._agreed:
            yield
            return
        from worldsize.models.factory import average

        weights = [p.detach() for p in self._parts.parameters]
        own = [w.clone() for w in weights]
        average(weights, self._parts.world)
        try:
            yield
        finally:
            for weight, kept in zip(weights, own, strict=True):
                weight.copy_(kept)

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        from worldsize.optim import optimizers

        return optimizers.state_tensors(self.optimizer, self._parts.model)

    def state(self) -> dict[str, torch.Tensor]:
        own = {f"optimizer/{name}": tensor for name, tensor in self._optimizer_state().items()}
        if not self._agreed:
            own |= {f"weight/{name}": p.detach() for name, p in self._parts.model.named_parameters()}
        return own

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        import torch

        from worldsize.optim import optimizers

        # By now the model has the mean of the saved weights, and the optimizer the state of rank 0.
        if self._step < self._begins:
            return  # gradients are averaged: what differs between ranks, because other settings saved it, would remain so
        parameters = dict(self._parts.model.named_parameters())
        kinds = (key.partition("/") for key in state)
        optimizer = {name: state[f"optimizer/{name}"] for kind, _, name in kinds if kind == "optimizer"}
        optimizers.load_state_tensors(self.optimizer, self._parts.model, optimizer)
        if self._agreed:
            return  # with other settings, the round that was saved in its middle has ended
        with torch.no_grad():
            for key, tensor in state.items():
                if key.startswith("weight/"):
                    parameters[key.removeprefix("weight/")].copy_(tensor)
