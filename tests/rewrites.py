"""Small graphs that the passes over the forward graph rewrite, by the pass that does it: each is a few nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.options import Options

SIZES = {"n": 3, "m": 5}
FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A graph and what becomes of it.

    Args:
        name: what is rewritten.
        inputs: for each input, all of them differentiable, its dimensions: numbers, or names of ``SIZES``.
        write: adds the nodes and gives the output, or several.
        after: the operators that are left, in order.
        exact: whether results and gradients keep every bit; else float64 decides, or how half precision rounds.
        dtype: element type of the inputs.
        options: what ``optimize`` is given beside the graph.
    """

    name: str
    inputs: dict[str, tuple[int | str, ...]]
    write: Callable[..., Any]
    after: str
    exact: bool = True
    dtype: ir.DataType = FLOAT
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def graph(self) -> ForwardGraph:
        """The graph before any pass."""
        dtype = ir.DataType.DOUBLE if not self.exact and self.dtype == FLOAT else self.dtype
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name=self.name)
        for name, dims in self.inputs.items():
            shape = [ir.SymbolicDim(d) if isinstance(d, str) else d for d in dims]
            graph.inputs.append(ir.val(name, dtype=dtype, shape=shape))
        made = self.write(Builder(graph), *graph.inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        for index, value in enumerate(outputs):
            value.name = f"y{index}"
            graph.outputs.append(value)
        names = tuple(self.inputs)
        return ForwardGraph(
            ir.Model(graph, ir_version=10),
            Signature(names, (), (), tuple(str(v.name) for v in outputs), {}, names),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Random content of the inputs."""
        dtype = torch.float64 if not self.exact and self.dtype == FLOAT else torch_dtype(self.dtype)
        sizes = [[SIZES[d] if isinstance(d, str) else d for d in dims] for dims in self.inputs.values()]
        return [torch.randn(s, dtype=torch.float64).to(dtype) for s in sizes]


V = ir.Value


def _turned_twice(op: Builder, x: V) -> V:
    return op.Exp(op.Transpose(op.Transpose(x, perm=[1, 2, 0]), perm=[1, 0, 2]))


def _turned_and_back(op: Builder, x: V) -> V:
    return op.Exp(op.Transpose(op.Unsqueeze(op.Transpose(x, perm=[1, 0, 2]), op.ints(1)), perm=[2, 1, 0, 3]))


def _unsqueezed_and_back(op: Builder, x: V) -> V:
    return op.Exp(op.Squeeze(op.Unsqueeze(op.Unsqueeze(x, op.ints(1)), op.ints(0)), op.ints(0, 2)))


def _flat_and_back(op: Builder, x: V) -> V:
    return op.Exp(op.Reshape(op.Flatten(x, axis=2), op.shape(x), allowzero=1))


def _one_head(op: Builder, x: V) -> V:
    heads = op.Transpose(op.Reshape(x, op.ints(0, 0, 1, 4)), perm=[0, 2, 1, 3])
    return op.Exp(heads)


def _sizes_of_a_view(op: Builder, x: V) -> V:
    """The first Reshape names a size that the second is made of."""
    count = op.Cast(op.ReduceSum(op.Cast(op.Greater(op.Abs(x), op.like(-1.0, x)), to=7), keepdims=0), to=7)
    apart = op.Reshape(x, op.Concat(op.Reshape(count, op.ints(1)), op.ints(1), axis=0))
    return op.Exp(op.Reshape(apart, op.Concat(op.Shape(apart, end=1), op.ints(1, 1), axis=0)))


def _visible_views(op: Builder, x: V) -> tuple[V, ...]:
    """What is an output keeps its name, and is no input under another."""
    back = op.Squeeze(op.Unsqueeze(x, op.ints(0)), op.ints(0))
    moved = op.Transpose(op.Unsqueeze(x, op.ints(1)), perm=[1, 0, 2])
    return back, moved, op.Gather(x, op.constant(0), axis=1), op.Slice(x, op.ints(1), op.ints(4), op.ints(1))


VIEWS = [
    Rewrite("two transposes", {"x": ("n", 4, "m")}, _turned_twice, "Transpose Exp"),
    Rewrite(
        "transposed and back around a new axis",
        {"x": ("n", "m", 4)},
        _turned_and_back,
        "Shape Shape Concat Reshape Exp",
    ),
    Rewrite("squeeze of unsqueezes", {"x": ("n", "m")}, _unsqueezed_and_back, "Exp"),
    Rewrite("flat and back", {"x": ("n", "m", 4)}, _flat_and_back, "Exp"),
    Rewrite("one head", {"x": ("n", "m", 4)}, _one_head, "Shape Shape Concat Reshape Exp"),
    Rewrite("views that are outputs", {"x": ("n", 4)}, _visible_views, "Reshape Reshape Split Squeeze"),
    Rewrite(
        "sizes of a view",
        {"x": ("n", 4)},
        _sizes_of_a_view,
        "Abs Greater Cast ReduceSum Reshape Concat Reshape Shape Concat Reshape Exp",
    ),
]


def _slices(op: Builder, x: V) -> V:
    x = op.Slice(x, op.ints(1), op.ints(2**63 - 1), op.ints(0))
    x = op.Slice(x, op.ints(0), op.ints(-1), op.ints(1))
    x = op.Slice(x, op.ints(2), op.ints(7), op.ints(2), op.ints(2))
    return op.Exp(op.Slice(x, op.ints(1, 1), op.ints(2**63 - 1, 3), op.ints(0, 2)))


def _slice_that_is_read_twice(op: Builder, x: V) -> V:
    part = op.Slice(x, op.ints(1), op.ints(4), op.ints(1))
    return op.Add(op.Exp(op.Slice(part, op.ints(0), op.ints(1), op.ints(1))), part)


def _end_that_may_come_before(op: Builder, x: V) -> V:
    """What is left depends on which of two ends comes first."""
    return op.Exp(op.Slice(op.Slice(x, op.ints(0), op.ints(2), op.ints(0)), op.ints(0), op.ints(-1), op.ints(0)))


def _rows_by_number(op: Builder, x: V) -> V:
    rows = op.Gather(x, op.ints(1, 3, 5), axis=1)
    every = op.Gather(x, op.Range(op.constant(0), op.Squeeze(op.size(x, 0)), op.constant(1)), axis=0)
    return op.Exp(rows), op.Sin(every)


def _rows_out_of_order(op: Builder, x: V) -> V:
    return op.Exp(op.Gather(x, op.ints(1, 3, 4), axis=1))


def _concat_and_slices(op: Builder, x: V, y: V) -> V:
    both = op.Concat(x, y, axis=0)
    first = op.Slice(both, op.ints(0), op.size(x, 0), op.ints(0))
    second = op.Slice(both, op.size(x, 0), op.ints(2**63 - 1), op.ints(0))
    return op.Add(op.Exp(first), op.ReduceSum(op.Sin(second), op.ints(0)))


def _concat_and_split(op: Builder, x: V, y: V) -> V:
    first, second = op.Split(op.Concat(x, y, axis=1), op.ints(4, 2), axis=1, outputs=2)
    return op.Exp(first), op.Sin(second)


def _other_border(op: Builder, x: V, y: V) -> V:
    first, second = op.Split(op.Concat(x, y, axis=1), op.ints(3, 3), axis=1, outputs=2)
    return op.Mul(op.Exp(first), op.Sin(second))


def _taken_apart(op: Builder, x: V) -> V:
    """Rotary embeddings take halves apart, packed projections heads."""
    halves = [op.Slice(x, op.ints(b), op.ints(e), op.ints(-1)) for b, e in ((0, 2), (2, 2**63 - 1))]
    rows = [op.Gather(x, op.constant(i), axis=1) for i in (0, 1, -1)]
    return op.Mul(op.Neg(halves[1]), op.Exp(halves[0])), op.Mul(op.Exp(rows[0]), rows[1]), op.Sin(rows[2])


def _apart_but_for_one(op: Builder, x: V) -> V:
    rows = [op.Gather(x, op.constant(i), axis=1) for i in (0, 2)]
    return op.Mul(op.Exp(rows[0]), rows[1])


SLICES = [
    Rewrite("slices of slices", {"x": ("m", "m", 8)}, _slices, "Slice Exp"),
    Rewrite("slice that is read twice", {"x": ("n", 6)}, _slice_that_is_read_twice, "Slice Slice Exp Add"),
    Rewrite("end that may come before another", {"x": ("m", 4)}, _end_that_may_come_before, "Slice Slice Exp"),
    Rewrite("rows by number", {"x": ("n", 6)}, _rows_by_number, "Slice Exp Sin"),
    Rewrite("rows out of order", {"x": ("n", 6)}, _rows_out_of_order, "Gather Exp"),
    Rewrite("concat and slices", {"x": ("n", 4), "y": ("m", 4)}, _concat_and_slices, "Exp Sin ReduceSum Add"),
    Rewrite("concat and split", {"x": ("n", 4), "y": ("n", 2)}, _concat_and_split, "Exp Sin"),
    Rewrite("other border", {"x": ("n", 4), "y": ("n", 2)}, _other_border, "Concat Split Exp Sin Mul"),
    Rewrite(
        "taken apart", {"x": ("n", 3, 4)}, _taken_apart, "Split Split Squeeze Squeeze Squeeze Neg Exp Mul Exp Mul Sin"
    ),
    Rewrite("apart but for one", {"x": ("n", 3, 4)}, _apart_but_for_one, "Gather Gather Exp Mul"),
]


def _convolution(**attributes: Any) -> Callable[..., V]:
    return lambda op, x, w, *bias: op.Exp(op.Conv(x, w, *bias, **attributes))


CONVOLUTIONS = [
    Rewrite(
        "convolution of one place", {"x": ("n", 4, "m"), "w": (6, 4, 1)}, _convolution(kernel_shape=[1]),
        "Squeeze MatMul Exp", exact=False,
    ),
    Rewrite(
        "convolution in groups with a bias", {"x": ("n", 4, "m"), "w": (6, 2, 1), "b": (6,)},
        _convolution(kernel_shape=[1], group=2, strides=[1], pads=[0, 0], dilations=[1]),
        "Squeeze Split Split MatMul MatMul Concat Unsqueeze Add Exp", exact=False,
    ),
    Rewrite(
        "convolution in many groups", {"x": ("n", 9, "m"), "w": (9, 1, 1)}, _convolution(group=9), "Conv Exp",
    ),
    Rewrite(
        "convolution with strides", {"x": ("n", 4, "m"), "w": (6, 4, 1)}, _convolution(strides=[2]), "Conv Exp",
    ),
    Rewrite(
        "convolution with pads", {"x": ("n", 4, "m"), "w": (6, 4, 1)}, _convolution(pads=[1, 0]), "Conv Exp",
    ),
    Rewrite("convolution of planes", {"x": ("n", 4, "m", "m"), "w": (6, 4, 1, 1)}, _convolution(), "Conv Exp"),
]  # fmt: skip


HALF, BRAIN = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def _casts(level: int = 1, strategy: str = "FLOOD_FILL", *allow: str) -> dict[str, Any]:
    names = ("propagate_cast_ops_level", "propagate_cast_ops_strategy", "propagate_cast_ops_allow")
    return {"options": Options(**dict(zip(names, (level, strategy, allow), strict=True)))}


def _views_between(op: Builder, x: V) -> V:
    wide = op.Reshape(op.Transpose(op.Cast(op.Exp(x), to=int(FLOAT)), perm=[1, 0, 2]), op.ints(0, -1))
    return op.Sin(op.Cast(wide, to=int(HALF)))


def _logits(op: Builder, x: V) -> V:
    """The loss is in float32, and of the logits half is cut off before it."""
    logits = op.Slice(op.Cast(x, to=int(FLOAT)), op.ints(0), op.ints(2), op.ints(1))
    return op.ReduceSum(op.LogSoftmax(logits, axis=-1), keepdims=0)


def _half_of_a_concat(op: Builder, x: V) -> V:
    wide = op.Cast(x, to=int(FLOAT))
    both = op.Concat(op.Cast(op.Exp(x), to=int(FLOAT)), op.Sin(wide), axis=0)
    return op.Cos(op.Cast(both, to=int(HALF)))


def _read_twice(op: Builder, x: V) -> V:
    wide = op.Cast(op.Exp(x), to=int(FLOAT))
    back = op.Sin(op.Cast(op.Transpose(wide, perm=[1, 0]), to=int(HALF)))
    return op.Mul(op.ReduceSum(wide, keepdims=0), op.ReduceSum(op.Cast(back, to=int(FLOAT)), keepdims=0))


def _rounded_and_back(op: Builder, x: V) -> V:
    return op.Sin(op.Cast(op.Reshape(op.Cast(op.Exp(x), to=int(HALF)), op.ints(-1)), to=int(FLOAT)))


def _between_types(op: Builder, x: V) -> V:
    mask = op.Cast(op.Cast(op.Greater(x, op.like(0.0, x)), to=7), to=int(FLOAT))
    return op.Mul(op.Cast(op.Exp(x), to=int(FLOAT)), mask)


def _activation(op: Builder, x: V) -> V:
    wide = op.Gelu(op.Cast(x, to=int(FLOAT)), approximate="none")
    return op.Exp(op.Cast(op.Transpose(op.Add(wide, 1.0), perm=[1, 0]), to=int(x.dtype or FLOAT)))


def _hidden(op: Builder, x: V) -> V:
    wide = op.Cast(x, to=int(FLOAT))
    return op.Exp(op.Cast(op.Where(op.Greater(x, op.like(0.0, x)), wide, op.like(-1e30, wide)), to=int(HALF)))


def _visible_casts(op: Builder, x: V) -> tuple[V, ...]:
    wide = op.Cast(op.Exp(x), to=int(FLOAT))
    return op.Cast(op.Transpose(wide, perm=[1, 0]), to=int(HALF)), op.Cast(op.Cast(x, to=int(FLOAT)), to=int(HALF))


_AROUND = "Exp Transpose Reshape Sin"
CASTS = [
    Rewrite("views between casts", {"x": ("n", "m", 4)}, _views_between, _AROUND, dtype=HALF),
    Rewrite("views between casts, off", {"x": ("n", "m", 4)}, _views_between, "Exp Cast Transpose Reshape Cast Sin",
            dtype=HALF, options=_casts(-1)),
    Rewrite("views between casts, one allowed", {"x": ("n", "m", 4)}, _views_between,
            "Exp Transpose Cast Reshape Cast Sin", dtype=HALF, options=_casts(0, "FLOOD_FILL", "Transpose")),
    Rewrite("views between casts, at once", {"x": ("n", "m", 4)}, _views_between, _AROUND, dtype=HALF,
            options=_casts(1, "INSERT_AND_REDUCE")),
    Rewrite("logits in half", {"x": ("n", 4)}, _logits, "Slice Cast LogSoftmax ReduceSum", dtype=HALF),
    Rewrite("half of a concat", {"x": ("n", 4)}, _half_of_a_concat, "Cast Exp Sin Cast Concat Cos", dtype=HALF),
    Rewrite("half of a concat, at once", {"x": ("n", 4)}, _half_of_a_concat, "Cast Exp Sin Cast Concat Cos", dtype=HALF,
            options=_casts(1, "INSERT_AND_REDUCE")),
    Rewrite("cast that is read twice", {"x": ("n", 4)}, _read_twice,
            "Exp Cast Transpose Cast Sin ReduceSum Cast ReduceSum Mul", dtype=HALF),
    Rewrite("rounded and back", {"x": ("n", 4)}, _rounded_and_back, "Exp Cast Reshape Cast Sin"),
    Rewrite("truth as a number", {"x": ("n", 4)}, _between_types, "Greater Cast Exp Cast Mul", dtype=HALF),
    Rewrite("activation", {"x": ("n", 4)}, _activation, "Cast Gelu Add Cast Transpose Exp", dtype=HALF),
    Rewrite("activation, level 2", {"x": ("n", 4)}, _activation, "Gelu Add Transpose Exp", exact=False, dtype=HALF,
            options=_casts(2)),
    Rewrite("activation, level 2 at once", {"x": ("n", 4)}, _activation, "Gelu Add Transpose Exp", exact=False,
            dtype=BRAIN, options=_casts(2, "INSERT_AND_REDUCE")),
    Rewrite("casts that are outputs", {"x": ("n", 4)}, _visible_casts, "Exp Transpose Cast Cast", dtype=HALF),
    Rewrite("beyond the range of half", {"x": ("n", 4)}, _hidden, "Cast Greater Where Cast Exp", dtype=HALF,
            options=_casts(2)),
]  # fmt: skip
REWRITES = {r.name: r for r in (*VIEWS, *SLICES, *CONVOLUTIONS, *CASTS)}
