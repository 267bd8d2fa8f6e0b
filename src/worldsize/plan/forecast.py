"""Predictions for numbers of devices: step, duration, price, needs, the bottleneck and what would lift it.

An interval is the range from the 5th to the 95th percentile of the predictions for `fit.Fitted.draws`, which contain the
uncertainty of the parameters: the range of assumptions, such as the efficiency of links, or the spread of measurements. For
sizes that were not measured, each prediction also varies by `MODEL_ERROR`, for what the model leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from worldsize.distributed.batch_plan import BatchPlan
from worldsize.plan import model
from worldsize.plan.arguments import Feed
from worldsize.plan.fit import Fitted, percentiles
from worldsize.plan.job import Job
from worldsize.plan.model import Cluster, Hardware, Message, Step, Traffic
from worldsize.plan.supply import Supply

CHECKPOINT_S = 0.1  # a step waits this long for the copy of the state; the file is written during training
# Standard deviation of the logarithm: the root mean square difference from the 17 published rows in docs/scaling.md.
MODEL_ERROR = 0.066
_STRIDE = 61  # has no factor in common with the number of draws
_WORTH = 0.005  # of the images/s: smaller gains are not named
_GOOD = 0.05  # of the step: losses below it are no bottleneck


@dataclass(frozen=True)
class Range:
    """A prediction with its 5th and 95th percentile."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Lever:
    """A change, and the images/s that it would give relative to the prediction (0.1: 10 % more)."""

    change: str
    gain: float


@dataclass(frozen=True)
class Forecast:
    """One number of devices. Times in seconds, rates per second, ``price`` in the currency of --price-per-hour."""

    devices: int
    cluster: Cluster
    plan: BatchPlan
    step: Step
    step_s: Range
    images_per_s: Range
    efficiency: Range
    duration_s: Range
    evaluation_share: float
    checkpoint_share: float
    price: Range | None
    cores_per_device: float
    storage_bytes_per_s: float
    memory: dict[str, float]
    bottleneck: str
    levers: tuple[Lever, ...]


@dataclass(frozen=True)
class Forecaster:
    """What all numbers of devices have in common. ``measured``: with which machines and images per device."""

    job: Job
    fitted: Fitted
    supply: Supply
    feed: Feed
    devices_per_node: int
    measured: frozenset[tuple[Cluster, float]]
    price_per_hour: float | None = None

    def forecast(self, devices: int) -> Forecast:
        """Predict a run on ``devices``.

        Raises:
            UserError: they cannot share the global batch.
        """
        job, plan = self.job, self.job.plan(devices)
        cluster = cluster_of(devices, self.devices_per_node)
        base = _Case(self, plan, cluster, job.traffic, self.supply.of(cluster))
        step = base.step(self.fitted.best)
        known = devices == 1 or (base.cluster, plan.per_process) in self.measured
        images_per_s = self._range(base.images_per_s, known)
        duration_s = self._range(base.duration_s, known)
        efficiency = self._range(lambda hardware: base.images_per_s(hardware) / devices / self._alone(hardware), known)
        bottleneck = _bottleneck(step)
        hours = self.price_per_hour and self.price_per_hour * devices / 3600
        return Forecast(
            devices=devices,
            cluster=base.cluster,
            plan=plan,
            step=step,
            step_s=self._range(lambda hardware: base.step(hardware).total_s, known),
            images_per_s=images_per_s,
            efficiency=replace(efficiency, high=min(1.0, efficiency.high)),
            duration_s=duration_s,
            evaluation_share=base.evaluation_s(self.fitted.best) / duration_s.value,
            checkpoint_share=base.saving_s(self.fitted.best) / duration_s.value,
            price=Range(*(hours * s for s in (duration_s.value, duration_s.low, duration_s.high))) if hours else None,
            cores_per_device=images_per_s.value / devices / self.feed.images_per_s_per_core,
            storage_bytes_per_s=images_per_s.value * job.images.file_bytes,
            memory=job.memory(plan),
            bottleneck=bottleneck,
            levers=self._levers(bottleneck, base),
        )

    def _range(self, value: Callable[[Hardware], float], known: bool) -> Range:
        drawn = [value(hardware) for hardware in self.fitted.draws]
        return Range(value(self.fitted.best), *percentiles(drawn if known else with_model_error(drawn)))

    def _alone(self, hardware: Hardware) -> float:
        """Images/s of one device that never waits: what efficiency refers to."""
        plan = self.job.plan(1)
        return _Case(self, plan, Cluster(1, 1), self.job.traffic, math.inf).images_per_s(hardware)

    def _levers(self, bottleneck: str, base: _Case) -> tuple[Lever, ...]:
        """What would lift the bottleneck, the largest gain first."""
        best, before = self.fitted.best, base.images_per_s(self.fitted.best)
        larger = replace(base, plan=self.job.doubled().plan(base.plan.world_size))
        found: list[Lever] = []

        def add(change: str, case: _Case, hardware: Hardware = best) -> None:
            found.append(Lever(change, case.images_per_s(hardware) / before - 1))

        if bottleneck == "communication":
            if (half := _halved(self.job, base.traffic)) is not None:
                add("--parallel.compression bf16", replace(base, traffic=half))
            if base.cluster.nodes > 1:
                faster = replace(best, link_bytes_per_s=2 * best.link_bytes_per_s)
                add("twice the network bandwidth", base, faster)
            else:
                add("twice the bandwidth in the machine", base, replace(best, local_bytes_per_s=2 * best.local_bytes_per_s))
            add("twice the global batch", larger)
        elif bottleneck == "fixed cost per pass":
            add("twice the global batch", larger)
            if (merged := self.job.largest_passes(base.plan)) != base.plan:
                add(f"--forward-batch {merged.forward_batch}", replace(base, plan=merged))
            if ways := self.job.cheaper_passes(base.plan):
                add(f"half the fixed cost (try {ways})", base, replace(best, pass_s=best.pass_s / 2))
        elif bottleneck == "contention in the machine":
            add("half the contention", base, replace(best, contention=best.contention / 2))
        elif bottleneck == "stragglers":
            add("half the jitter", base, replace(best, jitter=best.jitter / 2))
        elif bottleneck == "loading images":
            add("twice the loader's rate", replace(base, supply=2 * base.supply))
        else:
            add("devices twice as fast", base, replace(best, image_s=best.image_s / 2))
        return tuple(sorted((lever for lever in found if lever.gain > _WORTH), key=lambda lever: -lever.gain))


@dataclass(frozen=True)
class _Case:
    """A run of the job, with the batches of ``plan``."""

    common: Forecaster
    plan: BatchPlan
    cluster: Cluster
    traffic: Traffic
    supply: float

    def step(self, hardware: Hardware) -> Step:
        """A step at the mean image size of the run."""
        hardware = replace(hardware, image_s=hardware.image_s * self.common.job.relative_work(self.plan))
        return model.step(hardware, self.traffic, self.cluster, self.plan.per_process, self.plan.accumulation, self.supply)

    def images_per_s(self, hardware: Hardware) -> float:
        return self.plan.global_batch / self.step(hardware).total_s

    def training_s(self, hardware: Hardware) -> float:
        recipe, images = self.common.job.recipe, self.common.job.images
        return self.plan.total_steps(recipe, images.train) * self.step(hardware).total_s

    def evaluation_s(self, hardware: Hardware) -> float:
        return self.common.job.evaluation_work(self.plan) * hardware.image_s / self.cluster.devices

    def saving_s(self, hardware: Hardware) -> float:
        return CHECKPOINT_S * self.common.job.saves(self.plan, self.training_s(hardware))

    def duration_s(self, hardware: Hardware) -> float:
        return self.training_s(hardware) + self.evaluation_s(hardware) + self.saving_s(hardware)


def with_model_error(drawn: Sequence[float]) -> list[float]:
    """Times or rates, each multiplied by a factor of its own; the factors are log-normal with `MODEL_ERROR`."""
    count, normal = len(drawn), NormalDist()
    # The quantiles of the distribution in a fixed order that has nothing to do with that of the draws.
    order = ((i * _STRIDE) % count for i in range(count))
    return [x * math.exp(MODEL_ERROR * normal.inv_cdf((at + 0.5) / count)) for x, at in zip(drawn, order, strict=True)]


def cluster_of(devices: int, per_node: int) -> Cluster:
    """The fewest machines for ``devices``; if the last one is not full, as if all had equally many."""
    nodes = -(-devices // per_node)
    return Cluster(nodes, devices / nodes)


def _bottleneck(step: Step) -> str:
    """The largest part of the step that is not spent on images, or ``compute`` if none matters."""
    losses = {
        "loading images": step.data_s,
        "communication": step.exposed_s,
        "stragglers": step.straggler_s,
        "contention in the machine": step.contention_s,
        "fixed cost per pass": step.fixed_s,
    }
    name = max(losses, key=lambda loss: losses[loss])
    return name if losses[name] > _GOOD * step.total_s else "compute"


def _halved(job: Job, sent: Traffic) -> Traffic | None:
    """The traffic with 16-bit gradients, if the strategy offers them and they are not 16-bit already."""
    settings = job.recipe.parallel
    if settings.compression != "none" or settings.strategy not in ("auto", "ddp", "single"):
        return None
    return replace(sent, messages=tuple(Message(m.ready, m.size / 2) for m in sent.messages))
