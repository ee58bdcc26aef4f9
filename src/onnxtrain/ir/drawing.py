"""A graph as a drawing for other programs: DOT, as Graphviz reads it, and Mermaid, as Markdown pages show it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.ir.graphs import is_backward, source_of
from onnxtrain.ir.printer import type_text


def to_dot(model: ir.Model, *, title: str = "", saved: Collection[str] = ()) -> str:
    """The graph in the language of Graphviz: ``dot -Tsvg graph.dot``.

    Args:
        model: what to draw.
        title: its name; the graph's own where empty.
        saved: names of values that the backward pass keeps, drawn bold.
    """
    drawn = _Drawn(model.graph)
    lines = [f"digraph {_dot(title or str(model.graph.name or 'graph'))} {{", *_FONTS]
    for key, label, kind in drawn.nodes():
        lines.append(f"  {key} [label={_dot(label)}{_DOT[kind]}];")
    for source, target, value in drawn.edges():
        bold = ", style=bold" if value.name in saved else ""
        lines.append(f"  {source} -> {target} [label={_dot(type_text(value))}{bold}];")
    return "\n".join([*lines, "}"]) + "\n"


def to_mermaid(model: ir.Model, *, saved: Collection[str] = ()) -> str:
    """The graph as a flowchart of Mermaid, for a block of Markdown.

    Args:
        model: what to draw.
        saved: names of values that the backward pass keeps, drawn bold.
    """
    drawn = _Drawn(model.graph)
    lines = ["flowchart TD"]
    for key, label, kind in drawn.nodes():
        begin, end = _MERMAID[kind]
        lines.append(f'  {key}{begin}"{_mermaid(label)}"{end}')
    for source, target, value in drawn.edges():
        arrow = "==>" if value.name in saved else "-->"
        lines.append(f'  {source} {arrow}|"{_mermaid(type_text(value))}"| {target}')
    return "\n".join(lines) + "\n"


_FONTS = ("  node [shape=box, fontname=sans, fontsize=12];", "  edge [fontname=sans, fontsize=10];")
_DOT = {
    "input": ", shape=ellipse",
    "output": ", shape=ellipse",
    "forward": "",
    "backward": ', style=filled, fillcolor="#dde8f3"',
}
_MERMAID = {"input": ("([", "])"), "output": ("([", "])"), "forward": ("[", "]"), "backward": ("[[", "]]")}


class _Drawn:
    """What is drawn of a graph: its nodes, its inputs that something reads, its outputs; constants are not.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._shown = [node for node in graph if node.op_type != "Constant"]
        self._keys: dict[ir.Value, str] = {}
        for index, value in enumerate(v for v in graph.inputs if v.uses() or v in graph.outputs):
            self._keys[value] = f"i{index}"
        for index, node in enumerate(self._shown):
            self._keys |= dict.fromkeys(node.outputs, f"n{index}")

    def nodes(self) -> Iterator[tuple[str, str, str]]:
        """Key, label and kind of each."""
        for value, key in self._keys.items():
            if key.startswith("i"):
                yield key, f"{value.name}\n{type_text(value)}", "input"
        for index, node in enumerate(self._shown):
            label = "\n".join(filter(None, (node.op_type, source_of(node))))
            yield f"n{index}", label, "backward" if is_backward(node) else "forward"
        for index, value in enumerate(self._graph.outputs):
            yield f"o{index}", str(value.name), "output"

    def edges(self) -> Iterator[tuple[str, str, ir.Value]]:
        """From where to where each value goes."""
        for index, node in enumerate(self._shown):
            for value in dict.fromkeys(node.inputs):
                if value is not None and value in self._keys:
                    yield self._keys[value], f"n{index}", value
        for index, value in enumerate(self._graph.outputs):
            if value in self._keys:
                yield self._keys[value], f"o{index}", value


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _mermaid(text: str) -> str:
    return text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;").replace("\n", "<br>")
