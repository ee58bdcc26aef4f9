"""A node over packed rows gives the packed rows of the node over padded ones, for every layout that it accepts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.execute import backend
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature
from onnxtrain.ir.verify import verify
from onnxtrain.optimize.rows.passages import RULES, Layout, Operand, Passage, passage_of
from onnxtrain.plan import make_plan

SIZES = {"b": 3, "t": 4}
B, T = "b", "t"


@dataclasses.dataclass(frozen=True)
class Case:
    """One node.

    Args:
        op: the operator.
        inputs: the shape of each input, symbols among them; an array is a constant.
        attributes: of the node.
        accepts: layouts that it must have a passage for; it may have more.
        refuses: layouts that it must not have one for.
        outputs: how many outputs it has.
        domain: its domain.
        high: of integer inputs (all where it is set).
    """

    op: str
    inputs: tuple[Any, ...]
    accepts: tuple[Layout, ...]
    refuses: tuple[Layout, ...] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    integers: tuple[int, ...] = ()


def ints(*content: int) -> np.ndarray:
    return np.array(content, np.int64)


def numbers(*shape: int) -> np.ndarray:
    return np.linspace(-1.0, 2.0, math.prod(shape)).reshape(shape)


BT = (0, 1)
CODES, CODED = np.arange(15, dtype=np.uint8)[:, None] * 17, {"shape": [5, 6], "block_size": 4}  # of 4 bits
LEVELS = np.arange(-15, 15, dtype=np.int8).reshape(5, 6)
CASES = [
    Case("Add", ((B, T, 6), (6,)), (BT, (1, 0), (0, 2), (0,))),
    Case("Add", ((B, T, 6), (B, T, 6)), (BT, (0, 2), (2, 0), (1,))),
    Case("Mul", ((B, T, 2, 3), (B, 1, 1, 3)), (BT, (1, 0), (0,), (1,))),
    Case("Mul", ((B, T, 2, 3), (T, 1, 3)), (BT, (1, 0))),
    Case("Sub", ((B, 2, T, 3), (1, 1, T, 3)), ((0, 2), (2, 0))),
    Case("Add", ((T, 6), (B, T, 6)), (BT, (1, 0))),
    Case("Add", ((B, 1, 6), (1, T, 6)), (BT,)),
    Case("Where", (np.array([True, False, True]), (B, T, 3), (1,)), (BT,)),
    Case("Pow", ((B, T, 6), np.array(2.0)), (BT, (0,), (1,))),
    Case("Clip", ((B, T, 6), np.array(-0.5), np.array(0.5)), (BT,)),
    Case("Silu", ((B, T, 6),), (BT, (1, 0)), domain=DOMAIN),
    Case("Gelu", ((B, 2, T, 6),), ((0, 2), (0, 1)), attributes={"approximate": "tanh"}),
    Case("Dropout", ((B, T, 6), np.array(0.0, np.float32), np.array(True)), (BT, (0,))),
    Case("Linear", ((B, T, 6), numbers(5, 6), numbers(5)), (BT, (1, 0), (0,), (1,)), ((0, 2), (2,)), domain=DOMAIN),
    Case("LinearWithoutBias", ((B, T, 6), numbers(5, 6)), (BT,), ((1, 2),), domain=DOMAIN),
    Case("MatMulBnb4", ((B, T, 6), CODES, numbers(8)), (BT, (1, 0), (0,)), ((0, 2),), CODED, domain=DOMAIN),
    Case("MatMulInt8Weight", ((B, T, 6), LEVELS, numbers(5)), (BT, (1, 0), (0,)), ((0, 2),), domain=DOMAIN),
    Case("MatMul", ((B, T, 6), numbers(6, 5)), (BT, (0,), (1, 0)), ((0, 2),)),
    Case("MatMul", ((B, 2, T, 3), (B, 2, 3, T)), (), ((0, 2), (0, 3), BT)),
    Case("Gemm", ((B, 6), numbers(6, 5), numbers(5)), ((0,),), ((1,),)),
    Case("Gemm", ((B, 6), numbers(5, 6), numbers(1, 5)), ((0,),), attributes={"transB": 1, "alpha": 0.5}),
    Case("Gemm", ((6, B), numbers(6, 5), numbers(5)), (), ((0,),), attributes={"transA": 1}),
    Case("Gemm", ((B, 6), numbers(6, 5), (B, 5)), (), ((0,),)),
    Case("LayerNormalization", ((B, T, 6), numbers(6), numbers(6)), (BT, (0,), (1, 0)), ((0, 2),)),
    Case("LayerNormalization", ((B, T, 2, 3), numbers(2, 3)), (BT,), ((0, 2),), {"axis": 2}),
    Case("RMSNormalization", ((B, 2, T, 6), numbers(6)), ((0, 2), BT, (2, 0)), ((0, 3),)),
    Case("RMSNorm", ((B, 2, T, 6), numbers(6)), ((0, 2), BT, (2, 0)), ((0, 3),), domain=DOMAIN),
    Case("Softmax", ((B, 2, T, 6),), ((0, 2), BT, (2, 0)), ((0, 3), (3,))),
    Case("LogSoftmax", ((B, 5, T),), ((0, 2), (2, 0)), ((0, 1),), {"axis": 1}),
    Case("Split", ((B, T, 6), ints(2, 2, 2)), (BT, (0,)), ((0, 2),), {"axis": -1}, 3),
    Case("Split", ((B, 6, T), ints(2, 4)), ((0, 2),), ((0, 1),), {"axis": 1}, 2),
    Case("Gather", ((B, T, 6), ints(1, 3)), (BT,), ((0, 2),), {"axis": 2}),
    Case("Gather", ((B, 6, T), np.array(2)), (BT, (1, 0)), (), {"axis": 1}),
    Case("Gather", ((6, B, T), ints(1, 3).reshape(1, 2)), ((2, 3), (3, 2)), (BT, (1, 2)), {"axis": 0}),
    Case("GatherND", ((6, B, T, 3), ints(-1).reshape(1, 1)), ((1, 2), (2, 1), (1,)), (BT,)),
    Case("GatherND", ((6, B, T, 3), ints(2)), (BT, (0, 2))),
    Case("GatherND", ((B, T, 3), ints(1, 2).reshape(1, 2)), (), ((0,),)),
    Case("GatherElements", ((B, T, 9), (B, T, 1)), (BT, (1, 0), (1,)), ((0, 2),), {"axis": -1}, integers=(1,)),
    Case("GatherElements", ((B, 9, T), (B, 2, T)), ((0, 2), (2,)), (BT,), {"axis": 1}, integers=(1,)),
    Case("GatherElements", ((B, T, 9), (B, 2, 1)), ((0,),), (BT, (1,)), {"axis": -1}, integers=(1,)),
    *(
        Case(op, scores, (layout,), (), {"reduction": "none", "ignore_index": 3}, integers=(1,))
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for scores, layout in ((((B, 9), (B,)), (0,)), (((B, 9, T), (B, T)), BT))
    ),
    Case("SoftmaxCrossEntropyLoss", ((B, 9, T), (B, T)), (), (), {"reduction": "mean"}, integers=(1,)),
    Case("Embedding", (numbers(9, 6), (B, T)), (BT, (1, 0), (0,)), ((0, 2),), domain=DOMAIN, integers=(1,)),
    Case("Concat", ((B, T, 6), (B, T, 2)), (BT, (1, 0), (1,)), ((0, 2),), {"axis": -1}),
    Case("Concat", ((B, 2, T), (B, 1, T)), ((0, 2),), ((0, 1),), {"axis": 1}),
    Case("Slice", ((B, T, 6), ints(1), ints(5), ints(2), ints(2)), (BT,), ((0, 2),)),
    Case("Slice", ((B, 6, T, 2), ints(1, 0), ints(5, 1), ints(1, 3)), ((0, 2), (2, 0)), (BT, (0, 3))),
    Case("Slice", ((B, T, 6), ints(1), ints(3), ints(-1)), (BT,), ((1, 2),)),
    *(
        Case(op, ((B, 2, T, 3), ints(*axes)), accepts, (), {"keepdims": keep})
        for op in (
            "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
        )
        for axes, keep, accepts in (
            ((-1,), 1, ((0, 2), BT)), ((1,), 0, (BT, (1, 0))), ((1, 3), 1, ((0, 2),)), ((3, 1), 0, (BT,)),
        )
    ),
    Case("ReduceSum", ((B, T, 3), ints(1)), (), ((0, 1),), {"keepdims": 1}),
    Case("Transpose", ((B, T, 2, 3),), ((0, 2), (2, 0)), (), {"perm": [0, 2, 1, 3]}),
    Case("Transpose", ((B, T, 2, 3),), ((0, 1), (1, 0), (3, 2)), (), {"perm": [1, 0, 3, 2]}),
    Case("Transpose", ((B, T, 2, 3),), ((1, 3), (3,)), (), {"perm": [2, 0, 3, 1]}),
    Case("Reshape", ((B, T, 6), ints(0, 0, 2, 3)), (BT, (1, 0), (0,)), ((0, 2),)),
    Case("Reshape", ((B, T, 2, 3), ints(0, 0, 6)), (BT, (1, 0), (1,)), ((0, 2),)),
    Case("Reshape", ((B, T, 6), ints(-1, 6)), ((0,),), ((0, 1),)),
    Case("Reshape", ((B, T, 2, 3), ints(-1, 6)), ((0,),)),
    Case("Reshape", ((B, T), ints(-1)), ((0,),)),
    Case("Reshape", ((B, 2, T, 3), ints(0, 2, -1)), (), ((0, 2),)),
    Case("Unsqueeze", ((B, T, 6), ints(1)), ((0, 2), (2, 0))),
    Case("Unsqueeze", ((B, T, 6), ints(-1)), (BT,)),
    Case("Squeeze", ((B, 1, T, 6), ints(1)), (BT, (1, 0))),
    Case("Flatten", ((B, 2, 3),), ((0,),), (), {"axis": 1}),
    Case("Expand", ((B, 1, T, 3), ints(1, 2, 1, 1)), ((0, 2), (2, 0))),
    Case("Expand", ((B, T, 3), ints(2, 1, 1, 3)), ((1, 2),), ((0, 1), (0,))),
    Case("ReduceMean", ((B, T, 6), ints(1)), ((0,), (1,)), (), {"keepdims": 0}),
    Case("CumSum", ((B, T, 6), np.array(1)), (), (BT, (0,))),
    Case("Conv", ((B, 6, T), numbers(2, 6, 3)), (), ((0, 2), (0,))),
]  # fmt: skip


def shape_of(dims: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(SIZES.get(d, d) for d in dims)


def graph_of(inputs: dict[str, ir.Value]) -> tuple[ir.Graph, Builder]:
    graph = ir.Graph([*inputs.values()], [], nodes=[], opset_imports={"": 23, DOMAIN: 1}, name="rows")
    return graph, Builder(graph)


def given(case: Case) -> tuple[ir.Graph, ir.Node, dict[str, np.ndarray]]:
    """The node over padded inputs, and what they are."""
    rng = np.random.default_rng(0)
    inputs, arrays = {}, {}
    for place, dims in enumerate(case.inputs):
        if not isinstance(dims, np.ndarray):
            name, integer = f"x{place}", place in case.integers
            shape = shape_of(dims)
            arrays[name] = rng.integers(0, 9, shape) if integer else rng.uniform(-2, 2, shape)
            symbols = [ir.SymbolicDim(d) if isinstance(d, str) else d for d in dims]
            dtype = ir.DataType.INT64 if integer else ir.DataType.DOUBLE
            inputs[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(symbols))
    graph, op = graph_of(inputs)
    operands = [op.constant(d) if isinstance(d, np.ndarray) else inputs[f"x{i}"] for i, d in enumerate(case.inputs)]
    node = op.node(case.op, operands, case.attributes, domain=case.domain, outputs=case.outputs)
    return graph, node, arrays


def run(graph: ir.Graph, outputs: list[ir.Value], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    graph.outputs.clear()
    for index, value in enumerate(outputs):
        if value.is_graph_input() or value.name is None or value in graph.outputs:
            value = Builder(graph).Identity(value)
        value.name = value.name or f"y{index}"
        graph.outputs.append(value)
    names = tuple(str(v.name) for v in graph.inputs)
    model = ir.Model(graph, ir_version=10)
    verify(model)
    signature = Signature(names, (), (), tuple(str(v.name) for v in graph.outputs), {}, ())
    made, _ = backend("reference").compile(make_plan(ForwardGraph(model, signature))).forward([*arrays.values()])
    return [np.asarray(y) for y in made]


def packed(x: np.ndarray, layout: Layout, rows: np.ndarray) -> np.ndarray:
    """These rows one after the other, the other axes in their order."""
    rest = [a for a in range(x.ndim) if a not in layout]
    flat = x.transpose([*layout, *rest]).reshape(-1, *(x.shape[a] for a in rest))
    return flat[rows]


def operand_rows(x: np.ndarray, operand: Operand, sizes: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
    """What a node over packed rows reads in place of an input."""
    if operand.is_free:
        return x
    if operand.has_rows:
        return packed(x, tuple(a for a in operand.layout if a is not None), rows)
    axis = next(i for i, a in enumerate(operand.layout) if a is not None)
    inner = operand.layout[axis]
    assert inner is not None
    place = rows // sizes[1] if axis == 0 else rows % sizes[1]
    return np.moveaxis(x, inner, 0)[place]


def packed_node(
    node: ir.Node, passage: Passage, arrays: dict[str, np.ndarray], sizes: tuple[int, ...], layout: Layout, rows: Any
) -> list[np.ndarray]:
    """The outputs of the node over packed rows."""
    inputs, own = {}, {}
    values: list[ir.Value | None] = []
    for value, operand in zip(node.inputs, passage.operands, strict=True):
        assert value is not None and operand is not None
        constant = value.const_value is not None
        if constant and operand.is_free:
            values.append(None)
            continue
        name = str(value.name)
        array = operand_rows(value.const_value.numpy() if constant else arrays[name], operand, sizes, rows)
        if not operand.is_free and not operand.has_rows:
            array = _without_the_other(array, value, operand, node.outputs[0], layout)
        dims = [ir.SymbolicDim("n") if i == 0 and not operand.is_free else d for i, d in enumerate(array.shape)]
        inputs[name] = ir.Value(name=name, type=ir.TensorType(value.dtype), shape=ir.Shape(dims))
        own[name] = array
        values.append(inputs[name])
    graph, op = graph_of(inputs)
    read = [
        op.constant(v.const_value.numpy()) if made is None else made
        for made, v in zip(values, node.inputs, strict=True)  # type: ignore[union-attr]
    ]
    return run(graph, [*passage.build(op, read)], own)


def _without_the_other(array: np.ndarray, value: ir.Value, operand: Operand, y: ir.Value, layout: Layout) -> np.ndarray:
    """Without the axis of size 1 that stands for the row axis along which the input is the same."""
    assert value.shape is not None and y.shape is not None
    shift = len(y.shape) - len(value.shape)
    axis = next(i for i, a in enumerate(operand.layout) if a is not None)
    inner = operand.layout[axis]
    gone = [a - shift for i, a in enumerate(layout) if i != axis and a >= shift]
    order = [inner, *(a for a in range(len(value.shape)) if a != inner)]
    return array.squeeze(tuple(order.index(a) for a in gone))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{'-'.join(map(str, map(np.shape, c.inputs)))}")
def test_packed_rows(case: Case) -> None:
    graph, node, arrays = given(case)
    padded = run(graph, list(node.outputs), arrays)
    rank = padded[0].ndim
    layouts: list[Layout] = [(a,) for a in range(rank)] + list(itertools.permutations(range(rank), 2))
    assert {*case.accepts, *case.refuses} <= {*layouts}
    rng = np.random.default_rng(1)
    accepted = []
    for layout in layouts:
        passage = passage_of(node, layout)
        if passage is None:
            continue
        accepted.append(layout)
        sizes = tuple(padded[0].shape[a] for a in layout)
        total = math.prod(sizes)
        for count in sorted({1, total // 2, total} - {0}):
            rows = np.sort(rng.choice(total, count, replace=False))
            found = packed_node(node, passage, arrays, sizes, layout, rows)
            for ours, whole in zip(found, padded, strict=True):
                np.testing.assert_allclose(
                    ours, packed(whole, layout, rows), rtol=1e-12, atol=1e-12, err_msg=f"{layout}"
                )
    assert {*case.accepts} <= {*accepted}, f"accepted {accepted}"
    assert not {*case.refuses} & {*accepted}, f"accepted {accepted}"


def test_every_rule_has_a_case() -> None:
    assert {*RULES} <= {c.op for c in CASES if c.accepts}


def test_dropout_with_a_chance_draws_for_packed_rows() -> None:
    case = Case("Dropout", ((B, T, 6), np.array(0.5, np.float32), np.array(True)), (BT,))
    graph, node, _ = given(case)
    passage = passage_of(node, BT)
    assert passage is not None and passage.operands == (Operand(BT), Operand((None,)), Operand((None,)))
    made = passage.build(Builder(graph), list(node.inputs))
    producer = made[0].producer()
    assert producer is not None and (producer.domain, producer.op_type) == (DOMAIN, "PackedDropout")


def test_operators_of_other_domains_and_unknown_shapes_have_no_passage() -> None:
    graph, _ = graph_of({"x0": ir.val("x0", ir.DataType.DOUBLE, [B, T, 6])})
    foreign = ir.Node("elsewhere", "Add", [graph.inputs[0], graph.inputs[0]])
    foreign.outputs[0].shape = graph.inputs[0].shape
    assert passage_of(foreign, BT) is None
    unknown = ir.Node("", "Relu", [ir.val("x1", ir.DataType.DOUBLE)])
    assert passage_of(unknown, BT) is None
