"""Our operators for activations and their gradients."""

from __future__ import annotations

import math

from onnx import TensorProto, helper

from onnxtrain.ir.functions import function, op


def _exact(number: float) -> TensorProto:
    """A constant in double precision; the bodies cast it to their operand's type."""
    return helper.make_tensor("", TensorProto.DOUBLE, [], [number])


ROOT_HALF = _exact(math.sqrt(0.5))
INVERSE_ROOT_TWO_PI = _exact(1 / math.sqrt(2 * math.pi))
ROOT_TWO_OVER_PI = _exact(math.sqrt(2 / math.pi))
CUBIC = _exact(0.044715)


@function(like=(0,))
def GeluGrad(dy, x):
    """Gradient of the exact Gelu: dy * (Phi(x) + x * phi(x)), Phi and phi of the normal distribution."""
    half = op.CastLike(op.Constant(value_float=0.5), x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    cdf = half * (one + op.Erf(x * op.CastLike(op.Constant(value=ROOT_HALF), x)))
    density = op.CastLike(op.Constant(value=INVERSE_ROOT_TWO_PI), x) * op.Exp(op.Neg(half * x * x))
    return dy * (cdf + x * density)


@function(like=(0,))
def TanhGeluGrad(dy, x):
    """Gradient of the tanh approximation of Gelu: with u = sqrt(2/pi) (x + 0.044715 x^3), y = x (1 + tanh u) / 2."""
    half = op.CastLike(op.Constant(value_float=0.5), x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    three = op.CastLike(op.Constant(value_float=3.0), x)
    factor = op.CastLike(op.Constant(value=ROOT_TWO_OVER_PI), x)
    cubic = op.CastLike(op.Constant(value=CUBIC), x)
    t = op.Tanh(factor * (x + cubic * x * x * x))
    slope = factor * (one + three * cubic * x * x)
    return dy * half * (one + t + x * (one - t * t) * slope)


@function(like=(0,))
def Silu(x):
    """``x * sigmoid(x)``, also called swish."""
    return x * op.Sigmoid(x)


@function(like=(0,))
def SiluGrad(dy, x):
    """Gradient of x * sigmoid(x): dy * s * (1 + x * (1 - s))."""
    s = op.Sigmoid(x)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    return dy * s * (one + x * (one - s))


@function(like=(0,))
def SoftmaxGrad(dy, y, axis: int = -1):
    """Gradient of Softmax from its output: (dy - sum(dy * y)) * y."""
    axes = op.Reshape(op.Constant(value_int=axis), op.Constant(value_ints=[1]))
    return (dy - op.ReduceSum(dy * y, axes, keepdims=1)) * y


@function(like=(0,))
def LogSoftmaxGrad(dy, y, axis: int = -1):
    """Gradient of LogSoftmax from its output: dy - exp(y) * sum(dy)."""
    axes = op.Reshape(op.Constant(value_int=axis), op.Constant(value_ints=[1]))
    return dy - op.Exp(y) * op.ReduceSum(dy, axes, keepdims=1)


@function(like=(0,))
def ReluGrad(dy, y):
    """Gradient of Relu from its output: dy where y > 0."""
    zero = op.CastLike(op.Constant(value_float=0.0), y)
    return op.Where(op.Greater(y, zero), dy, zero)


@function(like=(0,))
def TanhGrad(dy, y):
    """Gradient of Tanh from its output: dy * (1 - y * y)."""
    return dy * (op.CastLike(op.Constant(value_float=1.0), y) - y * y)


@function(like=(0,))
def SigmoidGrad(dy, y):
    """Gradient of Sigmoid from its output: dy * y * (1 - y)."""
    return dy * y * (op.CastLike(op.Constant(value_float=1.0), y) - y)
