"""Our operators that have no rule of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtrain.ir import functions
from onnxtrain.ir.function_bodies import instantiate
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shapes import OTHERS, Data, Dim, Facts, data_of, dims_of, dtype_of, fresh_dim, shape_rule


@shape_rule(OTHERS, domain=DOMAIN)
def infer_by_body(node: ir.Node) -> Sequence[Facts]:
    """Facts of the outputs of one of our operators: from its ``like``, else from its body run symbolically."""
    functions.load()
    definition = functions.DEFINITIONS.get(node.op_type)
    if definition is None:
        return [Facts(v.dtype or ir.DataType.UNDEFINED, dims_of(v)) for v in node.outputs]
    if definition.like is not None:
        models = [node.inputs[i] for i in definition.like]
        return [Facts(dtype_of(m), dims_of(m)) for m in models if m is not None]
    graph = instantiate(node)
    return [_facts(value, own) for value, own in zip(graph.outputs, node.outputs, strict=False)]


def _facts(value: ir.Value, own: ir.Value) -> Facts:
    dims = dims_of(value)
    if dims is not None:  # symbols born inside the body must not be shared between instances
        dims = tuple(d if isinstance(d, int) or not _internal(d) else fresh_dim(own, i) for i, d in enumerate(dims))
    data = data_of(value)
    return Facts(value.dtype or ir.DataType.UNDEFINED, dims, None if _mentions_internal(data) else data)


def _internal(dim: ir.SymbolicDim) -> bool:
    return dim.value is None or any(s.startswith("_body_") for s in dim.free_symbols())


def _mentions_internal(data: Data | None) -> bool:
    parts: Iterable[Dim] = data if isinstance(data, tuple) else () if data is None else (data,)
    return any(_internal(d) for d in parts if not isinstance(d, int))
