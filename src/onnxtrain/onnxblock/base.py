"""The model under construction: what ``with onnxblock.base(model)`` opens and every block adds to."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArtifactError, close_to
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import values
from onnxtrain.ir.reading import Source, read_weights
from onnxtrain.options import OPSETS


class Base:
    """A model that blocks add nodes to; its weights are inputs of the graph.

    Args:
        model: the model.
        weights: content of the inputs that are weights, by name.

    Attributes:
        op: adds nodes: ``op.Mul(a, b)``; values are ``onnx_ir.Value``.
        predictions: names of the outputs that the model had before any block.
    """

    def __init__(self, model: ir.Model, weights: Mapping[str, ir.TensorProtocol] | None = None) -> None:
        self.model, self.weights = model, dict(weights or {})
        self.op = Builder(model.graph)
        self.predictions = tuple(str(v.name) for v in model.graph.outputs)

    def value(self, name: str) -> ir.Value:
        """The value of that name: an input, an initializer or a node's output.

        Raises:
            ArtifactError: there is none; close names are listed.
        """
        known = {str(v.name): v for v in values(self.model.graph)}
        if name not in known:
            raise ArtifactError(
                f"the model has no value {name}{close_to(name, known)}", cure="name a value of the model"
            )
        return known[name]

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str | ir.SymbolicDim | None]) -> ir.Value:
        """The graph input of that name, added where the model has none.

        Raises:
            ArtifactError: the name is taken by a weight, by another value, or by an input of another kind.
        """
        cure = "give it another name, or rename the value of the model"
        found = next((v for v in self.model.graph.inputs if v.name == name), None)
        if name in self.weights or (found is None and any(v.name == name for v in values(self.model.graph))):
            raise ArtifactError(f"the model has a value called {name}, which is no input", cure=cure)
        if found is None:
            return self.add_input(name, dtype, dims)
        kinds = {dtype, found.dtype}
        if len(kinds) > 1 and not all(kind is not None and kind.is_integer() for kind in kinds):
            raise ArtifactError(f"the input {name} is {found.dtype}, not {dtype}", cure=cure)
        return found

    def add_input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str | ir.SymbolicDim | None]) -> ir.Value:
        """A new graph input; that its name is its own is checked when the model is finished."""
        made = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
        self.model.graph.inputs.append(made)
        return made

    def weight(self, name: str) -> ir.Value:
        """The weight of that name: one of ``weights``, or any other floating initializer, which becomes one.

        Raises:
            ArtifactError: there is none; close names are listed.
        """
        graph = self.model.graph
        if name not in self.weights:
            known = [*self.weights, *(n for n, v in graph.initializers.items() if is_floating(v))]
            if name not in known:
                cure = "name initializers of the model"
                if name in graph.initializers:
                    cure = "integers behind DequantizeLinear become weights by onnxtrain.dequantize_weights(model)"
                raise ArtifactError(f"the model has no floating initializer {name}{close_to(name, known)}", cure=cure)
            value = graph.initializers.pop(name)
            self.weights[name], value.const_value = value.const_value, None  # type: ignore[assignment]
            graph.inputs.append(value)
        return self.value(name)

    def new_weight(self, name: str, content: np.ndarray) -> ir.Value:
        """A weight that the model did not have; a name that is taken gets a number."""
        taken = {str(v.name) for v in values(self.model.graph)}
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        self.weights[unique] = tensor = ir.tensor(content, name=unique)
        return self.add_input(unique, tensor.dtype, list(content.shape))

    def output(self, value: ir.Value, name: str | None = None) -> None:
        """Make a value an output of the graph, under another name where one is given."""
        if name is not None and value.name != name:
            value = self.op.Identity(value, name=name) if value.is_graph_input() or value.is_initializer() else value
            value.name = name
        self.model.graph.outputs.append(value)


def is_floating(value: ir.Value) -> bool:
    """Whether a value can be differentiated by its type."""
    return value.dtype is not None and value.dtype.is_floating_point()


_CURRENT: contextvars.ContextVar[Base | None] = contextvars.ContextVar("onnxtrain.onnxblock.base", default=None)


def current() -> Base:
    """The model that the innermost ``with base(...)`` or ``with empty_base()`` opened.

    Raises:
        ArtifactError: there is none.
    """
    found = _CURRENT.get()
    if found is None:
        raise ArtifactError("no model is being built", cure="call blocks within `with onnxblock.base(model):`")
    return found


@contextlib.contextmanager
def base(model: Source) -> Iterator[Base]:
    """Blocks called within extend a copy of this model.

    Args:
        model: the model or the path of its file; from 2 GB on, a path.

    Raises:
        GraphError: the model cannot be read.
    """
    graph, weights = read_weights(model)
    with _opened(Base(graph.model, weights)) as made:
        yield made


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Base]:
    """Blocks called within build a model from nothing, of this opset (20 where none is given)."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset_version or OPSETS[0]}, name="main")
    with _opened(Base(ir.Model(graph, ir_version=10))) as made:
        yield made


@contextlib.contextmanager
def _opened(made: Base) -> Iterator[Base]:
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def custom_op_library(path: Path | str) -> Iterator[Path]:
    """Say which library has the custom operators of the models built within.

    Nodes of such operators are kept as they are. Nothing is loaded here: the session that runs the model loads it,
    by ``SessionOptions.register_custom_ops_library``.

    Raises:
        ArtifactError: there is no such file.
    """
    library = Path(path)
    if not library.is_file():
        raise ArtifactError(f"there is no custom operator library {library}", cure="give the path of the library")
    yield library
