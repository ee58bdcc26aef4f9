"""A random module as the text that a person would have written, and the module that it is."""

from __future__ import annotations

import dataclasses
import linecache
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any

HEAD = """\
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.modules.beside import agree, default_type

REAL = torch.{real}


@dataclasses.dataclass
class Output:
    first: Any
    second: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, limit):
        ctx.save_for_backward(value)
        ctx.limit = limit
        return value.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * (0.5 + (value.abs() <= ctx.limit).to(gradient.dtype)), None


@functools.cache
def cached(size):
    return torch.ones(size, size, dtype=REAL).tril()


def kept(size, table={{}}):
    if size not in table:
        table[size] = torch.arange(size).to(REAL)
    return table[size]


NAMED = None


def named(size):
    global NAMED
    if NAMED is None or NAMED.shape[0] != size:
        NAMED = torch.linspace(0, 1, size, dtype=REAL)
    return NAMED
"""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of ``forward``.

    Args:
        name: of the parameter.
        value: an expression of the sizes ``B`` and ``L``.
        is_keyword: whether the caller says its name.
    """

    name: str
    value: str
    is_keyword: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A module, its inputs and how it is run.

    Args:
        seed: of what is random in weights and inputs, and what the program is made again from.
        arguments: of ``forward``.
        initial: lines of ``__init__``.
        body: statements of ``forward``; one may have several lines.
        returns: the expression that is returned.
        sizes: batch and length of each step.
        real: the floating type of parameters and inputs.
        training: whether the module is in training mode.
        settings: further keyword arguments of ``agree``, as text.
        prepared: lines of ``inputs`` that make what the arguments have in common.
        is_default: whether floating numbers without a type are of ``real``, too.
        definitions: classes that the module is made of.
    """

    seed: int
    arguments: tuple[Argument, ...]
    initial: tuple[str, ...]
    body: tuple[str, ...]
    returns: str
    sizes: tuple[tuple[int, int], ...]
    real: str = "float64"
    training: bool = True
    settings: str = ""
    prepared: tuple[str, ...] = ()
    is_default: bool = False
    definitions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A file with a test in it."""
        given = ", ".join(
            [f"seed={self.seed}", f"training={self.training}", *([self.settings] if self.settings else [])]
        )
        test = f"agree(Written, inputs, {list(self.sizes)}, {given})"
        return "\n".join(
            [
                HEAD.format(real=self.real),
                *(f"\n{text}" for text in self.definitions),
                "\nclass Written(nn.Module):",
                "    def __init__(self):",
                indented(["super().__init__()", *self.initial]),
                f"\n    def forward({', '.join(['self', *self._parameters()])}):",
                indented([*self.body, f"return {self.returns}"]),
                "\n\ndef inputs(B, L):",
                indented([*self.prepared, f"return {self._inputs()}"], 4),
                f"\n\ndef test_seed_{self.seed}():",
                indented([f"with default_type(REAL):\n    {test}" if self.is_default else test, ""], 4),
            ]
        )

    def _parameters(self) -> list[str]:
        return [a.name for a in self.arguments if not a.is_keyword] + [
            f"{a.name}=None" for a in self.arguments if a.is_keyword
        ]

    def _inputs(self) -> str:
        """An expression of a tuple and a dictionary."""
        places = "".join(f"{a.value}, " for a in self.arguments if not a.is_keyword)
        names = ", ".join(f'"{a.name}": {a.value}' for a in self.arguments if a.is_keyword)
        return f"({places}), {{{names}}}"


def load(text: str, name: str) -> dict[str, Any]:
    """What a program's text defines; its lines can be read by that name of a file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("random_program")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(text, name, "exec"), vars(module))
    return vars(module)


def indented(lines: Sequence[str], by: int = 8) -> str:
    """Lines and texts of several lines, moved to the right."""
    return textwrap.indent("\n".join(lines), " " * by)
