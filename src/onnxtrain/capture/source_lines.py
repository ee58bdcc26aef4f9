"""Which line of the user's code: neither torch's, nor ours, nor what stands between."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_BETWEEN = ("<", "/contextlib.py", "/functools.py", "/sympy/")
_TYPED = ("<stdin>", "<string>", "<console>", "<input>", "<ipython-input", "<python-input")  # not in a file

# Packages whose versions tell what their code does, and which ask nothing of the user's sizes
FOREIGN = frozenset(("torch", "onnxtrain", "sympy", "mpmath", "numpy", "typing_extensions", *sys.stdlib_module_names))

Place = tuple[str, int]  # file and line
_LONGEST = 16  # instructions between the begin of a handler and the test of which error it is


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those that are defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_within(inner)


def lines_of(function: Callable[..., Any]) -> Iterator[tuple[str, int, str]]:
    """The lines of a function with their files and numbers; none where its text is not there."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return
    for offset, text in enumerate(lines):
        yield function.__code__.co_filename, first + offset, text


def line_that_changes(lines: Iterable[tuple[str, int, str]], owner: str) -> str:
    """Where code sets something, or changes what is in it; empty where none does.

    Args:
        lines: of the code, with their files and numbers.
        owner: an expression for what it is in the code.
    """
    own = rf"{owner}(\[[^]]*\]|\.\w+)*"
    sets = rf"{own}\s*([-+*/%@|&^]|//|\*\*|<<|>>)?=[^=]"
    changes = rf"{owner}(\[[^]]*\])*\.(append|appendleft|add|extend|insert|pop|put|rotate|update)\("
    changes += rf"|\bnext\([^()]*{owner}"
    known = list(lines)
    found = ((f, n) for pattern in (sets, changes) for f, n, text in known if re.search(pattern, text))
    return next((f"{file}:{number}" for file, number in found), "")


@functools.lru_cache(4096)
def is_ours_or_torchs(filename: str) -> bool:
    """Whether a file is torch's or ours."""
    return filename.startswith((_OURS, _TORCH))


def is_foreign(home: str) -> bool:
    """Whether a Python module is one of a package whose version tells what its code does."""
    return home.partition(".")[0] in FOREIGN


@functools.lru_cache(4096)
def is_librarys(home: str) -> bool:
    """Whether a Python module is one of an installed package."""
    return str(getattr(sys.modules.get(home), "__file__", None) or "").startswith(PACKAGES)


@functools.lru_cache(4096)
def is_between(filename: str) -> bool:
    """Whether a file is what Python puts between a caller and what it calls (``functools``, frozen modules)."""
    return not filename.startswith(_TYPED) and any(part in filename for part in _BETWEEN)


@functools.lru_cache(4096)
def is_users(filename: str) -> bool:
    """Whether a file is the user's (or another library's), not torch's, ours or the glue of Python."""
    return filename.startswith(_TYPED) or not (is_ours_or_torchs(filename) or is_between(filename))


def is_asked_by_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code calls a frame, with nothing but ours in between."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def is_caught(frame: types.FrameType | None) -> bool:
    """Whether the user's code may catch what is raised within a frame, or within one that calls it, up to ours."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if is_users(frame.f_code.co_filename) and any(frame.f_lasti in lines for lines in _guarded(frame.f_code)):
            return True
        frame = frame.f_back
    return False


def caught_among(errors: Iterable[BaseException]) -> BaseException | None:
    """The first of some errors that the user's code has caught: where it was, its traceback ends."""
    raised = ((error, error.__traceback__) for error in errors)
    return next((e for e, trace in raised if trace and is_users(trace.tb_frame.f_code.co_filename)), None)


@functools.lru_cache(4096)
def _guarded(code: types.CodeType) -> list[range]:
    """The places in a function's bytecode whose errors it handles otherwise than a ``with`` does that it leaves."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    if not entries:
        return []
    names = {at.offset: (at.opname, after.opname) for at, after in itertools.pairwise(dis.get_instructions(code))}
    begun = ("PUSH_EXC_INFO", "WITH_EXCEPT_START")
    handlers = {offset for offset, pair in names.items() if pair[0] == begun[0] and pair != begun}
    return [range(entry.start, entry.end) for entry in entries if entry.target in handlers]


def expects(frame: types.FrameType, error: type[Exception]) -> bool:
    """Whether a frame is within a ``try`` that handles an error by its name, first of all."""
    return any(frame.f_lasti in lines and error.__name__ in names for lines, names in _expected(frame.f_code))


@functools.lru_cache(4096)
def _expected(code: types.CodeType) -> list[tuple[range, set[str]]]:
    """The places in a function's bytecode whose errors it handles, and the names of the first ones that it handles."""
    found = []
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        handler = itertools.dropwhile(lambda at, entry=entry: at.offset < entry.target, dis.get_instructions(code))
        asked = itertools.takewhile(lambda at: at.opname != "CHECK_EXC_MATCH", itertools.islice(handler, _LONGEST))
        found.append((range(entry.start, entry.end), {str(at.argval) for at in asked if at.opname.startswith("LOAD")}))
    return found


def places_in(stack: str) -> list[Place]:
    """The files and lines that a printed stack names, outermost first."""
    return [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', stack)]


def user_place(stack: str) -> Place | None:
    """The innermost place of a printed stack that is the user's; where there is none, torch's; never ours."""
    places = [p for p in places_in(stack) if not p[0].startswith(_OURS)]
    users = [p for p in places if is_users(p[0])] or places
    return users[-1] if users else None


def user_line(stack: str) -> str:
    """The same as ``file:line``; empty where there is none."""
    place = user_place(stack)
    return "" if place is None else "{}:{}".format(*place)


def line_of_error(error: BaseException) -> str:
    """The innermost line of the traceback (or of the message's own stack) that is not in torch."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno or 0) for f in frames]
    users = [p for p in [*places, *places_in(str(error))] if is_users(p[0])]
    return "{}:{}".format(*users[-1]) if users else ""
