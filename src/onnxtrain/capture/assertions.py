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
    place = _place(frame)
    return None if place is None else _expected(frame.f_code.co_filename, place)


def is_librarys_check(frame: types.FrameType) -> bool:
    """Whether a frame of an installed library evaluates a condition only to raise, itself or by ``torch._check``."""
    if not (file := frame.f_code.co_filename).startswith(_LIBRARIES):
        return False
    place = _place(frame)
    return place is not None and (_expected(file, place) is not None or _is_in_torchs_check(file, place))


@functools.cache
def tell(place: str) -> None:
    """Say once that a line's check is left out."""
    _LOG.warning("%s looks into a tensor and would raise: the graph does not look", place)


def _place(frame: types.FrameType) -> _Range | None:
    """What a frame evaluates; None where Python does not say."""
    place = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2 - 1, None))
    return None if None in place else place  # type: ignore[return-value]


def _nodes(filename: str) -> Iterator[ast.AST]:
    """What the code of a file is made of; nothing of one that is no code."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return iter(())
    return ast.walk(tree)


@functools.cache
def _is_in_torchs_check(filename: str, place: _Range) -> bool:
    calls = (node for node in _nodes(filename) if isinstance(node, ast.Call) and _holds(node, place))
    return any(ast.unparse(call.func).startswith(("torch._check", "torch._assert")) for call in calls)


@functools.cache
def _expected(filename: str, place: _Range) -> bool | None:
    for node in _nodes(filename):
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
