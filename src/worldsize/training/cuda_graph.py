"""CUDA graphs: the kernels of a function, captured once and then launched all together.

The host needs a few microseconds for a replay, instead of some for each kernel. A graph always works on the same memory:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from worldsize.errors import UserError

WARMUPS = 3  # cuDNN and cuBLAS choose their kernels and allocate workspaces; torch's documentation uses three too


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
    """

    def __init__(self, work: Callable[..., torch.Tensor], device: torch.device) -> None:
        self._work = work
        self._device = device
        self._calls = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arguments: tuple[torch.Tensor, ...] = ()
        self._graph: CudaGraph | None = None

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls <= WARMUPS:
            return self._warm_up(arguments)
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
        with torch.cuda.stream(side):
            result = self._work(*arguments)
        current.wait_stream(side)
        return result


def check(wanted: bool, device: torch.device, strategy: str, captured: bool) -> None:
    """Refuse ``--cuda-graphs`` where it does not work.

    Args:
        captured: whether the steps of the strategy can be captured.

    Raises:
        UserError: names the reason and the remedy.
    """
    if not wanted:
        return
    if device.type != "cuda":
        raise UserError("--cuda-graphs is for GPUs, and this run computes on a CPU: leave it out")
    if not captured:
        raise UserError(
            f"--cuda-graphs: the messages of strategy {strategy} cannot be captured in a CUDA graph. Leave it out, or train "
            "with one process (--parallel.strategy single); --model.compile works with every strategy"
        )
