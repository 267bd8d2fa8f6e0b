"""The curve of a range test as an SVG chart."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from worldsize.tune.curve import Curve

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 420, 70, 60, 50, 20


def svg(curve: Curve, chosen: float, title: str) -> str:
    """The smoothed loss over the learning rate (logarithmic), with a line at the chosen rate."""
    low, high = min(curve.losses), max(curve.losses)
    span = (high - low) or 1.0
    first, last = math.log10(curve.rates[0]), math.log10(max(curve.rates[-1], chosen))

    def x(rate: float) -> float:
        return _LEFT + (math.log10(rate) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / span * (_HEIGHT - _TOP - _BOTTOM)

    line = " ".join(f"{x(rate):.1f},{y(loss):.1f}" for rate, loss in zip(curve.rates, curve.losses, strict=True))
    base = _HEIGHT - _BOTTOM
    powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
    ticks = "".join(
        f'<path d="M{x(10.0**p):.1f} {base}v6" stroke="#666"/>'
        f'<text x="{x(10.0**p):.1f}" y="{base + 22}" text-anchor="middle">{10.0**p:g}</text>'
        for p in powers
    )
    levels = "".join(
        f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.3g}</text>'
        f'<path d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
        for level in (low + span * i / 4 for i in range(5))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="28" font-size="16">{escape(title)}</text>{levels}'
        f'<path d="M{_LEFT} {base}H{_WIDTH - _RIGHT}" stroke="#666"/>{ticks}'
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">learning rate</text>'
        f'<path d="M{x(chosen):.1f} {_TOP}V{base}" stroke="#c33" stroke-dasharray="5 4"/>'
        f'<text x="{x(chosen) + 6:.1f}" y="{_TOP + 14}" fill="#c33">{chosen:g}</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563a8" stroke-width="2"/></svg>\n'
    )
