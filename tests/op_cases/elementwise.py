"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, at, distinct, exactly, flag, positive, x


def _unary() -> list[Case]:
    plain = {
        "Neg": torch.neg, "Exp": torch.exp, "Sin": torch.sin, "Cos": torch.cos, "Erf": torch.erf, "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid, "Softplus": F.softplus, "Softsign": F.softsign, "Identity": lambda a: a,
        "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Mish": F.mish,
    }  # fmt: skip
    kinked = {
        "Abs": torch.abs, "Relu": F.relu, "LeakyRelu": F.leaky_relu, "Elu": F.elu, "HardSwish": F.hardswish,
        "HardSigmoid": lambda a: (0.2 * a + 0.5).clamp(0, 1), "Gelu": F.gelu,
    }  # fmt: skip
    above = {"Log": torch.log, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal}
    rows = [Case(op, (x(3, 4),), f) for op, f in plain.items()]
    rows += [Case(op, (distinct(3, 4),), f) for op, f in kinked.items()]
    rows += [Case(op, (positive(3, 4),), f) for op, f in above.items()]
    inside = {"Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atanh": torch.atanh}
    rows += [Case(op, (x(3, 4, low=-0.9, high=0.9),), f) for op, f in inside.items()]
    rows.append(Case("Acosh", (x(3, 4, low=1.1, high=3.0),), torch.acosh))
    rows += [
        Case("Gelu", (x(3, 4),), lambda a: F.gelu(a, approximate="tanh"), {"approximate": "tanh"}, label="tanh"),
        Case("LeakyRelu", (distinct(3, 4),), lambda a: F.leaky_relu(a, 0.3), {"alpha": 0.3}, label="alpha"),
        Case("Elu", (distinct(3, 4),), lambda a: F.elu(a, 0.7), {"alpha": 0.7}, label="alpha"),
        Case("Silu", (x(3, 4),), F.silu, domain=DOMAIN),
        Case("Log1p", (exactly(np.array([-0.9, -1e-9, 0.0, 1e-9, 0.4, 3.0, 1e4])),), torch.log1p, domain=DOMAIN),
        Case("Expm1", (exactly(np.array([-60.0, -0.6, -1e-9, 0.0, 1e-9, 0.4, 3.0])),), torch.expm1, domain=DOMAIN),
        Case("Erfc", (exactly(np.array([-3.0, -0.5, 0.0, 0.9, 1.1, 2.0, 4.0])),), torch.erfc, domain=DOMAIN),
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


def _activations() -> list[Case]:
    alpha, gamma = 1.67326319217681884765625, 1.05070102214813232421875  # ONNX's defaults, float32 numbers
    ends = at(-3.0, -2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.5, 3.0)
    sixth = {"alpha": 1 / 6, "beta": 0.5}
    functions: dict[str, tuple[Callable[..., Tensor], dict[str, float]]] = {
        "Relu": (F.relu, {}), "Abs": (torch.abs, {}), "LeakyRelu": (F.leaky_relu, {}), "Softsign": (F.softsign, {}),
        "Elu": (lambda a: F.elu(a, 0.7), {"alpha": 0.7}), "Celu": (lambda a: F.celu(a, 0.5), {"alpha": 0.5}),
        "Selu": (lambda a: gamma * F.elu(a, alpha), {}), "HardSwish": (F.hardswish, {}),
        "HardSigmoid": (lambda a: torch.where(a.abs() < 3, a / 6 + 0.5, 0.5 + 0.5 * a.sign()), sixth), "ThresholdedRelu": (lambda a: F.threshold(a, 1.0, 0.0), {}),
        "Shrink": (F.hardshrink, {}), "Mish": (F.mish, {}),
    }  # fmt: skip
    rows = [Case(op, (ends,), f, a, label="kinks") for op, (f, a) in functions.items()]
    return [
        *rows,
        Case("Celu", (distinct(3, 4),), F.celu),
        Case("Selu", (distinct(3, 4),), lambda a: 1.25 * F.elu(a, 0.75), {"alpha": 0.75, "gamma": 1.25}, label="own"),
        Case("HardSigmoid", (at(-2.5, -1.0, 0.0, 2.5, 3.0),), lambda a: a * 0.0 + 0.5, {"alpha": 0.0}, label="flat"),
        Case("HardSigmoid", (distinct(3, 4),), lambda a: (0.5 - 0.4 * a).clamp(0, 1), {"alpha": -0.4}, label="falling"),
        Case("ThresholdedRelu", (distinct(3, 4),), lambda a: F.threshold(a, -0.6, 0.0), {"alpha": -0.6}, label="negative"),
        Case("Shrink", (at(-2.0, -0.75, -0.5, 0.0, 0.75, 1.5),), lambda a: F.softshrink(a, 0.75),
             {"lambd": 0.75, "bias": 0.75}, label="soft"),
        Case("Swish", (x(3, 4),), F.silu, opset=24),
        Case("Swish", (x(3, 4),), lambda a: a * (1.75 * a).sigmoid(), {"alpha": 1.75}, label="alpha", opset=24),
        Case("SwiGLU", (x(3, 4), x(3, 4)), lambda a, b: F.silu(a) * b, opset=28),
        Case("SwiGLU", (x(3, 4), x(3, 4)), lambda a, b: a * (0.5 * a).sigmoid() * b, {"alpha": 0.5}, label="alpha", opset=28),
        Case("Softplus", (at(-40.0, -1.0, 0.0, 19.0, 21.0, 60.0),), F.softplus, label="large"),
        Case("Mish", (at(-40.0, -1.0, 0.0, 19.0, 21.0, 60.0),), F.mish, label="large"),
        Case("Gelu", (at(-9.0, -1.0, 0.0, 1.0, 9.0),), F.gelu, label="large"),
        Case("Sqrt", (at(0.0, 0.25, 4.0),), torch.sqrt, label="zero"),
        *(Case("PRelu", (distinct(2, 3, 4), x(*s)), lambda a, w: torch.where(a < 0, a * w, a), label=n) for n, s in _SLOPES),
        Case("PRelu", (at(-1.0, 0.0, 1.0), at(0.3)), F.prelu, label="kink"),
        Case("Hardmax", (distinct(3, 4),), lambda a: F.one_hot(a.argmax(-1), 4).to(a.dtype), differentiable=False),
        Case("Hardmax", (at([1.0, 1.0, 0.0], [0.0, 2.0, 2.0]),), lambda a: torch.tensor([[1, 1, 0], [0, 1, 1]]).to(a.dtype)
             * torch.tensor([[1, 0, 0], [0, 1, 0]]).to(a.dtype), label="ties", differentiable=False),
    ]  # fmt: skip


_SLOPES = [("scalar", ()), ("one", (1,)), ("channel", (3, 1)), ("full", (2, 3, 4)), ("outer", (2, 1, 1))]


def _even(name: str) -> Callable[..., Tensor]:
    """The extreme of operands of one shape; torch's amax and amin share the gradient evenly among equals."""
    return lambda *a: getattr(torch.stack(torch.broadcast_tensors(*a)), name)(0)


def _clipped(a: torch.Tensor) -> torch.Tensor:
    """Between -0.5 and 0.7; elements at a bound keep their gradient, which torch's clamp takes from them since 2.15."""
    return torch.where(a < -0.5, -0.5, torch.where(a > 0.7, 0.7, a))


def _ties() -> list[Case]:
    a, b, c = at([1.0, 2.0, 3.0], [0.0, -1.0, 5.0]), at(1.0, 2.0, -1.0), at([1.0], [5.0])
    bounds = at(-0.5, 0.7, 0.0, -0.6, 0.8)
    return [
        *(Case(op, (a, b), _even(f), label="ties") for op, f in (("Max", "amax"), ("Min", "amin"))),
        *(Case(op, (a, b, c), _even(f), label="three-ties") for op, f in (("Max", "amax"), ("Min", "amin"))),
        *(Case(op, (x(3, 4),), lambda a: a * 1.0, label="single") for op in ("Max", "Min", "Sum", "Mean")),
        Case("Min", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: torch.minimum(torch.minimum(a, b), c), label="three"),
        Case("Clip", (bounds, np.array(-0.5), np.array(0.7)), _clipped, label="bounds"),
        Case("Clip", (distinct(3, 4), exactly(np.array(-0.5)), exactly(np.array(0.7))), torch.clamp, label="learned"),
        Case("Clip", (distinct(3, 4), exactly(np.array(0.7)), exactly(np.array(-0.5))), torch.clamp, label="crossed"),
        Case("Clip", (distinct(3, 4), exactly(np.array(-0.5))), torch.clamp, label="below"),
        Case("Clip", (distinct(3, 4),), lambda a: a * 1.0, label="open"),
        Case("Where", (flag(2, 3, 1), x(), x(3, 4)), torch.where, label="scalar"),
        Case("Mod", (distinct(3, 4), positive(4)), torch.fmod, {"fmod": 1}, label="tensor"),
        Case("Mod", (x(3, 4, low=-9.0, high=9.0), x(3, 1, low=-1.5, high=-0.5)), torch.fmod, {"fmod": 1}, label="negative"),
        Case("Mean", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: (a + b + c) / 3),
    ]  # fmt: skip


def _powers() -> list[Case]:
    bases = at(-1.5, -1.0, 0.0, 0.5, 2.0)
    exponents = {"zero": 0.0, "one": 1.0, "minus-one": -1.0, "minus-two": -2.0, "half": 0.5, "four": 4.0}
    rows = [
        Case(
            "Pow",
            (at(0.5, 2.0, 1.0) if e == 0.5 else at(-1.5, -1.0, 0.5, 2.0), np.array(e)),
            lambda a, e=e: a**e,
            label=n,
        )
        for n, e in exponents.items()
    ]
    return [
        *rows,
        *(
            Case("Pow", (bases, np.array(e)), lambda a, e=e: a**e, label=f"zero-base-{e}")
            for e in (0.0, 0.5, 1.0, 2.0, 3.0)
        ),
        Case("Pow", (bases, np.array(3, np.int64)), lambda a: a**3, label="integer"),
        Case("Pow", (bases, at([0.0], [1.0], [2.0], [3.0])), torch.pow, label="whole-exponents"),
        Case("Pow", (at(0.0, 0.0, 0.0, 0.0), at(0.0, 0.5, 1.0, 2.5)), torch.pow, label="zero-base-tensor"),
        Case("Pow", (at(-2.0, -0.5), at(2.0, -3.0)), torch.pow, label="negative-base"),
        Case("Pow", (positive(2, 1, 4), x(3, 1)), torch.pow, label="broadcast"),
        Case("Pow", (exactly(np.array(2.0)), x(3, 4)), torch.pow, label="scalar-base"),
    ]


def _integers() -> list[Case]:
    a, b = np.array([[1, 2, 255], [7, 128, 3]], np.uint8), np.array([1, 3, 7], np.uint8)

    def bits(op: str, function: Callable[..., Tensor], **attributes: str) -> Case:
        label = attributes.get("direction", "").lower()
        return Case(op, (exactly(a), exactly(b)), function, attributes, label=label, differentiable=False)

    return [
        bits("BitShift", torch.bitwise_left_shift, direction="LEFT"),
        bits("BitShift", torch.bitwise_right_shift, direction="RIGHT"),
        bits("BitwiseAnd", torch.bitwise_and), bits("BitwiseOr", torch.bitwise_or), bits("BitwiseXor", torch.bitwise_xor),
        Case("BitwiseNot", (exactly(a),), torch.bitwise_not, differentiable=False),
        Case("Mod", (exactly(np.array([-7, 7, 5])), exactly(np.array([3, -3, 3]))), torch.remainder, label="integer",
             differentiable=False),
        *(
            Case("IsInf", (at(math.inf, -math.inf, math.nan, 1.0),), f, {"detect_negative": n, "detect_positive": p},
                 label=f"{n}{p}", differentiable=False)
            for n, p, f in ((1, 1, torch.isinf), (1, 0, torch.isneginf), (0, 1, torch.isposinf))
        ),
        Case("IsNaN", (at(math.inf, math.nan, 1.0),), torch.isnan, label="nan", differentiable=False),
    ]  # fmt: skip


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


CASES = [*_unary(), *_activations(), *_binary(), *_ties(), *_powers(), *_integers()]
