"""Gradients registered as lists of nodes, and edges that stop: against torch autograd in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import pytest
import torch

import onnxtrain
from onnxtrain.errors import GradientError
from onnxtrain.execute import backend
from onnxtrain.gradient import (
    build_gradient,
    register_custom_stop_gradient_edges,
    register_gradient,
    rules,  # noqa: F401  (fills RULES)
)
from onnxtrain.gradient.registry import RULES, STOP_EDGES
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Plan, Signature
from onnxtrain.plan import make_plan

ATEN = "org.pytorch.aten"
X = torch.linspace(-1.5, 1.6, 12, dtype=torch.float64).reshape(3, 4)


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = [(table, dict(table)) for table in (RULES, STOP_EDGES)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


def plan_of(make: Callable[[Builder, Sequence[ir.Value]], ir.Value], *tensors: torch.Tensor) -> Plan:
    """The plan of a graph of these inputs and one output; all floating inputs get a gradient."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, DOMAIN: 1}, name="lists")
    kinds = {torch.float64: ir.DataType.DOUBLE, torch.int64: ir.DataType.INT64}
    inputs = [ir.val(f"x{i}", dtype=kinds[t.dtype], shape=[*t.shape]) for i, t in enumerate(tensors)]
    graph.inputs.extend(inputs)
    y = make(Builder(graph), inputs)
    y.name = "y"
    graph.outputs.append(y)
    names = tuple(str(v.name) for v in inputs)
    floating = tuple(n for n, t in zip(names, tensors, strict=True) if t.is_floating_point())
    signature = Signature(names, (), (), ("y",), {}, floating)
    return make_plan(build_gradient(ForwardGraph(ir.Model(graph, ir_version=10), signature)))


def agrees(
    make: Callable[[Builder, Sequence[ir.Value]], ir.Value],
    reference: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
) -> list[str]:
    """Compare outputs and gradients with torch; returns the operators of the backward pass."""
    plan = plan_of(make, *tensors)
    executable = backend("torch").compile(plan)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    expected = reference(*leaves)
    dy = torch.linspace(0.3, 1.7, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    (found, *_), saved = executable.forward([t.clone() for t in tensors])
    torch.testing.assert_close(found, expected.detach())
    gradients = torch.autograd.grad(expected, [t for t in leaves if t.requires_grad], dy)
    for ours, theirs in zip(executable.backward(saved, [dy]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    return [n.op_type for n in plan.backward.graph]


def aten(operator: str, overload: str, arguments: list[Any], outputs: int = 1):
    """A graph of one operator of torch, whose outputs have the sizes that meta tensors get."""

    def make(op: Builder, inputs: Sequence[ir.Value]) -> ir.Value:
        call = {"operator": operator, "overload": overload, "arguments": json.dumps(arguments), "keywords": "{}"}
        called = getattr(getattr(torch.ops.aten, operator.split("::")[1].split(".")[0]), overload)
        kinds = {ir.DataType.DOUBLE: torch.float64, ir.DataType.INT64: torch.int64}
        metas = [torch.empty([*v.shape], dtype=kinds[v.dtype], device="meta") for v in inputs]
        results = called(*(metas[a["input"]] if isinstance(a, dict) else a for a in arguments))
        results = results if isinstance(results, tuple) else (results,)
        back = {v: k for k, v in kinds.items()}
        like = [ir.val("", dtype=back[r.dtype], shape=[*r.shape]) for r in results]
        made = op.node("ATen", list(inputs), call, domain=DOMAIN, outputs=outputs, like=like)
        return made.outputs[0]

    return make


def softsign() -> list[tuple]:
    one = {"value": {"value": 1.0, "dtype": "IElemType(0)", "is_tensor": True}}
    return [
        ("Constant", [], ["one"], one),
        ("Abs", ["I(0)"], ["size"]),
        ("Add", ["size", "one"], ["root"]),
        ("Mul", ["root", "root"], ["square"]),
        ("Div", ["GO(0)", "square"], ["GI(0)"]),
    ]


def test_a_list_is_a_rule() -> None:
    register_gradient("", "Softsign", replace=True)(softsign)
    operators = agrees(lambda op, v: op.Softsign(v[0]), torch.nn.functional.softsign, X)
    assert operators.count("Mul") == 1 and operators[-1] == "Div"


def test_outputs_attributes_and_several_gradients() -> None:
    @register_gradient("", "Div", replace=True)
    def _() -> list[tuple]:
        return [
            ("Div", ["GO(0)", "I(1)"], ["GI(0)"]),
            ("Mul", ["GI(0)", "O(0)"], ["part"]),
            ("Neg", ["part"], ["GI(1)"]),
        ]

    @register_gradient("", "ReduceSum", replace=True)
    def _() -> list[tuple]:
        return [
            ("Unsqueeze", ["GO(0)", "I(1)"], ["column"]),
            ("Shape", ["I(0)"], ["sizes"], {"start": {"value": 0, "dtype": "int"}}),
            ("Expand", ["column", "sizes"], ["GI(0)"]),
        ]

    def make(op: Builder, v: Sequence[ir.Value]) -> ir.Value:
        return op.ReduceSum(op.Div(v[0], v[1]), op.ints(1), keepdims=0)

    assert "Unsqueeze" in agrees(make, lambda a, b: (a / b).sum(1), X, X.cos() + 2)


def test_an_operator_of_torch_takes_arguments_in_order_defaults_too() -> None:
    @register_gradient(ATEN, "ATen", "aten::diagonal", "")
    def _() -> list[tuple]:
        backward = {"operator": {"value": "aten::diagonal_backward", "dtype": "string"}}
        return [
            ("Shape", ["I(0)"], ["sizes"]),
            (("ATen", ATEN), ["GO(0)", "sizes", "I(1)", "I(2)", "I(3)"], ["GI(0)"], backward),
        ]

    operators = agrees(aten("aten::diagonal", "default", [{"input": 0}, 1]), lambda a: a.diagonal(1), X)
    assert "ATenGrad" not in operators, "the registered gradient comes before torch's own"


def test_an_overload_is_told_from_another() -> None:
    @register_gradient(ATEN, "ATen", "aten::max", "dim")
    def _() -> list[tuple]:
        backward = {"operator": {"value": "aten::value_selecting_reduction_backward", "dtype": "string"}}
        return [
            ("Shape", ["I(0)"], ["sizes"]),
            (("ATen", ATEN), ["GO(0)", "I(1)", "O(1)", "sizes", "I(2)"], ["GI(0)"], backward),
        ]

    rows = aten("aten::max.dim", "dim", [{"input": 0}, 1, True], outputs=2)
    assert "ATenGrad" not in agrees(rows, lambda a: a.max(1, keepdim=True).values, X)
    assert "ATenGrad" in agrees(aten("aten::max", "default", [{"input": 0}]), lambda a: a.max(), X)


def test_integers_get_no_gradient_and_sizes_become_numbers() -> None:
    @register_gradient(ATEN, "ATen", "aten::embedding", "")
    def _() -> list[tuple]:
        backward = {"operator": {"value": "aten::embedding_backward", "dtype": "string"}}
        return [
            ("Constant", [], ["zero"], {"value": {"value": 0, "dtype": "int", "is_tensor": True}}),
            ("Shape", ["I(0)"], ["sizes"]),
            ("Gather", ["sizes", "zero"], ["rows"], {"axis": {"value": 0, "dtype": "int"}}),
            (("ATen", ATEN), ["GO(0)", "I(1)", "rows", "I(2)", "I(3)", "I(4)"], ["GI(0)"], backward),
        ]

    indices = torch.tensor([[0, 2], [2, 1]])
    call = aten("aten::embedding", "default", [{"input": 0}, {"input": 1}, 1])
    agrees(call, lambda w, i: torch.nn.functional.embedding(i, w, padding_idx=1), X, indices)


def test_a_value_that_is_two_inputs_gets_both_gradients() -> None:
    @register_gradient(ATEN, "ATen", "aten::sub", "Tensor")
    def _() -> list[tuple]:
        return [("Identity", ["GO(0)"], ["GI(0)"]), ("Neg", ["GO(0)"], ["GI(1)"])]

    def make(op: Builder, v: Sequence[ir.Value]) -> ir.Value:
        call = {"operator": "aten::sub.Tensor", "overload": "Tensor", "keywords": "{}"}
        call["arguments"] = json.dumps([{"input": 0}, {"input": 1}])
        made = op.node("ATen", [v[0], v[0]], call, domain=DOMAIN, like=[v[0]])
        return op.Add(made.outputs[0], v[0])

    agrees(make, lambda a: a - a + a, X)


def test_no_gradient_flows_over_a_stop_edge() -> None:
    register_custom_stop_gradient_edges([1], "", "Mul")
    plan = plan_of(lambda op, v: op.Mul(op.Exp(v[0]), op.Sin(v[1])), X, X)
    assert list(plan.gradients) == ["x0"]
    register_custom_stop_gradient_edges([0], ATEN, "ATen", "aten::diagonal", "")
    assert plan_of(aten("aten::diagonal", "default", [{"input": 0}]), X).gradients == {}


def test_registering_twice_is_an_error_unless_asked_for() -> None:
    with pytest.raises(ValueError, match=r"Softsign.*twice"):
        register_gradient("", "Softsign")(softsign)
    register_gradient("", "Softsign", replace=True)(softsign)


REPLACED_FIRST = """
from onnxtrain.gradient import gradient
from onnxtrain.gradient.registry import RULES

@gradient("Tanh", replace=True)
def rule(ctx, dy, x): ...

from onnxtrain.gradient import rules

assert RULES["", "Tanh"] is rule and ("", "Softmax") in RULES
"""


def test_a_rule_may_be_replaced_before_the_others_are_there() -> None:
    subprocess.run([sys.executable, "-c", REPLACED_FIRST], check=True)


@pytest.mark.parametrize(
    ("entry", "message"), [(("Neg", ["GO(0)"]), "entry 0"), (("Cast", [], [], {"to": 1}), "attribute to")]
)
def test_another_form_is_an_error_at_once(entry: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_gradient("", "Det")(lambda: [entry])


def test_a_name_that_nothing_made_is_an_error_that_says_so() -> None:
    register_gradient("", "Softsign", replace=True)(lambda: [("Neg", ["nothing"], ["GI(0)"])])
    with pytest.raises(GradientError, match="nothing is no output"):
        plan_of(lambda op, v: op.Softsign(v[0]), X)


def test_the_names_of_the_predecessor_are_the_same_functions() -> None:
    from onnxtrain.ortmodule._custom_gradient_registry import register_gradient as moved

    assert moved is onnxtrain.register_gradient is register_gradient
    assert onnxtrain.register_custom_stop_gradient_edges is register_custom_stop_gradient_edges
