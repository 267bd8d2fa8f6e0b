"""The mean over the micro-batches of all ranks, added along one binary tree, bucket by bucket, during the backward pass.

A bucket holds the gradients of some parameters. Each rank adds up its own micro-batches to few nodes of the tree: one, if
their number is a power of two. Once the last backward pass has filled a bucket, its nodes are cut into W chunks. Rank r
receives chunk r of all nodes and adds them along the tree; then all ranks gather the sums. With one node per rank, a rank
sends 2 (W - 1) / W of the bucket, as in a ring all-reduce, in two rounds.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from worldsize.distributed.tree_sum import TreeSum, layout
from worldsize.distributed.world import World
from worldsize.parallel.base import Exchange

_FIRST_BUCKET = 2**20  # bytes; a small first bucket starts the communication early, as in torch's DDP


class TreeReducer:
    """Leaves the mean gradient in each parameter's ``grad`` after the last micro-batch of a step.

    Args:
        accumulation: micro-batches per rank and step.
        bucket_bytes: size of a bucket.
        exchange: counts what is sent and how long this rank waits.
    """

    def __init__(self, model: nn.Module, world: World, accumulation: int, bucket_bytes: int, exchange: Exchange) -> None:
        self._first = world.rank * accumulation
        self._size = world.size
        self._exchange = exchange
        self._tree_mean = TreeMean(world.rank, world.size, accumulation, exchange)
        self._runner = _runner(world)
        parameters = [p for p in model.parameters() if p.requires_grad]
        broadcast([*parameters, *model.buffers()], world.size)
        groups = in_buckets(parameters, bucket_bytes)
        self._buckets = [_Bucket(group, len(layout(self._first, accumulation)), world.size) for group in groups]
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(lambda p: self._accumulated(bucket_of[p])) for p in parameters]
        self._micro = 0
        self._last = False
        self._next = 0  # the first bucket that is not sent yet

    def close(self) -> None:
        """Leave the parameters to another reducer."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        self._last = last
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        yield
        if last:
            self._finish()
            return
        for bucket in self._buckets:
            bucket.add(self._first + self._micro)
        self._micro += 1

    def _accumulated(self, bucket: _Bucket) -> None:
        """Autograd has computed the gradient of one of the bucket's parameters."""
        bucket.missing -= 1
        # All ranks must send the buckets in the same order.
        while self._last and self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        bucket.fill(self._first + self._micro)
        self._runner.submit(lambda: self._tree_mean(bucket.nodes))
        self._next += 1

    def _finish(self) -> None:
        while self._next < len(self._buckets):  # of parameters that this backward pass did not reach
            self._send()
        with self._exchange.waiting():
            self._runner.wait()
        for bucket in self._buckets:
            bucket.publish()
        self._micro = self._next = 0

    def mean(self, nodes: list[torch.Tensor]) -> torch.Tensor:
        """The mean over the micro-batches of all ranks, (n,), of another quantity; ``nodes`` of this rank, each (n,)."""
        n = nodes[0].numel()
        padded = nodes[0].new_zeros(len(nodes), _padded(n, self._size))
        padded[:, :n] = torch.stack(nodes)
        self._runner.submit(lambda: self._tree_mean(padded))
        with self._exchange.waiting():
            self._runner.wait()
        return padded[0, :n]


class TreeMean:
    """The mean over the micro-batches of all ranks, given each rank's nodes of the tree."""

    def __init__(self, rank: int, size: int, accumulation: int, exchange: Exchange) -> None:
        self._rank = rank
        self._layouts = [layout(r * accumulation, accumulation) for r in range(size)]
        self._rounds = rounds([place for nodes_of_rank in self._layouts for place in nodes_of_rank])
        self._scale = 1 / (size * accumulation)
        self._exchange = exchange

    def __call__(self, nodes: torch.Tensor) -> None:
        """Replace the first row of ``nodes`` by the mean; the other rows are overwritten.

        Args:
            nodes: (number of nodes of this rank, n), contiguous; n is a multiple of the world size.
        """
        size = len(self._layouts)
        if size == 1:
            self._add(nodes)
            return
        chunk = nodes.shape[1] // size
        sent = nodes.view(-1, size, chunk).transpose(0, 1).contiguous()
        received = nodes.new_empty(sum(map(len, self._layouts)), chunk)
        counts = [len(nodes_of_rank) * chunk for nodes_of_rank in self._layouts]
        dist.all_to_all_single(received.view(-1), sent.view(-1), counts, [counts[self._rank]] * size)
        self._exchange.sends(sent[1:])  # this rank keeps its own chunk
        total = self._add(received)
        self._exchange.sends(total)
        dist.all_gather_into_tensor(nodes[0], total)

    def _add(self, nodes: torch.Tensor) -> torch.Tensor:
        """Add the nodes of all ranks, (number of nodes, n), into the first one, which becomes the mean; returns it."""
        rows = list(nodes)
        for pairs in self._rounds:
            # On a GPU one kernel for all additions of a round, not one for each of up to W - 1.
            torch._foreach_add_([rows[left] for left, _ in pairs], [rows[right] for _, right in pairs])
        return rows[0].mul_(self._scale)


def rounds(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The additions of `TreeSum` over nodes at these (level, index), as pairs (left, right) of the nodes' numbers.

    Those of a round are independent of each other; ``left += right``, round after round, leaves the sum in node 0.
    """
    found: list[list[tuple[int, int]]] = []

    def add(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        """Of a node's number and the round in which it is complete."""
        after = max(left[1], right[1])
        if after == len(found):
            found.append([])
        found[after].append((left[0], right[0]))
        return left[0], after + 1

    tree: TreeSum[tuple[int, int]] = TreeSum(add)
    for number, (level, index) in enumerate(places):
        tree.push((number, 0), index, level)
    tree.total()
    return found


class _Bucket:
    """Parameters whose gradients are sent in one message.

    Attributes:
        nodes: (number of nodes, n): the parameters' gradients, one after the other, then for each parameter whether a
            backward pass of a rank has reached it (not 0), padded to a multiple of W.
        missing: the number of gradients that the current backward pass has not computed yet.
    """

    def __init__(self, parameters: list[nn.Parameter], nodes: int, world_size: int) -> None:
        self.parameters = parameters
        n = sum(p.numel() for p in parameters)
        first = parameters[0]
        padded = _padded(n + len(parameters), world_size)
        self.nodes = torch.zeros(nodes, padded, dtype=first.dtype, device=first.device)
        self._views = [_views(row, parameters) for row in self.nodes]
        self._marks = self.nodes[:, n : n + len(parameters)]
        self._reached = [False] * len(parameters)  # by this rank, in this step
        self._sum: TreeSum[list[torch.Tensor]] = TreeSum(_add_lists)
        self.missing = 0

    def add(self, micro_batch: int) -> None:
        """Move the gradients from the parameters to the sum."""
        gradients = []
        for number, parameter in enumerate(self.parameters):
            self._reached[number] |= parameter.grad is not None
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self._sum.push(gradients, micro_batch)

    def fill(self, micro_batch: int) -> None:
        """Add the last micro-batch, and write the sums to `nodes`."""
        self.add(micro_batch)
        for views, gradients in zip(self._views, self._sum.take(), strict=True):
            torch._foreach_copy_(views, gradients)
        if all(self._reached):
            self._marks.fill_(1)
        else:
            self._marks.copy_(torch.tensor(self._reached))

    def publish(self) -> None:
        """Let the parameters' ``grad`` refer to the first row of `nodes`; None where no rank has computed one.

        An optimizer leaves parameters without a gradient alone. With zeros, weight decay and momentum would move them.
        """
        # What a rank has reached itself needs no answer from the device.
        reached = self._reached if all(self._reached) else [mark != 0 for mark in self._marks[0].tolist()]
        for parameter, view, found in zip(self.parameters, self._views[0], reached, strict=True):
            parameter.grad = view if found else None
        self._reached = [False] * len(self.parameters)


def _add_lists(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(left, right)
    return left


def _views(row: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Parts of the row with the shapes and memory layouts (channels_last) of the parameters."""
    parts = row.split([*(p.numel() for p in parameters), row.numel() - sum(p.numel() for p in parameters)])
    return [part.as_strided(p.size(), p.stride()) for part, p in zip(parts, parameters, strict=False)]


def _padded(n: int, world_size: int) -> int:
    return n + -n % world_size


def in_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in groups of at most ``bucket_bytes``, or one; last first, as the backward pass computes them."""
    groups: list[list[nn.Parameter]] = []
    size, limit = 0, 0
    for parameter in reversed(parameters):
        own = parameter.numel() * parameter.element_size()
        if not groups or size + own > limit:
            limit = bucket_bytes if groups else min(_FIRST_BUCKET, bucket_bytes)
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += own
    return groups


def broadcast(tensors: list[torch.Tensor], world_size: int) -> None:
    """Give all ranks rank 0's values."""
    if world_size == 1:
        return
    with torch.no_grad():
        for dtype in sorted({t.dtype for t in tensors}, key=str):  # in the same order on all ranks
            own = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in own])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(own, flat.split([t.numel() for t in own]), strict=True):
                tensor.copy_(part.view(tensor.shape))


# Where communication runs ---------------------------------------------------------------------------------------------


class _Runner(Protocol):
    """Runs work in the order in which it is submitted, during the backward pass."""

    def submit(self, work: Callable[[], object]) -> None: ...

    def wait(self) -> None:
        """Wait for all work, or make the device wait; raises what the work raised."""


def _runner(world: World) -> _Runner:
    if world.device.type == "cuda":
        return _Stream(world.device)
    return _Inline() if world.size == 1 else _Thread()


class _Inline:
    def submit(self, work: Callable[[], object]) -> None:
        work()

    def wait(self) -> None:
        return


class _Stream:
    """On a stream of its own: the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Thread:
    """In one thread: gloo's operations block, and all ranks must start them in the same order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._running: list[Future[object]] = []
        # A daemon: a process that fails must not wait for a message that never comes.
        threading.Thread(target=_work, args=(self._queue,), name="tree-reduce", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], object]) -> None:
        self._running.append(Future())
        self._queue.put((work, self._running[-1]))

    def wait(self) -> None:
        running, self._running = self._running, []
        for future in running:
            future.result()


def _work(work_queue: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]) -> None:
    while (item := work_queue.get()) is not None:
        work, future = item
        try:
            future.set_result(work())
        except BaseException as error:  # raised in the thread that waits
            future.set_exception(error)
        del work, future, item
