"""A page with the time of each line of a step's program, and how much of it the machine needs."""

from __future__ import annotations

import html
from collections.abc import Sequence

from onnxtrain.engine.costs import Cost
from onnxtrain.engine.pages import framed

_WIDTH, _HEIGHT, _GAP = 1040, 120, 30


def page(text: str, costs: Sequence[Cost]) -> str:
    """The page.

    Args:
        text: what is said of the step.
        costs: of its lines, in order.
    """
    return framed("Time of a step", picture(costs), text)


def picture(costs: Sequence[Cost]) -> str:
    """A drawing (SVG): a strip for either pass, of lines as wide as they took, filled as far as the machine needs."""
    parts = [[c for c in costs if c.part == part] for part in ("forward", "backward")]
    strips = [part for part in parts if part]
    longest = max((sum(c.seconds for c in part) for part in strips), default=0.0) or 1.0
    drawn = [_strip(part, index * (_HEIGHT + _GAP), _WIDTH / longest) for index, part in enumerate(strips)]
    height = len(strips) * (_HEIGHT + _GAP)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="time of each line">{"".join(drawn)}</svg>'


def _strip(costs: Sequence[Cost], top: int, scale: float) -> str:
    """The lines of one pass from left to right."""
    found, left = [], 0.0
    for cost in costs:
        width, filled = cost.seconds * scale, _HEIGHT * min(cost.least / cost.seconds if cost.seconds else 0.0, 1.0)
        at = f'x="{left:.2f}" width="{width:.2f}"'
        found.append(
            f"<g><title>{html.escape(cost.line)}\n{1000 * cost.seconds:.3g} ms, at least {1000 * cost.least:.3g} ms"
            f'</title><rect class="light" {at} y="{top}" height="{_HEIGHT}"/>'
            f'<rect class="now" {at} y="{top + _HEIGHT - filled:.1f}" height="{filled:.1f}"/></g>'
        )
        left += width
    name = f"{costs[0].part}: {1000 * sum(c.seconds for c in costs):.3g} ms"
    return "".join([*found, f'<text x="0" y="{top + _HEIGHT + 18}">{name}</text>'])
