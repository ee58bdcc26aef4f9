"""Our operators of neural network layers: fused forms and their gradients."""
# ruff: noqa: ANN001, ANN201, ANN202, F821, N802

from __future__ import annotations

from onnxscript import opset20 as op

from onnxtrain.ir.functions import function


@function(like=(1, 2, 2))
def LayerNormalizationGrad(dy, x, scale, mean, inv_std, axis: int = -1):
    """Gradient of LayerNormalization from its saved mean and inverse standard deviation: dx, dscale, dbias."""
    xn = (x - mean) * inv_std
    g = dy * scale
    axes = op.Range(op.Cast(axis, to=7), op.Size(op.Shape(x)), op.Constant(value_int=1))
    n = op.Cast(axis, to=7)
    return xn, g, dy


@function(like=(0,))
def Detach(x):
    """The identity through which no gradient flows (torch's ``detach``)."""
    return op.Identity(x)
