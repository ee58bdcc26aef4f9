"""Weights that were one before an exporter made two of them, such as a table of embeddings and the head of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArtifactError, close_to
from onnxtrain.ir import forms
from onnxtrain.onnxblock.base import Base

_PRODUCTS, _LEAST = frozenset(("MatMul", "Gemm")), 16  # elements below which equal content says little


def untied(base: Base) -> list[tuple[str, str]]:
    """Pairs of a table and a factor of a product with the same content, transposed or not."""
    inputs = [v for v in base.ir_model.graph.inputs if v.name in base.weights]
    tables = [v for v in inputs if any(u.node.op_type == "Gather" and u.idx == 0 for u in v.uses())]
    factors = [v for v in inputs if v not in tables and any(u.node.op_type in _PRODUCTS for u in v.uses())]
    return [(str(t.name), str(f.name)) for t in tables for f in factors if _are_one(base, t, f) is not None]


def tie(base: Base, pairs: bool | Sequence[Sequence[str]]) -> None:
    """Let the second of each pair be the first, transposed where its content is; one weight is trained for both.

    Args:
        base: the model under construction, before any block.
        pairs: names of weights; True takes those that ``untied`` finds.

    Raises:
        ArtifactError: a name is not known, or two weights do not hold the same numbers.
    """
    for kept, dropped in _pairs(base, pairs):
        first, second = base.weight(kept), base.weight(dropped)
        transposed = _are_one(base, first, second)
        if transposed is None or first is second:
            what = f"{kept} and {dropped} do not hold the same numbers, transposed or not"
            raise ArtifactError(what, cure="tie weights that are one in the module that was exported")
        before = next((n for n in base.ir_model.graph if second in n.inputs), None)
        made = base.transposed(first, before) if transposed else first
        second.replace_all_uses_with(made, replace_graph_outputs=True)
        base.ir_model.graph.inputs.remove(second)
        del base.weights[dropped]


def _pairs(base: Base, pairs: bool | Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    if isinstance(pairs, bool):
        yield from untied(base) if pairs else ()
        return
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise ArtifactError(f"tie has {pair!r}, which is no pair of names", cure='write tie=[("table", "head")]')
        for name in pair:
            if name not in base.weights:
                what = f"the model has no weight {name}{close_to(name, base.weights)}"
                raise ArtifactError(what, cure="name two weights")
        yield pair[0], pair[1]


def _are_one(base: Base, first: ir.Value, second: ir.Value) -> bool | None:
    """Whether the second weight is the first transposed (True) or as it is (False); None where it is neither."""
    one, other = (base.weights[str(v.name)] for v in (first, second))
    shapes = tuple(one.shape.numpy()), tuple(other.shape.numpy())
    if one.dtype != other.dtype or one.size < _LEAST or shapes[0] not in (shapes[1], shapes[1][::-1]):
        return None
    x, y = one.numpy(), other.numpy()
    if forms.of(x) is forms.Form.SAME:
        return None
    if shapes[0] == shapes[1] and np.array_equal(x, y):
        return False
    return True if shapes[0] == shapes[1][::-1] and len(shapes[0]) == 2 and np.array_equal(x.T, y) else None
