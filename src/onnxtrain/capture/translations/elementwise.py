"""Functions whose formula in torch.onnx is less exact than torch's, which stay whole, and one that it does not know."""

from __future__ import annotations

import onnx_ir as ir
import torch

from onnxtrain.capture.nodes import op
from onnxtrain.capture.translations import like, translation, whole

aten = torch.ops.aten


@translation(round)
def rounded(x, digits=None):
    """The whole number nearest to a number that a tensor holds, of two the even one."""
    if digits is not None:
        raise NotImplementedError("digits")
    return op.Cast(op.Round(x), to=int(ir.DataType.INT64))


@translation(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(x, y):
    """Of floating numbers by the exact remainder of truncated division, which has the sign of x."""
    y = y if isinstance(y, ir.Value) and y.dtype is not None else like(y, x)
    if not x.dtype.is_floating_point():
        return op.Mod(x, y)
    left = op.Mod(x, y, fmod=1)
    zero = like(0, x)
    turns = op.And(op.Not(op.Equal(left, zero)), op.Xor(op.Less(left, zero), op.Less(y, zero)))
    return op.Where(turns, op.Add(left, y), left)


@whole(aten.special_log_ndtr.default)
def has_tails(node: torch.fx.Node) -> bool:
    """The formula is the logarithm of a distribution function that has become 0 in its tail."""
    return True


@whole(aten.selu.default, aten.celu.default, aten.hardsigmoid.default)
def has_numbers_in_double(node: torch.fx.Node) -> bool:
    """The numbers of the formula are attributes, and ONNX keeps these in float32."""
    return node.meta["val"].dtype == torch.float64
