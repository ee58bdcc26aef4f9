"""Graphs of older opsets in the form of opset 20: the one that gradient rules and our functions speak.

Only what changed in an operator's form between opsets 13 and 20 is rewritten; the source is ONNX's Changelog.md.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphError

LOWEST, SPOKEN = 13, 20
_KINDS = ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
_REDUCTIONS = frozenset(f"Reduce{kind}" for kind in _KINDS)
_GRID_SAMPLE_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def raise_opset(graph: ir.Graph) -> None:
    """Rewrite a graph of opset 13 to 19 as one of opset 20, in place; newer graphs stay as they are.

    Raises:
        GraphError: the graph is older than opset 13.
    """
    version = graph.opset_imports.get("", SPOKEN)
    if version >= SPOKEN:
        return
    if version < LOWEST:
        raise GraphError(
            f"the graph is of opset {version}; {LOWEST} is the oldest that can be trained",
            cure=f"convert it with onnx.version_converter.convert_version(model, {SPOKEN})",
        )
    for node in graph.all_nodes():
        if node.domain == "":
            node.version = None
            _rewrite(node, graph, version)
    graph.opset_imports[""] = SPOKEN


def _rewrite(node: ir.Node, graph: ir.Graph, version: int) -> None:
    """One node in the form that its operator has since opset 18 or 20."""
    if version < 18 and node.op_type in _REDUCTIONS and "axes" in node.attributes:
        _attribute_as_input(node, graph, "axes", 1)
    elif version < 18 and node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
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
    base = f"{node.outputs[0].name}_{name}"
    value = ir.val(base, const_value=ir.tensor(content, name=base))
    graph.register_initializer(value)
    node.resize_inputs(max(index + 1, len(node.inputs)))
    node.replace_input_with(index, value)
