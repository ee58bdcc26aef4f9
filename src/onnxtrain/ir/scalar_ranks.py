"""Single numbers with as many dimensions as what they meet: onnxruntime's kernels are fast for these alone.

Where the last dimension of ``x`` is 1, as in the kernels of 1 x 1 convolutions and in statistics of rows, a product
with a number of fewer dimensions takes 65 to 400 times as long as with one of shape ``(1, …, 1)``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import free_name, values

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu")
_LOGIC = ("And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
_ELEMENTWISE = frozenset((*_ARITHMETIC, *_LOGIC))


def match_ranks(graph: ir.Graph) -> None:
    """Give single numbers the rank of what they meet where the last dimension of that is 1, in place."""
    made: dict[tuple[ir.Value, int], ir.Value] = {}
    taken: set[str] = set()
    for node in list(graph):
        rank = _rank(node)
        for index, value in enumerate(node.inputs) if rank else ():
            if value is None or not _is_short(value, rank):
                continue
            if (value, rank) not in made:
                taken = taken or {str(v.name) for v in values(graph)}
                made[value, rank] = _of_rank(graph, value, rank, taken)
            node.replace_input_with(index, made[value, rank])


def _rank(node: ir.Node) -> int:
    """The rank of the result of an operator on elements whose last dimension is 1, else 0."""
    if node.domain or node.op_type not in _ELEMENTWISE:
        return 0
    dims = shapes.dims_of(node.outputs[0]) or ()
    return len(dims) if len(dims) > 1 and dims[-1] == 1 and shapes.product(dims) != 1 else 0


def _is_short(value: ir.Value, rank: int) -> bool:
    dims = shapes.dims_of(value)
    return dims is not None and len(dims) < rank and all(d == 1 for d in dims)


def _of_rank(graph: ir.Graph, value: ir.Value, rank: int, taken: set[str]) -> ir.Value:
    """The number with that many dimensions, made where the number is; of a constant it is computed once, at loading."""
    name = free_name(f"{value.name}_{rank}d", taken)
    taken.add(name)
    sizes = ir.val(free_name(f"{name}_shape", taken), const_value=ir.tensor(np.array([1] * rank, np.int64)))
    taken.add(str(sizes.name))
    graph.register_initializer(sizes)
    node, producer = ir.Node("", "Reshape", [value, sizes], num_outputs=1), value.producer()
    if producer is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(producer, node)
    y = node.outputs[0]
    y.name, y.type, y.shape = name, value.type, ir.Shape([1] * rank)
    return y
