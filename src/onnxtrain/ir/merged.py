"""Parameters that an exporter merged because they held the same numbers, made parameters of their own again.

Exporters keep one of several equal initializers. A module that was just made has ones and zeros in many places, and a
normalization the same zeros as bias and as running mean: one initializer would be trained for all of them. Where nodes
say which module they come from, each module gets its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.errors import GraphError, close_to
from onnxtrain.ir import forms
from onnxtrain.ir.graphs import free_name, values
from onnxtrain.ir.weights import Kind, decide

_SCOPES = "pkg.torch.onnx.name_scopes"  # what torch.onnx says of a node: the modules around it, the outermost first
_PARTS = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}  # inputs of BatchNormalization
_Place = tuple[str, str]  # module, and part of it


def split_merged(graph: ir.Graph, names: Collection[str] = ()) -> None:
    """Give each module its own initializer where several read one of ones, zeros or another number, in place.

    Args:
        graph: its initializers still have their content.
        names: initializers of any content that are split as well.

    Raises:
        GraphError: there is no such initializer, or nodes do not say that several modules read it.
    """
    if unknown := [n for n in names if n not in graph.initializers]:
        known = close_to(unknown[0], graph.initializers)
        raise GraphError(f"the model has no initializer {unknown[0]}{known}", cure="name initializers of the model")
    taken = {str(v.name) for v in values(graph)}
    for value in list(graph.initializers.values()):
        asked = value.name in names
        if (asked or _is_merged(value)) and not _split(graph, value, taken) and asked:
            what = f"{value.name} is not read by several modules, as far as the nodes of the model say"
            raise GraphError(what, cure="leave it out of untie")


def _is_merged(value: ir.Value) -> bool:
    """Whether a weight may be several that held the same number everywhere."""
    tensor = value.const_value
    if tensor is None or len(value.uses()) < 2:
        return False
    decision = decide(value)
    is_used = decision is not None and decision.kind in (Kind.WEIGHT, Kind.STATISTIC)
    return is_used and forms.of(tensor.numpy()) is forms.Form.SAME


def _split(graph: ir.Graph, value: ir.Value, taken: set[str]) -> bool:
    """Give all places but one an initializer of their own; says whether there are several."""
    places: dict[_Place, list[tuple[ir.Node, int]]] = {}
    for use in value.uses():
        places.setdefault(_place(use.node, use.idx, str(value.name)), []).append((use.node, use.idx))
    home = next((p for p in places if ".".join(filter(None, p)) == value.name), next(iter(places)))
    for place, uses in places.items():
        if place == home:
            continue
        name = free_name(".".join(filter(None, place)), taken)
        taken.add(name)
        tensor = value.const_value
        assert tensor is not None
        made = ir.val(name, const_value=ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name))
        graph.register_initializer(made)
        for node, index in uses:
            node.replace_input_with(index, made)
    return len(places) > 1


def _place(node: ir.Node, index: int, name: str) -> _Place:
    """The module that a node is of, and which of its parts an input is."""
    part = name.rpartition(".")[2]
    if node.op_type == "BatchNormalization":
        part = _PARTS.get(index, part)
    return module_of(node), part


def module_of(node: ir.Node) -> str:
    """The module that a node was exported from, as ``layers.0.norm``; empty where the node does not say."""
    scopes = node.metadata_props.get(_SCOPES)
    if scopes is not None:
        try:
            found = ast.literal_eval(scopes)
        except (ValueError, SyntaxError):
            return ""
        return str(found[-2]) if isinstance(found, list) and len(found) > 1 else ""
    return (node.name or "").rpartition("/")[0].strip("/").replace("/", ".")
