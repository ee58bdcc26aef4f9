"""What became of a program, and the program made smaller while that stays the same."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import signal
import time
import traceback
from collections.abc import Iterator

import torch
from parity import choices

from fuzz.modules.beside import EagerRefuses
from fuzz.modules.overlaps import Overlaps
from fuzz.modules.program import Program, load
from fuzz.outcomes import FAULT, PASS, REFUSED, THROWN, Fault, Outcome
from onnxtrain.errors import BackendError, GradientError, OnnxTrainError

_OURS = "report this model"  # a cure that says that the fault is ours
SECONDS = 240  # of one program


def check(program: Program, device: str = "cpu") -> Outcome:
    """Run the test that a program prints, with the tensors that it makes on a device."""
    torch.manual_seed(program.seed)
    try:
        with _limit(SECONDS), on(device), choices() as chosen:
            load(program.text, f"/random/program_{program.seed}.py")[f"test_seed_{program.seed}"]()
    except EagerRefuses as error:
        return Outcome(THROWN, plain(str(error).splitlines()[0]))
    except SyntaxError as error:
        return Outcome(THROWN, f"SyntaxError: {error.msg}")
    except Fault as fault:
        if _reads_what_it_writes(program, device):
            return Outcome(THROWN, "an operator reads what it writes, element by element", fault.detail)
        return Outcome(FAULT, f"{fault.reason}{_told(fault)}", fault.detail)
    except OnnxTrainError as error:
        return _refusal(error, program)
    except TimeoutError:
        return Outcome(FAULT, f"takes more than {SECONDS} seconds")
    return Outcome(PASS, steps=len(chosen), dropped=sum(bool(c.batch.active) for c in chosen if c.batch))


def _reads_what_it_writes(program: Program, device: str) -> bool:
    """Whether eager PyTorch's numbers depend on the order in which a kernel goes through elements."""
    torch.manual_seed(program.seed)
    with _limit(SECONDS), on(device), contextlib.suppress(Exception, Fault), Overlaps() as seen:
        load(program.text, f"/random/program_{program.seed}.py")[f"test_seed_{program.seed}"]()
    return seen.found


def _refusal(error: OnnxTrainError, program: Program) -> Outcome:
    """An error of ours: it must say which line of the program it means, and what to do."""
    reason = f"{type(error).__name__}: {plain(error.what)}"
    if isinstance(error, BackendError) and "backend=" in program.settings:
        return Outcome(THROWN, reason, str(error))
    if _OURS in str(error):
        return Outcome(FAULT, reason, "".join(traceback.format_exception(error)))
    has_line = "/random/program_" in error.source or isinstance(error, GradientError)  # which a backward pass raises
    if not has_line or not error.cure:
        return Outcome(FAULT, f"no {'line' if error.cure else 'cure'}: {reason}", str(error))
    return Outcome(REFUSED, reason, str(error))


def _told(fault: Fault) -> str:
    """What a foreign exception says, as part of the reason."""
    return (
        f": {plain(fault.detail.splitlines()[0])}" if fault.reason.startswith("raises") and fault.detail.strip() else ""
    )


def plain(text: str) -> str:
    """A sentence without the names and numbers of this program."""
    first = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", text.splitlines()[0] if text.strip() else "")
    return re.sub(r"\[[^\]]*\]|\([^)]*\)|\b[\w.]*\d[\w.]*\b", "#", first)[:160]


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Tensors that are made in the block without a device are on this one."""
    if device == "cpu":
        yield
        return
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class _limit:
    """Raises TimeoutError in the block after some seconds."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(self.seconds)

    def __exit__(self, *caught: object) -> None:
        signal.alarm(0)

    def _stop(self, *_: object) -> None:
        raise TimeoutError


def shrunk(program: Program, found: Outcome, seconds: float = 150.0, device: str = "cpu") -> Program:
    """The smallest program that is found in this time and ends alike."""
    end = time.monotonic() + seconds
    tried: set[str] = set()
    going = True
    while going:
        going = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if smaller.text in tried:
                continue
            tried.add(smaller.text)
            other = check(smaller, device)
            if (other.kind, other.reason) == (found.kind, found.reason):
                program, going = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them: what is not read first, then steps, statements, settings, arguments."""
    yield from _without_dead(program)
    for returns in _shorter(program.returns):
        yield dataclasses.replace(program, returns=returns)
    for count in (1, 2, 3):
        for first in range(len(program.sizes) - count + 1 if count < len(program.sizes) else 0):
            yield dataclasses.replace(program, sizes=program.sizes[first : first + count])
    for place in reversed(range(len(program.body))):
        yield _cut(program, place)
        yield from _bypassed(program, place)
    for place, text in enumerate(program.body):
        for less in _without_a_line(text):
            yield _with(program, place, less)
    for place, text in enumerate(program.definitions):
        for less in _without_a_line(text):
            made = (*program.definitions[:place], less, *program.definitions[place + 1 :])
            yield dataclasses.replace(program, definitions=made)
    if program.is_default:
        yield dataclasses.replace(program, is_default=False)
    if program.settings:
        yield dataclasses.replace(program, settings="")
        for kept in program.settings.split(", "):
            yield dataclasses.replace(program, settings=kept)
    for place, argument in enumerate(program.arguments):
        if ".requires_grad_()" in argument.value:
            less = dataclasses.replace(argument, value=argument.value.replace(".requires_grad_()", ""))
            yield _with_argument(program, place, less)


def _without_dead(program: Program) -> Iterator[Program]:
    """The program without arguments and lines of ``__init__`` that nothing reads."""
    text = "\n".join([*program.body, program.returns, *program.definitions])
    arguments = tuple(a for a in program.arguments if re.search(rf"\b{a.name}\b", text))
    initial = tuple(line for line in program.initial if re.search(rf"{re.escape(_layer(line))}\b", text))
    if arguments != program.arguments or initial != program.initial:
        yield dataclasses.replace(program, arguments=arguments, initial=initial)


def _layer(line: str) -> str:
    """The attribute that a line of ``__init__`` makes, as ``forward`` reads it."""
    return "self." + re.findall(r"register_buffer\(['\"](\w+)|^self\.(\w+)", line)[0][-1 - ("register" in line)]


def _without_a_line(text: str) -> Iterator[str]:
    """A text of several lines without one of them; the last ones, which fewer others read, first."""
    lines = text.split("\n")
    for place in reversed(range(len(lines) if len(lines) > 1 else 0)):
        if lines[place].strip():
            yield "\n".join([*lines[:place], *lines[place + 1 :]])


def _cut(program: Program, place: int) -> Program:
    return dataclasses.replace(program, body=program.body[:place] + program.body[place + 1 :])


def _with(program: Program, place: int, statement: str) -> Program:
    body = (*program.body[:place], *([statement] if statement.strip() else []), *program.body[place + 1 :])
    return dataclasses.replace(program, body=body)


def _with_argument(program: Program, place: int, argument: object) -> Program:
    made = list(program.arguments)
    made[place] = argument  # type: ignore[call-overload]
    return dataclasses.replace(program, arguments=tuple(made))


def _bypassed(program: Program, place: int) -> Iterator[Program]:
    """The program with one of what a statement reads in the place of what it makes, or a copy of it."""
    statement = program.body[place]
    made = re.match(r"(v\d+)(?:, v\d+)? = (.*)", statement, re.S)
    if not made:
        return
    read = list(dict.fromkeys(re.findall(r"\b(v\d+|x|y\d?|ids|mask)\b", made.group(2))))
    for name in read:
        cut = _cut(program, place)
        body = tuple(re.sub(rf"\b{made.group(1)}\b", name, line) for line in cut.body)
        yield dataclasses.replace(cut, body=body, returns=re.sub(rf"\b{made.group(1)}\b", name, program.returns))
        if f" = {name} * 1" not in statement and "\n" not in statement:
            yield _with(program, place, f"{made.group(1)} = {name} * 1")


def _shorter(returns: str) -> Iterator[str]:
    """Single values of what is returned."""
    tree = ast.parse(returns, mode="eval").body
    if isinstance(tree, ast.Name):
        return
    yield from dict.fromkeys(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id != "Output")
    if isinstance(tree, ast.Tuple | ast.List) and len(tree.elts) > 2:
        for place in range(len(tree.elts)):
            yield f"({', '.join(ast.unparse(e) for i, e in enumerate(tree.elts) if i != place)})"
