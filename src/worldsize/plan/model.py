"""The time of one training step with synchronous data parallelism. Pure: no device, no clock, no file.

The compute time of a step with b images per device in k forward passes is ``(k c0 + b / r) (1 + a (p - 1))``: a fixed time
c0 per pass, a rate r, and the contention a of each other device in the machine of p devices, the linear term of Gunther's
law (Gunther 2007, "Guerrilla Capacity Planning", chapter 4). The backward pass takes two thirds of it: it multiplies
matrices twice for each time that the forward pass does.

One stream sends the gradient buckets in the order in which the backward pass fills them; what the backward pass does not
hide is *exposed*. A bucket is added up within each machine and then between N machines, by a ring or a tree, whichever is
faster (Thakur et al. 2005, "Optimization of collective communication operations in MPICH").

Each step waits for the slowest of W devices. For compute times that are normally distributed, the expected delay is
their standard deviation times the expected maximum of W standard normal variables (Blom 1958, "Statistical estimates and
transformed beta-variables").
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from statistics import NormalDist

BACKWARD = 2 / 3  # share of the compute time of a pass


@dataclass(frozen=True)
class Hardware:
    """What the machines can do. Times in seconds, bandwidths in bytes/s, all positive.

    Attributes:
        image_s: compute time of one image, forward and backward.
        pass_s: fixed time of each forward pass with its backward pass: kernel launches, optimizer, loop.
        contention: how much slower a device computes per other device in its machine, relative.
        jitter: standard deviation of the compute time of a step, relative to its mean.
        link_latency_s: of a message between machines.
        link_bytes_per_s: bandwidth of one machine's network that messages reach.
        local_latency_s: of a message within a machine.
        local_bytes_per_s: bandwidth of one device to the next within a machine that messages reach.
    """

    image_s: float
    pass_s: float
    contention: float
    jitter: float
    link_latency_s: float
    link_bytes_per_s: float
    local_latency_s: float
    local_bytes_per_s: float


@dataclass(frozen=True)
class Message:
    """An all-reduce of ``size`` bytes, possible once this share of the backward pass is done (0 to 1)."""

    ready: float
    size: float


@dataclass(frozen=True)
class Traffic:
    """What each device sends in a step: all-reduces during or after the backward pass, in order; see `model`.

    ``every`` is the mean number of steps between two steps that send: 1, or more for local SGD. ``gradients`` is the mean
    number of gradients that a step computes and sends: 1, or more for sharpness-aware minimization.
    """

    messages: tuple[Message, ...]
    every: float = 1.0
    gradients: float = 1.0

    @property
    def size(self) -> float:
        """Bytes per step that sends."""
        return sum(message.size for message in self.messages)


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines with ``per_node`` devices each, the mean if the last one has fewer."""

    nodes: int
    per_node: float

    @property
    def devices(self) -> int:
        return round(self.nodes * self.per_node)


@dataclass(frozen=True)
class Step:
    """Where the time of a step goes, seconds, the mean over devices.

    ``images_s`` is spent on images, ``fixed_s`` on what each pass costs in any case, ``contention_s`` because of other
    devices in the machine, ``straggler_s`` waiting for the slowest device, ``exposed_s`` waiting for messages, ``data_s``
    waiting for images. ``busy_s`` is the time of all messages, hidden or not.
    """

    images_s: float
    fixed_s: float
    contention_s: float
    straggler_s: float
    exposed_s: float
    data_s: float
    busy_s: float

    @property
    def compute_s(self) -> float:
        return self.images_s + self.fixed_s + self.contention_s

    @property
    def communication_s(self) -> float:
        """What a device waits for others: `track.base.Step.communication_ms`."""
        return self.straggler_s + self.exposed_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s + self.data_s


def step(
    hardware: Hardware,
    traffic: Traffic,
    cluster: Cluster,
    batch: float,
    passes: int = 1,
    supply: float = math.inf,
) -> Step:
    """Predict a step.

    Args:
        batch: images per device and step.
        passes: forward passes per device and step; only the last one overlaps with messages.
        supply: images/s that each device's loader can deliver.
    """
    images_s, fixed_s = batch * hardware.image_s, passes * hardware.pass_s
    contention_s = (images_s + fixed_s) * hardware.contention * (cluster.per_node - 1)
    compute_s = images_s + fixed_s + contention_s
    ends = begins = compute_s - BACKWARD * compute_s / passes
    busy_s = 0.0
    if cluster.devices > 1:
        for message in traffic.messages:
            took = all_reduce_s(message.size, cluster, hardware)
            ends = max(ends, begins + message.ready * (compute_s - begins)) + took
            busy_s += took
    exposed_s = max(0.0, ends - compute_s) / traffic.every
    # The sum of n independent steps has sqrt(n) times the standard deviation of one.
    straggler_s = compute_s * hardware.jitter * expected_maximum(cluster.devices) / math.sqrt(traffic.every)
    once = Step(images_s, fixed_s, contention_s, straggler_s, exposed_s, 0.0, busy_s / traffic.every)
    # Further gradients are of the same images, which are loaded once.
    whole = Step(*(traffic.gradients * part for part in astuple(once)))
    return replace(whole, data_s=max(0.0, batch / supply - whole.total_s))


def all_reduce_s(size: float, cluster: Cluster, hardware: Hardware) -> float:
    """Seconds of one all-reduce of ``size`` bytes."""
    p, n = cluster.per_node, cluster.nodes
    took = 0.0
    if p > 1:
        took += 2 * (p - 1) / p * size / hardware.local_bytes_per_s + 2 * (p - 1) * hardware.local_latency_s
    if n > 1:
        ring = 2 * (n - 1) / n * size / hardware.link_bytes_per_s + 2 * (n - 1) * hardware.link_latency_s
        tree = 2 * size / hardware.link_bytes_per_s + 4 * math.log2(n) * hardware.link_latency_s
        took += min(ring, tree)
    return took


def expected_maximum(count: int) -> float:
    """Blom's approximation of the expected maximum of ``count`` independent standard normal variables; 0 for one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
