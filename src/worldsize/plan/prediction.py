"""From the command line to forecasts: assumptions as priors, measurements, and one forecast per number of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from worldsize import parallel
from worldsize.config import command_line
from worldsize.errors import UserError
from worldsize.plan import job as jobs
from worldsize.plan import measured, model
from worldsize.plan.arguments import Feed, Machines, Plan
from worldsize.plan.fit import Fitted, Measurement, Prior, fit
from worldsize.plan.forecast import Forecast, Forecaster
from worldsize.plan.job import Job
from worldsize.plan.measured import Calibration
from worldsize.plan.model import Cluster, Hardware, Traffic
from worldsize.plan.supply import Delivered, Supply

_A100 = 2470.0  # images/s, ResNet-50 v1.5 at 224 pixels, mixed precision (NVIDIA DeepLearningExamples)
_A100_MULTIPLY_ADDS = 4.09e9  # of that network, per image

# The parameters that each flag of `Machines` sets, and how uncertain the flag is: the standard deviation of the logarithm.
# Links: 0.06 covers efficiencies from 0.8 to 1 around 0.9. Latencies and fixed costs are often wrong by a factor of two.
_SPREADS = {
    "image_s": 0.3,
    "pass_s": 0.7,
    "contention": 1.0,
    "jitter": 0.5,
    "link_latency_s": 0.7,
    "link_bytes_per_s": 0.06,
    "local_latency_s": 0.7,
    "local_bytes_per_s": 0.5,
}
_LOCAL_GBYTE = (200.0, 2.0)  # assumed bandwidth within a machine, GB/s: GPUs, CPU processes
_OPEN = 1.0  # of image_s if there are measurements, which then decide
_LOCAL_SPREAD = 1.0  # of that of CPU processes
_POWERS = 11  # without --devices: 1 to 1024
_OF_RATE = 0.03  # of --images-per-s

# By parameter: the flags that set it.
FLAGS = {
    "image_s": ("images_per_s",),
    "pass_s": ("fixed_ms",),
    "contention": ("contention",),
    "jitter": ("jitter",),
    "link_latency_s": ("link_latency_us",),
    "link_bytes_per_s": ("node_bandwidth_gbit", "link_efficiency"),
    "local_latency_s": ("intra_latency_us",),
    "local_bytes_per_s": ("intra_bandwidth_gbyte",),
}


@dataclass(frozen=True)
class Predicted:
    """The result. ``worst`` is the largest difference between a measured step and the model's, relative. ``sources`` says
    where each parameter is from: measured, given or default."""

    job: Job
    calibration: Calibration
    fitted: Fitted
    worst: float
    sources: dict[str, str]
    forecasts: tuple[Forecast, ...]


def predict(asked: Plan) -> Predicted:
    """Predict all numbers of devices.

    Raises:
        UserError: invalid numbers, what ``train`` refuses too, devices that cannot share the batch, or see `measured.read`
            and `job.describe`.
    """
    _check(asked)
    parallel.validate(asked.settings)
    asked.settings.data.check_crop_sizes()
    counts = _counts(asked)
    job = jobs.describe(asked.settings, asked.feed, counts[0], asked.weak)
    found = measured.read(asked.measured, job, asked.machines.devices_per_node)
    if found.cpu:
        job = replace(job, recipe=job.recipe.model_copy(update={"device": "cpu"}))
    for count in counts:
        _check_size(job, count)
    rates = _rates(asked.machines, job.plan(counts[0]).forward_batch)
    fitted = fit(_priors(asked.machines, job, rates, found), (*rates, *found.measurements), found.level)
    forecaster = Forecaster(
        job=job,
        fitted=fitted,
        supply=_supply(asked.feed, found, job),
        feed=asked.feed,
        devices_per_node=asked.machines.devices_per_node,
        measured=frozenset((m.cluster, m.batch) for m in found.measurements),
        price_per_hour=asked.price_per_hour,
    )
    forecasts = tuple(forecaster.forecast(count) for count in counts)
    worst = max(_worst(fitted.best, rates), _worst(fitted.best, found.measurements, found.delivered))
    return Predicted(job, found, fitted, worst, _sources(asked.machines, fitted, found), forecasts)


def _check_size(job: Job, count: int) -> None:
    """Refuse what ``train`` refuses with this many processes.

    One device is what efficiency refers to, also that of strategies for several processes.
    """
    if count == 1:
        job.plan(count)
        return
    try:
        parallel.resolve_strategy(job.recipe.parallel, count)
    except UserError as error:
        raise UserError(f"--devices {count}: {error}") from None
    job.plan(count)
    parallel.check_size(job.recipe, count)


def _counts(asked: Plan) -> list[int]:
    recipe = asked.settings
    if asked.devices is None and parallel.strategy_class(recipe.parallel).processes == "one":
        return [1]
    if asked.devices is None:
        powers = [2**i for i in range(_POWERS)]
        if asked.weak or recipe.per_process_batch is not None:
            return powers
        return [count for count in powers if recipe.global_batch // recipe.micro_batch % count == 0]
    try:
        counts = sorted({int(word) for word in asked.devices.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UserError(f"--devices {asked.devices!r}: pass numbers of devices such as 8,16,64")
    return counts


def _check(asked: Plan) -> None:
    """Refuse assumptions that are not positive numbers."""
    for section in (asked.machines, asked.feed):
        for field in fields(section):
            value, may_be_zero = getattr(section, field.name), field.name in ("val_images", "image_kb")
            if isinstance(value, (int, float)) and not (0 < value < math.inf or (value == 0 and may_be_zero)):
                raise UserError(f"--{field.name.replace('_', '-')} {value:g} must be positive and finite")
    if asked.machines.link_efficiency > 1:
        raise UserError(f"--link-efficiency {asked.machines.link_efficiency:g}: a share of the bandwidth, at most 1")
    command_line.check_price(asked.price_per_hour)


def _rates(machines: Machines, batch: int) -> list[Measurement]:
    """--images-per-s as measurements of one device; rates without a batch are at ``batch`` images per forward pass."""
    found = []
    for word in machines.images_per_s.split(",") if machines.images_per_s else ():
        rate, _, at = word.partition("@")
        try:
            speed, size = float(rate), int(at or batch)
        except ValueError:
            speed = size = 0
        if not (speed > 0 and size > 0 and math.isfinite(speed)):
            raise UserError(f"--images-per-s {machines.images_per_s!r}: pass a rate such as 2470, or rates 2470@256,1900@64")
        found.append(Measurement(Cluster(1, 1), Traffic(()), size, 1, size / speed, spread=_OF_RATE))
    return found


def _priors(machines: Machines, job: Job, rates: list[Measurement], found: Calibration) -> dict[str, Prior]:
    known = [*rates, *found.measurements]
    rate = _A100 * _A100_MULTIPLY_ADDS / max(job.network.multiply_adds, 1.0)
    image_s, spread = 1 / rate, dict(_SPREADS)
    if known:
        image_s, spread["image_s"] = min(m.step_s / m.batch for m in known), _OPEN
    if found.cpu:
        spread["local_bytes_per_s"] = _LOCAL_SPREAD
    values = {
        "image_s": image_s,
        "pass_s": machines.fixed_ms / 1000,
        "contention": machines.contention,
        "jitter": machines.jitter,
        "link_latency_s": machines.link_latency_us * 1e-6,
        "link_bytes_per_s": machines.node_bandwidth_gbit / 8 * 1e9 * machines.link_efficiency,
        "local_latency_s": machines.intra_latency_us * 1e-6,
        "local_bytes_per_s": 1e9 * (machines.intra_bandwidth_gbyte or _LOCAL_GBYTE[job.recipe.device == "cpu"]),
    }
    return {name: Prior(value, spread[name]) for name, value in values.items()}


def _supply(feed: Feed, found: Calibration, job: Job) -> Supply:
    """The smallest of what the flags and the measurements say."""
    cores = math.inf if feed.cores_per_device is None else feed.cores_per_device * feed.images_per_s_per_core
    total = math.inf
    if feed.storage_gbyte is not None and job.images.file_bytes:
        total = feed.storage_gbyte * 1e9 / job.images.file_bytes
    return Supply(cores, total, found.delivered)


def _worst(hardware: Hardware, known: Sequence[Measurement], delivered: tuple[Delivered, ...] = ()) -> float:
    """The largest difference between a measured and a predicted step, with its wait for images; 0 without measurements."""
    supply = Supply(measured=delivered)
    predicted = (model.step(hardware, m.traffic, m.cluster, m.batch, m.passes, supply.of(m.cluster)) for m in known)
    return max((abs(p.total_s / (m.step_s + m.data_s) - 1) for p, m in zip(predicted, known, strict=True)), default=0.0)


def _sources(machines: Machines, fitted: Fitted, found: Calibration) -> dict[str, str]:
    """Where each parameter is from. Rates of --images-per-s at several batches also determine the fixed time."""
    defaults = Machines()
    sources = {}
    for name, flags in FLAGS.items():
        given = any(getattr(machines, flag) != getattr(defaults, flag) for flag in flags) or name in fitted.measured
        sources[name] = "given" if given else "default"
        if name in fitted.measured and found.measurements:
            sources[name] = "measured"
    return sources
