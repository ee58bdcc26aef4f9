"""Convolutions: how a window slides over the spatial axes, and the sizes that gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy

from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import (
    Dim,
    Dims,
    Facts,
    as_expression,
    attribute,
    dtype_of,
    fresh_dims,
    known_dims,
    operand,
    shape_rule,
    simplify,
)


@dataclasses.dataclass(frozen=True)
class Window:
    """How a kernel slides over the spatial axes, those after batch and channels.

    Args:
        kernel: size along each axis.
        strides: steps between two places of the kernel.
        dilations: distance of two neighbouring elements of the kernel.
        pads: elements added before each axis, then after each axis; None where ``auto_pad`` decides.
        auto_pad: NOTSET, VALID, SAME_UPPER or SAME_LOWER.
        ceil: whether a last place that reaches over the end counts (pooling).
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...] | None
    auto_pad: str = "NOTSET"
    ceil: bool = False

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
    ) -> Window:
        """A window from ONNX attributes, with their defaults."""
        ones = (1,) * len(kernel)
        same = auto_pad.startswith("SAME")
        given = tuple(pads) if pads is not None and auto_pad in ("NOTSET", "") else (0,) * (2 * len(kernel))
        steps, apart = tuple(strides or ones), tuple(dilations or ones)
        return cls(tuple(kernel), steps, apart, None if same else given, auto_pad, bool(ceil_mode) and not same)

    @property
    def is_known(self) -> bool:
        """Whether the size of the kernel is a number along every axis: a weight may be any value of the graph."""
        return all(isinstance(k, int) for k in self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements from the first to the last of the kernel, along each axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def output_sizes(self, sizes: Sequence[Dim]) -> Dims:
        """The number of places of the window along axes of these sizes."""
        if self.pads is None:
            return tuple(_floor_divide(n + s - 1, s) for n, s in zip(sizes, self.strides, strict=True))
        count = len(self.kernel)
        ends = zip(self.pads[:count], self.pads[count:], strict=True)
        axes = zip(sizes, self.reach, self.strides, ends, strict=True)
        return tuple(self._places(n, reach, step, *pads) for n, reach, step, pads in axes)

    def _places(self, size: Dim, reach: int, step: int, before: int, after: int) -> Dim:
        free = size + before + after - reach
        if not self.ceil:
            return simplify(_floor_divide(free, step) + 1)
        over = simplify(_floor_divide(free + step - 1, step) + 1)
        if reach >= step + after:
            return over
        inside = simplify(_floor_divide(size + before - 1, step) + 1)  # no place may start in the padding at the end
        if isinstance(over, int) and isinstance(inside, int):
            return min(over, inside)
        return ir.SymbolicDim(sympy.Min(as_expression(over), as_expression(inside)))

    def paddings(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The elements added before each axis, then after each axis."""
        if self.pads is not None:
            return self.pads
        places = self.output_sizes(sizes)
        axes = zip(places, self.strides, self.reach, sizes, strict=True)
        totals = [max((p - 1) * s + r - n, 0) for p, s, r, n in axes]  # type: ignore[type-var,operator]
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        return small + large if self.auto_pad == "SAME_UPPER" else large + small

    def fixed_pads(self, sizes: Sequence[Dim]) -> tuple[int, ...] | None:
        """``paddings`` where no size that is known only at run time decides; None otherwise."""
        if self.pads is not None:
            return self.pads
        if not self.is_known:
            return None
        if all(s == 1 for s in self.strides):
            return self.paddings(self.reach)  # with steps of 1 every size is padded alike
        return self.paddings(sizes) if all(isinstance(n, int) for n in sizes) else None  # type: ignore[arg-type]


def _floor_divide(size: Dim, step: int) -> Dim:
    return size if step == 1 else simplify(size // step)  # type: ignore[operator]


def window_of(node: ir.Node, kernel: Sequence[Any]) -> Window:
    """The window of a node from its attributes; ``kernel`` is used where it does not state a shape."""
    return Window.of(
        attribute(node, "kernel_shape") or kernel,
        attribute(node, "strides"),
        attribute(node, "dilations"),
        attribute(node, "pads"),
        attribute(node, "auto_pad", "NOTSET"),
        attribute(node, "ceil_mode", 0),
    )


@shape_rule("Conv", "DeformConv")
def conv(node: ir.Node) -> Sequence[Facts]:
    """Batch of the operand, channels of the weight, one size for each place of the window."""
    x, w = known_dims(operand(node, 0)), known_dims(operand(node, 1))  # type: ignore[arg-type]
    dtype = dtype_of(node.inputs[0])  # type: ignore[arg-type]
    window = window_of(node, w[2:])
    if not window.is_known:
        return [Facts(dtype, (x[0], w[0], *fresh_dims(node.outputs[0], len(x))[2:]))]
    return [Facts(dtype, (x[0], w[0], *window.output_sizes(x[2:])))]


@shape_rule("ConvTranspose")
def conv_transpose(node: ir.Node) -> Sequence[Facts]:
    """The size of which a convolution would give the operand's, with ``output_padding`` at the end."""
    x, w = known_dims(operand(node, 0)), known_dims(operand(node, 1))  # type: ignore[arg-type]
    channels = simplify(w[1] * attribute(node, "group", 1))
    sizes = attribute(node, "output_shape") or transposed_sizes(
        window_of(node, w[2:]), x[2:], attribute(node, "output_padding")
    )
    return [Facts(dtype_of(node.inputs[0]), (x[0], channels, *sizes[-len(w[2:]) :]))]  # type: ignore[arg-type]


def transposed_sizes(window: Window, sizes: Sequence[Dim], extra: Sequence[int] | None = None) -> Dims:
    """The spatial sizes of a transposed convolution over these sizes."""
    if window.pads is None:
        return tuple(simplify(n * s) for n, s in zip(sizes, window.strides, strict=True))
    count = len(window.kernel)
    pads = [a + b for a, b in zip(window.pads[:count], window.pads[count:], strict=True)]
    axes = zip(sizes, window.strides, window.reach, extra or (0,) * count, pads, strict=True)
    return tuple(simplify((n - 1) * s + e + r - p) for n, s, r, e, p in axes)


@shape_rule("ConvGrad", domain=DOMAIN)
def conv_grad(node: ir.Node) -> Sequence[Facts]:
    """As operand and weight; one number for each channel of the output."""
    x, w = node.inputs[1], node.inputs[2]
    assert x is not None and w is not None
    dims = known_dims(w)
    return [Facts(dtype_of(x), known_dims(x)), Facts(dtype_of(w), dims), Facts(dtype_of(w), dims[:1])]
