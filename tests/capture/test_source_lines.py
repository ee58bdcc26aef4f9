"""Which code is the user's, and what it does with errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from onnxtrain.capture.source_lines import is_caught


def asked() -> bool:
    return is_caught(sys._getframe(1))


def within() -> bool:
    try:
        return asked()
    except RuntimeError:
        return False


def within_a_loop() -> bool:
    for _ in range(2):
        try:
            found = asked()
            break
        except ValueError:
            pass
    return found


def within_and_with() -> bool:
    with contextlib.nullcontext():
        try:
            return asked()
        except RuntimeError:
            return False


def by_the_caller() -> bool:
    try:
        return in_order()
    except RuntimeError:
        return False


def in_order() -> bool:
    return asked()


def with_a_context() -> bool:
    with contextlib.nullcontext():
        return asked()


def of_each() -> bool:
    return bool([n for n in range(2) if asked()]) or any(asked() for _ in range(2))


def after() -> bool:
    try:
        count = sys.getrefcount(None)
    except RuntimeError:
        count = 0
    return asked() or not count


def handling() -> bool:
    try:
        raise RuntimeError
    except RuntimeError:
        found = asked()
        return found


def called_by_ours(run: Callable[[], bool]) -> bool:
    """Call it from a file of the package, as a trace calls a forward pass: what calls that may catch what it likes."""
    space: dict[str, Any] = {}
    exec(compile("def call(run): return run()", str(Path(onnxtrain.__file__).with_name("caller.py")), "exec"), space)
    return bool(space["call"](run))


@pytest.mark.parametrize("run", [within, within_a_loop, within_and_with, by_the_caller])
def test_an_error_is_caught(run: Callable[[], bool]) -> None:
    assert called_by_ours(run)


@pytest.mark.parametrize("run", [in_order, with_a_context, of_each, after, handling])
def test_an_error_is_not_caught(run: Callable[[], bool]) -> None:
    assert not called_by_ours(run)
