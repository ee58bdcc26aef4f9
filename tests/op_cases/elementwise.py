"""Elementwise operators."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, distinct, flag, positive, x


def _unary() -> list[Case]:
    plain = {
        "Neg": torch.neg, "Exp": torch.exp, "Sin": torch.sin, "Cos": torch.cos, "Erf": torch.erf, "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid, "Softplus": F.softplus, "Softsign": F.softsign, "Identity": lambda a: a,
    }  # fmt: skip
    kinked = {
        "Abs": torch.abs, "Relu": F.relu, "LeakyRelu": F.leaky_relu, "Elu": F.elu, "HardSwish": F.hardswish,
        "HardSigmoid": lambda a: (0.2 * a + 0.5).clamp(0, 1), "Gelu": F.gelu,
    }  # fmt: skip
    above = {"Log": torch.log, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal}
    rows = [Case(op, (x(3, 4),), f) for op, f in plain.items()]
    rows += [Case(op, (distinct(3, 4),), f) for op, f in kinked.items()]
    rows += [Case(op, (positive(3, 4),), f) for op, f in above.items()]
    rows += [
        Case("Gelu", (x(3, 4),), lambda a: F.gelu(a, approximate="tanh"), {"approximate": "tanh"}, label="tanh"),
        Case("LeakyRelu", (distinct(3, 4),), lambda a: F.leaky_relu(a, 0.3), {"alpha": 0.3}, label="alpha"),
        Case("Elu", (distinct(3, 4),), lambda a: F.elu(a, 0.7), {"alpha": 0.7}, label="alpha"),
        Case("Silu", (x(3, 4),), F.silu, domain=DOMAIN),
        Case("Detach", (x(3, 4),), lambda a: a.detach(), domain=DOMAIN, differentiable=False),
        Case("Softmax", (x(3, 4, 5),), lambda a: F.softmax(a, -1)),
        Case("Softmax", (x(3, 4, 5),), lambda a: F.softmax(a, 1), {"axis": 1}, label="axis1"),
        Case("LogSoftmax", (x(3, 4, 5),), lambda a: F.log_softmax(a, -1)),
        Case("LogSoftmax", (x(3, 4, 5),), lambda a: F.log_softmax(a, 1), {"axis": 1}, label="axis1"),
        Case("Clip", (distinct(3, 4), np.array(-0.5), np.array(0.7)), lambda a: a.clamp(-0.5, 0.7)),
        Case("Clip", (distinct(3, 4), None, np.array(0.7)), lambda a: a.clamp(max=0.7), label="above"),
        Case("Cast", (x(3, 4),), lambda a: a.float(), {"to": 1}, label="float", differentiable=False),
        Case("Cast", (x(3, 4),), lambda a: a.double(), {"to": 11}, label="double"),
        Case("CastLike", (x(3, 4), x(2, 2)), lambda a, b: a + 0 * b.sum()),
        Case("Dropout", (x(3, 4), np.array(0.3), np.array(False)), lambda a: a),
    ]
    stops = {
        "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
        "IsNaN": torch.isnan, "IsInf": torch.isinf,
    }  # fmt: skip
    rows += [Case(op, (distinct(3, 4),), f, differentiable=False) for op, f in stops.items()]
    rows.append(Case("Not", (flag(3, 4),), torch.logical_not, differentiable=False))
    return rows


def _binary() -> list[Case]:
    shapes = {"same": ((3, 4), (3, 4)), "broadcast": ((2, 3, 4), (3, 1)), "scalar": ((3, 4), ())}
    plain = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul}
    rows = [Case(op, (x(*a), x(*b)), f, label=n) for op, f in plain.items() for n, (a, b) in shapes.items()]
    rows += [Case("Div", (x(*a), positive(*b)), torch.div, label=n) for n, (a, b) in shapes.items()]
    rows += [
        Case("Pow", (x(3, 4), np.array(2.0)), lambda a: a**2, label="square"),
        Case("Pow", (x(3, 4), np.array(3.0)), lambda a: a**3, label="cube"),
        Case("Pow", (positive(3, 4), np.array(-0.5)), lambda a: a**-0.5, label="root"),
        Case("Pow", (positive(3, 4), x(4)), torch.pow, label="tensor"),
        Case("Mod", (distinct(3, 4), np.array(0.7)), lambda a: torch.fmod(a, 0.7), {"fmod": 1}),
        Case("Max", (distinct(3, 4), x(4)), torch.maximum),
        Case("Min", (distinct(3, 4), x(4)), torch.minimum),
        Case("Max", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: torch.maximum(torch.maximum(a, b), c), label="three"),
        Case("Sum", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: a + b + c),
        Case("Where", (flag(3, 4), x(3, 4), x(4)), torch.where),
        Case("Where", (flag(3, 1), x(1, 4), x(3, 4)), torch.where, label="broadcast"),
        Case("PRelu", (distinct(3, 4), x(4)), lambda a, s: torch.where(a < 0, a * s, a)),
    ]
    comparisons = {
        "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    }  # fmt: skip
    rows += [Case(op, (x(3, 4), x(4)), f, differentiable=False) for op, f in comparisons.items()]
    logic = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
    rows += [Case(op, (flag(3, 4), flag(4)), f, differentiable=False) for op, f in logic.items()]
    return rows


CASES = [*_unary(), *_binary()]
