"""A model computed node by node in double precision: what gradients are compared with.

Each node of the graph is a model of its own, computed by the first that computes it as onnxruntime does in float32:
onnxruntime's kernel for doubles, the reference of the onnx package in doubles, onnxruntime in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Value = Any  # an array, a list of arrays (a sequence), or None (an optional)
_KINDS = ("to", "dtype", "output_datatype")  # attributes that are element types


class Rejected(Exception):
    """What was tried is no valid call; nothing to report."""


def reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads of the graph around it, those of its bodies included."""
    found = [n for n in node.input if n]
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else []:
            own = {v.name for v in (*body.input, *body.initializer)} | {o for n in body.node for o in n.output}
            found += [n for inner in body.node for n in reads(inner) if n not in own]
            found += [v.name for v in body.output if v.name not in own]
    return list(dict.fromkeys(found))


def type_of(value: Value, shape: Sequence[int | str | None] | None = None) -> onnx.TypeProto:
    """The type of a value; without its shape where none is given."""
    if isinstance(value, list):
        return helper.make_sequence_type_proto(type_of(value[0] if value else np.zeros(1, np.float32)))
    dtype = np.asarray(value).dtype
    kind = TensorProto.STRING if dtype.kind in "OUS" else helper.np_dtype_to_tensor_dtype(dtype)
    return helper.make_tensor_type_proto(kind, shape)


def tensor(array: np.ndarray, name: str) -> TensorProto:
    """An array as a tensor; strings too."""
    if array.dtype.kind in "OUS":
        return helper.make_tensor(name, TensorProto.STRING, array.shape, [str(s).encode() for s in array.reshape(-1)])
    return numpy_helper.from_array(np.asarray(array), name)


class Unit:
    """One node as a model.

    Args:
        node: the node.
        imports: what the model imports.
        functions: those of the model.
        constants: inputs that are initializers.
        feeds: the other inputs, for their types.
    """

    def __init__(
        self,
        node: onnx.NodeProto,
        imports: Iterable[onnx.OperatorSetIdProto],
        functions: Sequence[onnx.FunctionProto] = (),
        constants: Mapping[str, np.ndarray] | None = None,
        feeds: Mapping[str, Value] | None = None,
    ) -> None:
        constants, feeds = constants or {}, feeds or {}
        self.outputs = [n for n in node.output if n]
        inputs = [onnx.ValueInfoProto(name=n, type=type_of(v)) for n, v in feeds.items()]
        outputs = [onnx.ValueInfoProto(name=n) for n in self.outputs]
        held = [tensor(a, n) for n, a in constants.items()]
        graph = helper.make_graph([node], "unit", inputs, outputs, held)
        self.model = helper.make_model(graph, opset_imports=list(imports), functions=functions, ir_version=10)

    def session(self, exact: bool) -> Any:
        """A function from feeds to outputs, by onnxruntime; in doubles where exact.

        Raises:
            Rejected: onnxruntime has no kernel, or the node is not valid.
        """
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            model = doubled(self.model) if exact else self.model
            made = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises many types
            raise Rejected(str(error)) from error
        return lambda feeds: made.run(self.outputs, feeds)

    def reference(self) -> Any:
        """A function from feeds to outputs, by the reference of the onnx package in doubles."""
        try:
            made = ReferenceEvaluator(doubled(self.model))
        except Exception as error:
            raise Rejected(str(error)) from error
        return lambda feeds: made.run(None, dict(feeds))


def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with doubles in the place of float32."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    _double_graph(made.graph)
    for function in made.functions:
        for node in function.node:
            _double_node(node)
        for attribute in function.attribute_proto:
            _double_attribute(attribute)
    return made


def _double_graph(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        _double_type(info.type)
    for held in graph.initializer:
        _double_tensor(held)
    for node in graph.node:
        _double_node(node)


def _double_type(kind: onnx.TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type == TensorProto.FLOAT:
        kind.tensor_type.elem_type = TensorProto.DOUBLE
    elif kind.HasField("sequence_type"):
        _double_type(kind.sequence_type.elem_type)


def _double_tensor(held: TensorProto) -> None:
    if held.data_type == TensorProto.FLOAT:
        held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held).astype(np.float64), held.name))


def _double_node(node: onnx.NodeProto) -> None:
    if node.op_type == "Constant":
        for attribute in node.attribute:
            if attribute.name in ("value_float", "value_floats") and not attribute.ref_attr_name:
                content = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                held = numpy_helper.from_array(np.array(content, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", held))
    for attribute in node.attribute:
        _double_attribute(attribute)


def _double_attribute(attribute: onnx.AttributeProto) -> None:
    if attribute.HasField("g"):
        _double_graph(attribute.g)
    elif attribute.HasField("t"):
        _double_tensor(attribute.t)
    elif attribute.name in _KINDS and attribute.i == TensorProto.FLOAT:
        attribute.i = TensorProto.DOUBLE


def up(value: Value) -> Value:
    """A value in doubles."""
    if isinstance(value, list):
        return [up(v) for v in value]
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value


def close(a: Value, b: Value, tolerance: float = 1e-3) -> bool:
    """Whether two values are nearly the same."""
    if isinstance(a, list) or isinstance(b, list):
        return isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(map(close, a, b))
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "fc" and b.dtype.kind in "fc":
        return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * 0.1, equal_nan=True))
    return bool(np.array_equal(a, b))


class Evaluator:
    """A model node by node.

    Args:
        model: the model.
        feeds: its inputs.

    Attributes:
        values: all values of the outermost graph in float32.
        exact: the same in doubles.
        coarse: operators that are computed in float32.

    Raises:
        Rejected: onnxruntime cannot compute a node.
    """

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
        held = {i.name: _array(i) for i in model.graph.initializer}
        self.values: dict[str, Value] = held | dict(feeds)
        self.exact: dict[str, Value] = {n: up(v) for n, v in self.values.items()}
        self.coarse: set[str] = set()
        self._runs: list[tuple[list[str], list[str], Any]] = []
        for node in model.graph.node:
            self._add(node, model)

    def _add(self, node: onnx.NodeProto, model: onnx.ModelProto) -> None:
        read = reads(node)
        constants = {n: self.values[n] for n in read if _is_setting(self.values[n])}
        feeds = {n: self.values[n] for n in read if n not in constants}
        unit = Unit(node, model.opset_import, model.functions, constants, feeds)
        plain = unit.session(False)
        made = _outcome(plain, feeds)
        exact_feeds = {n: self.exact[n] for n in feeds}
        run, exact = None, None
        for kind in (lambda: unit.session(True), unit.reference):
            try:
                run = kind()
                exact = _outcome(run, exact_feeds)
            except Rejected:
                continue
            if close(made, exact) and all(_is_exact(v) for v in exact):
                break
            exact = None
        if exact is None:
            self.coarse.add(node.op_type)
            run = _coarse(plain, feeds)
            exact = _outcome(run, exact_feeds)
        self.values |= zip(unit.outputs, made, strict=True)
        self.exact |= zip(unit.outputs, exact, strict=True)
        self._runs.append((list(feeds), unit.outputs, run))

    def run(self, changed: Mapping[str, np.ndarray]) -> dict[str, Value]:
        """All values in doubles where these are others."""
        values, dirty = self.exact | dict(changed), set(changed)
        for inputs, outputs, run in self._runs:
            if dirty.isdisjoint(inputs):
                continue
            values |= zip(outputs, run({n: values[n] for n in inputs}), strict=True)
            dirty.update(outputs)
        return values


def _array(held: TensorProto) -> np.ndarray:
    return numpy_helper.to_array(held)


def _is_setting(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "f"


def _is_exact(value: Value) -> bool:
    if isinstance(value, list):
        return all(map(_is_exact, value))
    return not isinstance(value, np.ndarray) or value.dtype != np.float32


def _outcome(run: Any, feeds: Mapping[str, Value]) -> list[Value]:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [np.asarray(v) if isinstance(v, np.generic) else v for v in run(feeds)]
    except Exception as error:  # of onnxruntime or the reference
        raise Rejected(str(error)) from error


def _coarse(plain: Any, like: Mapping[str, Value]) -> Any:
    """A function in doubles that computes in the types of ``like``."""
    return lambda feeds: [up(v) for v in plain({n: _as(v, like[n]) for n, v in feeds.items()})]


def _as(value: Value, like: Value) -> Value:
    if isinstance(value, list):
        return [_as(v, o) for v, o in zip(value, like, strict=True)]
    return value.astype(like.dtype) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
