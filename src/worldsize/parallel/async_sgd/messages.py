"""Reports and grants between a worker and the parameter server, over torch.distributed's point-to-point operations.

Each worker shares its own gloo group with rank 0, so a worker that dies breaks only its own link. torch's RPC (still in
torch 2.12) would also work, but it calls any pickled function that a peer sends; here only numbers and JSON are sent.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from worldsize.distributed.world import World
from worldsize.parallel.async_sgd.server import Grant, Report

_NONE = -1  # instead of a step


class Lost(Exception):
    """The peer disconnected, or sent nothing before the timeout."""


class Link:
    """One end. ``gradient`` and ``weights`` are the numbers of elements sent in each direction, of type ``dtype``.

    Raises:
        Lost: from all methods.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, gradient: int, weights: int, dtype: torch.dtype) -> None:
        self._group = group
        self._peer = peer
        self._gradient = gradient
        self._weights = weights
        self._dtype = dtype

    def send_report(self, report: Report | None) -> None:
        """Worker: send a gradient; None before the first one."""
        if report is None:
            self._send(torch.tensor([_NONE] + [0.0] * 10, dtype=torch.float64))
            return
        times = [report.seconds, report.waited_s, report.data_s]
        broken = json.dumps(list(report.broken.items())).encode() if report.broken else b""
        numbers = [report.step, report.version, report.gradient is not None, report.leaving, len(broken), *times]
        self._send(torch.tensor(numbers + report.values.tolist(), dtype=torch.float64))
        if broken:
            self._send(torch.frombuffer(bytearray(broken), dtype=torch.uint8))
        if report.gradient is not None:
            self._send(report.gradient.cpu())

    def receive_report(self) -> Report | None:
        """Server: the inverse of `send_report`."""
        numbers = self._receive(torch.empty(11, dtype=torch.float64))
        step, version, whole, leaving, size, seconds, waited_s, data_s = numbers[:8].tolist()
        if step == _NONE:
            return None
        broken = bytes(self._receive(torch.empty(int(size), dtype=torch.uint8)).tolist()) if size else b"[]"
        gradient = self._receive(torch.empty(self._gradient, dtype=self._dtype)) if whole else None
        times = (seconds, waited_s, data_s)
        return Report(int(step), int(version), gradient, numbers[8:], *times, bool(leaving), dict(json.loads(broken)))

    def send_grant(self, grant: Grant) -> None:
        """Server: send steps and weights."""
        steps = [*grant.steps, _NONE, _NONE][:2]
        self._send(torch.tensor([*steps, grant.version]))
        self._send(grant.weights.cpu())

    def receive_grant(self) -> Grant:
        """Worker: the inverse of `send_grant`."""
        first, second, version = self._receive(torch.empty(3, dtype=torch.int64)).tolist()
        weights = self._receive(torch.empty(self._weights, dtype=self._dtype))
        return Grant([step for step in (first, second) if step != _NONE], version, weights)

    def _send(self, tensor: torch.Tensor) -> None:
        try:
            dist.send(tensor, dst=self._peer, group=self._group)
        except RuntimeError as error:
            raise Lost(str(error)) from error

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            dist.recv(tensor, src=self._peer, group=self._group)
        except RuntimeError as error:
            raise Lost(str(error)) from error
        return tensor


def connect(world: World, gradient: int, weights: int, dtype: torch.dtype, timeout_s: float) -> dict[int, Link]:
    """On rank 0, a link to each other rank; elsewhere, the one to rank 0. Every rank must call it."""
    links = {}
    for worker in range(1, world.size):
        group = dist.new_group([0, worker], backend="gloo", timeout=timedelta(seconds=timeout_s))
        if world.rank in (0, worker):
            peer = worker if world.is_main else 0
            links[peer] = Link(group, peer, gradient, weights, dtype)
    return links
