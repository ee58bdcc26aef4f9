"""The equation of an Einsum: one string of letters for each operand and one for the result."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation without ellipses and without an implied result.

    Args:
        operands: the letters of each operand's axes, in order; a letter twice takes the diagonal.
        result: the letters of the result's axes, in order.
    """

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"


def parse(equation: str, ranks: Sequence[int]) -> Equation:
    """Read an equation as ONNX and numpy do; the axes of ellipses get letters of their own, aligned at the end.

    Args:
        equation: such as ``"...ij,...jk->...ik"``; without ``->`` the result has the ellipsis, then all letters
            that occur once, sorted.
        ranks: the number of axes of each operand.

    Raises:
        ValueError: the letters do not fit the ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"the equation {equation!r} has {len(terms)} operands, the node {len(ranks)}")
    named = [term.replace("...", "") for term in terms]
    extra = [rank - len(letters) for rank, letters in zip(ranks, named, strict=True)]
    if any(e < 0 or (e and "..." not in term) for e, term in zip(extra, terms, strict=True)):
        raise ValueError(f"the equation {equation!r} does not fit operands of {list(ranks)} axes")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    most = max((e for e, term in zip(extra, terms, strict=True) if "..." in term), default=0)
    if most > len(free):
        raise ValueError(f"the equation {equation!r} has more axes than there are letters")
    dots = "".join(free[:most])
    filled = tuple(term.replace("...", dots[most - e :]) for term, e in zip(terms, extra, strict=True))
    if arrow:
        return Equation(filled, right.replace("...", dots))
    once = sorted(letter for letter in set("".join(named)) if "".join(named).count(letter) == 1)
    return Equation(filled, dots + "".join(once))
