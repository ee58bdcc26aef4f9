"""The frame of pages that show a report: a picture, and its text."""

from __future__ import annotations

import html

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { background: #f6f6f4; padding: 1rem; overflow: auto } svg { width: 100%; height: auto }
.now { fill: #4a7db5; opacity: .75 } .before { fill: none; stroke: #b0b0b0 }
.light { fill: #c9d8e8; stroke: #fff; stroke-width: .3 }
.mark { stroke: #c0392b; stroke-dasharray: 4 3 }
text { font-size: 12px; fill: #555 }
"""


def framed(title: str, picture: str, text: str) -> str:
    """A page in HTML.

    Args:
        title: its heading.
        picture: a drawing (SVG).
        text: what is said below it.
    """
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{picture}<pre>{html.escape(text)}</pre></html>\n"
    )
