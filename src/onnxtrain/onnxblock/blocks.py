"""Blocks: names of values in, the name of a new value out."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.number_ranges import check_number, check_whole
from onnxtrain.onnxblock import model_accessor as accessor  # noqa: F401  (programs read it here)
from onnxtrain.onnxblock.base import Base, current


class Block(abc.ABC):
    """A part of a model. Subclasses say in ``build`` what it adds to the model under construction.

    Inside of ``build`` other blocks are called by names of values; ``self.value(name)`` and ``self.op`` are the same
    in terms of values: ``self.op.Mul(x, 2.0)``. Nodes may also be written into ``self.base.graph``, a ``GraphProto``.
    """

    def __call__(self, *names: Any, **named: Any) -> Any:
        """Add the block to the model; the name of its output, or a tuple of names."""
        made = self.build(*names, **named)
        self.base.refresh()
        return made

    @abc.abstractmethod
    def build(self, *names: Any, **named: Any) -> Any:
        """Add nodes and return the name of the output, or a tuple of names."""

    @property
    def base(self) -> Base:
        """The model under construction; ``self.base.model`` is it as a ``ModelProto``."""
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
        self.exponent = check_number("exponent", exponent)

    def build(self, name: str) -> str:
        """Add the node."""
        return str(self.op.Pow(self.value(name), float(self.exponent)).name)


class _Reduce(Block):
    """Reduction over axes, all of them where none is given."""

    def __init__(self, keepdims: bool = True, axes: Sequence[int] | None = None) -> None:
        self.keepdims, self.axes = keepdims, axes
        for axis in axes or ():
            check_whole("axes", axis)

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
        for name, bound in (("clip_min", clip_min), ("clip_max", clip_max)):
            if bound is not None:
                check_number(name, bound)

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
    """The value itself, or the values themselves."""

    def build(self, *names: str) -> str | tuple[str, ...]:
        """Add nothing."""
        return names[0] if len(names) == 1 else names


class InputLike(Block):
    """A graph input of the type and shape of a value, under the name that is built.

    Args:
        like: name of the value.
    """

    def __init__(self, like: str) -> None:
        self.like = like

    def build(self, name: str | None = "input") -> str:
        """Add the input where the model has none of that name; None is any name that is free."""
        model = self.value(self.like)
        name = self.base.unused_name("user_input") if name is None else name
        axes = range(shapes.rank(model))
        return str(input_of_shape(self.base, name, shapes.dtype_of(model), model, axes).name)


def input_of_shape(base: Base, name: str, dtype: ir.DataType, like: ir.Value, axes: Sequence[int]) -> ir.Value:
    """The graph input of that name in the shape of a value: what has another is refused, not broadcast.

    Where the names of sizes say that the input has that shape, whoever gives it can see whether it has. Else a node
    brings it into the shape, which fails where it has another number of elements.

    Args:
        base: the model under construction.
        name: of the input.
        dtype: its element type.
        like: has the shape on some of its axes.
        axes: these axes, in order.
    """
    dims = [shapes.known_dims(like)[a] for a in axes]
    known = frozenset[str]().union(*(_symbols(d) for v in base.ir_model.graph.inputs for d in v.shape or ()))
    given = base.input(name, dtype, [d if _symbols(d) <= known else f"{name}_dim{i}" for i, d in enumerate(dims)])
    if shapes.dims_of(given) == tuple(dims):
        return given
    return base.op.Reshape(given, base.op.Gather(base.op.shape(like), base.op.ints(*axes)))


def _symbols(dim: shapes.Dim) -> frozenset[str]:
    """The symbols in a size; one that nothing has where it is not known."""
    if isinstance(dim, int):
        return frozenset()
    return dim.free_symbols() if dim.value else frozenset(("?",))


class LabelEncoder(Block):
    """``ai.onnx.ml.LabelEncoder``: keys replaced by values.

    Args:
        default_value: for keys that are not listed.
        keys, values: of one type each: int, float or str.
        attributes: the same by the names of ONNX: ``keys_int64s``, ``values_floats``, ``default_string``, ….
    """

    _KINDS: ClassVar = {
        int: ("int64s", "int64", ir.DataType.INT64),
        float: ("floats", "float", ir.DataType.FLOAT),
        str: ("strings", "string", ir.DataType.STRING),
    }

    def __init__(
        self,
        default_value: Any = None,
        keys: Sequence[Any] | None = None,
        values: Sequence[Any] | None = None,
        **attributes: Any,
    ) -> None:
        given = {name: value for name, value in attributes.items() if value is not None}
        for many, one, _ in self._KINDS.values():
            keys, values = given.pop(f"keys_{many}", keys), given.pop(f"values_{many}", values)
            default = given.pop(f"default_{one}", None)
            default_value = default if default is not None and f"values_{many}" in attributes else default_value
        if given or not keys or not values or len(keys) != len(values):
            what = f"LabelEncoder has no attribute {next(iter(given))}" if given else "keys and values are not in pairs"
            raise ArtifactError(what, cure="give keys and values, or keys_int64s and values_int64s")
        self.default_value, self.keys, self.values = default_value, list(keys), list(values)
        default = () if default_value is None else (default_value,)
        kinds = {type(k) for k in self.keys}, {type(v) for v in (*self.values, *default)}
        if any(len(k) != 1 or not k <= {int, float, str} for k in kinds):
            what = "keys and values of LabelEncoder are not as many of one type each, int, float or str"
            raise ArtifactError(what, cure="give a value to each key, and a default of their type")

    def build(self, name: str) -> str:
        """Add the node."""
        (of_keys, _, _), (of_values, of_default, dtype) = (self._KINDS[type(v[0])] for v in (self.keys, self.values))
        attributes = {f"keys_{of_keys}": self.keys, f"values_{of_values}": self.values}
        if self.default_value is not None:
            attributes[f"default_{of_default}"] = self.default_value
        x = self.value(name)
        self.base.ir_model.graph.opset_imports.setdefault("ai.onnx.ml", 3)
        model = ir.Value(name="", type=ir.TensorType(dtype), shape=x.shape)
        made = self.op.node("LabelEncoder", [x], attributes, domain="ai.onnx.ml", like=[model])
        return str(made.outputs[0].name)


class Cast(Block):
    """The value in another element type.

    Args:
        to: ONNX number of the type.
    """

    def __init__(self, to: int) -> None:
        self.to = check_whole("to", to, least=1)
        if self.to not in {int(t) for t in ir.DataType}:
            raise ArtifactError(f"to={to} is no element type of ONNX", cure="give onnx.TensorProto.FLOAT or another")

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
        self.in_features = check_whole("in_features", in_features, least=1)
        self.out_features, self.bias = check_whole("out_features", out_features, least=1), bias
        self.alpha, self.beta = check_number("alpha", alpha), check_number("beta", beta)
        self.prefix, self.seed = prefix, check_whole("seed", seed, least=0)

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
