"""Inference agrees with execution; symbolic sizes and shape tensors survive."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from op_cases import CASES, Case
from op_runs import prepare, run
from releases import needs_attributes

from onnxtrain.errors import ShapeError
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_inference_agrees_with_execution(case: Case) -> None:
    needs_attributes(case.op, case.attributes)
    row = prepare(case, np.float64, gradients=case.differentiable)
    outputs, gradients = run(row, "torch")
    plan = row.plan
    named = dict(zip(plan.signature.outputs, outputs, strict=True)) | dict(
        zip(plan.gradients.values(), gradients, strict=True)
    )
    graphs = [plan.forward.graph] + ([plan.backward.graph] if plan.backward is not None else [])
    for value in (v for g in graphs for v in g.outputs if v.name in named):
        array = named[str(value.name)]
        assert value.dtype == ir.DataType.from_numpy(array.dtype)
        dims = shapes.known_dims(value)
        assert len(dims) == array.ndim
        for dim, size in zip(dims, array.shape, strict=True):
            assert _evaluate(dim) in (size, None), (dim, size)


def _evaluate(dim: shapes.Dim) -> int | None:
    """A dimension with every ``n3`` read as 3; None for one born in the graph."""
    if isinstance(dim, int):
        return dim
    names = dim.free_symbols()
    if not all(n[0] == "n" and n[1:].isdigit() for n in names):
        return None
    return int(dim.evaluate({n: int(n[1:]) for n in names}))


@pytest.fixture
def op() -> Builder:
    return Builder(ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="shapes"))


def value(op: Builder, name: str, *dims: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    made = ir.val(name, dtype=dtype, shape=[ir.SymbolicDim(d) if isinstance(d, str) else d for d in dims])
    op.graph.inputs.append(made)
    return made


def text(result: ir.Value) -> list[str]:
    return [str(d if isinstance(d, int) else d.value) for d in shapes.known_dims(result)]


def test_expand_to_the_shape_of_another_keeps_its_dimensions(op: Builder) -> None:
    x, y = value(op, "x", 1, 1), value(op, "y", "batch", "length")
    assert text(op.Expand(x, op.Shape(y))) == ["batch", "length"]


def test_reshape_of_concatenated_sizes(op: Builder) -> None:
    x = value(op, "x", "batch", "length", 64)
    sizes = op.Concat(op.Shape(x, start=0, end=2), op.ints(4, -1), axis=0)
    assert text(op.Reshape(x, sizes)) == ["batch", "length", "4", "16"]


def test_minus_one_cancels_common_dimensions(op: Builder) -> None:
    x = value(op, "x", "batch", "length", 64)
    assert text(op.Reshape(x, op.ints(-1, 64))) == ["batch*length", "64"]


def test_sliced_and_gathered_sizes(op: Builder) -> None:
    x = value(op, "x", "batch", "length", 8)
    shape = op.Shape(x)
    assert shapes.data_of(op.Gather(shape, op.constant(np.array(1)))) == ir.SymbolicDim("length")
    assert shapes.data_of(op.Slice(shape, op.ints(1), op.ints(3))) == (ir.SymbolicDim("length"), 8)


def test_arithmetic_on_sizes(op: Builder) -> None:
    x = value(op, "x", "batch", "length")
    n = op.Gather(op.Shape(x), op.constant(np.array(1)))
    wide = op.Unsqueeze(op.Mul(n, op.constant(np.array(2))), op.ints(0))
    assert text(op.Expand(op.constant(np.float32(1)), wide)) == ["2*length"]


def test_two_symbols_broadcast_to_their_maximum(op: Builder) -> None:
    a, b = value(op, "a", "m", 3), value(op, "b", "n", 1)
    assert text(op.Add(a, b)) == ["Max(m, n)", "3"]


def test_contradiction_names_the_shapes(op: Builder) -> None:
    a, b = value(op, "a", 2, 3), value(op, "b", 4, 3)
    with pytest.raises(ShapeError, match="broadcast"):
        op.Add(a, b)


def test_inner_dimensions_must_agree(op: Builder) -> None:
    with pytest.raises(ShapeError, match="inner dimensions 3 and 4"):
        op.MatMul(value(op, "a", 2, 3), value(op, "b", 4, 5))


def test_renamed_symbols_are_the_same_size(op: Builder) -> None:
    x, y = value(op, "x", "n", 2), value(op, "y", "m", 2)
    total, size = op.Add(x, y), op.Concat(op.size(y, 0), op.ints(2), axis=0)
    assert text(total) == ["Max(m, n)", "2"]
    shapes.rename_symbols(op.graph, {"m": "n"})
    assert text(total) == text(y) == ["n", "2"]
    assert shapes.data_of(size) == (ir.SymbolicDim("n"), 2)


def test_functions_are_inferred_through_their_bodies(op: Builder) -> None:
    x = value(op, "x", "batch", "length")
    grad = op.GatherGrad(value(op, "dy", "k", "length"), value(op, "i", "k", dtype=ir.DataType.INT64), op.Shape(x))
    assert text(grad) == ["batch", "length"]


def test_packed_rows_keep_their_symbols(op: Builder) -> None:
    x, rows = value(op, "x", "batch", "length", 8), value(op, "rows", "tokens", dtype=ir.DataType.INT64)
    packed, sizes = op.FlattenAndUnpad(x, rows, outputs=2)
    assert text(packed) == ["tokens", "8"]
    assert text(op.PadAndUnflatten(packed, rows, sizes)) == ["batch", "length", "8"]
    assert text(op.PadAndUnflatten(packed, rows, op.Shape(x, end=2))) == ["batch", "length", "8"]
    some = value(op, "some", "chosen", dtype=ir.DataType.INT64)
    assert text(op.ShrunkenGather(packed, some)) == ["chosen", "8"]
    heads = op.Reshape(packed, op.ints(-1, 2, 4))
    y, log_sum_exp = op.PackedAttention(heads, heads, heads, rows, rows, sizes, sizes, scale=0.5, outputs=2)
    assert text(y) == ["tokens", "2", "4"] and text(log_sum_exp) == ["tokens", "2"]


def test_of_a_tensor_of_no_known_type_nothing_is_told(op: Builder) -> None:
    x, places = ir.val("x", shape=[3, 4]), value(op, "places", 1, 4, dtype=ir.DataType.INT64)
    made = ir.node("GatherElements", [x, places], attributes={"axis": 0})
    shapes.infer(made)
    assert (made.outputs[0].dtype, made.outputs[0].shape) == (None, None)
