"""Which tensors of a model may be written over by what they become: a proof from the graph, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxtrain.api.exporting import captured
from onnxtrain.artifact_names import updated

# element by element; BatchNormalization, whose statistics are, reads them once for what they become
_IN_PLACE = frozenset(("Add", "Sub", "Mul", "Div", "Identity", "Where", "Cast", "BatchNormalization"))


def unsafe_updates(model: onnx.ModelProto, updates: Mapping[str, str] | None = None) -> list[str]:
    """Inputs that could be overwritten before they are read, if what they become were written over them.

    An update is safe in every order of execution that respects dependencies where each node that reads the input is one
    that the node which makes the output depends on, or is that node itself and reads each element before it writes it.

    Args:
        model: an optimizer or training model.
        updates: output for each input that is overwritten; None is ``X.out`` for each input X that has such an output.
    """
    producers = {o: n for n in model.graph.node for o in n.output}
    if updates is None:
        outputs = {o.name for o in model.graph.output}
        updates = {i.name: updated(i.name) for i in model.graph.input if updated(i.name) in outputs}
    found = []
    for name, new in updates.items():
        last = producers[new]
        before = _ancestors(last, producers)
        readers = [n for n in model.graph.node if name in n.input or name in captured(n)]
        if not all(id(n) in before or (n is last and _reads_first(n)) for n in readers):
            found.append(name)
    return found


def _reads_first(node: onnx.NodeProto) -> bool:
    """Whether a node reads each element of its inputs before it writes that of its output, its branches too."""
    branches = [inner for a in node.attribute if a.HasField("g") for inner in a.g.node]
    return node.op_type in _IN_PLACE or (node.op_type == "If" and all(map(_reads_first, branches)))


def _ancestors(node: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> set[int]:
    todo, seen = [node], set()
    while todo:
        last = todo.pop()
        for name in (*last.input, *captured(last)):
            before = producers.get(name)
            if before is not None and id(before) not in seen:
                seen.add(id(before))
                todo.append(before)
    return seen
