"""Parameters that an exporter merged because they held the same numbers, made parameters of their own again.

Exporters keep one of several equal initializers. A module that was just made has ones and zeros in many places, and a
normalization the same zeros as bias and as running mean: one initializer would be trained for all of them. torch's
TorchScript exporter leaves an Identity with the parameter's own name for each that it merged; elsewhere nodes say which
module they come from, and each module gets its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.errors import GraphError, close_to
from onnxtrain.ir import forms
from onnxtrain.ir.graphs import free_name, values
from onnxtrain.ir.modules import NAMESPACE, modules_of
from onnxtrain.ir.weights import FLOATING, Kind, decide, is_generated

_PARTS = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}  # inputs of normalizations
_NORMALIZATIONS = frozenset(f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "RMS"))
_LEFT = re.compile(r"Identity_\d+")  # nodes that TorchScript's exporter leaves for what it merged
_CALL = re.compile(r"(.+)_\d+")  # a module that is called again
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
    modules = _Modules(graph)
    parted = _part_named(graph, modules)
    taken = {str(v.name) for v in values(graph)}
    for value in list(graph.initializers.values()):
        asked = value.name in names and value.name not in parted
        merged = asked or (not parted and _is_merged(value))  # one exporter wrote them all: the rest is really tied
        if merged and not _split(graph, value, taken, modules) and asked:
            what = f"{value.name} is not read by several modules, as far as the nodes of the model say"
            raise GraphError(what, cure="leave it out of untie")


def _part_named(graph: ir.Graph, modules: _Modules) -> set[str]:
    """Give each parameter that TorchScript's exporter merged its initializer again; says whose copies they were.

    What it folded, such as a transposed matrix, it merges also where one module is called twice: that stays one.
    """
    found = list(_left(graph))
    kept: dict[tuple[str, str], ir.Value] = {}  # by initializer and parameter, or module where that has no name
    nodes = {node for _, node in found}
    for source in dict.fromkeys(source for source, _ in found):
        readers = (use.node for use in source.uses() if use.node not in nodes)
        kept |= {(str(source.name), modules.of(reader)): source for reader in readers}
    for source, node in found:
        y = node.outputs[0]
        name = str(y.name)
        place = str(source.name), modules.of(next(iter(y.uses())).node) if is_generated(name) else name
        if place not in kept:
            y.name, kept[place] = None, _copy(source, name)
            graph.register_initializer(kept[place])
        y.replace_all_uses_with(kept[place])
        graph.remove(node, safe=True)
    return {str(source.name) for source, _ in found}


def _left(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.Node]]:
    """Initializers and the nodes that TorchScript's exporter left where it merged others into them."""
    for node in graph:
        x = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
        if x is None or not x.is_initializer() or x.const_value is None or not _LEFT.fullmatch(node.name or ""):
            continue
        y = node.outputs[0]
        if x.const_value.dtype in FLOATING and y.uses() and not y.is_graph_output():
            yield x, node


def _copy(value: ir.Value, name: str) -> ir.Value:
    """An initializer of the same content."""
    tensor = value.const_value
    assert tensor is not None
    return ir.val(name, const_value=ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name))


def _is_merged(value: ir.Value) -> bool:
    """Whether a weight may be several that held the same number everywhere."""
    tensor = value.const_value
    if tensor is None or len(value.uses()) < 2:
        return False
    decision = decide(value)
    is_used = decision is not None and decision.kind in (Kind.WEIGHT, Kind.STATISTIC)
    return is_used and forms.of(tensor.numpy()) is forms.Form.SAME


def _split(graph: ir.Graph, value: ir.Value, taken: set[str], modules: _Modules) -> bool:
    """Give all places but one an initializer of their own; says whether there are several."""
    places: dict[_Place, list[tuple[ir.Node, int]]] = {}
    for use in value.uses():
        place = modules.of(use.node), _part(use.node, use.idx, str(value.name))
        places.setdefault(place, []).append((use.node, use.idx))
    home = next((p for p in places if ".".join(filter(None, p)) == value.name), next(iter(places)))
    for place, uses in places.items():
        if place == home:
            continue
        name = free_name(".".join(filter(None, place)), taken)
        taken.add(name)
        made = _copy(value, name)
        graph.register_initializer(made)
        for node, index in uses:
            node.replace_input_with(index, made)
    return len(places) > 1


def _part(node: ir.Node, index: int, name: str) -> str:
    """Which part of its module an input of a node is."""
    part = name.rpartition(".")[2]
    return _PARTS.get(index, part) if node.op_type in _NORMALIZATIONS else part


class _Modules:
    """The modules that the nodes of a graph were exported from.

    Args:
        graph: all its parameters still have the names that the exporter gave them.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._called = {_module_of(node) for node in graph.all_nodes()}
        names = (str(v.name) for v in values(graph))
        self._owners = {name.rpartition(".")[0] for name in names if not name.startswith("/")}

    def of(self, node: ir.Node) -> str:
        """The module of a node, as ``layers.0.norm``; empty where the node does not say.

        TorchScript's exporter calls it ``layers.0.norm_1`` where it is called a second time.
        """
        module = _module_of(node)
        called_again = None if NAMESPACE in node.metadata_props else _CALL.fullmatch(module)
        if called_again is None or module in self._owners or called_again[1] not in self._called:
            return module
        return called_again[1]


def _module_of(node: ir.Node) -> str:
    """The module and call that a node was exported from, as far as it says."""
    if NAMESPACE in node.metadata_props:
        found = modules_of(node)
        return found[-1][0] if found else ""
    parts = (node.name or "").strip("/").split("/")[:-1]
    # what is in a container is called by all of its name: layers.0/layers.0.norm
    return ".".join(p for p, inner in itertools.pairwise([*parts, ""]) if not inner.startswith(f"{p}."))
