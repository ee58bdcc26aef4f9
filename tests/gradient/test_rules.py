"""Every gradient rule against torch autograd in float64; the table is closed."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch
from op_cases import CASES, Case, Given
from op_cases.case import index, x
from op_runs import Row, prepare, reference, run, seeds

from onnxtrain.errors import GradientError
from onnxtrain.execute import backend
from onnxtrain.gradient import build_gradient, gradient
from onnxtrain.gradient.registry import RULES
from onnxtrain.ir import functions
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.function_bodies import body_of
from onnxtrain.ir.graphs import DOMAIN, SOURCE, ForwardGraph, Signature
from onnxtrain.plan import make_plan

DIFFERENTIABLE = [c for c in CASES if c.differentiable]
ELSEWHERE = {
    ("", "Dropout"): "tests/ortmodule/test_random.py",
    (DOMAIN, "ATen"): "tests/capture/test_aten.py",
    (DOMAIN, "ATenGrad"): "tests/ortmodule/test_double_backward.py",
    (DOMAIN, "DropoutGrad"): "tests/ortmodule/test_double_backward.py",
    (DOMAIN, "PythonOp"): "tests/ortmodule/test_autograd_functions.py",
    (DOMAIN, "PythonOpGrad"): "tests/ortmodule/test_autograd_functions.py",
}


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.id)
def test_rule_agrees_with_autograd(case: Case) -> None:
    _agrees(prepare(case, np.float64, gradients=True))


SEVERAL = [(c, i) for c in DIFFERENTIABLE for i in range(c.outputs) if c.outputs > 1]


@pytest.mark.parametrize(("case", "only"), SEVERAL, ids=[f"{c.id}-{i}" for c, i in SEVERAL])
def test_gradient_of_each_output_alone(case: Case, only: int) -> None:
    """No other output has one, the first neither."""
    _agrees(prepare(case, np.float64, gradients=True, only=only))


def _agrees(row: Row) -> None:
    outputs, gradients = run(row, "torch")
    expected, expected_gradients = reference(row, torch.float64)
    for ours, theirs in zip(outputs, expected, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    assert len(gradients) == len(expected_gradients)
    assert gradients or outputs[0].dtype.kind != "f" or row.case.op == "BatchNormTraining"  # whose statistics have none
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", [c for c in CASES if not c.differentiable and c.op != "Cast"], ids=lambda c: c.id)
def test_stop_gives_no_gradient(case: Case) -> None:
    row = prepare(case, np.float64, gradients=True)
    assert row.plan.gradients == {}


def test_every_rule_has_a_row() -> None:
    from onnxtrain.gradient import rules  # noqa: F401

    covered = {(c.domain, c.op) for c in DIFFERENTIABLE} | set(ELSEWHERE)
    assert sorted(set(RULES) - covered) == []


def test_every_function_is_a_row_or_emitted_by_a_rule() -> None:
    emitted = {c.op for c in CASES if c.domain == DOMAIN} | {"DropoutGrad"}
    for case in DIFFERENTIABLE:
        plan = prepare(case, np.float64, gradients=True).plan
        nodes = [*plan.forward.graph.all_nodes(), *(plan.backward.graph.all_nodes() if plan.backward else ())]
        emitted |= {n.op_type for n in nodes if n.domain == DOMAIN}
    assert functions.defines("Silu")
    emitted &= set(functions.DEFINITIONS)  # those that carry their bodies are not functions
    todo, reached = set(emitted), set(emitted)
    while todo:
        name = todo.pop()
        inner = {n.op_type for n in body_of(name) if n.domain == DOMAIN}
        todo |= inner - reached
        reached |= inner
    assert sorted(set(functions.DEFINITIONS) - reached) == []


def test_missing_rule_names_node_line_and_cure() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="missing")
    value = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2, 3])
    graph.inputs.append(value)
    op = Builder(graph)
    op.metadata = {SOURCE: "model.py:12"}
    y = op.node("Mystery", [value], domain="com.example", like=[value]).outputs[0]
    y.name = "y"
    graph.outputs.append(y)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), ("y",), {}, ("x",)))
    with pytest.raises(GradientError, match=r"com\.example::Mystery") as raised:
        build_gradient(forward)
    assert raised.value.source == "model.py:12"
    assert "Mystery" in raised.value.node and "gradient(" in raised.value.cure


def test_registering_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="twice"):
        gradient("Softmax")(lambda ctx, dy, x: dy)


def test_value_used_twice_sums_its_gradients() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="twice")
    value = ir.val("x", dtype=ir.DataType.DOUBLE, shape=[3])
    graph.inputs.append(value)
    op = Builder(graph)
    y = op.Mul(op.Exp(value), op.Sin(value))
    y.name = "y"
    graph.outputs.append(y)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), ("y",), {}, ("x",)))
    from onnxtrain.execute import backend
    from onnxtrain.plan import make_plan

    executable = backend("torch").compile(make_plan(build_gradient(forward)))
    x = torch.tensor([0.1, 0.7, -1.2], dtype=torch.float64)
    _, saved = executable.forward([x])
    (dx,) = executable.backward(saved, [torch.ones(3, dtype=torch.float64)])
    torch.testing.assert_close(dx, x.exp() * x.sin() + x.exp() * x.cos())


def test_gradient_of_an_output_that_the_rule_does_not_know_is_an_error() -> None:
    case = next(c for c in CASES if c.op == "ScaledDotProductAttention")
    with pytest.raises(GradientError, match="output 1 of ScaledDotProductAttention"):
        prepare(dataclasses.replace(case, outputs=2), np.float64, gradients=True)


def test_weights_of_a_query_that_sees_nothing_have_gradient_zero() -> None:
    """As exporters write it: zeros are put where the softmax is no number."""
    x = ir.val("x", dtype=ir.DataType.DOUBLE, shape=(2, 3))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1})
    op = Builder(graph)
    weights = op.Softmax(op.Add(x, op.constant(np.array([[0.0, -np.inf, 0.0], [-np.inf] * 3]))), axis=-1)
    y = op.Where(op.IsNaN(weights), op.like(0.0, x), weights)
    y.name = "y"
    graph.outputs.append(y)
    forward = ForwardGraph(ir.Model(graph, ir_version=10), Signature(("x",), (), (), ("y",), {}, ("x",)))
    executable = backend("torch").compile(make_plan(build_gradient(forward)))
    given, dy = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 3.0]], dtype=torch.float64), torch.rand(2, 3).double()
    _, saved = executable.forward([given])
    (dx,) = executable.backward(saved, [dy])
    likely = given[0, ::2].softmax(0)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    expected[0, ::2] = likely * (dy[0, ::2] - (likely * dy[0, ::2]).sum())
    torch.testing.assert_close(dx, expected)


def test_mean_over_no_label_has_gradient_zero() -> None:
    """The loss is 0 / 0; torch gives NaN and zero gradients."""
    case = Case("SoftmaxCrossEntropyLoss", (x(4, 3), index(4, high=1)), lambda s, i: s, {"ignore_index": 0})
    (loss,), (dscores,) = run(prepare(case, np.float64, gradients=True), "torch")
    assert np.isnan(loss) and not dscores.any()


@pytest.mark.parametrize("training", [True, False])
def test_dropout_whose_training_is_known_only_at_run_time(training: bool) -> None:
    given = (x(40, 50), np.array(0.25), Given((), boolean=True))
    row = prepare(Case("Dropout", given, lambda a, t: a, outputs=2), np.float64, gradients=True)
    row.arrays[1] = np.array(training)
    (y, mask), (dx,) = run(row, "torch")
    (dy,) = seeds(row, [y, mask])
    assert bool(mask.all()) is not training
    np.testing.assert_allclose(dx, dy * mask / (0.75 if training else 1.0))
