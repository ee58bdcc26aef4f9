"""Statements made of templates: ``{f}.cumsum({axis})`` and what stands for its braces.

A tensor: ``{f}`` floating, ``{f3}`` of three axes, ``{i}`` integer, ``{b}`` boolean, ``{t}`` any, ``{w}`` one that
was computed, or sometimes given (to be changed in place), ``{s}`` floating of the shape of the first, ``{0}`` the
first again, ``{1}`` the second. A number: ``{axis}`` of the first, ``{k}`` small, ``{p}`` small and positive, ``{c}``
a constant, ``{n}`` made of sizes. ``{d}``, ``{d1}`` are the first's last and second size, where all calls agree;
``{m}`` is a mask and ``{idx}`` are indices. ``{o}``, ``{o2}`` are new names; ``{layer}`` is an attribute that
``initial`` makes, ``{name}`` its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fuzz.modules.scenes import Known, Scenes, Unusable

_TOKEN = re.compile(r"\{(\w+)\}")
CONSTANTS = ("0.5", "2.0", "-1.5", "0.1", "1e-3", "3", "1", "-2", "math.pi")
NUMBERS = (
    "{t}.shape[{axis}]", "{0}.size({axis})", "{0}.shape[{axis}] // 2", "max(1, {0}.shape[{axis}] - 1)", "len({0})",
    "{0}.size({axis}) + {p}", "(x.shape[0] + 1) // 2", "min({0}.shape[{axis}], {p})", "x.numel()", "{0}.dim()",
    "2 * x.shape[0]", "-(-{0}.shape[{axis}] // 2)",
)  # fmt: skip
MASKS = (
    "({f} > {c})", "{b}", "({f} < 0)", "({i} == {p})", "({i} != {k})", "({f} >= {f}.mean())", "torch.isfinite({f})",
    "(torch.arange({n}) < {n})", "torch.ones({n}, {n}).tril().bool()", "({f}.abs() > {c})",
)  # fmt: skip
INDICES = (
    "{i}", "({i} % {p})", "torch.arange({n})", "torch.tensor([0, {k}])", "torch.zeros({n}, dtype=torch.long)",
    "({f} > 0).long()", "{f}.argmax({axis})", "(torch.arange({n}) // 2)", "{f}.argsort({axis})",
)  # fmt: skip


def _is_value(text: str) -> bool:
    """Whether a statement is an expression that changes nothing."""
    try:
        first = ast.parse(text).body[0]
    except SyntaxError as error:
        raise Unusable(str(error)) from error
    if not isinstance(first, ast.Expr):
        return False
    called = first.value.func if isinstance(first.value, ast.Call) else None
    return not (isinstance(called, ast.Attribute) and called.attr.endswith("_"))


class Filler:
    """Fills templates with what the scenes hold.

    Args:
        scenes: the program so far.
        rng: chooses.
        reach: how many of the newest tensors are likely to be read.
    """

    def __init__(self, scenes: Scenes, rng: np.random.Generator, reach: float = 3) -> None:
        self.scenes, self.rng, self.reach = scenes, rng, reach
        self._count = 0

    def fill(self, template: str, initial: Sequence[str] = ()) -> tuple[str, list[str]]:
        """The statement and the lines of ``__init__``.

        Raises:
            Unusable: nothing there fits.
        """
        self.operands: list[str] = []
        self.made: dict[str, str] = {}
        text = self._filled(template)
        if _is_value(text):
            text = f"{self._new('o')} = {text}"
        return text, [self._filled(line) for line in initial]

    def _filled(self, template: str) -> str:
        return _TOKEN.sub(lambda found: self._token(found.group(1)), template)

    def _token(self, name: str) -> str:
        if name.isdigit():
            return self._operand(int(name))
        if re.fullmatch(r"o\d?|layer\d?", name):
            return self._new(name)
        if re.fullmatch(r"[fibtws]\d?", name):
            return self._tensor(name)
        return _NUMBERS[name](self)

    def _operand(self, place: int) -> str:
        if place >= len(self.operands):
            raise Unusable("there is no such operand")
        return self.operands[place]

    def _new(self, token: str) -> str:
        """The same name each time in one statement."""
        if token not in self.made:
            self._count += 1
            self.made[token] = f"v{self._count}" if token[0] == "o" else f"self.layer{self._count}"
        return self.made[token]

    def _tensor(self, token: str) -> str:
        fits = _FITS[token[0]]
        names = [
            n for n, k in self.scenes.known.items() if fits(self, n, k) and (len(token) < 2 or k.rank == int(token[1]))
        ]
        if not names:
            raise Unusable("there is no such tensor")
        chosen = names[max(0, len(names) - 1 - int(self.rng.exponential(self.reach)))]
        self.operands.append(chosen)
        return chosen

    def is_like_the_first(self, known: Known) -> bool:
        """Whether it has the shape of the first operand."""
        return bool(self.operands) and known.shapes == self.scenes.known[self.operands[0]].shapes

    def may_be_changed(self, name: str) -> bool:
        """Whether a tensor was computed; sometimes one that was given too."""
        return name.startswith("v") or self.rng.random() < 0.2

    def choose(self, texts: Sequence[str]) -> str:
        """One of some texts."""
        return str(texts[int(self.rng.integers(len(texts)))])

    def axis(self) -> str:
        """An axis of the first operand, from either end."""
        rank = self.scenes.known[self._operand(0)].rank
        return str(int(self.rng.integers(-rank, max(rank, 1))))

    def static(self, axis: int) -> str:
        """A size of the first operand, as a number."""
        known = self.scenes.known[self._operand(0)]
        if known.rank < 2 and axis > 0:
            raise Unusable("there is no such axis")
        return str(known.static(axis))

    def nested(self, texts: Sequence[str]) -> str:
        """One of some templates, filled; its operands are not the statement's."""
        kept, self.operands = self.operands, []
        text = self._filled(self.choose(texts))
        self.operands = kept
        return text

    def number(self) -> str:
        """A number made of sizes."""
        if self.scenes.numbers and self.rng.random() < 0.4:
            return self.choose(self.scenes.numbers)
        return self.nested(NUMBERS)


_FITS: dict[str, Callable[[Filler, str, Known], bool]] = {
    "f": lambda filler, name, known: known.dtype.is_floating_point,
    "i": lambda filler, name, known: known.dtype in (torch.int64, torch.int32),
    "b": lambda filler, name, known: known.dtype == torch.bool,
    "t": lambda filler, name, known: True,
    "w": lambda filler, name, known: known.dtype.is_floating_point and filler.may_be_changed(name),
    "s": lambda filler, name, known: known.dtype.is_floating_point and filler.is_like_the_first(known),
}
_NUMBERS: dict[str, Callable[[Filler], str]] = {
    "name": lambda filler: filler.made["layer"].removeprefix("self."),
    "axis": Filler.axis,
    "k": lambda filler: str(int(filler.rng.integers(-4, 7))),
    "p": lambda filler: str(int(filler.rng.integers(1, 4))),
    "c": lambda filler: filler.choose(CONSTANTS),
    "n": Filler.number,
    "d": lambda filler: filler.static(-1),
    "d1": lambda filler: filler.static(1),
    "m": lambda filler: filler.nested(MASKS),
    "idx": lambda filler: filler.nested(INDICES),
}
