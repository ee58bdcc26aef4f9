"""Calls under ``torch.vmap``: recorded without the axis that it hides, they are recorded once more with it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from onnxtrain.capture.lowering.functional import written_by
from onnxtrain.capture.lowering.records import arguments_of, memory_of
from onnxtrain.capture.lowering.types import may_have_gradient
from onnxtrain.capture.lowering.writer import Writer, values
from onnxtrain.errors import CaptureError

GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled  # a region of a recorded program
_BEGIN, _END, _PREPARES = "_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"
# Questions that torch does not know of what has the axis, and what answers them.
_SIZES: Mapping[Any, Any] = {
    torch.ops.aten.sym_numel.default: torch.Tensor.numel,
    torch.ops.aten.sym_size.int: torch.Tensor.size,
    torch.ops.aten.sym_stride.int: torch.Tensor.stride,
}


@dataclasses.dataclass(frozen=True)
class Batched:
    """What one vmap has recorded.

    Args:
        nodes: its calls, from the one that begins it to the one that ends it.
    """

    nodes: tuple[Node, ...]

    @property
    def inputs(self) -> list[Node]:
        """What it reads of the graph around it."""
        inside = set(self.nodes)
        return list(dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes if n not in inside))

    @property
    def results(self) -> list[Node]:
        """What the graph around it reads."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]


def batched(module: GraphModule) -> dict[Node, Batched]:
    """The vmaps of a graph, without those within others, by their last call.

    Regions of the graph in which gradients are switched become part of it where a vmap goes beyond them.

    Raises:
        CaptureError: a vmap goes beyond a region of another kind.
    """
    _join(module)
    found: dict[Node, Batched] = {}
    open_: list[Node] = []
    depth = 0
    for node in module.graph.nodes:
        name = _name(node)
        depth += name == _BEGIN
        if depth:
            open_.append(node)
        depth -= name == _END
        if open_ and not depth:
            found[node] = Batched(tuple(open_))
            open_ = []
    if open_:
        raise CaptureError(
            "the forward pass switches torch.autocast within torch.vmap", cure="switch it around torch.vmap"
        )
    return found


def _join(module: GraphModule) -> None:
    """Let the calls of regions be calls of the graph where a vmap has some of them."""
    regions = [n for n in module.graph.nodes if n.target is GRADIENTS]
    parts = [list(getattr(module, str(n.args[1].target)).graph.nodes) for n in regions]
    inside = dict(zip(regions, parts, strict=True))
    if not any(depth for node, depth in _depths(module.graph.nodes, inside) if node in inside):
        return
    for region, nodes in zip(regions, parts, strict=True):
        on, body, *given = region.args
        inputs = iter(given)
        copies: dict[Node, Any] = {}
        with module.graph.inserting_before(region):
            for node in nodes:
                if node.op == "placeholder":
                    copies[node] = next(inputs)
                elif node.op != "output":
                    copies[node] = module.graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copies[node].target = f"{body.target}.{node.target}"
            results = [copies[n] if on else _stopped(copies[n]) for n in nodes[-1].args[0]]
        for part in list(region.users):
            part.replace_all_uses_with(results[part.args[1]])
            module.graph.erase_node(part)
        module.graph.erase_node(region)
        if not body.users:
            module.graph.erase_node(body)


def _depths(nodes: Iterable[Node], inside: Mapping[Node, Sequence[Node]]) -> Iterator[tuple[Node, int]]:
    """How many vmaps each node lies in, or is among whose first or last calls."""
    depth = 0
    for node in nodes:
        steps = [(_name(n) == _BEGIN) - (_name(n) == _END) for n in inside.get(node, [node])]
        yield node, max(depth, depth + sum(steps))
        depth += sum(steps)


def _stopped(node: Node) -> Node:
    """What leaves a region without gradients."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not may_have_gradient(value):
        return node
    made = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta.update(node.meta)
    return made


def prepares(node: Node) -> bool:
    """Whether a call does nothing that a graph has."""
    return _name(node) == _PREPARES


def _name(node: Node) -> str:
    target = node.target
    is_functorch = node.op == "call_function" and str(getattr(target, "__module__", "")).startswith("torch._functorch")
    return target.__name__ if is_functorch else ""  # type: ignore[union-attr]


def unbatched(writer: Writer, region: Batched) -> GraphModule:
    """The calls that torch makes of a vmap, as a graph of its inputs that returns its results.

    Raises:
        CaptureError: torch cannot run it again.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    given = region.inputs
    try:
        with writer.symbolic(), _level_kept():
            made = make_fx(_copied(region), tracing_mode="real")(*values(given))
    except Exception as error:
        raise CaptureError(
            f"the forward pass calls torch.vmap, whose calls cannot be recorded with its axis: {error}",
            cure="write what is mapped for all elements at once, or keep it outside the wrapped module",
        ) from error
    return made


def writes_to_inputs(module: GraphModule) -> bool:
    """Whether a graph changes in place what it is given."""
    memories = {memory_of(node.meta.get("val")) for node in module.graph.nodes if node.op == "placeholder"} - {None}
    for node in module.graph.nodes:
        names = written_by(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()
        if any(memory_of(arguments_of(node)[n].meta["val"]) in memories for n in names):
            return True
    return False


def _copied(region: Batched) -> GraphModule:
    graph, copies = Graph(), {}
    for node in region.inputs:
        copies[node] = graph.placeholder(node.name)
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = _SIZES.get(node.target, node.target)
    graph.output([copies[node] for node in region.results])
    return GraphModule(torch.nn.Module(), graph)


@contextlib.contextmanager
def _level_kept() -> Iterator[None]:
    """Leave no vmap open behind an error."""
    functorch = torch._C._functorch
    before = functorch.maybe_current_level()
    try:
        yield
    finally:
        while functorch.maybe_current_level() != before:
            functorch._vmap_decrement_nesting()
