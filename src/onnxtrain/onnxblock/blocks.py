"""Blocks: names of values in, the name of a new value out."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.onnxblock.base import Base, current


class Block(abc.ABC):
    """A part of a model. Subclasses say in ``build`` what it adds to the model under construction.

    Inside of ``build`` other blocks are called by names of values; ``self.value(name)`` and ``self.op`` are the same
    in terms of values: ``self.op.Mul(x, 2.0)``.
    """

    def __call__(self, *names: Any, **named: Any) -> Any:
        """Add the block to the model; the name of its output, or a tuple of names."""
        return self.build(*names, **named)

    @abc.abstractmethod
    def build(self, *names: Any, **named: Any) -> Any:
        """Add nodes and return the name of the output, or a tuple of names."""

    @property
    def base(self) -> Base:
        """The model under construction."""
        return current()

    @property
    def op(self) -> Builder:
        """Adds nodes to the model under construction."""
        return current().op

    def value(self, name: str) -> ir.Value:
        """The value of that name."""
        return current().value(name)


class _Elementwise(Block):
    """An operator of ONNX with as many inputs as names are given."""

    def build(self, *names: str) -> str:
        """Add the node."""
        made = self.op.node(type(self).__name__, [self.value(n) for n in names])
        return str(made.outputs[0].name)


class Add(_Elementwise):
    """``a + b``."""


class Sub(_Elementwise):
    """``a - b``."""


class Mul(_Elementwise):
    """``a * b``."""


class Div(_Elementwise):
    """``a / b``."""


class Sigmoid(_Elementwise):
    """``1 / (1 + exp(-x))``."""


class Log(_Elementwise):
    """Natural logarithm."""


class Neg(_Elementwise):
    """``-x``."""


class Abs(_Elementwise):
    """``|x|``."""


class Pow(Block):
    """``x ** exponent``."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def build(self, name: str) -> str:
        """Add the node."""
        return str(self.op.Pow(self.value(name), float(self.exponent)).name)


class _Reduce(Block):
    """Reduction over axes, all of them where none is given."""

    def __init__(self, keepdims: bool = True, axes: Sequence[int] | None = None) -> None:
        self.keepdims, self.axes = keepdims, axes

    def build(self, name: str) -> str:
        """Add the node."""
        axes = None if self.axes is None else self.op.ints(*self.axes)
        return str(getattr(self.op, type(self).__name__)(self.value(name), axes, keepdims=int(self.keepdims)).name)


class ReduceMean(_Reduce):
    """Mean over axes."""


class ReduceSum(_Reduce):
    """Sum over axes."""


class ReduceAllL2(Block):
    """The Euclidean norm of all tensors together, a scalar."""

    def build(self, *names: str) -> str:
        """Add the nodes."""
        op = self.op
        squares = [op.ReduceSumSquare(self.value(n), keepdims=0) for n in names]
        return str(op.Sqrt(squares[0] if len(squares) == 1 else op.Sum(*squares)).name)


class Clip(Block):
    """``min(max(x, clip_min), clip_max)``; a bound that is None is none."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        self.clip_min, self.clip_max = clip_min, clip_max

    def build(self, name: str) -> str:
        """Add the node."""
        x = self.value(name)
        bounds = [None if b is None else self.op.like(b, x) for b in (self.clip_min, self.clip_max)]
        return str(self.op.Clip(x, *bounds).name)


class Constant(Block):
    """A float32 scalar, or an array as it is."""

    def __init__(self, value: float | np.ndarray) -> None:
        self.content = value if isinstance(value, np.ndarray) else np.float32(value)

    def build(self) -> str:
        """Add the constant."""
        return str(self.op.constant(self.content).name)


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *names: str) -> str:
        """Add the node."""
        return str(self.op.node("SequenceConstruct", [self.value(n) for n in names]).outputs[0].name)


class PassThrough(Block):
    """The value itself."""

    def build(self, name: str) -> str:
        """Add nothing."""
        return name


class InputLike(Block):
    """A graph input of the type and shape of a value, under the name that is built.

    Args:
        like: name of the value.
    """

    def __init__(self, like: str) -> None:
        self.like = like

    def build(self, name: str = "input") -> str:
        """Add the input where the model has none of that name."""
        model = self.value(self.like)
        self.base.input(name, shapes.dtype_of(model), shapes.known_dims(model))
        return name


class LabelEncoder(Block):
    """``ai.onnx.ml.LabelEncoder``: keys replaced by values.

    Args:
        default_value: for keys that are not listed.
        keys, values: of one type each: int, float or str.
    """

    def __init__(self, default_value: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        self.default_value, self.keys, self.values = default_value, list(keys), list(values)

    def build(self, name: str) -> str:
        """Add the node."""
        kinds = {int: ("int64s", "int64"), float: ("floats", "float"), str: ("strings", "string")}
        dtypes = {int: ir.DataType.INT64, float: ir.DataType.FLOAT, str: ir.DataType.STRING}
        of_key, of_value = type(self.keys[0]), type(self.values[0])
        attributes = {
            f"keys_{kinds[of_key][0]}": self.keys,
            f"values_{kinds[of_value][0]}": self.values,
            f"default_{kinds[of_value][1]}": self.default_value,
        }
        x = self.value(name)
        self.base.model.graph.opset_imports.setdefault("ai.onnx.ml", 3)
        model = ir.Value(name="", type=ir.TensorType(dtypes[of_value]), shape=x.shape)
        made = self.op.node("LabelEncoder", [x], attributes, domain="ai.onnx.ml", like=[model])
        return str(made.outputs[0].name)


class Cast(Block):
    """The value in another element type.

    Args:
        to: ONNX number of the type.
    """

    def __init__(self, to: int) -> None:
        self.to = to

    def build(self, name: str) -> str:
        """Add the node."""
        return str(self.op.Cast(self.value(name), to=int(self.to)).name)


class Linear(Block):
    """``alpha * x @ weightᵀ + beta * bias`` with parameters of its own, ``{prefix}linear.weight`` and ``…bias``.

    Args:
        in_features, out_features: sizes of the last axis of x and of the result.
        bias: whether there is one.
        alpha, beta: factors.
        prefix: how the parameters' names begin.
        seed: of the initial values, uniform within 1/√in_features as torch.nn.Linear's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
        *,
        prefix: str = "",
        seed: int = 0,
    ) -> None:
        self.in_features, self.out_features, self.bias = in_features, out_features, bias
        self.alpha, self.beta, self.prefix, self.seed = alpha, beta, prefix, seed

    def build(self, name: str) -> str:
        """Add the parameters and the nodes."""
        random = np.random.default_rng(self.seed)
        bound = self.in_features**-0.5
        dtype = shapes.dtype_of(self.value(name))

        def parameter(suffix: str, *shape: int) -> ir.Value:
            content = random.uniform(-bound, bound, shape).astype(dtype.numpy())
            return self.base.new_weight(f"{self.prefix}linear.{suffix}", content)

        weight = parameter("weight", self.out_features, self.in_features)
        given = parameter("bias", self.out_features) if self.bias else None
        x = self.value(name)
        if shapes.rank(x) == 2:
            made = self.op.Gemm(x, weight, given, transB=1, alpha=self.alpha, beta=self.beta)
            return str(made.name)
        made = self.op.MatMul(x, self.op.Transpose(weight, perm=[1, 0]))
        made = made if self.alpha == 1.0 else self.op.Mul(made, self.alpha)
        if given is not None:
            made = self.op.Add(made, given if self.beta == 1.0 else self.op.Mul(given, self.beta))
        return str(made.name)
