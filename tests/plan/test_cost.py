"""Operations counted from shapes alone are those that torch's counter sees eager PyTorch compute."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from onnxtrain import Options
from onnxtrain.compiler import Report, capture_module
from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.gradient import build_gradient
from onnxtrain.ir import functions, shapes
from onnxtrain.ir.bodies import close_bodies
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import ForwardGraph, Signature
from onnxtrain.optimize import optimize_training
from onnxtrain.plan.cost import flops, node_flops, training_flops

aten = torch.ops.aten
CPU_ATTENTION = {  # torch's counter knows the kernels of GPUs only
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v)
    ),
}


class Attention(nn.Module):
    """Self-attention over 3 heads, causal or with a mask."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.projection, self.form = nn.Linear(12, 36), form

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (3, 4)).transpose(1, 2) for p in self.projection(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.form == "causal")


class Products(nn.Module):
    """Einsum with and without a sum, and a matrix product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bse,ehd->bhsd", x, self.weight)
        return y @ y.transpose(-1, -2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5, bias=False), nn.Softmax(-1))


def _partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 9))
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 2, dilation=2), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2),
    )  # fmt: skip


def _bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=32, **sizes)
    return transformers.BertForMaskedLM(config)


def _tokens() -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(0, 30, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _mask(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(*shape), "mask": torch.randn(shape[1], shape[1])}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "mlp": (_mlp, lambda: {"input": torch.randn(4, 7, 6)}),
    "partly frozen": (_partly_frozen, lambda: {"input": torch.randn(4, 6)}),
    "input needs a gradient": (_mlp, lambda: {"input": torch.randn(4, 7, 6, requires_grad=True)}),
    "convolutions": (_convolutions, lambda: {"input": torch.randn(2, 3, 15, 18)}),
    "einsum": (Products, lambda: {"x": torch.randn(3, 7, 6)}),
    "attention": (lambda: Attention("plain"), lambda: {"x": torch.randn(2, 7, 12)}),
    "causal attention": (lambda: Attention("causal"), lambda: {"x": torch.randn(2, 7, 12)}),
    "masked attention": (lambda: Attention("masked"), lambda: _mask(2, 7, 12)),
    "bert": (_bert, _tokens),
}


def _scalar(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.square().sum()


def _eager(module: nn.Module, given: dict[str, Any]) -> tuple[int, int]:
    """The operations that torch's counter sees: in the forward pass, and in forward and backward.

    Attention with a mask is written out in the graph, so it is in eager: its kernel computes the scores once more.
    """
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    written_out = "mask" in given or "attention_mask" in given
    with counter, sdpa_kernel(SDPBackend.MATH) if written_out else contextlib.nullcontext():
        loss = _scalar(module(**given))
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def _captured(module: nn.Module, given: dict[str, Any]) -> tuple[ForwardGraph, tuple[str, ...], dict[str, int]]:
    """The forward graph, what is differentiated, and the sizes of its dynamic dimensions."""
    graph = capture_module(module, (), given, Options(), Report()).graph
    trained = [n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    names = dict.fromkeys(graph.signature.parameters)
    differentiable = [n for n in names if n in trained]
    sizes = {}
    for value in graph.model.graph.inputs:
        if value.name in given:
            tensor = given[value.name]
            sizes |= {str(d.value): n for d, n in zip(value.shape, tensor.shape, strict=True) if not isinstance(d, int)}
            differentiable += [value.name] if tensor.requires_grad else []
    return graph, tuple(differentiable), sizes


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_that_eager_computes(name: str) -> None:
    build, inputs = CASES[name]
    module, given = build(), inputs()
    graph, differentiable, sizes = _captured(module, given)
    forward, step = _eager(module, given)
    assert forward and sizes
    assert flops(graph.model.graph).products.evaluate(sizes) == forward
    assert training_flops(graph, differentiable).products.evaluate(sizes) == step


@pytest.mark.parametrize("name", CASES)
def test_a_training_graph_has_the_products_of_eager(name: str) -> None:
    build, inputs = CASES[name]
    module, given = build(), inputs()
    graph, differentiable, sizes = _captured(module, given)
    training = build_gradient(ForwardGraph(graph.model, _differentiated(graph.signature, differentiable)))
    optimize_training(training)
    counted = flops(training.model.graph)
    assert not counted.uncounted
    assert counted.products.evaluate(sizes) == _eager(module, given)[1]


def _differentiated(signature: Signature, names: tuple[str, ...]) -> Signature:
    return dataclasses.replace(signature, differentiable=names)


def test_a_recurrent_layer_and_its_gradients() -> None:
    module = nn.LSTM(5, 8, batch_first=True)
    given = {"input": torch.randn(3, 7, 5)}
    graph, differentiable, sizes = _captured(module, given)
    per_token, tokens = 2 * 4 * 8, 3 * 7  # gates
    assert flops(graph.model.graph).products.evaluate(sizes) == tokens * per_token * (5 + 8)
    step = training_flops(graph, differentiable).products.evaluate(sizes)
    assert step == tokens * per_token * (2 * 5 + 3 * 8), "the input needs no gradient"
    training = build_gradient(ForwardGraph(graph.model, _differentiated(graph.signature, differentiable)))
    assert flops(training.model.graph).products.evaluate(sizes) == step + tokens * per_token * (5 + 8), "run again"


def test_grouped_convolution() -> None:
    module = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    graph, differentiable, sizes = _captured(module, {"input": torch.randn(2, 4, 9, 9)})
    forward = 2 * (2 * 6 * 7 * 7) * (2 * 3 * 3)
    assert flops(graph.model.graph).evaluate(sizes) == forward
    assert training_flops(graph, differentiable).evaluate(sizes) == 2 * forward, "the input needs no gradient"


def _graph(**dims: list[int | str]) -> tuple[ir.Graph, Builder]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "onnxtrain": 1}, name="cost")
    for name, sizes in dims.items():
        shape = [ir.SymbolicDim(d) if isinstance(d, str) else d for d in sizes]
        graph.inputs.append(ir.val(name, dtype=ir.DataType.FLOAT, shape=shape))
    return graph, Builder(graph)


def test_elements_are_counted_by_kind_of_operator() -> None:
    graph, op = _graph(x=["n", 4], y=["n", 1])
    x, y = graph.inputs
    total = op.ReduceSum(op.Softmax(op.Add(y, x)), op.ints(1), keepdims=0)
    op.Concat(op.Reshape(total, op.ints(-1, 1)), y, axis=1)
    counted = flops(graph)
    assert {k: str(v) for k, v in counted.by_operator().items()} == {
        "Add": "4*n",
        "Softmax": "20*n",
        "ReduceSum": "4*n",
    }
    assert str(counted.total) == "28*n" and counted.evaluate({"n": 3, "unused": 1}) == 84
    assert counted.products.evaluate({}) == 0
    with pytest.raises(ShapeError, match="the size of dimension n is not given"):
        counted.evaluate({})


def test_rounded_sizes_are_exact() -> None:
    graph, op = _graph(x=[1, 1, "n"], w=[1, 1, 2])
    op.Conv(*graph.inputs, strides=[49])
    counted, n = flops(graph), 49 * 10**15 + 2
    assert counted.evaluate({"n": n}) == 4 * (10**15 + 1), "in floating point a window is lost"


def test_nodes_that_sizes_do_not_tell_of_are_named() -> None:
    graph, op = _graph(x=["n"])
    call = {"operator": "aten::cos", "overload": "default", "arguments": '[{"input": 0}]', "keywords": "{}"}
    node = op.node("ATen", graph.inputs, call, domain="onnxtrain", outputs=1, like=graph.inputs)
    op.Neg(node.outputs[0])
    counted = flops(graph)
    assert counted.evaluate({"n": 5}) == 5 and [u.split("(")[0] for u in counted.uncounted] == ["onnxtrain::ATen"]
    with pytest.raises(GraphError, match="ATen"):
        node_flops(node)


def test_fused_loss_counts_both_gradients() -> None:
    graph, op = _graph(x=["t", 8], weight=["v", 8], bias=["v"], labels=["t"])
    node = op.node("LinearCrossEntropy", graph.inputs, {}, domain="onnxtrain", outputs=1, like=graph.inputs[:1])
    assert str(node_flops(node)) == "48*t*v"
    signature = Signature(("x", "labels"), ("weight", "bias"), (), (str(node.outputs[0].name),), {})
    graph.outputs.append(node.outputs[0])
    forward = ForwardGraph(ir.Model(graph, ir_version=10), signature)
    assert training_flops(forward, ["x", "weight"]).evaluate({"t": 3, "v": 5}) == 48 * 3 * 5


@pytest.mark.parametrize(("suffix", "products"), [("", 2), ("Grad", 5)])
def test_packed_attention_spreads_its_tokens_evenly(
    suffix: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(q, k, v, q_rows, q_shape, scale: float = 1.0): ...

    def backward(dy, q, k, v, q_rows, q_shape, scale: float = 1.0): ...

    name = f"PackedAttention{suffix}"
    monkeypatch.setitem(functions.DEFINITIONS, name, functions.Definition(backward if suffix else forward, None))
    graph, op = _graph(padded=["b", "s", 4], q=["tq", 2, 4], k=["tk", 2, 4], v=["tk", 2, 4], rows=["tq"])
    padded, q, k, v, rows = graph.inputs
    inputs = [*([q] if suffix else []), q, k, v, rows, op.shape(padded)]
    node = op.node(name, inputs, {"scale": 0.5}, domain="onnxtrain", outputs=1, like=[q])
    found = flops([node]).evaluate({"b": 3, "tq": 10, "tk": 9})
    assert found == products * 2 * 10 * 9 * 2 * 4 // 3


@pytest.mark.parametrize("count", ["", "count = Constant <value = int64 {5}> ()"], ids=["unknown", "known"])
def test_control_flow_counts_a_known_number_of_bodies(count: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    control (float[N,2] x, float[2,2] w, bool c{"" if count else ", int64 count"}) => (float[N,2] z) {{
        {count}
        y = Loop (count, , x) <body = step (int64 i, bool go, float[N,2] s) => (bool on, float[N,2] new) {{
            p = MatMul(s, w) new = Tanh(p) on = Identity(go)
        }}>
        z = If (c) <
            then_branch = yes () => (float[N,2] a) {{ t = Sin(y) a = Mul(t, x) }},
            else_branch = no () => (float[N,2] b) {{ b = Neg(y) }}
        >
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    close_bodies(model.graph)
    shapes.infer_graph(model.graph)
    counted = flops(model.graph)
    n = 3
    iterations, branch = 5 * (2 * n * 2 * 2 + n * 2), 2 * n * 2
    assert [u.split("(")[0] for u in counted.uncounted] == ([] if count else ["onnxtrain::Loop"])
    assert counted.evaluate({"N": n}) == branch + (iterations if count else 0)
