"""Each cleanup pass does its work, and leaves alone what it must."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from op_cases import CASES
from op_cases.case import Case
from op_runs import prepare, reference

from onnxtrain.errors import GraphError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.passes import Pipeline, Step
from onnxtrain.ir.verify import verify
from onnxtrain.optimize import cleanup
from onnxtrain.optimize.cleanup import (
    CommonSubexpressionsPass,
    ConstantsPass,
    DeadCodePass,
    KnownShapesPass,
    KnownTypesPass,
    NoOperationPass,
)
from onnxtrain.optimize.views import ViewsPass


@pytest.fixture
def op() -> Builder:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="cleanup")
    graph.inputs.append(ir.val("x", dtype=ir.DataType.FLOAT, shape=[ir.SymbolicDim("n"), 4]))
    graph.inputs.append(ir.val("w", dtype=ir.DataType.FLOAT, shape=[4, 4]))
    return Builder(graph)


def run(op: Builder, result: ir.Value, *passes: ir.passes.PassBase) -> list[str]:
    op.graph.outputs.append(result)
    model = ir.Model(op.graph, ir_version=10)
    Pipeline([Step(p, "test") for p in (*passes, DeadCodePass())]).run(model)
    verify(model)
    return [n.op_type for n in op.graph]


def test_constants_are_folded_but_not_weights(op: Builder) -> None:
    x, w = op.graph.inputs
    two = op.Add(op.constant(np.float32(1)), op.constant(np.float32(1)))
    assert run(op, op.Mul(op.Mul(x, two), op.Transpose(w, perm=[1, 0])), ConstantsPass()) == ["Mul", "Transpose", "Mul"]


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_what_onnx_computes_in_float32_is_not_folded(op: Builder, kind: type) -> None:
    made = op.Cast(op.Erf(op.constant(kind(0.3))), to=int(ir.DataType.FLOAT))
    assert "Erf" in run(op, op.Add(op.graph.inputs[0], made), ConstantsPass())


@pytest.mark.parametrize("case", [c for c in CASES if not c.domain and c.op in cleanup._EXACT], ids=lambda c: c.id)
def test_what_is_folded_is_what_torch_computes(case: Case) -> None:
    row = prepare(case, np.float64)
    wanted, _ = reference(row, torch.float64)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": case.opset, "onnxtrain": 1}, name="constants")
    builder, given = Builder(graph), iter(row.arrays)
    operands = [
        None if i is None else builder.constant(i if isinstance(i, np.ndarray) else next(given)) for i in case.inputs
    ]
    node = builder.node(case.op, operands, case.attributes, outputs=case.outputs)
    read = [builder.Identity(value) for value in node.outputs]
    graph.outputs.extend(read)
    ConstantsPass()(ir.Model(graph, ir_version=10))
    for value, right in zip(read, wanted, strict=True):
        source = value.producer().inputs[0] if value.producer().op_type == "Identity" else value  # type: ignore[union-attr]
        content = shapes.constant_of(source)
        if content is not None:
            np.testing.assert_allclose(content, right, rtol=1e-10, atol=1e-11)


def test_what_is_cast_like_a_value_does_not_need_it(op: Builder) -> None:
    x, w = op.graph.inputs
    y = op.CastLike(op.Greater(x, 0.0), op.Exp(w))
    assert run(op, op.Mul(y, op.CastLike(op.constant(2), w)), KnownTypesPass(), ConstantsPass()) == [
        "Greater",
        "Cast",
        "Mul",
    ]
    assert op.graph[1].attributes["to"].as_int() == ir.DataType.FLOAT


def test_known_shape_becomes_a_constant(op: Builder) -> None:
    x, w = op.graph.inputs
    sizes = op.Concat(op.ints(-1), op.Slice(op.Shape(w), op.ints(0), op.ints(1)), axis=0)
    assert run(op, op.Reshape(x, sizes), KnownShapesPass(), ConstantsPass()) == ["Reshape"]


@pytest.mark.parametrize("name", ["Add", "Sub"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_that_changes_the_sign_of_zeros_stays(op: Builder, name: str, zero: float) -> None:
    x, _ = op.graph.inputs
    changes = np.signbit(np.float32(-0.0) + np.float32(zero if name == "Add" else -zero)) == 0
    made = run(op, op.Exp(op.node(name, [x, zero]).outputs[0]), NoOperationPass())
    assert made == ([name, "Exp"] if changes else ["Exp"])


def test_zeros_of_integers_go(op: Builder) -> None:
    size = op.Cast(op.graph.inputs[0], to=int(ir.DataType.INT64))
    assert run(op, op.Neg(op.Sub(op.Add(size, 0), 0)), NoOperationPass()) == ["Cast", "Neg"]


def test_operations_without_effect_go(op: Builder) -> None:
    x, _ = op.graph.inputs
    y = op.Identity(op.Cast(x, to=1))
    y = op.Reshape(y, op.Shape(x))
    y = op.Sub(op.Add(op.Mul(y, 1.0), -0.0), 0.0)
    y = op.Expand(op.Transpose(op.Transpose(y, perm=[1, 0]), perm=[1, 0]), op.Shape(x))
    assert run(op, op.Exp(y), NoOperationPass(), ViewsPass(), NoOperationPass()) == ["Exp"]


def test_broadcasting_add_of_zero_stays(op: Builder) -> None:
    x, _ = op.graph.inputs
    row = op.ReduceSum(x, op.ints(0), keepdims=0)
    assert run(op, op.Exp(op.Add(row, op.constant(np.zeros((3, 4), np.float32)))), NoOperationPass())[-2:] == [
        "Add",
        "Exp",
    ]


def test_equal_nodes_are_computed_once_but_not_random_ones(op: Builder) -> None:
    x, _ = op.graph.inputs
    drops = [op.Dropout(x, op.constant(np.float32(0.5)), op.constant(np.array(True))) for _ in range(2)]
    y = op.Add(op.Add(op.Exp(x), op.Exp(x)), op.Add(*drops))
    assert run(op, y, CommonSubexpressionsPass()).count("Exp") == 1
    assert [n.op_type for n in op.graph].count("Dropout") == 2


def test_pipeline_records_and_names_the_pass_that_broke_the_graph(op: Builder) -> None:
    class Breaks(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            model.graph[0].op_type = "NoSuchOperator"
            return ir.passes.PassResult(model, True)

    op.graph.outputs.append(op.Exp(op.graph.inputs[0]))
    model = ir.Model(op.graph, ir_version=10)
    records = Pipeline([Step(DeadCodePass(), "nothing to do")]).run(model)
    assert records[0].name == "DeadCode" and not records[0].modified and records[0].nodes_after == 1
    with pytest.raises(GraphError, match=r"NoSuchOperator.*after Breaks"):
        Pipeline([Step(Breaks(), "test")]).run(model)
