"""A page with the bytes in use over the lines of a step's program."""

from __future__ import annotations

import html
from collections.abc import Sequence

from onnxtrain.engine.pages import framed
from onnxtrain.execute import Footprint, Use
from onnxtrain.ir.printer import in_bytes

_WIDTH, _HEIGHT, _LEFT, _BELOW = 960, 300, 80, 30


def page(text: str, footprint: Footprint, before: Footprint) -> str:
    """The page.

    Args:
        text: what is said of the step.
        footprint: the step.
        before: the step where nothing is computed again.
    """
    return framed("Memory of a step", picture(footprint, before), text)


def picture(footprint: Footprint, before: Footprint) -> str:
    """Bytes in use as a drawing (SVG): an area, the step where nothing is computed again as an outline."""
    most = max(footprint.peak, before.peak, 1)
    turn = _LEFT + _across(sum(u.part == "forward" for u in footprint.uses), len(footprint.uses))
    level = _up(footprint.peak, most)
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="bytes in use">'
        f'<polygon class="now" points="{_outline(footprint.uses, most)}"/>'
        f'<polyline class="before" points="{_outline(before.uses, most)}"/>'
        f'<line class="mark" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{level}" y2="{level}"/>'
        f'<text x="0" y="{level + 4}">{in_bytes(footprint.peak)}</text>'
        f'<line class="before" x1="{turn}" x2="{turn}" y1="0" y2="{_HEIGHT}"/>'
        f'<text x="{_LEFT}" y="{_HEIGHT + 20}">forward</text><text x="{turn + 4}" y="{_HEIGHT + 20}">backward</text>'
        f"{''.join(_hover(footprint.uses))}</svg>"
    )


def _across(index: int, count: int) -> float:
    return round(_WIDTH * index / max(count, 1), 1)


def _up(size: int, most: int) -> float:
    return round(_HEIGHT * (1 - size / most) + 1, 1)


def _outline(uses: Sequence[Use], most: int) -> str:
    """The corners of the area, scaled to the whole width."""
    corners = [(float(_LEFT), float(_HEIGHT))]
    for index, use in enumerate(uses):
        corners += [(_LEFT + _across(i, len(uses)), _up(use.most, most)) for i in (index, index + 1)]
    return " ".join(f"{x},{y}" for x, y in [*corners, (float(_LEFT + _WIDTH), float(_HEIGHT))])


def _hover(uses: Sequence[Use]) -> list[str]:
    """An invisible stripe for each line, which says what it is."""
    width = _across(1, len(uses))
    return [
        f'<rect x="{_LEFT + _across(i, len(uses))}" y="0" width="{width}" height="{_HEIGHT}" fill="transparent">'
        f"<title>{html.escape(use.line)}\n{in_bytes(use.most)}</title></rect>"
        for i, use in enumerate(uses)
    ]
