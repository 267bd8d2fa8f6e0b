"""The curve of a range test as an SVG chart."""

from __future__ import annotations

import math

from worldsize import pages
from worldsize.tune.curve import Curve

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 420, 70, 60, 50, 20


def svg(curve: Curve, chosen: float, title: str) -> str:
    """The smoothed loss over the learning rate (logarithmic), with a line at the chosen rate."""
    low, high = min(curve.losses), max(curve.losses)
    span = (high - low) or 1.0
    # The chosen rate is drawn also if it is beyond those of the range test.
    first, last = math.log10(min(curve.rates[0], chosen)), math.log10(max(curve.rates[-1], chosen))

    def x(rate: float) -> float:
        return _LEFT + (math.log10(rate) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / span * (_HEIGHT - _TOP - _BOTTOM)

    powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
    levels = [low + span * i / 4 for i in range(5)]
    return pages.render(
        "range_test.svg",
        title=title,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        base=_HEIGHT - _BOTTOM,
        ticks=[(x(10.0**power), f"{10.0**power:g}") for power in powers],
        levels=[(y(level), f"{level:.3g}") for level in levels],
        chosen=x(chosen),
        chosen_name=f"{chosen:g}",
        line=[(x(rate), y(loss)) for rate, loss in zip(curve.rates, curve.losses, strict=True)],
    )
