"""The model under construction: what ``with onnxblock.base(model)`` opens and every block adds to."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError, close_to
from onnxtrain.files import check_file
from onnxtrain.ir.bodies import read_outside
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import free_name, values
from onnxtrain.ir.opsets import LOWEST, NEWEST
from onnxtrain.ir.reading import Source, hold_constants, read_weights
from onnxtrain.number_ranges import check_whole
from onnxtrain.onnxblock.protos import LentProto
from onnxtrain.options import OPSETS


class Base:
    """A model that blocks add nodes to; its weights are inputs of the graph.

    Args:
        model: the model.
        weights: content of the inputs that are weights, by name.
        path: the file that it was read from.

    Attributes:
        ir_model: the model itself, which blocks extend.
        op: adds nodes: ``op.Mul(a, b)``; values are ``onnx_ir.Value``.
        predictions: names of the outputs that the model had before any block.
    """

    def __init__(
        self,
        model: ir.Model,
        weights: Mapping[str, ir.TensorProtocol] | None = None,
        path: Path | str | None = None,
    ) -> None:
        self.ir_model, self.weights = model, dict(weights or {})
        self._path = path
        self._lent: LentProto | None = None
        self._names = {str(v.name) for v in values(model.graph)}
        self.op = Builder(model.graph, names=self._names)
        self.predictions = tuple(str(v.name) for v in model.graph.outputs)

    @property
    def model(self) -> onnx.ModelProto:
        """The model as a ``ModelProto`` that may be written to; weights are its initializers.

        What a program adds, changes or removes there is part of the model from the next block on, and what blocks add
        shows there when they return; the ``ModelProto`` and its ``graph`` stay the same objects, lists in them are
        brought up to date. It is in the form that rules speak: opset 20 at least, functions written out. Values
        (``onnx_ir.Value``) that were taken before such a change belong to the model before it: go by names.

        Raises:
            ArtifactError: the model is larger than protobuf's limit of 2 GB.
            GraphError: what was written before is no valid graph.
        """
        self.take_over()
        self._lent = self._lent or LentProto()
        return self._lent.shown(self.ir_model, self.weights)

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph of ``model``."""
        return self.model.graph

    @property
    def opset_import(self) -> Sequence[onnx.OperatorSetIdProto]:
        """The operator sets of ``model``."""
        return self.model.opset_import

    @property
    def has_path(self) -> bool:
        """Whether the model was read from a file that is known."""
        return self._path is not None

    @property
    def path(self) -> str:
        """The file that the model was read from.

        Raises:
            ArtifactError: it was not read from a file.
        """
        if self._path is None:
            raise ArtifactError("the model was not read from a file", cure="give `base` the path of a file")
        return str(self._path)

    def take_over(self) -> None:
        """Make what a program wrote into ``model`` part of the model.

        Raises:
            GraphError: it is no valid graph.
        """
        written = self._lent.written() if self._lent is not None else None
        if written is not None:
            graph, self.weights = read_weights(ir.from_proto(written), [*self.weights])  # without outputs yet
            self._names.update(str(v.name) for v in values(graph.model.graph))
            self.ir_model, self.op = graph.model, Builder(graph.model.graph, names=self._names)

    def refresh(self) -> None:
        """Bring a ``model`` that a program holds up to date, both ways."""
        if self._lent is not None:
            _ = self.model

    def value(self, name: str) -> ir.Value:
        """The value of that name: an input, an initializer or a node's output.

        Raises:
            ArtifactError: there is none; close names are listed.
        """
        known = {str(v.name): v for v in values(self.ir_model.graph)}
        if name not in known:
            raise ArtifactError(
                f"the model has no value {name}{close_to(name, known)}", cure="name a value of the model"
            )
        return known[name]

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str | ir.SymbolicDim | None]) -> ir.Value:
        """The graph input of that name, or the value that a node makes; an input is added where there is neither.

        Raises:
            ArtifactError: the name is taken by a weight, or by a value of another kind.
        """
        cure = "give it another name, or rename the value of the model"
        found = next((v for v in values(self.ir_model.graph) if v.name == name), None)
        if name in self.weights or (found is not None and found.is_initializer()):
            raise ArtifactError(f"the model has a weight or constant called {name}, which is no input", cure=cure)
        if found is None:
            return self.add_input(name, dtype, dims)
        kinds = {dtype, found.dtype}
        if len(kinds) > 1 and not all(kind is not None and kind.is_integer() for kind in kinds):
            what = "input" if found.is_graph_input() else "value"
            raise ArtifactError(f"the {what} {name} is {found.dtype}, not {dtype}", cure=cure)
        return found

    def target_name(self, usual: str) -> str:
        """The usual name of a target, or with a number where a value that is no input has it."""
        inputs = {v.name for v in self.ir_model.graph.inputs} - self.weights.keys()
        return usual if usual in inputs else self.unused_name(usual)

    def add_input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str | ir.SymbolicDim | None]) -> ir.Value:
        """A new graph input; where the model has a value of that name, it gets a number."""
        made = ir.Value(name=self.free_name(name), type=ir.TensorType(dtype), shape=ir.Shape(dims))
        self.ir_model.graph.inputs.append(made)
        return made

    def unused_name(self, wanted: str) -> str:
        """The name, or with a number where the model has a value of that name."""
        return free_name(wanted, self._names)

    def free_name(self, wanted: str) -> str:
        """The same, and it is taken from then on."""
        name = self.unused_name(wanted)
        self._names.add(name)
        return name

    def weight(self, name: str) -> ir.Value:
        """The weight of that name: one of ``weights``, or any other floating constant, which becomes one.

        Raises:
            ArtifactError: there is none; close names are listed.
        """
        graph = self.ir_model.graph
        if name not in self.weights:
            hold_constants(graph, lambda v: v.name == name)
            known = [*self.weights, *(n for n, v in graph.initializers.items() if is_floating(v))]
            if name not in known:
                cure = "name initializers of the model"
                if name in graph.initializers:
                    cure = "integers behind DequantizeLinear become weights by onnxtrain.dequantize_weights(model)"
                if any(v.name == name for v in graph.inputs):
                    cure = "the gradient of an input is an output of onnxtrain.gradient_graph(model, wrt=name)"
                raise ArtifactError(f"the model has no floating initializer {name}{close_to(name, known)}", cure=cure)
            value = graph.initializers.pop(name)
            self.weights[name], value.const_value = value.const_value, None  # type: ignore[assignment]
            graph.inputs.append(value)
            read_outside(graph, value)
        return self.value(name)

    def new_weight(self, name: str, content: np.ndarray) -> ir.Value:
        """A weight that the model did not have; a name that is taken gets a number."""
        tensor = ir.tensor(content)
        made = self.add_input(name, tensor.dtype, list(content.shape))
        tensor.name = made.name
        self.weights[str(made.name)] = tensor
        return made

    def transposed(self, weight: ir.Value, before: ir.Node | None) -> ir.Value:
        """A matrix transposed, made before a node."""
        return Builder(self.ir_model.graph, before=before, names=self._names).Transpose(weight, perm=[1, 0])

    def output(self, value: ir.Value, name: str) -> str:
        """Make a value an output of the graph; says under which name: this one, with a number where it is taken."""
        taken = value.is_graph_input() or value.is_initializer() or value.is_graph_output()
        value = self.op.Identity(value) if taken else value
        value.name = self.free_name(name)
        self.ir_model.graph.outputs.append(value)
        return str(value.name)


def is_floating(value: ir.Value) -> bool:
    """Whether a value can be differentiated by its type."""
    return value.dtype is not None and value.dtype.is_floating_point()


_CURRENT: contextvars.ContextVar[Base | None] = contextvars.ContextVar("onnxtrain.onnxblock.base", default=None)


def opened() -> Base | None:
    """The model that the innermost ``with base(...)`` or ``with empty_base()`` opened, None where there is none."""
    return _CURRENT.get()


def current() -> Base:
    """The model that the innermost ``with base(...)`` or ``with empty_base()`` opened.

    Raises:
        ArtifactError: there is none.
    """
    found = opened()
    if found is None:
        raise ArtifactError("no model is being built", cure="call blocks within `with onnxblock.base(model):`")
    found.take_over()
    return found


@contextlib.contextmanager
def base(model: Source, model_path: Path | str | None = None, *, untie: Sequence[str] = ()) -> Iterator[Base]:
    """Blocks called within extend a copy of this model.

    Args:
        model: the model or the path of its file; from 2 GB on, a path.
        model_path: the file that a model was read from, for programs that ask for it; nothing is read from there.
        untie: initializers that several modules read and that each gets for itself, as it does those of ones or zeros.

    Raises:
        GraphError: the model cannot be read.
    """
    graph, weights = read_weights(model, split=untie)
    path = model_path or (model if isinstance(model, str | Path) else None)
    with _opened(Base(graph.model, weights, path)) as made:
        yield made


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Base]:
    """Blocks called within build a model from nothing, of this opset (20 where none is given)."""
    version = OPSETS[0]
    if opset_version is not None:
        version = check_whole("opset_version", opset_version, least=LOWEST, most=NEWEST)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": version}, name="main")
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
def custom_op_library(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Say which library has the custom operators of the models built within.

    Nodes of such operators are kept as they are. Nothing is loaded here: the session that runs the model loads it,
    by ``SessionOptions.register_custom_ops_library``.

    Raises:
        ArtifactError: there is no such file.
    """
    check_file(path, ArtifactError, "give the path of the library of custom operators")
    yield Path(path)
