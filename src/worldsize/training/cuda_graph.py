"""CUDA graphs: the kernels of a function, captured once and then launched all together.

The host needs a few microseconds for a replay, instead of some for each kernel. A graph always works on the same memory:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import network_names, training_pass
from worldsize.parallel.base import Strategy
from worldsize.training.precision import Precision

log = logging.getLogger(__name__)

WARMUPS = 3  # cuDNN and cuBLAS choose their kernels and allocate workspaces; torch's documentation uses three too
_WAITS = "called a synchronizing CUDA operation"  # torch's warning
_SPARE = 1.5  # how much of a pass's memory is free before it is captured: a graph keeps its own, and evaluations need some


class CudaGraph:
    """The kernels that ``work`` launches."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, the loader's) may use the device meanwhile.
        with torch.cuda.graph(self._graph, _shared().pool(), capture_error_mode="thread_local"):
            self._result = work()

    def replay(self) -> torch.Tensor:
        """Launch them. Returns the result, whose memory the next replay overwrites."""
        self._graph.replay()
        return self._result


@cache
def _shared() -> torch.cuda.CUDAGraph:
    """A graph whose memory all others use, too: each runs alone, and its result is copied before the next one runs.

    Otherwise each would keep the memory of its activations for itself. It lives as long as the process, because torch does
    not use the memory again once no graph has it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
    return graph


class Graphed:
    """A function of tensors on a GPU that returns a tensor: called as it is at first, then captured and replayed.

    Whatever else it reads or writes (weights, gradients, statistics) must keep its memory between calls, and it must not
    wait for the device.

    Args:
        cautious: do not capture it if it waits for the device after all, or if little memory is free.
    """

    def __init__(self, work: Callable[..., torch.Tensor], device: torch.device, cautious: bool = False) -> None:
        self._work = work
        self._device = device
        self._cautious = cautious
        self._obstacle: str | None = None
        self._calls = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arguments: tuple[torch.Tensor, ...] = ()
        self._graph: CudaGraph | None = None

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls <= WARMUPS:
            return self._warm_up(arguments)
        if self._obstacle is not None:
            return self._work(*arguments)
        if self._graph is None:
            self._arguments = tuple(argument.to(self._device, copy=True) for argument in arguments)
            self._graph = CudaGraph(lambda: self._work(*self._arguments))
        for fixed, argument in zip(self._arguments, arguments, strict=True):
            fixed.copy_(argument, non_blocking=True)
        return self._graph.replay().clone()

    def _warm_up(self, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """On a stream of its own: a capture must not depend on what earlier calls left on the current one."""
        side = self._side
        if side is None:
            return self._work(*arguments)
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        looks = self._cautious and self._calls == WARMUPS
        with torch.cuda.stream(side), _waits_recorded(looks) as waits:
            result = self._work(*arguments)
        current.wait_stream(side)
        if looks:
            self._obstacle = _obstacle(self._device, waits)
        return result


def add_gradient(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradient of ``loss`` to the parameters' ``grad``, as ``loss.backward()`` does, with a few kernels.

    A backward pass adds to each parameter's gradient by itself: 161 kernels for ResNet-50, where it cannot just take the new
    one because a graph has the old one's memory.
    """
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    sums, terms = [], []
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sums.append(parameter.grad)
            terms.append(gradient)
    torch._foreach_add_(sums, terms)


@contextmanager
def _waits_recorded(wanted: bool) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of torch where the host waits for the device; none unless ``wanted``."""
    if not wanted:
        yield []
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", _WAITS)
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _obstacle(device: torch.device, waits: list[warnings.WarningMessage]) -> str | None:
    """Why not to capture what ran; None if nothing speaks against it."""
    own = [w for w in waits if _WAITS in str(w.message)]
    for other in waits:
        if other not in own:
            warnings.showwarning(other.message, other.category, other.filename, other.lineno)
    if own:
        reason = f"the network makes the host wait for the GPU ({own[0].filename}:{own[0].lineno})"
    elif not _has_room(device):
        reason = "the GPU has too little memory for their own copy of it"
    else:
        return None
    log.warning("the steps are not replayed as CUDA graphs, so the host launches each kernel: %s", reason)
    return reason


def _has_room(device: torch.device) -> bool:
    """Whether the memory that a pass needs at most is free once more, and some for evaluations."""
    held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
    return free >= _SPARE * (most - held)


def wanted(recipe: Recipe, world: World, precision: Precision, compiled: bool) -> bool:
    """Whether the steps are replayed as CUDA graphs.

    ``auto`` does on GPUs in a 16-bit format, with a compiled network or one of worldsize itself: what another one does in
    Python in each step would be lost. Not where bits are promised, nor in formats of 32 bits, in which no GPU has replayed a
    compiled network yet.
    """
    if recipe.cuda_graphs != "auto":
        return recipe.cuda_graphs
    known = compiled or network_names.is_built_in(recipe.model.name)
    if world.device.type != "cuda" or not known or recipe.deterministic or precision.name not in ("bf16", "fp16"):
        return False
    return recipe.not_captured is None and parallel.resolve_strategy(recipe.parallel, world.size).captured


def repeats(network: nn.Module, recipe: Recipe) -> bool:
    """Whether replays do what the network does. Numbers that it draws on the host are not drawn again in a replay.

    Raises:
        UserError: they do not, and the recipe asks for graphs.
    """
    if not training_pass.draws_on_host(network, recipe):
        return True
    reason = f"{recipe.model.name} draws random numbers on the host, which would be the same in all steps"
    if recipe.cuda_graphs is True:
        raise UserError(
            f"--cuda-graphs: {reason}. Leave it out, pass --no-cuda-graphs if the recipe or the run has it, or draw them on "
            "the GPU (torch.rand(..., device=x.device)), and let no Python code depend on them"
        )
    log.warning("the steps are not replayed as CUDA graphs, so the host launches each kernel: %s", reason)
    return False


def check(recipe: Recipe, device: torch.device, strategy: type[Strategy]) -> None:
    """Refuse ``--cuda-graphs`` where it does not work.

    Raises:
        UserError: names the reason and the remedy.
    """
    if recipe.cuda_graphs is not True:
        return
    if device.type != "cuda":
        raise UserError("--cuda-graphs is for GPUs, and this run computes on a CPU: leave it out")
    if not strategy.captured:
        raise UserError(
            f"--cuda-graphs: the messages of strategy {strategy.name} cannot be captured in a CUDA graph. Leave it out, or "
            "train with one process (--parallel.strategy single); --model.compile works with every strategy"
        )
