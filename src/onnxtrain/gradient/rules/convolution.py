"""Gradients of convolution, pooling and BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes

Value = ir.Value


def _windows(ctx: Context, spatial: int, auto_pad: str) -> dict[str, Any]:
    """Strides, pads and dilations of a window, defaults filled in."""
    if auto_pad not in ("NOTSET", "VALID"):
        raise ctx.unsupported(f"the gradient of {ctx.node.op_type} with auto_pad {auto_pad}")
    get = shapes.attribute
    return {
        "strides": list(get(ctx.node, "strides") or [1] * spatial),
        "pads": list(get(ctx.node, "pads") or [0] * 2 * spatial),
        "dilations": list(get(ctx.node, "dilations") or [1] * spatial),
    }


@gradient("Conv")
def conv(
    ctx: Context,
    dy: Value,
    x: Value,
    w: Value,
    bias: Value | None = None,
    *,
    group: int = 1,
    auto_pad: str = "NOTSET",
    **_: Any,
) -> Any:
    """One ConvGrad node: dx, dw and dbias."""
    windows = _windows(ctx, shapes.rank(x) - 2, auto_pad)
    return ctx.op.ConvGrad(dy, x, w, outputs=3 if bias is not None else 2, group=group, **windows)


@gradient("MaxPool")
def max_pool(
    ctx: Context, dy: Value, x: Value, *, kernel_shape: Sequence[int], storage_order: int = 0, **_: Any
) -> Any:
    """Dy added at the indices that the forward pass gives."""
    if storage_order:
        raise ctx.unsupported("the gradient of MaxPool with column-major indices")
    return ctx.op.MaxPoolGrad(dy, ctx.output(1), ctx.op.shape(x))


@gradient("AveragePool")
def average_pool(
    ctx: Context,
    dy: Value,
    x: Value,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: str = "NOTSET",
    **_: Any,
) -> Any:
    """Dy shared equally by the elements of each window."""
    windows = _windows(ctx, len(kernel_shape), auto_pad)
    if ceil_mode or any(d != 1 for d in windows.pop("dilations")):
        raise ctx.unsupported("the gradient of AveragePool with ceil_mode or dilations")
    return ctx.op.AveragePoolGrad(
        dy, x, kernel_shape=list(kernel_shape), count_include_pad=count_include_pad, **windows
    )


@gradient("GlobalAveragePool")
def global_average_pool(ctx: Context, dy: Value, x: Value) -> Any:
    """Dy divided by the number of elements of a plane, expanded."""
    op = ctx.op
    count = op.cast(op.Div(op.Size(x), op.Size(ctx.y)), shapes.dtype_of(dy))
    return op.Expand(dy / count, op.shape(x))


@gradient("BatchNormTraining", domain=DOMAIN)
def batch_norm_training(
    ctx: Context, dy: Value, x: Value, scale: Value, bias: Value, mean: Value, var: Value, **_: Any
) -> Any:
    """One node, from the batch mean and inverse deviation that the forward pass gives."""
    return ctx.op.BatchNormTrainingGrad(dy, x, scale, ctx.output(3), ctx.output(4), outputs=3)


@gradient("BatchNormalization")
def batch_norm(
    ctx: Context,
    dy: Value,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    var: Value,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    **_: Any,
) -> Any:
    """Running statistics are constants: dx = dy · scale / deviation."""
    if training_mode:
        raise ctx.unsupported("the gradient of BatchNormalization with training_mode=1")
    op, rank = ctx.op, shapes.rank(x)
    channels = op.ints(*[-1 if axis == 1 else 1 for axis in range(rank)])
    others = op.ints(*[axis for axis in range(rank) if axis != 1])
    inv_std = op.Reshape(op.Reciprocal(op.Sqrt(var + epsilon)), channels)
    normal = (x - op.Reshape(mean, channels)) * inv_std
    dx = dy * inv_std * op.Reshape(scale, channels)
    return dx, op.ReduceSum(dy * normal, others, keepdims=0), op.ReduceSum(dy, others, keepdims=0)
