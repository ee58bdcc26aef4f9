"""What stand-ins give while a module is traced, and what becomes of it in the recorded program.

What a layer gives to the next one is taken out, so that the last layer reads what the third one gives. What it hands
to an object that keeps tensors by layer stays: which layer's it is, is told by how much further it is than the third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture.call_forms import OF_FORM, form_of_value
from onnxtrain.capture.stand_in_modules import UnlikeError
from onnxtrain.ir.layers import COPIED, Layers

_OTHERS = (bytes, complex)


@torch.library.custom_op("onnxtrain::like_layer", mutates_args=(), schema="(Tensor x, bool is_next) -> Tensor")
def like_layer(x: torch.Tensor, is_next: bool) -> torch.Tensor:
    """What a stand-in gives; it is taken out of the recorded calls, so that the layer after it reads ``x``."""
    raise RuntimeError("onnxtrain::like_layer stands for a layer while a module is traced; it does not run")


@torch.library.custom_op(
    "onnxtrain::layers_further", mutates_args=(), schema="(Tensor x, str prefix, int by) -> Tensor"
)
def layers_further(x: torch.Tensor, prefix: str, by: int) -> torch.Tensor:
    """What ``x``, of the third layer of the row at a path, is so many layers further (``ir.unfolding``)."""
    raise RuntimeError("onnxtrain::layers_further stands for a layer while a module is traced; it does not run")


def _like(x: torch.Tensor, *given: Any) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _no_gradient(ctx: Any, *dys: Any) -> Any:
    raise RuntimeError("a stand-in is differentiated in its graph")


for _operator in (like_layer, layers_further):
    _operator.register_fake(_like)
    _operator.register_autograd(_no_gradient)
_LIKE = torch.ops.onnxtrain.like_layer.default
_FURTHER = torch.ops.onnxtrain.layers_further.default
OF_FORM.update((_LIKE, _FURTHER))
_aten = torch.ops.aten
_LIKE_OTHERS = (_aten.type_as, _aten.view_as, _aten.expand_as, _aten.reshape_as)  # of which the rest is only a form


def is_further(node: torch.fx.Node) -> bool:
    """Whether a node stands for what another one gives some layers further."""
    return node.target is _FURTHER


def take_out(program: torch.export.ExportedProgram, rows: Sequence[Layers], prefix: str) -> None:
    """Take out of a program what stand-ins gave: chains as long as there are stand-ins, with nothing in between.

    Args:
        program: a recorded program.
        rows: the rows that have stand-ins.
        prefix: of the names that the program has for parameters and buffers.

    Raises:
        UnlikeError: a layer was read by something else than the layer after it, or what it gives is not computed
            with its parameters, so that nothing would tell how often that is done.
    """
    if not rows:
        return
    signature = program.graph_signature
    owned = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {
        n: owned[n.name].removeprefix(prefix) for n in program.graph.nodes if n.op == "placeholder" and n.name in owned
    }
    _take_out(program.graph_module, names, rows)


def _take_out(module: torch.fx.GraphModule, names: Mapping[torch.fx.Node, str], rows: Sequence[Layers]) -> None:
    """Take it out of a region of a program, and of the regions within it.

    Args:
        module: the region.
        names: of the parameters and buffers that it is given.
        rows: the rows.
    """
    graph, reads = module.graph, _reads(module.graph, names)
    order = {node: at for at, node in enumerate(graph.nodes)}
    given = [node for node in graph.nodes if node.target is _LIKE]
    lengths = {row.missing for row in rows}
    for node in given:
        source: Any = node.args[0]
        is_first = node.args[1] and source.target is not _LIKE  # after a layer that was traced
        later = [n for n in source.users if order[n] > order[node]]
        is_shared = len(node.users) > 1 and any(n.target is _LIKE for n in node.users)
        if (is_first and later) or is_shared or (not node.args[1] and node.users):
            raise UnlikeError("what a layer gives is read by something else than the next layer")
        if is_first and _length(node) not in lengths:
            raise UnlikeError("something is done to what a layer gives before the next one has it")
        if is_first and not any(_is_thirds(name, row) for name in reads[source] for row in rows):
            raise UnlikeError("what a layer gives is not computed with what is its own")
    for node in graph.nodes:
        for at, inner in enumerate(node.args):
            is_attribute = isinstance(inner, torch.fx.Node) and inner.op == "get_attr"
            region = getattr(module, str(inner.target)) if is_attribute else None  # type: ignore[union-attr]
            if isinstance(region, torch.fx.GraphModule):
                own = [n for n in region.graph.nodes if n.op == "placeholder"]
                passed = dict(zip(own, node.args[at + 1 :], strict=False))  # a branch has others
                _take_out(region, {n: names[x] for n, x in passed.items() if x in names}, rows)  # type: ignore[index]
    for node in given:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _is_thirds(name: str, row: Layers) -> bool:
    place = row.place(name)
    return place is not None and place[0] == COPIED


def _reads(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> dict[torch.fx.Node, frozenset[str]]:
    """Names of the parameters and buffers whose content each node's depends on."""
    found: dict[torch.fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        read = [] if _reads_form(node) else node.all_input_nodes
        read = node.all_input_nodes[:1] if getattr(node.target, "overloadpacket", None) in _LIKE_OTHERS else read
        found[node] = frozenset([names[node]] if node in names else []).union(*(found[n] for n in read))
    return found


def _reads_form(node: torch.fx.Node) -> bool:
    """Whether a node reads no content: sizes, or what makes a tensor like another one."""
    target: Any = node.target
    name = target.__name__ if callable(target) else ""
    return name.startswith(("sym_", "new_")) or "_like" in name


def _length(node: torch.fx.Node | None) -> int:
    """How many stand-ins follow on each other from one on."""
    count = 0
    while node is not None:
        node, count = next((n for n in node.users if n.target is _LIKE), None), count + 1
    return count


def known_of(value: Any) -> Any:
    """All that a trace knows of a value but which tensor it is; the user's code asks nothing of it by this.

    Raises:
        UnknownFormError: it is more than that.
    """
    with torch._C.DisableTorchFunction():
        return form_of_value(value) if not isinstance(value, _OTHERS) else (type(value), value)
