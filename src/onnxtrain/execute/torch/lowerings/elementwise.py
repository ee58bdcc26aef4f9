"""Arithmetic, comparison, selection and activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten

_SAME = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Erf": torch.erf,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "HardSwish": F.hardswish,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Not": torch.logical_not,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "IsNaN": torch.isnan,
    "Where": torch.where,
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Mean": lambda *operands: sum(operands[1:], operands[0]) / len(operands),
}
_IN_PLACE = {"Add": Tensor.add_, "Mul": Tensor.mul_}
for _name, _function in _SAME.items():
    lowering(_name, inplace=_IN_PLACE.get(_name))(_function)

_GRADIENTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "GeluGrad": (
        lambda dy, x: aten.gelu_backward(dy, x),
        lambda dy, x: aten.gelu_backward.grad_input(dy, x, grad_input=dy),
    ),
    "TanhGeluGrad": (
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy),
    ),
    "SiluGrad": (aten.silu_backward, lambda dy, x: aten.silu_backward.grad_input(dy, x, grad_input=dy)),
    "ReluGrad": (
        lambda dy, y: aten.threshold_backward(dy, y, 0),
        lambda dy, y: aten.threshold_backward.grad_input(dy, y, 0, grad_input=dy),
    ),
    "TanhGrad": (aten.tanh_backward, lambda dy, y: aten.tanh_backward.grad_input(dy, y, grad_input=dy)),
    "SigmoidGrad": (aten.sigmoid_backward, lambda dy, y: aten.sigmoid_backward.grad_input(dy, y, grad_input=dy)),
}
for _name, (_function, _inplace) in _GRADIENTS.items():
    lowering(_name, domain=DOMAIN, inplace=_inplace)(_function)
for _name, _function in {"Silu": F.silu, "Log1p": torch.log1p, "Expm1": torch.expm1, "Erfc": torch.erfc}.items():
    lowering(_name, domain=DOMAIN)(_function)


@lowering("Identity", view=True)
@lowering("Detach", domain=DOMAIN, view=True)
def identity(x: Tensor) -> Tensor:
    """The same tensor."""
    return x


@lowering("Pow", scalars=(1,))
def power(x: Tensor, exponent: Tensor | float) -> Tensor:
    """A number as exponent stays one: torch takes roots and products of those that have them, which differ at ends."""
    return torch.pow(x, exponent)


@lowering("Div")
def div(a: Tensor, b: Tensor) -> Tensor:
    """Integers are divided towards zero, and by zero as by one: empty tensors have as many elements."""
    if a.is_floating_point():
        return torch.div(a, b)
    return torch.div(a, b.masked_fill(b == 0, 1), rounding_mode="trunc")


@lowering("Mod")
def mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    """The sign follows the divisor; with ``fmod`` the dividend."""
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@lowering("Sum", view=True)
def sum_(*operands: Tensor) -> Tensor:
    """The operands added up."""
    total = operands[0]
    for x in operands[1:]:
        total = total + x
    return total


@lowering("Max", view=True)
def max_(*operands: Tensor) -> Tensor:
    """The largest of the operands, element by element."""
    best = operands[0]
    for x in operands[1:]:
        best = torch.maximum(best, x)
    return best


@lowering("Min", view=True)
def min_(*operands: Tensor) -> Tensor:
    """The smallest of the operands, element by element."""
    best = operands[0]
    for x in operands[1:]:
        best = torch.minimum(best, x)
    return best


@lowering("Clip", view=True)
def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Bounded on the sides that are given."""
    return x if low is None and high is None else torch.clamp(x, low, high)


@lowering("Cast", view=True)
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The same content in another type."""
    return x.to(torch_dtype(to))


@lowering("CastLike", view=True)
def cast_like(x: Tensor, model: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The same content in the model's type."""
    return x.to(model.dtype)


@lowering("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Which elements are infinite, of the signs asked for."""
    if detect_negative and detect_positive:
        return torch.isinf(x)
    return torch.isneginf(x) if detect_negative else torch.isposinf(x)


@lowering("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Exact, or by tanh."""
    return F.gelu(x, approximate=approximate)


@lowering("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """X or alpha · x."""
    return F.leaky_relu(x, alpha)


@lowering("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X or alpha · (exp(x) - 1)."""
    return F.elu(x, alpha)


@lowering("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X or alpha · (exp(x / alpha) - 1)."""
    return F.celu(x, alpha)


@lowering("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    """Gamma times x or alpha · (exp(x) - 1)."""
    return aten.elu(x, alpha, gamma)


@lowering("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X above alpha, 0 elsewhere."""
    return F.threshold(x, alpha, 0.0)


@lowering("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """X moved towards 0 by the bias outside of ±lambd, 0 within."""
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@lowering("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X · sigmoid(alpha · x)."""
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


@lowering("BitShift")
def bit_shift(x: Tensor, by: Tensor, *, direction: str) -> Tensor:
    """Unsigned bits moved, zeros moved in; torch shifts int64, so the sign bit of uint64 is put in by hand."""
    wide, count = x.to(torch.int64), by.to(torch.int64)
    if direction == "LEFT":
        return torch.bitwise_left_shift(wide, count).to(x.dtype)
    moved = torch.bitwise_right_shift(wide, count)
    if x.dtype == torch.uint64:
        filled = torch.bitwise_not(torch.bitwise_left_shift(torch.full_like(count, -2), 63 - count))
        moved = torch.where(count > 0, moved & filled, moved)
    return moved.to(x.dtype)


@lowering("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first of the largest elements along an axis, 0 elsewhere."""
    return torch.zeros_like(x).scatter_(axis, x.argmax(axis, keepdim=True), 1.0)


@lowering("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """alpha · x + beta within 0 and 1."""
    return torch.clamp(x * alpha + beta, 0, 1)


@lowering("Softmax")
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Normalized exponentials along an axis."""
    return torch.softmax(x, axis)


@lowering("LogSoftmax")
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Logarithm of the Softmax."""
    return torch.log_softmax(x, axis)


@lowering("SoftmaxGrad", domain=DOMAIN)
def softmax_grad(dy: Tensor, y: Tensor, *, axis: int = -1) -> Tensor:
    """ATen's fused kernel."""
    return aten._softmax_backward_data(dy, y, axis, y.dtype)


@lowering("LogSoftmaxGrad", domain=DOMAIN)
def log_softmax_grad(dy: Tensor, y: Tensor, *, axis: int = -1) -> Tensor:
    """ATen's fused kernel."""
    return aten._log_softmax_backward_data(dy, y, axis, y.dtype)


@lowering("Dropout", host=(1, 2), view=True)
def dropout(
    x: Tensor, ratio: float | None = None, training: bool | None = None, *, outputs: int = 1, seed: int | None = None
) -> tuple[Tensor, Tensor] | Tensor:
    """Torch's own random numbers, drawn as eager draws them: the same seed gives the same mask."""
    p = 0.5 if ratio is None else ratio
    if not training or p == 0.0:
        return x if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))
    if p == 1.0:  # where eager draws nothing
        mask = torch.zeros_like(x, dtype=torch.bool)
        return x * mask if outputs == 1 else (x * mask, mask)
    y, mask = torch.native_dropout(x, p, True)
    return y if outputs == 1 else (y, mask)


@lowering("DropoutGrad", domain=DOMAIN, host=(2,))
def dropout_grad(dy: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """dy · mask / (1 - ratio)."""
    return aten.native_dropout_backward(dy, mask, 0.0 if ratio == 1.0 else 1.0 / (1.0 - ratio))
