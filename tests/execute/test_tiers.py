"""Kernels of several operators: found, put together, and run on a loop of Inductor where that is faster and right."""

from __future__ import annotations

import concurrent.futures
import copy
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from models import ARCHITECTURES, build
from parity import pair, same_step
from transformers import LlamaConfig, LlamaForCausalLM

from onnxtrain import Options, ORTModule
from onnxtrain.errors import BackendError
from onnxtrain.execute import backend
from onnxtrain.execute.torch.kernel_compiler import Compiled, KernelCompiler
from onnxtrain.execute.torch.kernels import body_of, is_kernel, with_kernels
from onnxtrain.execute.torch.tiers import Kernel, Kernels, order_of
from onnxtrain.ir.builder import Builder

Tensor = torch.Tensor
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    """No test sees the kernels of another."""
    with mock.patch.object(backend("torch"), "_kernels", {}):
        yield


def kernels() -> dict[str, str]:
    """What the kernels run on."""
    found: dict[str, str] = {}
    for each in backend("torch")._kernels.values():  # type: ignore[attr-defined]
        found |= each.states
    return found


class Block(torch.nn.Module):
    """A product between what kernels are made of, with a residual that is read on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(x.sin() + y)
        z = F.silu(self.inner(h)) * h
        return (self.outer(z).tanh() + h * 0.5 + z.sigmoid()).softmax(-1)


class Loss(torch.nn.Module):
    """The loss of a language model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def graph_of(write: Callable[[Builder, ir.Value, ir.Value], Any]) -> ir.Model:
    """A model of two matrices with named sizes."""
    shape = ir.Shape(["rows", 8])
    given = [ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=shape) for n in ("a", "b")]
    graph = ir.Graph(given, [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="test")
    made = write(Builder(graph), *given)
    for number, value in enumerate(made if isinstance(made, tuple) else (made,)):
        value.name = f"out{number}"
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=10)


def bodies(model: ir.Model, parts: tuple[int, ...] = ()) -> list[list[str]]:
    """The operators of each kernel of a model."""
    made = with_kernels(model, parts, "cpu").graph
    return [[inner.op_type for inner in body_of(n)] for n in made if is_kernel(n)]


def test_neighbours_of_one_shape_are_a_kernel() -> None:
    model = graph_of(lambda op, a, b: op.Tanh(op.Mul(op.Add(a, b), b)))
    assert bodies(model) == [["Add", "Mul", "Tanh"]]
    assert [n.op_type for n in model.graph] == ["Add", "Mul", "Tanh"], "the model itself is not changed"


def test_one_operator_is_no_kernel() -> None:
    assert not bodies(graph_of(lambda op, a, b: op.Add(a, b)))


def test_a_kernel_waits_for_nothing_that_waits_for_it() -> None:
    """A product reads what the first addition gives, and the last one reads the product."""

    def write(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
        first = op.Exp(op.Add(a, b))
        weight = op.MatMul(op.Transpose(b, perm=(1, 0)), first)
        return op.Sin(op.Add(op.MatMul(first, weight), first))

    assert bodies(graph_of(write)) == [["Add", "Exp"], ["Add", "Sin"]]


def test_a_kernel_stands_where_all_is_there_that_it_reads() -> None:
    """What is written between its operators, but reads none of them, comes before it."""

    def write(op: Builder, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
        first = op.Exp(a)
        product = op.MatMul(b, op.MatMul(op.Transpose(b, perm=(1, 0)), b))
        seen = op.MatMul(first, op.MatMul(op.Transpose(a, perm=(1, 0)), b))
        return op.Add(first, product), seen

    made = with_kernels(graph_of(write), (), "cpu").graph
    names = [n.op_type for n in made]
    kernel = next(i for i, n in enumerate(made) if is_kernel(n))
    assert names.count("MatMul") == 4 and names[kernel + 1 :] == ["MatMul"]


def test_rows_and_one_number_for_each_of_them_are_one_kernel() -> None:
    def write(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
        mean = op.ReduceMean(op.Mul(a, a), op.ints(-1), keepdims=1)
        return op.Mul(op.Mul(a, op.Reciprocal(op.Sqrt(mean))), b)

    assert bodies(graph_of(write)) == [["Mul", "ReduceMean", "Sqrt", "Reciprocal", "Mul", "Mul"]]


def test_no_kernel_reaches_over_the_end_of_a_part() -> None:
    model = graph_of(lambda op, a, b: op.Tanh(op.Mul(op.Sin(op.Add(a, b)), b)))
    assert bodies(model, (2, 2)) == [["Add", "Sin"], ["Mul", "Tanh"]]


def test_what_computes_the_same_has_one_name() -> None:
    def write(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
        for _ in range(3):
            a = op.MatMul(op.Sin(op.Add(a, b)), op.MatMul(op.Transpose(a, perm=(1, 0)), b))
        return a

    made = with_kernels(graph_of(write), (), "cpu").graph
    assert len({n.op_type for n in made if is_kernel(n)}) == 1
    other = with_kernels(graph_of(lambda op, a, b: op.Cos(op.Add(a, b))), (), "cpu").graph
    assert not {n.op_type for n in other} & {n.op_type for n in made}


@pytest.mark.parametrize(("shape", "order"), [((2, 3, 4), ()), ((3, 2, 4), (1, 0, 2)), ((4, 3, 2), (2, 1, 0))], ids=str)
def test_the_order_of_axes_in_memory(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    x = torch.empty(2, 3, 4)
    assert order_of(x.permute(order) if order else x) == order and (x.permute(order) if order else x).shape == shape
    assert order_of(x[:, :2]) is None and order_of(x[:1].expand(2, 3, 4)) is None


class Refusing(KernelCompiler):
    """Makes no loop, ever: kernels run on ATen, as they do until theirs is there."""

    def submit(self, *args: Any) -> concurrent.futures.Future[Compiled]:
        return concurrent.futures.Future()


@pytest.fixture
def without_loops() -> Iterator[None]:
    with mock.patch.object(backend("torch"), "_compiler", Refusing()):
        yield


@pytest.mark.usefixtures("without_loops")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_stay_bitwise_what_they_were(name: str) -> None:
    """What waits for its loop computes what it computes without kernels, in any order of operators."""
    model, given = build(name), ARCHITECTURES[name].batch(3, 9)
    results = []
    for codegen in ("none", "auto"):
        module = ORTModule(copy.deepcopy(model), options=Options(codegen=codegen, summary=False))
        loss = module(**given).loss
        loss.backward()
        results.append({"loss": loss, **{n: p.grad for n, p in module.named_parameters() if p.grad is not None}})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[1][n], theirs) for n, theirs in results[0].items())
    assert kernels() and all(state.startswith("ATen: ") for state in kernels().values())


@needs_compiler
def test_loops_of_all_sizes() -> None:
    """Waited for: outputs and gradients are eager's, at sizes that no loop was made for, too."""
    wrapped, eager = pair(Block(), codegen="inductor")
    for rows in ((4, 5), (7, 3), (2, 2), (1, 6), (4, 1), (0, 5)):
        same_step(wrapped, eager, torch.randn(*rows, 8, requires_grad=True), torch.randn(*rows, 8))
    assert kernels() and set(kernels().values()) == {"Inductor"}


@needs_compiler
def test_a_loop_comes_while_steps_run_and_is_compared() -> None:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    wrapped, eager = pair(Loss(LlamaForCausalLM(config)), codegen="auto")
    ids = torch.randint(0, 50, (3, 9))
    until = time.monotonic() + 300
    while time.monotonic() < until:
        same_step(wrapped, eager, ids)
        if not any("being made" in state for state in kernels().values()):
            break
        time.sleep(1)
    same_step(wrapped, eager, ids)
    assert any("µs on Inductor's loop" in state for state in kernels().values()), kernels()


def _kernel(call: Callable[[list[Tensor]], Any], is_waited_for: bool = False) -> Kernel:
    """A kernel whose loop is a function."""

    class Giving(KernelCompiler):
        def submit(self, *args: Any) -> concurrent.futures.Future[Compiled]:
            future: concurrent.futures.Future[Compiled] = concurrent.futures.Future()
            future.set_result(Compiled(call, lambda sizes: True))
            return future

    made = with_kernels(graph_of(lambda op, a, b: op.Tanh(op.Add(a, b))), (), "cpu").graph
    return Kernel(next(n for n in made if is_kernel(n)), "cpu", Giving(), is_waited_for)


def test_a_loop_that_is_wrong_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    kernel, x = _kernel(lambda args: ((args[0] + args[1]).tanh() * 1.001,)), torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "onnxtrain.execute"):
        for _ in range(3):
            assert torch.equal(kernel(x, x), (x + x).tanh())
    assert kernel.state.startswith("ATen: Inductor's loop differs") and "differs by" in caplog.text


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_loop_that_loses_a_number_is_not_taken(lost: float) -> None:
    kernel, x = _kernel(lambda args: (torch.full((3, 8), lost),)), torch.randn(3, 8)
    kernel(x, x)
    kernel(x, x)
    assert kernel.state.startswith("ATen: Inductor's loop differs")


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_loop_that_raises_is_not_taken(is_waited_for: bool, caplog: pytest.LogCaptureFixture) -> None:
    def raising(args: list[Tensor]) -> tuple[Tensor]:
        raise NameError("s36")

    kernel, x = _kernel(raising, is_waited_for), torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "onnxtrain.execute"):
        for _ in range(3):
            assert torch.equal(kernel(x, x), (x + x).tanh())
    assert kernel.state == "ATen: Inductor's loop raises NameError: s36" and len(caplog.records) == 1


def test_a_loop_that_is_slower_is_not_taken() -> None:
    def slow(args: list[Tensor]) -> tuple[Tensor]:
        time.sleep(0.01)
        return ((args[0] + args[1]).tanh(),)

    kernel, x = _kernel(slow), torch.randn(3, 8)
    kernel(x, x)
    kernel(x, x)
    assert kernel.state.startswith("ATen: ") and "µs on Inductor's loop" in kernel.state


def test_a_loop_is_not_given_what_lies_otherwise_in_memory() -> None:
    given: list[bool] = []

    def loop(args: list[Tensor]) -> tuple[Tensor]:
        given.append(all(x.is_contiguous() for x in args))
        return ((args[0] + args[1]).tanh(),)

    kernel, x = _kernel(loop), torch.randn(3, 8)
    kernel(x, x)
    for other in (torch.randn(8, 3).t(), torch.randn(3, 16)[:, ::2], torch.randn(1, 8).expand(3, 8)):
        assert torch.equal(kernel(other, x), (other + x).tanh())
    assert all(given)


def test_a_process_that_dies_leaves_atens_kernels(caplog: pytest.LogCaptureFixture) -> None:
    compiler = KernelCompiler()
    found = Kernels("cpu", compiler, is_waited_for=True)
    made = with_kernels(graph_of(lambda op, a, b: op.Tanh(op.Add(a, b))), (), "cpu").graph
    node = next(n for n in made if is_kernel(n))
    with (
        mock.patch("onnxtrain.execute.torch.kernel_compiler._WORKER", "onnxtrain.no_such_module"),
        caplog.at_level(logging.WARNING, "onnxtrain.execute"),
    ):
        x = torch.randn(3, 8)
        assert torch.equal(found(node).function(x, x), (x + x).tanh())
        future = compiler.submit(body_of(node), "cpu", [(3, 8), (3, 8)], [(), ()])
        assert isinstance(future.exception(60), BackendError)
    assert len([r for r in caplog.records if "Inductor made no loop" in r.message]) == 1, "told once"


def test_no_kernels_within_a_budget() -> None:
    """What it plans is what ATen's operators need."""
    module = ORTModule(Block(), options=Options(codegen="auto", memory_budget=0.9, summary=False))
    module(torch.randn(4, 5, 8), torch.randn(4, 5, 8)).sum().backward()
    assert not kernels()
