"""The interface between the loop and a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from worldsize.recipe import Parallel
from worldsize.world import World


class Strategy(ABC):
    """How the replicas of one model come to agree, step by step.

    For each step the loop computes its micro-batches through ``module`` inside ``gradients(last)``, then calls
    ``update``. Synchronous averaging acts in the first, combining of weights or updates in the second.

    Attributes:
        name: as in the recipe.
        module: what to call for the forward pass.
    """

    name: str
    module: nn.Module

    @abstractmethod
    def __init__(self, model: nn.Module, settings: Parallel, world: World) -> None: ...

    def gradients(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``last`` is True for the last one of the step."""
        return nullcontext()

    def update(self, step: Callable[[], None]) -> None:
        """Apply the optimiser (``step``) once gradients are ready."""
        step()

    def settle(self, rehearse: Callable[[], None]) -> None:
        """Before the first step: a chance to run ``rehearse``, a forward and backward pass that leaves no trace."""
        return

    def communication(self) -> list[float]:
        """Milliseconds that each step since the last call waited for communication alone."""
        return []

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's own state, beyond model and optimiser, that the next step depends on."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        return
