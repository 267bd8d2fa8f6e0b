"""The interface between the loop and a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from worldsize.clock import Stamp, elapsed_ms, stamp
from worldsize.recipe import Parallel
from worldsize.world import World


@dataclass(frozen=True)
class Parts:
    """What a strategy works on.

    ``model`` is the network itself, ``module`` what to call for its forward pass (the same, or its compiled form).
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Parallel
    world: World
    accumulation: int
    steps_per_epoch: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]


class Strategy(ABC):
    """How the replicas of one model come to agree, step by step.

    For each step the loop computes its micro-batches through ``module`` inside ``gradients(last)``, then calls
    ``update``. Synchronous averaging acts in the first, combining of weights or updates in the second.

    Attributes:
        name: as in the recipe.
        local_gradients: whether ranks still hold different gradients when ``update`` is called.
        asynchronous: whether ranks do not step together at all, see `worldsize.asynchronous`.
        module: what to call for the forward pass.
        optimizer: what steps, and what a checkpoint saves.
        backend: what carries the agreement between processes, for people; None for one process.
        exchange: what the step cost in communication; the loop takes it after each.
    """

    name: ClassVar[str]
    local_gradients: bool = False
    asynchronous: ClassVar[bool] = False
    module: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def __init__(self, parts: Parts) -> None:
        self.module = parts.module
        self.optimizer = parts.optimizer
        self.backend = parts.world.backend
        self.exchange = Exchange(parts.world.device)

    def describe(self) -> str:
        """The name with what sets it apart, for people."""
        return self.name

    def gradients(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``last`` is True for the last one of the step."""
        return nullcontext()

    def update(self, step: Callable[[], None]) -> None:
        """Apply the optimiser (``step``) once gradients are ready."""
        step()

    def settle(self, rehearse: Callable[[], None]) -> None:
        """Before the first step: a chance to run ``rehearse``, a forward and backward pass that leaves no trace."""
        return

    def at_step(self, step: int) -> None:
        """The run goes on after so many steps of it, possibly as another world or by another strategy than before."""
        return

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that stand for all ranks: those to evaluate and to save."""
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's own state, beyond the model and rank 0's optimiser, that the next step depends on."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        return


@dataclass
class Exchange:
    """What one step costs this rank in communication.

    ``sent_bytes`` is the payload it hands to collective operations; how often a network carries it is up to them.
    """

    device: torch.device
    sent_bytes: int = 0
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    _begun: Stamp = 0.0

    def sends(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is sent."""
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def begin(self) -> None:
        """From here on this rank waits for others alone; a later call before `end` moves the beginning."""
        self._begun = stamp(self.device)

    def end(self) -> None:
        """They are here."""
        self.waits.append((self._begun, stamp(self.device)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        self.begin()
        yield
        self.end()

    def take(self) -> Exchange:
        """What came since the last call, which then begins anew."""
        taken = Exchange(self.device, self.sent_bytes, self.waits)
        self.sent_bytes, self.waits = 0, []
        return taken

    def milliseconds(self) -> float:
        """The time waited; waits for the device."""
        return sum(elapsed_ms(begin, end) for begin, end in self.waits)
