"""Losses over steps, as a drawing."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _BELOW = 960, 260, 60, 40
_STYLES = ("curve", "second", "before")


def picture(curves: Mapping[str, Sequence[float]]) -> str:
    """The curves as a drawing (SVG), each under its name; numbers that are not finite are left out.

    Args:
        curves: by name, a number for each step.
    """
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    if not finite:
        return ""
    low, high, count = min(finite), max(finite), max(map(len, curves.values()))
    span = (high - low) or 1.0

    def at(step: int, value: float) -> str:
        across, up = step / max(count - 1, 1), (value - low) / span
        return f"{_LEFT + _WIDTH * across:.1f},{_HEIGHT * (1 - up) + 8:.1f}"

    drawn = []
    for index, (name, curve) in enumerate(curves.items()):
        style, left = _STYLES[index % len(_STYLES)], _LEFT + 180 * index
        points = " ".join(at(step, value) for step, value in enumerate(curve) if math.isfinite(value))
        drawn.append(f'<polyline class="{style}" points="{points}"/>')
        drawn.append(f'<line class="{style}" x1="{left}" x2="{left + 24}" y1="{_HEIGHT + 32}" y2="{_HEIGHT + 32}"/>')
        drawn.append(f'<text x="{left + 30}" y="{_HEIGHT + 36}">{html.escape(name)}</text>')
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="losses over {count} steps">'
        f'{"".join(drawn)}<text x="0" y="14">{high:.3g}</text><text x="0" y="{_HEIGHT + 8}">{low:.3g}</text></svg>\n'
    )
