"""Arithmetic, comparisons and selections, of tensors and of sizes: mostly one node each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import like, translation

aten = torch.ops.aten
_BOOL = ir.DataType.BOOL


def _one_node(op_type: str, *targets: Any) -> None:
    """The operator of ONNX that computes the same of the same operands."""

    def translate(*operands: Any) -> Any:
        return getattr(op, op_type)(*operands)

    translation(*targets)(translate)


for _name, _op_type in (
    ("abs", "Abs"),
    ("ceil", "Ceil"),
    ("cos", "Cos"),
    ("erf", "Erf"),
    ("exp", "Exp"),
    ("floor", "Floor"),
    ("log", "Log"),
    ("neg", "Neg"),
    ("reciprocal", "Reciprocal"),
    ("relu", "Relu"),
    ("sigmoid", "Sigmoid"),
    ("sign", "Sign"),
    ("sin", "Sin"),
    ("sqrt", "Sqrt"),
    ("tanh", "Tanh"),
):
    _one_node(_op_type, getattr(aten, _name).default)
_one_node("Neg", operator.neg)
_one_node("Add", operator.add)
_one_node("Sub", operator.sub)
_one_node("Mul", operator.mul)
_one_node("Mod", operator.mod)
_one_node("Equal", operator.eq)
_one_node("Less", operator.lt)
_one_node("LessOrEqual", operator.le)
_one_node("Greater", operator.gt)
_one_node("GreaterOrEqual", operator.ge)
_one_node("Max", torch.sym_max)
_one_node("Min", torch.sym_min)
_one_node("Not", torch.sym_not)


@translation(operator.floordiv)
def whole_quotient_of_sizes(x, y):
    """One Div where nothing is negative; else first without the remainder: ONNX rounds towards 0, Python down."""
    return op.Div(x, y) if _is_natural(x) and _is_natural(y) else op.Div(op.Sub(x, op.Mod(x, y)), y)


def _is_natural(number: Any) -> bool:
    """Whether a number is 0 or more, as sizes are and what is made of them without a difference."""
    if not isinstance(number, ir.Value):
        return bool(number >= 0)
    if number.const_value is not None:
        return bool((number.const_value.numpy() >= 0).all())
    node = number.producer()
    if node is None or node.op_type not in _NATURAL:
        return False
    return node.op_type == "Shape" or all(_is_natural(x) for x in node.inputs if x is not None)


_NATURAL = ("Shape", "Squeeze", "Add", "Mul", "Div", "Mod", "Max", "Min")


@translation(operator.truediv)
def quotient_of_sizes(x, y):
    """A float, of whole numbers too."""
    return op.Div(op.Cast(x, to=ir.DataType.FLOAT), op.Cast(y, to=ir.DataType.FLOAT))


@translation(torch.sym_float)
def as_float(x):
    """A size as a float."""
    return op.Cast(x, to=ir.DataType.FLOAT)


@translation(math.ceil)
def ceiling(x):
    """The next whole number."""
    return op.Cast(op.Ceil(x), to=ir.DataType.INT64)


@translation(aten.add.Tensor, aten.add.Scalar)
def add(x, y, alpha=1):
    """One Add; of truth values an Or."""
    if _is_true_or_false(x):
        return NotImplemented
    return op.Add(x, _times(y, alpha, x))


@translation(aten.sub.Tensor, aten.sub.Scalar)
def sub(x, y, alpha=1):
    """One Sub."""
    return op.Sub(x, _times(y, alpha, x))


def _times(y: Any, alpha: Any, x: Any) -> Any:
    if isinstance(alpha, int | float) and alpha == 1:
        return y
    return op.Mul(y if isinstance(y, ir.Value) else like(y, x), like(alpha, x))


@translation(aten.rsub.Scalar)
def rsub(x, y, alpha=1):
    """One Sub, the other way round."""
    return op.Sub(like(y, x), _times(x, alpha, x)) if _holds(y, x) else NotImplemented


@translation(aten.mul.Tensor, aten.mul.Scalar)
def mul(x, y):
    """One Mul; of truth values an And."""
    return op.And(x, y) if _is_true_or_false(x) else op.Mul(x, y)


@translation(aten.einsum.default)
def einsum(equation, tensors, path=None):
    """One Einsum."""
    return op.Einsum(*tensors, equation=equation) if isinstance(tensors, list | tuple) else NotImplemented


@translation(aten.div.Tensor, aten.div.Scalar)
def div(x, y):
    """One Div."""
    return op.Div(x, y)


@translation(aten.pow.Tensor_Scalar)
def power(x, exponent):
    """One Pow, with the exponent in the type of the base."""
    return op.Pow(x, like(exponent, x)) if x.dtype.is_floating_point() else NotImplemented


@translation(aten.pow.Tensor_Tensor)
def power_of(x, exponent):
    """One Pow."""
    return op.Pow(x, exponent)


@translation(aten.square.default)
def square(x):
    """The second power."""
    return power(x, 2)


@translation(aten.pow.Scalar)
def power_of_number(base, exponent):
    """One Pow, with the base in the type of the exponent."""
    return op.Pow(like(base, exponent), exponent) if exponent.dtype.is_floating_point() else NotImplemented


@translation(aten.rsqrt.default)
def rsqrt(x):
    """The reciprocal of a root."""
    return op.Reciprocal(op.Sqrt(x))


def _of_numbers(op_type: str) -> Callable[..., Any]:
    def translate(x: Any, y: Any) -> Any:
        return NotImplemented if _is_true_or_false(x) else getattr(op, op_type)(x, y)

    return translate


for _name, _op_type in (("ge", "GreaterOrEqual"), ("gt", "Greater"), ("le", "LessOrEqual"), ("lt", "Less")):
    translation(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_of_numbers(_op_type))
for _name, _op_type in (("max", "Max"), ("min", "Min")):
    translation(getattr(aten, f"{_name}imum").default, getattr(aten, _name).other)(_of_numbers(_op_type))
_one_node("Equal", aten.eq.Tensor, aten.eq.Scalar)


@translation(aten.ne.Tensor, aten.ne.Scalar, operator.ne)
def ne(x, y):
    """Not equal."""
    return op.Not(op.Equal(x, y))


@translation(aten.bitwise_and.Tensor, aten.__and__.Tensor)
def bitwise_and(x, y):
    """Of truth values And, of integers their bits."""
    return op.And(x, y) if _is_true_or_false(x) else op.BitwiseAnd(x, y)


@translation(aten.bitwise_or.Tensor, aten.__or__.Tensor)
def bitwise_or(x, y):
    """Of truth values Or, of integers their bits."""
    return op.Or(x, y) if _is_true_or_false(x) else op.BitwiseOr(x, y)


def _shifted(direction: str) -> Callable[..., Any]:
    def translate(x: Any, y: Any) -> Any:
        """Of numbers without sign; torch.onnx gives them one."""
        return op.BitShift(x, y, direction=direction) if x.dtype == ir.DataType.UINT8 else NotImplemented

    return translate


for _name, _direction in (("lshift", "LEFT"), ("rshift", "RIGHT")):
    _shift = getattr(aten, f"__{_name}__")
    translation(_shift.Scalar, _shift.Tensor)(_shifted(_direction))


@translation(aten.bitwise_not.default)
def bitwise_not(x):
    """Of truth values Not, of integers their bits."""
    return op.Not(x) if _is_true_or_false(x) else op.BitwiseNot(x)


@translation(aten.logical_not.default)
def logical_not(x):
    """What is 0 is true."""
    return op.Not(x if _is_true_or_false(x) else op.Cast(x, to=_BOOL))


@translation(aten.where.self)
def where(condition, x, y):
    """One Where."""
    return op.Where(condition, x, y)


@translation(aten.where.ScalarOther)
def where_else_number(condition, x, y):
    """One Where, with a number in the type of the tensor."""
    return op.Where(condition, x, like(y, x)) if _holds(y, x) else NotImplemented


@translation(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x, mask, value):
    """One Where."""
    return op.Where(mask, like(value, x), x)


def _holds(number: Any, x: Any) -> bool:
    """Whether the type of a tensor is that of the tensor and a number, which may be computed, together."""
    is_whole = number.dtype == ir.DataType.INT64 if isinstance(number, ir.Value) else type(number) is int
    return x.dtype.is_floating_point() or (is_whole and not _is_true_or_false(x))


def _is_true_or_false(x: Any) -> bool:
    return isinstance(x, ir.Value) and x.dtype == _BOOL
