"""Kinks, special numbers and integers of elementwise operators; operators without a gradient rule."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from op_table import Case, distinct, flag, index, positive, special, ties, x

from onnxtrain.ir.graphs import DOMAIN


def _kinks() -> list[Case]:
    """At the kinks themselves our choice is torch's."""
    six = ties(3, 10, low=-3.0, high=3.0)
    return [
        Case("Relu", (ties(3, 10),), F.relu, label="ties"),
        Case("LeakyRelu", (ties(3, 10),), F.leaky_relu, label="ties"),
        Case("Elu", (ties(3, 10),), F.elu, label="ties"),
        Case("Abs", (ties(3, 10),), torch.abs, label="ties"),
        Case("HardSwish", (six,), F.hardswish, label="ties"),
        Case("HardSigmoid", (six,), lambda a: F.hardsigmoid(a), {"alpha": 1 / 6}, label="ties"),
        Case("Clip", (ties(3, 10), np.array(-1.0), np.array(1.0)), lambda a: a.clamp(-1, 1), label="ties"),
        Case("Clip", (ties(3, 10), np.array(-1.0)), lambda a: a.clamp(min=-1), label="below"),
        Case("Clip", (x(3, 4),), lambda a: a + 0, label="unbounded"),
        Case("Max", (ties(3, 10), ties(3, 10)), torch.maximum, label="ties"),
        Case("Min", (ties(3, 10), ties(3, 10)), torch.minimum, label="ties"),
        Case("Max", (x(3, 4),), lambda a: a + 0, label="one"),
        Case("PRelu", (ties(3, 10), x(1)), lambda a, s: F.prelu(a, s), label="ties"),
        Case("Softplus", (x(3, 4, low=-30.0, high=30.0),), F.softplus, label="wide"),
        Case("Sigmoid", (x(3, 4, low=-90.0, high=90.0),), torch.sigmoid, label="wide"),
        Case("Silu", (x(3, 4, low=-90.0, high=90.0),), F.silu, domain=DOMAIN, label="wide"),
        Case("Gelu", (x(3, 4, low=-9.0, high=9.0),), F.gelu, label="wide"),
        Case("Round", (ties(3, 10, low=-1.0, high=1.0),), torch.round, label="halves", differentiable=False),
        Case("Sign", (ties(3, 10),), torch.sign, label="ties", differentiable=False),
    ]


def _powers() -> list[Case]:
    """Exponents where x^(e-1) is not defined at 0."""
    given = ties(3, 10)
    rows = [
        Case("Pow", (given, np.array(float(e))), lambda a, e=e: a**e, label=f"ties-{e}")
        for e in (0, 1, 2, 3)
    ]  # fmt: skip
    return [
        *rows,
        Case("Pow", (positive(3, 4), np.array([1.5])), lambda a: a**1.5, label="vector"),
        Case("Pow", (x(3, 4), np.array(2)), lambda a: a**2, label="integer-exponent"),
        Case("Pow", (positive(3, 1), x(2, 1, 4)), torch.pow, label="broadcast"),
        Case("Pow", (ties(3, 10, low=0.0, high=2.0), positive(3, 10)), torch.pow, label="zero-base"),
        Case("Mod", (distinct(3, 4), positive(4)), torch.fmod, {"fmod": 1}, label="tensor"),
    ]


def _types() -> list[Case]:
    """Integers and casts: what models compute sizes and masks with."""
    a, b = index(3, 4, low=-9, high=9), index(4, low=1, high=5)
    truncated = {"rounding_mode": "trunc"}
    integer = {
        "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": lambda p, q: torch.div(p, q, **truncated),
        "Max": torch.maximum, "Min": torch.minimum, "Equal": torch.eq, "Less": torch.lt, "Mod": torch.remainder,
    }  # fmt: skip
    rows = [Case(op, (a, b), f, label="integers", differentiable=False) for op, f in integer.items()]
    rows += [
        Case("Mod", (a, b), torch.fmod, {"fmod": 1}, label="integers-fmod", differentiable=False),
        Case("Neg", (a,), torch.neg, label="integers", differentiable=False),
        Case("Abs", (a,), torch.abs, label="integers", differentiable=False),
        Case("Where", (flag(3, 4), a, b), torch.where, label="integers", differentiable=False),
        Case("Clip", (a, np.array(-2), np.array(3)), lambda p: p.clamp(-2, 3), label="integers", differentiable=False),
        Case("Cast", (x(3, 4),), lambda p: p.long(), {"to": 7}, label="int64", differentiable=False),
        Case("Cast", (x(3, 4),), lambda p: p.int(), {"to": 6}, label="int32", differentiable=False),
        Case("Cast", (ties(3, 10),), lambda p: p.bool(), {"to": 9}, label="bool", differentiable=False),
        Case("Cast", (flag(3, 4),), lambda p: p.float(), {"to": 1}, label="of-bool", differentiable=False),
        Case("Cast", (a,), lambda p: p.float(), {"to": 1}, label="of-integers", differentiable=False),
        Case("CastLike", (x(3, 4), index(2, high=3)), lambda p, q: p.long(), label="int64", differentiable=False),
        Case("IsNaN", (special(3, 4),), torch.isnan, label="special", differentiable=False),
        Case("IsInf", (special(3, 4),), torch.isinf, label="special", differentiable=False),
        Case("IsInf", (special(3, 4),), torch.isposinf, {"detect_negative": 0}, label="positive", differentiable=False),
        Case("IsInf", (special(3, 4),), torch.isneginf, {"detect_positive": 0}, label="negative", differentiable=False),
        Case("Dropout", (x(3, 4),), lambda p: p + 0, label="inference"),
        Case("Dropout", (x(3, 4), np.array(0.0), np.array(True)), lambda p: p + 0, label="ratio-0"),
        Case("Detach", (index(3, 4, high=5),), lambda p: p, domain=DOMAIN, label="integers", differentiable=False),
    ]  # fmt: skip
    return rows


def _without_rule() -> list[Case]:
    """Operators that the torch backend runs and that have no gradient rule yet."""
    plain = {
        "Tan": torch.tan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Atan": torch.atan, "Asinh": torch.asinh,
        "Mish": F.mish,
    }  # fmt: skip
    inside = {"Asin": torch.asin, "Acos": torch.acos, "Atanh": torch.atanh}
    rows = [Case(op, (x(3, 4, low=-1.4, high=1.4),), f, differentiable=False, missing=True) for op, f in plain.items()]
    rows += [
        Case(op, (x(3, 4, low=-0.9, high=0.9),), f, differentiable=False, missing=True) for op, f in inside.items()
    ]
    rows.append(Case("Acosh", (x(3, 4, low=1.1, high=3.0),), torch.acosh, differentiable=False, missing=True))
    bits = {"BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor}
    both = (index(3, 4, high=64), index(4, high=64))
    rows += [Case(op, both, f, differentiable=False) for op, f in bits.items()]
    rows.append(Case("BitwiseNot", both[:1], torch.bitwise_not, differentiable=False))
    return rows


ROWS = [*_kinks(), *_powers(), *_types(), *_without_rule()]
