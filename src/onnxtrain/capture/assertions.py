"""Statements that look into a tensor only to raise: a graph goes on as if they did not."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import logging
import types
from collections.abc import Iterator
from typing import TypeAlias

_LOG = logging.getLogger(__name__)
_Range: TypeAlias = tuple[int, int, int, int]  # first and last line, first and last column


def expected(frame: types.FrameType) -> bool | None:
    """What the condition that a frame evaluates must be for ``assert``, or for an ``if`` that raises, to do nothing.

    None where the statement does something else; a condition left out is told of once.
    """
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2 - 1, None))
    found = None if None in place else _expected(code.co_filename, place)  # type: ignore[arg-type]
    if found is not None:
        _tell(f"{code.co_filename}:{frame.f_lineno}")
    return found


@functools.cache
def _tell(place: str) -> None:
    _LOG.warning("%s looks into a tensor and would raise: the graph does not look", place)


@functools.cache
def _expected(filename: str, place: _Range) -> bool | None:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        does_raise = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.Assert | ast.If) and (does_raise or isinstance(node, ast.Assert)):
            for part, answer in _parts(node.test, isinstance(node, ast.Assert)):
                if _holds(part, place):
                    return answer
    return None


def _parts(condition: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """What a condition is made of, each with what it must be for the whole to be what is wanted."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _parts(condition.operand, not wanted)
    elif isinstance(condition, ast.BoolOp):
        for part in condition.values:
            yield from _parts(part, wanted)
    else:
        yield condition, wanted


def _holds(part: ast.expr, place: _Range) -> bool:
    first, last, begin, end = place
    after = (part.lineno, part.col_offset) <= (first, begin)
    return after and (last, end) <= (part.end_lineno or last, part.end_col_offset or end)
