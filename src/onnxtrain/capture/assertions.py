"""Statements that look into a tensor only to raise.

Those of installed libraries are left out of graphs, which go on as if they did not look. Those of the user's own code
are looks like others where a module can have several paths, so that they raise when they do in eager PyTorch.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import logging
import sysconfig
import types
from collections.abc import Iterator
from typing import TypeAlias

_LOG = logging.getLogger(__name__)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_Range: TypeAlias = tuple[int, int, int, int]  # first and last line, first and last column


def expected(frame: types.FrameType) -> bool | None:
    """What the condition that a frame evaluates must be for ``assert``, or for an ``if`` that raises, to do nothing.

    None where the statement does something else.
    """
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2 - 1, None))
    return None if None in place else _expected(code.co_filename, place)  # type: ignore[arg-type]


def is_librarys_check(frame: types.FrameType) -> bool:
    """Whether a frame of an installed library evaluates a condition only to raise."""
    return frame.f_code.co_filename.startswith(_LIBRARIES) and expected(frame) is not None


@functools.cache
def tell(place: str) -> None:
    """Say once that a line's check is left out."""
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
