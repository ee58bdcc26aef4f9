"""Pages that show a report: they need nothing but themselves, and are light or dark as the reader's browser is."""

from __future__ import annotations

import abc
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from onnxtrain.files import write_atomically

_STYLE = """
:root { color-scheme: light dark; --text: #222; --dim: #5a5a5a; --paper: #fff; --raised: #f5f5f3; --line: #d8d8d4;
  --fill: #3f74ad; --faint: #c3d5e8; --mark: #b5301f; --second: #a8590a }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e3; --dim: #a9a9a4; --paper: #17181a; --raised: #222427;
  --line: #3a3c40; --fill: #77aee6; --faint: #2d4560; --mark: #ff8b7a; --second: #f0a95a } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  background: var(--paper) }
h1 { margin-bottom: .2rem } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
p { max-width: 46rem } .dim { color: var(--dim) }
pre, code { font: 13px/1.45 ui-monospace, monospace }
pre { background: var(--raised); padding: 1rem; overflow: auto } svg { width: 100%; height: auto }
details { margin: .3rem 0 } summary { cursor: pointer } details > :not(summary) { margin-left: 1.2rem }
table { border-collapse: collapse; margin: .8rem 0 } caption { text-align: left; color: var(--dim) }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } .bar { display: inline-block; height: .7rem; background: var(--fill); min-width: 1px }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .8rem; padding: 0 }
.facts div { background: var(--raised); padding: .7rem .9rem; border-radius: .4rem }
.facts dt { color: var(--dim) } .facts dd { margin: 0; font-size: 1.35rem }
.now { fill: var(--fill); opacity: .8 } .before { fill: none; stroke: var(--dim) }
.light { fill: var(--faint); stroke: var(--paper); stroke-width: .3 }
.mark { stroke: var(--mark); stroke-dasharray: 4 3 }
.curve { fill: none; stroke: var(--fill); stroke-width: 2.5 }
.second { fill: none; stroke: var(--second); stroke-width: 1.5; stroke-dasharray: 6 4 }
text { font-size: 12px; fill: var(--dim) }
"""


class Paged(abc.ABC):
    """A report that is a page, too."""

    @abc.abstractmethod
    def page(self) -> str:
        """The page in HTML: what ``str()`` tells, and pictures of it."""

    def save(self, path: str | Path) -> Path:
        """Write the page, which needs nothing else.

        Args:
            path: the file, which is written whole or not at all.
        """
        path = Path(path)
        write_atomically(path, self.page().encode())
        return path

    def _repr_html_(self) -> str:
        """The page, as a notebook shows it."""
        return inline(self.page())


def document(title: str, body: str) -> str:
    """A page in HTML.

    Args:
        title: its heading.
        body: what is below it, in HTML.
    """
    named = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{named}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{named}</h1>\n{body}\n</main></body></html>\n"
    )


def framed(title: str, picture: str, text: str) -> str:
    """A page of a picture and a text.

    Args:
        title: its heading.
        picture: a drawing (SVG).
        text: what is said below it.
    """
    return document(title, f"{picture}{preformatted(text)}")


def inline(page: str) -> str:
    """A page within another one, as a notebook shows it: neither's style is the other's."""
    return (
        f'<iframe title="report" style="width: 100%; height: 40rem; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    )


def preformatted(text: str) -> str:
    """A text with its lines as they are."""
    return f'<pre tabindex="0">{html.escape(text)}</pre>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str | float | int]]) -> str:
    """A table.

    Args:
        caption: what it shows.
        columns: their headings; those of numbers begin with ``#``, which is left out.
        rows: what is in them: a text that is not HTML, or a ``Bar``.
    """
    sides = ["number" if column.startswith("#") else "" for column in columns]
    heads = (
        f'<th scope="col"{_as(side)}>{html.escape(c.lstrip("#"))}</th>' for c, side in zip(columns, sides, strict=True)
    )
    lines = (
        "".join(f"<td{_as(side)}>{_cell(cell)}</td>" for cell, side in zip(row, sides, strict=True)) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    told = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{told}{head}\n<tbody>{body}</tbody></table></div>\n'


class Bar(float):
    """A share, from 0 to 1, that is drawn."""


def _as(side: str) -> str:
    return f' class="{side}"' if side else ""


def _cell(cell: object) -> str:
    if isinstance(cell, Bar):
        return f'<span class="bar" style="width:{12 * min(max(cell, 0.0), 1.0):.2f}rem"></span>'
    return html.escape(str(cell))


def folded(summary: str, body: str, *, is_open: bool = False) -> str:
    """Something that is unfolded by whoever wants to see it.

    Args:
        summary: what is seen before, a text that is not HTML.
        body: what is folded, in HTML.
        is_open: whether it is unfolded at first.
    """
    return f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}</summary>\n{body}</details>\n"


def section(title: str, *parts: str) -> str:
    """A part of a page under a heading; nothing where there is nothing in it.

    Args:
        title: the heading.
        parts: in HTML.
    """
    body = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>\n{body}</section>\n" if body else ""


def paragraph(text: str) -> str:
    """A text that is not HTML, as a paragraph."""
    return f"<p>{html.escape(text)}</p>\n"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """What is to be seen first: names with what they are, large."""
    cells = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(fact)}</dd></div>" for name, fact in rows)
    return f'<dl class="facts">{cells}</dl>\n'
