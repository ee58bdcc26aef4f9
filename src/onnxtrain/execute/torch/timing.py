"""What the lines of a step's programs cost: they run with operators that look at the clock."""

from __future__ import annotations

import collections
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.execute.base import Timing
from onnxtrain.execute.torch.program import Program


class Clock:
    """Sees how long the operators of programs run, and how many bytes they read and write.

    On an accelerator each one is waited for, so small kernels seem to take what it takes to start them.

    Args:
        device: where the programs run.
    """

    def __init__(self, device: str) -> None:
        self._wait = waits_for(device)
        self._programs: dict[str, Program] = {}
        self._seen: dict[tuple[str, int], _Line] = collections.defaultdict(_Line)
        self._inner: list[float] = []  # seconds that operators within those that run took, with their clocks

    def watched(self, program: Program) -> Program:
        """The program with operators that are seen."""
        name = program.function.__name__
        self._programs[name] = program
        return program.with_operators(lambda operator, function: self._timed(name, operator, function))

    def timings(self) -> list[Timing]:
        """What was seen, in the order of the programs' lines."""
        order = list(self._programs)
        found = sorted(self._seen.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
        lines = {name: program.source.splitlines() for name, program in self._programs.items()}
        return [self._timing(part, lines[part][number - 1].strip(), seen) for (part, number), seen in found]

    def _timing(self, part: str, line: str, seen: _Line) -> Timing:
        value = self._programs[part].value_of(line)
        return Timing(part, line, seen.operator, value, seen.seconds, seen.calls, seen.read, seen.written)

    def _timed(self, part: str, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        name = operator.rstrip("_")

        def timed(*args: Any, **kwargs: Any) -> Any:
            entered = time.perf_counter()
            versions = [(t, _version(t)) for t in _tensors((args, kwargs))]
            self._inner.append(0.0)
            self._wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._wait()
            spent = time.perf_counter() - start - self._inner.pop()
            line = self._seen[part, sys._getframe(1).f_lineno]
            line.operator, line.calls, line.seconds = name, line.calls + 1, line.seconds + spent
            read, written = _moved(versions, _tensors(result))
            line.read, line.written = line.read + read, line.written + written
            if self._inner:
                self._inner[-1] += time.perf_counter() - entered
            return result

        return timed


class _Line:
    """What was seen of a line."""

    def __init__(self) -> None:
        self.operator, self.seconds, self.calls, self.read, self.written = "", 0.0, 0, 0, 0


def waits_for(device: str) -> Callable[[], None]:
    """A function that returns when all that was started on a device has been done."""
    kind = torch.device(device)
    if kind.type == "cpu":
        return lambda: None
    return functools.partial(torch.accelerator.synchronize, kind)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """How long a call takes, with what it starts on the device."""
    wait = waits_for(device)
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _moved(given: list[tuple[torch.Tensor, int]], made: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes that a call read and wrote.

    Args:
        given: what it was given, with the versions that these had.
        made: what it returned.
    """
    read = {_memory(t): _bytes(t) for t, _ in given}
    changed = {_memory(t) for t, version in given if _version(t) != version}
    written = {_memory(t): _bytes(t) for t in made if _memory(t) not in read or _memory(t) in changed}
    return (sum(read.values()), sum(written.values())) if written else (0, 0)


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _bytes(t: torch.Tensor) -> int:
    """Of a tensor; where an axis is expanded, of the memory that it has."""
    return min(t.nbytes, t.untyped_storage().nbytes())
