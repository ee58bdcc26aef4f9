"""Graphs of other opsets in the form of opset 20: the one that gradient rules and our functions speak.

Only what changed in an operator's form between opsets 13 and 20 is rewritten; the source is ONNX's Changelog.md.
Up to opset 12 ONNX's own converter comes first. Newer operators mostly learned new element types; what else they
learned (an attribute, an input) may be there with its default and is an error otherwise.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError, first_line
from onnxtrain.ir.graphs import free_name, unavailable

LOWEST, SPOKEN, NEWEST = 13, 20, 28
_KINDS = ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
_REDUCTIONS = frozenset(f"Reduce{kind}" for kind in _KINDS)
_NEWER_FORMS = {"Attention": 25}  # what these learned since opset 20 is known here
_KNOWN = {("QuantizeLinear", "output_dtype"), ("SpaceToDepth", "mode")}
_ANY_NUMBER = 2**31 - 1  # of inputs, as ONNX says it
_LARGEST_CONSTANT = 64  # elements: the content of axes and sizes decides how a node is converted
_GRID_SAMPLE_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def version_of(graph: ir.Graph) -> int:
    """The opset of a graph; a graph of no operator of ONNX is as good as one of opset 20."""
    return graph.opset_imports.get("", SPOKEN)


def raise_opset(graph: ir.Graph) -> None:
    """Rewrite a graph of opset 13 to 19 as one of opset 20, in place; newer graphs keep their opset.

    Nodes may have versions of their own: those that come from functions do.

    Raises:
        GraphError: the graph is older than opset 13 or newer than 28, or a node uses what its operator learned later.
    """
    version = version_of(graph)
    for node in list(graph.all_nodes()):
        if node.domain == "":
            _raise_node(node, graph, node.version or version)
    graph.opset_imports[""] = max(version, SPOKEN)


def _raise_node(node: ir.Node, graph: ir.Graph, version: int) -> None:
    if version < LOWEST:
        raise GraphError(
            f"the graph is of opset {version}; {LOWEST} is the oldest that can be trained",
            cure=f"convert it with onnx.version_converter.convert_version(model, {SPOKEN})",
        )
    if version > NEWEST:
        raise GraphError(
            f"the graph is of opset {version}; {NEWEST} is the newest that can be trained",
            cure=f"export it with opset {SPOKEN}",
        )
    node.version = None
    if version < SPOKEN:
        _rewrite(node, graph, version)
    elif version > SPOKEN:
        _refuse_later(node, version)


def _refuse_later(node: ir.Node, version: int) -> None:
    """Take away what the operator learned after the form we speak where it states the default; else it is an error."""
    later, inputs = _later(node.op_type, version)
    for name, default in later.items():
        if name not in node.attributes:
            continue
        found = node.attributes.pop(name)
        if (found.value.encode() if isinstance(found.value, str) else found.value) != default:
            raise _learned(node, version, f"{name}={found.value}")
    if any(v is not None for v in node.inputs[inputs:]):
        raise _learned(node, version, f"an input {inputs}")


def _learned(node: ir.Node, version: int, what: str) -> GraphError:
    cure = f"export it with opset {SPOKEN}, or write that line with other operators"
    return unavailable(node, f"{node.op_type} of opset {version} with {what}", cure)


@functools.cache
def _later(op_type: str, version: int) -> tuple[dict[str, object], int]:
    """The attributes, with their defaults, that an operator learned since our form of it; and how many inputs it had.

    Our form is that of opset 20, or the first of a newer operator, but for what the tables above say.
    """
    schemas = [s for s in _history().get(op_type, ()) if s.since_version <= version]
    if not schemas:  # onnxruntime's alone, or newer than this onnx
        return {}, _ANY_NUMBER
    spoken = _NEWER_FORMS.get(op_type, SPOKEN)
    ours = next((s for s in reversed(schemas) if s.since_version <= spoken), schemas[0])
    added = {n: a for n, a in schemas[-1].attributes.items() if n not in ours.attributes and (op_type, n) not in _KNOWN}
    return {n: onnx.helper.get_attribute_value(a.default_value) for n, a in added.items()}, ours.max_input


@functools.cache
def _history() -> dict[str, list[onnx.defs.OpSchema]]:
    """All that ONNX's operators have been, the oldest first."""
    found: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: s.since_version):
        if not schema.domain:
            found.setdefault(schema.name, []).append(schema)
    return found


def convert(model: ir.Model) -> ir.Model:
    """A model of an opset before 13 as one of opset 13, by ONNX's converter, which does not see the weights.

    Raises:
        GraphError: the converter does not know the way.
    """
    version, weights = version_of(model.graph), _take_weights(model.graph)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), LOWEST)
    except Exception as error:  # the converter raises many types
        raise GraphError(
            f"opset {version} cannot be brought to {LOWEST}: {first_line(error)}", cure="export it with a newer opset"
        ) from error
    converted = ir.from_proto(proto)
    values = {str(v.name): v for v in converted.graph.inputs}
    for name, (tensor, is_input) in weights.items():
        values[name].const_value = tensor
        converted.graph.register_initializer(values[name])
        if not is_input:
            converted.graph.inputs.remove(values[name])
    for node in converted.graph.all_nodes() if version < 11 else ():
        if node.op_type == "Resize":  # it and Upsample had no other way to place pixels, which the converter leaves out
            node.attributes["coordinate_transformation_mode"] = ir.AttrString(
                "coordinate_transformation_mode", "asymmetric"
            )
            node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")
    return converted


def _take_weights(graph: ir.Graph) -> dict[str, tuple[ir.TensorProtocol, bool]]:
    """Turn large initializers into inputs; gives back their content, and whether they were inputs as well."""
    taken = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and (tensor.size > _LARGEST_CONSTANT or isinstance(tensor, ir.ExternalTensor)):
            graph.initializers.pop(name)
            value.const_value = None
            taken[name] = (tensor, value in graph.inputs)
            if value not in graph.inputs:
                graph.inputs.append(value)
    return taken


def _rewrite(node: ir.Node, graph: ir.Graph, version: int) -> None:
    """One node in the form that its operator has since opset 18 or 20."""
    if version < 18 and node.op_type in _REDUCTIONS and "axes" in node.attributes:
        _attribute_as_input(node, graph, "axes", 1)
    elif version < 18 and node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    elif version < 14 and node.op_type == "BatchNormalization" and len(node.outputs) > 1:
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)  # that is what more outputs meant
        node.resize_outputs(min(3, len(node.outputs)))
    elif version < 16 and node.op_type == "RoiAlign":
        node.attributes["coordinate_transformation_mode"] = ir.AttrString(
            "coordinate_transformation_mode", "output_half_pixel"
        )
    elif node.op_type == "GridSample" and "mode" in node.attributes:
        mode = node.attributes["mode"].as_string()
        node.attributes["mode"] = ir.AttrString("mode", _GRID_SAMPLE_MODES.get(mode, mode))
    elif node.op_type == "DFT":
        if "axis" not in node.attributes:
            node.attributes["axis"] = ir.AttrInt64("axis", 1)
        _attribute_as_input(node, graph, "axis", 2)


def _attribute_as_input(node: ir.Node, graph: ir.Graph, name: str, index: int) -> None:
    """Move an integer attribute to the input of that index."""
    content = np.array(node.attributes.pop(name).value, np.int64)
    taken = {v.name for inner in graph.all_nodes() for v in (*inner.inputs, *inner.outputs) if v} | {
        *graph.initializers
    }
    base = free_name(f"{node.outputs[0].name}_{name}", taken)
    value = ir.val(base, const_value=ir.tensor(content, name=base))
    graph.register_initializer(value)
    node.resize_inputs(max(index + 1, len(node.inputs)))
    node.replace_input_with(index, value)
