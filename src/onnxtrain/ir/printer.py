"""A graph as text: one line per node with type, symbolic shape, bytes and source line; and the difference of two."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import DOMAIN, is_backward, source_of

_TYPES = {"float": "f32", "float16": "f16", "bfloat16": "bf16", "double": "f64"}
RULER = "---- backward ----"


def to_text(model: ir.Model, *, title: str = "", saved: Collection[str] = (), recomputed: Collection[str] = ()) -> str:
    """The graph as text, deterministic: the same graph gives the same text.

    Args:
        model: what to print.
        title: first line; the graph's name where empty.
        saved: names of values that the backward pass keeps.
        recomputed: names of values that it computes again.
    """
    marks = dict.fromkeys(saved, "saved") | dict.fromkeys(recomputed, "recomputed")
    return "\n".join(_lines(model.graph, title or str(model.graph.name or "graph"), marks)) + "\n"


def diff(before: ir.Model, after: ir.Model) -> str:
    """Unified difference of two graphs as text; empty where they are equal."""
    old, new = (to_text(m).splitlines(keepends=True) for m in (before, after))
    return "".join(difflib.unified_diff(old, new, "before", "after"))


def type_text(value: ir.Value) -> str:
    """``f32[batch,64]``; ``?`` for what is not known."""
    if not isinstance(value.type, ir.TensorType):
        return str(value.type or "?")
    name = _TYPES.get(str(value.dtype).lower(), str(value.dtype).lower())
    dims = shapes.dims_of(value)
    return f"{name}[{','.join(map(_dim_text, dims))}]" if dims is not None else f"{name}[?]"


def bytes_text(value: ir.Value) -> str:
    """The bytes of a value: a number, or an expression in its symbols; empty where unknown."""
    dims = shapes.dims_of(value)
    if dims is None or value.dtype is None or any(not isinstance(d, int) and d.value is None for d in dims):
        return ""
    total = shapes.product((*dims, max(int(value.dtype.itemsize), 1)))
    return f"{_unit(total)}B" if isinstance(total, int) else f"{str(total.value).replace(' ', '')}B"


def in_bytes(count: int) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    text = _unit(count)
    return f"{text[:-1]} {text[-1].upper()}iB" if text[-1].isalpha() else f"{text} bytes"


def _unit(count: int) -> str:
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _dim_text(dim: shapes.Dim) -> str:
    return str(dim) if isinstance(dim, int) else str(dim.value or "?").replace(" ", "")


def _lines(graph: ir.Graph, title: str, marks: dict[str, str]) -> Iterator[str]:
    yield f"{title}: {len(graph)} nodes"
    for value in graph.inputs:
        yield _pad(f"  input {value.name}: {type_text(value)}", _remarks(value, "", marks))
    ruled = False
    for node in graph:
        if is_backward(node) and not ruled:
            ruled = True
            yield RULER
        results = ", ".join(f"{v.name}: {type_text(v)}" for v in node.outputs if v.name)
        yield _pad(f"  {results} = {_call(node)}", _remarks(node.outputs[0], source_of(node), marks))
    for value in graph.outputs:
        yield f"  output {value.name}: {type_text(value)}"


def _pad(text: str, remark: str) -> str:
    return f"{text:<100}  # {remark}" if remark else text


def _remarks(value: ir.Value, source: str, marks: dict[str, str]) -> str:
    return "  ".join(part for part in (marks.get(str(value.name), ""), bytes_text(value), source) if part)


def _call(node: ir.Node) -> str:
    prefix = "" if node.domain in ("", DOMAIN) else f"{node.domain}::"
    operands = [_operand(v) for v in node.inputs]
    operands += [f"{a.name}={_attribute(a)}" for a in sorted(node.attributes.values(), key=lambda a: a.name)]
    return f"{prefix}{node.op_type}({', '.join(operands)})"


def _operand(value: ir.Value | None) -> str:
    if value is None:
        return "_"
    constant = None if value.is_graph_input() else shapes.constant_of(value)
    if constant is None or constant.size > 8:
        return str(value.name)
    return np.array2string(constant, separator=",", precision=6).replace("\n", "").replace(" ", "")


def _attribute(attr: ir.Attr) -> str:
    if attr.type == ir.AttributeType.TENSOR:
        return np.array2string(attr.value.numpy(), separator=",", threshold=8).replace("\n", "").replace(" ", "")
    if isinstance(attr.value, str | int | float):
        return repr(attr.value)
    return (
        f"[{','.join(map(str, attr.value))}]" if isinstance(attr.value, list | tuple) else f"<{attr.type.name.lower()}>"
    )
