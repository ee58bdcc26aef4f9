"""Cleanup: constants, known types and shapes, nodes that do nothing, equal and dead nodes; weights stay as they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import remove_unread, rewrite
from onnxtrain.ir.graphs import free_name, keep_size
from onnxtrain.ir.traits import Trait, traits_of

_LARGEST_FOLD = 65536  # elements of a folded constant
# What ONNX's evaluator computes as exactly as the type allows, and soon: of others it computes some in float32 whatever
# the type is (HardSwish, Gelu, Erf), some not as ONNX says (LRN), and some in loops of Python (convolutions)
_NAMES = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Cast CastLike Ceil Celu CenterCropPad Clip Compress Concat ConstantOfShape Cos Cosh CumProd CumSum DepthToSpace
    DequantizeLinear Det Div Equal Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gemm
    GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual Hardmax Identity IsInf IsNaN Less LessOrEqual Log
    LogSoftmax MatMul Max Mean MelWeightMatrix Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow
    QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence Round ScatterElements ScatterND Selu Shape
    Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh
    ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Where Xor"""
_EXACT = frozenset(_NAMES.split())


class ConstantsPass(ir.passes.InPlacePass):
    """Constant nodes become initializers; a node whose inputs are all constants becomes its result.

    Weights are graph inputs, so nothing computed from one is ever folded.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            content = _content(node)
            if content is not None:
                _replace_by_constants(model.graph, node, content)
                modified = True
        return ir.passes.PassResult(model, modified)


def _content(node: ir.Node) -> list[np.ndarray] | None:
    """The results of a node that depends on constants alone, or None; a graph output needs its node."""
    if any(o.is_graph_output() for o in node.outputs):
        return None
    if node.op_type == "Constant" and node.domain == "":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        return None if tensor is None else [tensor.numpy()]
    if node.domain != "" or node.op_type not in _EXACT or not node.inputs:
        return None
    arrays = [shapes.constant_of(v) if v is not None else None for v in node.inputs]
    if any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
        return None
    if any(_too_large(v) for v in node.outputs):
        return None
    if node.op_type == "Slice" and len(arrays) > 4 and arrays[4] is not None and (arrays[4] < 0).any():
        return None  # the evaluator has numpy's ends there
    return _evaluate(node, arrays)


def _too_large(value: ir.Value) -> bool:
    dims = shapes.dims_of(value)
    size = None if dims is None else shapes.product(dims)
    return not isinstance(size, int) or size > _LARGEST_FOLD


def _evaluate(node: ir.Node, arrays: list[np.ndarray | None]) -> list[np.ndarray] | None:
    """Run one node in ONNX's reference evaluator; None where it has no implementation."""
    version = node.graph.opset_imports.get("", 20) if node.graph is not None else 20
    names = [f"i{k}" if a is not None else "" for k, a in enumerate(arrays)]
    proto = onnx.helper.make_node(node.op_type, names, [f"o{k}" for k in range(len(node.outputs))])
    proto.attribute.extend(ir.serde.serialize_attribute(a) for a in node.attributes.values())
    graph = onnx.helper.make_graph(
        [proto],
        "fold",
        [
            onnx.helper.make_tensor_value_info(n, int((v and v.dtype) or 1), None)
            for n, v in zip(names, node.inputs, strict=True)
            if n
        ],
        [
            onnx.helper.make_tensor_value_info(o, int(v.dtype or 1), None)
            for o, v in zip(proto.output, node.outputs, strict=True)
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)], ir_version=10)
    try:
        made = ReferenceEvaluator(model).run(None, {n: a for n, a in zip(names, arrays, strict=True) if n})
    except Exception:  # what cannot be computed here, such as an index out of range, is for the runtime to say
        return None
    return [np.asarray(m) for m in made]


def _replace_by_constants(graph: ir.Graph, node: ir.Node, content: list[np.ndarray]) -> None:
    for value, array in zip(node.outputs, content, strict=True):
        _to_constant(graph, value, array)
    graph.remove(node, safe=True)


def _to_constant(graph: ir.Graph, value: ir.Value, array: np.ndarray) -> None:
    if value.is_graph_output() or not value.uses():
        return
    tensor, name = ir.tensor(array, dtype=value.dtype), free_name(f"{value.name}_const", graph.initializers)
    shape = ir.Shape(array.shape)
    constant = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(constant)
    value.replace_all_uses_with(constant)


class KnownTypesPass(ir.passes.InPlacePass):
    """CastLike, whose type is known, becomes Cast: it no longer reads a value for its type."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in model.graph:
            dtype = node.outputs[0].dtype if node.outputs else None
            if node.op_type == "CastLike" and not node.domain and dtype is not None:
                kept = [a for a in node.attributes.values() if a.name == "saturate"]
                rewrite(node, "Cast", node.inputs[:1], [ir.AttrInt64("to", int(dtype)), *kept])
                modified = True
        return ir.passes.PassResult(model, modified)


class KnownShapesPass(ir.passes.InPlacePass):
    """Shape arithmetic whose result is a constant becomes that constant; sizes that inputs have are read from them.

    A size that is read from a value in between keeps it from being fused with what made it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = self._read_from_inputs(model.graph)
        for node in list(model.graph):
            value = node.outputs[0]
            data = shapes.data_of(value)
            if len(node.outputs) != 1 or data is None or value.is_graph_output() or not value.uses():
                continue
            parts = data if isinstance(data, tuple) else (data,)
            if all(isinstance(p, int) for p in parts) and value.dtype is not None:
                _to_constant(model.graph, value, np.array(data, value.dtype.numpy()))
                modified = True
        return ir.passes.PassResult(model, modified)

    @staticmethod
    def _read_from_inputs(graph: ir.Graph) -> bool:
        places: dict[str, tuple[ir.Value, int]] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(shapes.dims_of(value) or ()):
                if not isinstance(dim, int) and dim.value and dim.value.isidentifier():
                    places.setdefault(dim.value, (value, axis))
        modified = False
        for node in list(graph):
            source, sizes = node.inputs[0] if node.inputs else None, shapes.data_of(node.outputs[0])
            if node.op_type != "Shape" or node.domain or source is None or source.producer() is None:
                continue
            symbol = sizes[0] if isinstance(sizes, tuple) and len(sizes) == 1 else None
            place = places.get(str(getattr(symbol, "value", None)))
            if place is not None:
                node.replace_input_with(0, place[0])
                node.attributes["start"] = ir.AttrInt64("start", place[1])
                node.attributes["end"] = ir.AttrInt64("end", place[1] + 1)
                modified = True
        return modified


class NoOperationPass(ir.passes.InPlacePass):
    """Nodes that give back an input are bypassed: Identity, casts and reshapes that change nothing."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        modified = False
        for node in list(model.graph):
            x, y = _given_back(node), node.outputs[0]
            if x is None or not _is_noop(node, x, y) or len([o for o in node.outputs if o.uses()]) > 1:
                continue
            if y.is_graph_output() or shapes.names_a_size(x, y):
                continue
            keep_size(y, x)
            y.replace_all_uses_with(x)
            modified = True
        return ir.passes.PassResult(model, modified)


def _given_back(node: ir.Node) -> ir.Value | None:
    """The input that a node may give back: the first, of a choice that is known the one that is taken."""
    chosen = shapes.constant_of(node.inputs[0]) if node.op_type == "Where" and not node.domain else None
    if chosen is not None and chosen.size and (chosen == chosen.flat[0]).all():
        return node.inputs[1 if chosen.flat[0] else 2]
    return node.inputs[0] if node.inputs else None


_SAME_SHAPE = frozenset(("Reshape", "Expand", "Squeeze", "Unsqueeze", "Flatten", "Tile"))


def _is_noop(node: ir.Node, x: ir.Value, y: ir.Value) -> bool:
    if node.domain != "":
        return False
    op_type, same = node.op_type, shapes.same_dims(x, y)
    if op_type == "Identity":
        return True
    if op_type in ("Cast", "CastLike"):
        return x.dtype == y.dtype and x.dtype is not None
    if op_type == "Where":
        return same and x is not node.inputs[0]
    if op_type == "Transpose":
        order = shapes.attribute(node, "perm")
        return order is not None and list(order) == sorted(order)
    if op_type in _SAME_SHAPE or op_type == "Slice":
        return same and (op_type != "Slice" or _whole(node))
    if op_type in ("Concat", "Sum", "Max", "Min", "Mean"):
        return len(node.inputs) == 1
    if op_type == "Dropout":
        training = shapes.constant_of(shapes.operand(node, 2))
        ratio = shapes.constant_of(shapes.operand(node, 1))
        return (
            shapes.operand(node, 2) is None
            or (training is not None and not training)
            or (ratio is not None and ratio == 0)
        )
    return _is_neutral(node, same)


def _whole(node: ir.Node) -> bool:
    """Whether a Slice that keeps its input's shape also keeps its order."""
    steps = shapes.constant_of(shapes.operand(node, 4))
    return shapes.operand(node, 4) is None or (steps is not None and bool((steps > 0).all()))


def _is_neutral(node: ir.Node, same: bool) -> bool:
    """``x * 1``, ``x / 1``, ``x + 0``, ``x - 0``; of floating zeros -0 alone where it is added: -0 + 0 is 0."""
    neutral = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}.get(node.op_type)
    if neutral is None or not same:
        return False
    other = shapes.constant_of(node.inputs[1])
    if other is None or other.size > 64 or not (other == neutral).all():
        return False
    value = node.outputs[0]
    if neutral or (value.dtype is not None and value.dtype.is_integer()):
        return True
    is_negative = np.signbit(other.astype(np.float64))
    return bool((is_negative if node.op_type == "Add" else ~is_negative).all())


class CommonSubexpressionsPass(ir.passes.InPlacePass):
    """Equal nodes on equal inputs are computed once; random ones, and ones of different passes, are left alone."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        seen: dict[Hashable, ir.Node] = {}
        modified = _merge_constants(model.graph)
        for node in list(model.graph):
            if Trait.RANDOM in traits_of(node) or node.op_type == "BatchNormTraining":
                continue
            first = seen.setdefault(_key(node), node)
            if first is not node and not any(v.is_graph_output() for v in node.outputs):
                for old, new in zip(node.outputs, first.outputs, strict=True):
                    if old.uses():
                        _merge_names(old, new, model.graph)
                        keep_size(old, new)
                        old.replace_all_uses_with(new)
                        modified = True
        return ir.passes.PassResult(model, modified)


def _merge_names(old: ir.Value, new: ir.Value, graph: ir.Graph) -> None:
    """Let the sizes of a value that goes be called as those of an equal one that stays; inputs keep their names."""
    pairs = zip(shapes.dims_of(old) or (), shapes.dims_of(new) or (), strict=False)
    differ = [(a, b) for a, b in pairs if a != b and _is_name(a) and _is_name(b)]
    if differ:
        given = shapes.sizes_of_inputs(graph)
        kept = [(b, a) if a in given else (a, b) for a, b in differ if not (a in given and b in given)]
        shapes.rename_symbols(graph, {str(goes): str(stays) for goes, stays in kept})


def _is_name(dim: shapes.Dim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim.value.isidentifier()


def _merge_constants(graph: ir.Graph) -> bool:
    seen: dict[Hashable, ir.Value] = {}
    modified = False
    for value in list(graph.initializers.values()):
        array = None if value.is_graph_input() else shapes.constant_of(value)
        if array is None or array.size > 64:
            continue
        first = seen.setdefault((str(array.dtype), array.shape, array.tobytes()), value)
        if first is not value:
            value.replace_all_uses_with(first)
            graph.initializers.pop(str(value.name))
            modified = True
    return modified


def _key(node: ir.Node) -> Hashable:
    attributes = tuple(sorted((a.name, _attribute_key(a)) for a in node.attributes.values()))
    named = tuple(bool(v.name) for v in node.outputs)
    return node.domain, node.op_type, tuple(id(v) for v in node.inputs), attributes, len(named)


def _attribute_key(attr: ir.Attr) -> Any:
    if attr.type == ir.AttributeType.TENSOR:
        array = attr.value.numpy()
        return str(array.dtype), array.shape, array.tobytes()
    if attr.type == ir.AttributeType.GRAPH:
        return id(attr.value)
    return tuple(attr.value) if isinstance(attr.value, list) else repr(attr.value)


class DeadCodePass(ir.passes.InPlacePass):
    """Nodes and constants that nothing reads are removed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        return ir.passes.PassResult(model, remove_unread(model.graph))


__all__ = [
    "CommonSubexpressionsPass",
    "ConstantsPass",
    "DeadCodePass",
    "KnownShapesPass",
    "NoOperationPass",
]
