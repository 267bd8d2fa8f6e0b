"""Parameters of the cost model with their uncertainty, from assumptions and measurements. Pure.

Each parameter has a prior: its logarithm is distributed around the assumed value with the given spread (0.1: one standard
deviation is about 10 %). Near the assumption the distribution is normal; farther away it falls slowly, as Student's t
does, so that measurements prevail over an assumption that is wrong by orders of magnitude. Measurements move the
parameters that they depend on and narrow them; the others keep their priors.

`fit` finds the most probable parameters with the Levenberg-Marquardt method (Nocedal and Wright 2006, "Numerical
Optimization", section 10.3) and approximates their distribution by a normal one around them (Laplace's method; MacKay
2003, "Information Theory, Inference, and Learning Algorithms", chapter 27). Predictions for draws from it give the
intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from worldsize.plan import model
from worldsize.plan.model import Cluster, Hardware, Traffic

Vector = NDArray[np.float64]
Residuals = Callable[[Vector], Vector]

NAMES = tuple(field.name for field in fields(Hardware))
_COMPUTING = [NAMES.index("image_s"), NAMES.index("pass_s")]
_DRAWS = 200
_LEAST_SPREAD = 0.01  # of a measurement, relative to its step: what the model itself leaves out
_LEAST_WAIT = 0.1  # the same for a wait, relative to it
# Factors of the assumed values to start from: hidden messages and tiny losses have no gradient to follow.
_BANDWIDTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
_CONTENTIONS = (1.0, 10.0, 30.0, 100.0, 300.0)
_LATENCIES = (1.0, 10.0, 100.0)
_JITTERS = (1.0, 10.0, 30.0)
_ITERATIONS = 100


@dataclass(frozen=True)
class Prior:
    """The assumed value of a parameter, and the standard deviation of its natural logarithm."""

    value: float
    spread: float


@dataclass(frozen=True)
class Measurement:
    """A measured step, seconds without waiting for data, with ``batch`` images per device in ``passes`` forward passes.

    ``communication_s``, if known, is the part of ``step_s`` spent waiting for others, and ``straggler_s`` the part of that
    spent waiting for slower devices. ``spread`` is the standard error, relative to the step; ``errors_s``, if known, are
    those of computing, of waiting for slower devices and of waiting for messages, seconds. ``data_s`` came on top: waiting
    for images and their copies.
    """

    cluster: Cluster
    traffic: Traffic
    batch: float
    passes: int
    step_s: float
    communication_s: float | None = None
    straggler_s: float | None = None
    spread: float = 0.03
    errors_s: tuple[float, float, float] | None = None
    data_s: float = 0.0

    def residuals(self, hardware: Hardware) -> list[float]:
        """Predicted minus measured times, in standard errors."""
        step = model.step(hardware, self.traffic, self.cluster, self.batch, self.passes)
        unit = max(self.spread, _LEAST_SPREAD) * self.step_s
        if self.communication_s is None:
            return [(step.total_s - self.step_s) / unit]
        computed = self.step_s - self.communication_s
        if self.straggler_s is None:
            return [(step.compute_s - computed) / unit, (step.communication_s - self.communication_s) / unit]
        parts = (computed, self.straggler_s, self.communication_s - self.straggler_s)
        predicted = (step.compute_s, step.straggler_s, step.exposed_s)
        errors = self.errors_s or (unit, unit, unit)
        least = (_LEAST_SPREAD * self.step_s, *(_LEAST_WAIT * (part + 0.02 * self.step_s) for part in parts[1:]))
        return [(p - part) / max(e, low) for p, part, e, low in zip(predicted, parts, errors, least, strict=True)]


@dataclass(frozen=True)
class Fitted:
    """The most probable parameters, draws from their distribution, and which of them measurements determined.

    A parameter counts as measured if its spread is less than half its prior's.
    """

    best: Hardware
    draws: tuple[Hardware, ...]
    measured: frozenset[str]

    def interval(self, name: str) -> tuple[float, float]:
        """5th and 95th percentile of a parameter."""
        return percentiles([getattr(draw, name) for draw in self.draws])


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    low, high = np.percentile(np.asarray(values, dtype=np.float64), (5, 95))
    return float(low), float(high)


def fit(priors: Mapping[str, Prior], measurements: Sequence[Measurement] = (), level: float = 0.0) -> Fitted:
    """The parameters after the measurements. The same input gives the same draws.

    Args:
        priors: one for each of `NAMES`.
        level: standard error of the speed at which all measurements were made, relative: it changes no ratio of theirs.
    """
    center = np.log([priors[name].value for name in NAMES])
    spread = np.array([priors[name].spread for name in NAMES])

    def residuals(x: Vector) -> Vector:
        hardware = Hardware(*np.exp(x).tolist())
        measured = [r for m in measurements for r in m.residuals(hardware)]
        away = (x - center) / spread
        return np.array([*measured, *(np.sign(away) * np.sqrt(np.log1p(away**2)))])

    def cost(x: Vector) -> float:
        return _cost(residuals(x))

    starts = _tried(sorted(_starts(center, measurements), key=cost))
    best = min((_minimize(residuals, start) for start in starts), key=cost)
    slope = _jacobian(residuals, best)
    count = len(slope) - len(NAMES)
    # Measurements that differ from the model by more than their errors have larger errors than they say (Birge 1932).
    free = max(count - _determined(slope, count), 1.0)
    slope[:count] /= max(1.0, np.sqrt(_cost(residuals(best)[:count]) / free))
    covariance = np.linalg.inv(slope.T @ slope)
    generator = np.random.default_rng(0)
    draws = best + generator.standard_normal((_DRAWS, len(NAMES))) @ np.linalg.cholesky(covariance).T
    draws[:, _COMPUTING] += level * generator.standard_normal((_DRAWS, 1))
    known = np.sqrt(np.diag(covariance)) < 0.5 * spread
    return Fitted(
        best=Hardware(*np.exp(best).tolist()),
        draws=tuple(Hardware(*np.exp(draw).tolist()) for draw in draws),
        measured=frozenset(name for name, is_known in zip(NAMES, known, strict=True) if is_known),
    )


def _determined(slope: Vector, count: int) -> float:
    """How many parameters the first ``count`` residuals determine, rather than the priors: the trace of the hat matrix."""
    measured = slope[:count]
    return float(np.trace(np.linalg.inv(slope.T @ slope) @ measured.T @ measured))


def _starts(center: Vector, measurements: Sequence[Measurement]) -> list[Vector]:
    """Points of a grid over what the measurements may say about machines and links."""
    local, linked = (any(getattr(m.cluster, side) > 1 for m in measurements) for side in ("per_node", "nodes"))
    grid = {
        "local_bytes_per_s": _BANDWIDTHS if local else (),
        "local_latency_s": _LATENCIES if local else (),
        "contention": _CONTENTIONS if local else (),
        "link_bytes_per_s": _BANDWIDTHS if linked else (),
        "link_latency_s": _LATENCIES if linked else (),
    }
    starts = [center]
    for name, factors in grid.items():
        shift = np.eye(len(NAMES))[NAMES.index(name)]
        starts = [start + np.log(factor) * shift for start in starts for factor in factors or (1.0,)]
    return starts


def _tried(starts: list[Vector]) -> list[Vector]:
    """Of the starts, best first: the first with each contention, also with more jitter.

    A wrong bandwidth costs most, so the first few are alike in all else. Where an assumption is wrong by orders of
    magnitude, the cost has a minimum near the assumption and another near the measurement.
    """
    contention, jitter = (NAMES.index(name) for name in ("contention", "jitter"))
    first = {start[contention]: start for start in reversed(starts)}.values()
    return [start + np.log(factor) * np.eye(len(NAMES))[jitter] for start in first for factor in _JITTERS]


def _cost(residuals: Vector) -> float:
    return float(residuals @ residuals)


def _minimize(residuals: Residuals, x: Vector) -> Vector:
    """Levenberg-Marquardt from ``x``."""
    damping, now = 1e-3, residuals(x)
    for _ in range(_ITERATIONS):
        slope = _jacobian(residuals, x)
        normal, gradient = slope.T @ slope, slope.T @ now
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        step = np.clip(step, -2.0, 2.0)  # at most a factor of e^2 at once
        then = residuals(x + step)
        if _cost(then) < _cost(now):
            finished = _cost(now) - _cost(then) < 1e-9 * (1 + _cost(now))
            x, now, damping = x + step, then, max(damping / 5, 1e-9)
            if finished:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 5
    return x


def _jacobian(residuals: Residuals, x: Vector, width: float = 1e-4) -> Vector:
    """Central differences, (number of residuals, number of parameters)."""
    columns = [(residuals(x + h) - residuals(x - h)) / (2 * width) for h in width * np.eye(len(x))]
    return np.stack(columns, axis=1)
