"""Operators that draw random numbers: their distribution, and torch's seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute import backend
from onnxtrain.execute.torch.registry import LOWERINGS
from onnxtrain.gradient import build_gradient
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, ForwardGraph, Signature
from onnxtrain.plan import make_plan

SHAPE = [200, 300]
ROWS: dict[str, tuple[Callable[[Builder, ir.Value], ir.Value], float, float]] = {
    "RandomNormal": (lambda op, p: op.RandomNormal(shape=SHAPE, mean=1.0, scale=2.0, seed=3.0), 1.0, 2.0),
    "RandomNormalLike": (lambda op, p: op.RandomNormalLike(p, mean=-1.0, scale=0.5), -1.0, 0.5),
    "RandomUniform": (lambda op, p: op.RandomUniform(shape=SHAPE, low=2.0, high=4.0), 3.0, 2 / 12**0.5),
    "RandomUniformLike": (lambda op, p: op.RandomUniformLike(p, dtype=1), 0.5, 1 / 12**0.5),
    "Bernoulli": (lambda op, p: op.Bernoulli(p), 0.25, (0.25 * 0.75) ** 0.5),
    "PackedDropout": (
        lambda op, p: op.PackedDropout(op.Mul(p, 4.0), op.constant(0.3, p.dtype), outputs=2)[0],
        1.0, (0.3 / 0.7) ** 0.5,
    ),
    "Multinomial": (
        lambda op, p: op.Cast(op.Multinomial(op.Log(op.constant([[0.25, 0.75]], p.dtype)), sample_size=60_000), to=1),
        0.75, (0.25 * 0.75) ** 0.5,
    ),
}  # fmt: skip


def _graph(make: Callable[[Builder, ir.Value], ir.Value]) -> ForwardGraph:
    """``y = drawn * x``."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g")
    p = ir.val("p", dtype=ir.DataType.FLOAT, shape=SHAPE)
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[])
    graph.inputs.extend([p, x])
    op = Builder(graph)
    graph.outputs.append(op.Mul(make(op, p), x, name="y"))
    return ForwardGraph(ir.Model(graph, ir_version=10), Signature(("p", "x"), (), (), ("y",), {}, ("x",)))


@pytest.mark.parametrize(("make", "mean", "deviation"), ROWS.values(), ids=ROWS)
def test_distribution_and_gradient(make: Callable[..., ir.Value], mean: float, deviation: float) -> None:
    compiled = backend("torch").compile(make_plan(build_gradient(_graph(make))))
    given = [torch.full(SHAPE, 0.25), torch.tensor(1.0)]
    torch.manual_seed(0)
    (y,), saved = compiled.forward(given)
    np.testing.assert_allclose([y.mean(), y.std()], [mean, deviation], atol=0.02)
    (dx,) = compiled.backward(saved, [torch.ones_like(y)])
    torch.testing.assert_close(dx, y.sum(), rtol=1e-4, atol=1.0)
    torch.manual_seed(0)
    again = compiled.forward(given)[0][0]
    assert torch.equal(y, again) and not torch.equal(y, compiled.forward(given)[0][0])


MASKED = {
    "in order": (lambda: torch.randn(6, 40), 0.3),
    "transposed": (lambda: torch.randn(40, 6).T, 0.3),
    "expanded": (lambda: torch.randn(6, 1).expand(6, 40), 0.1),
    "a part": (lambda: torch.randn(6, 43)[:, 3:], 0.3),
    "a part that lies in order": (lambda: torch.randn(43)[3:], 0.3),
    "channels last": (lambda: torch.randn(2, 6, 4, 5).contiguous(memory_format=torch.channels_last), 0.5),
    "all": (lambda: torch.randn(6, 40), 1.0),
    "of nothing": (lambda: torch.randn(0, 40), 0.3),
}


def _generator_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("domain", ["", DOMAIN])
@pytest.mark.parametrize(("make", "ratio"), MASKED.values(), ids=MASKED)
def test_a_mask_is_drawn_again(make: Callable[[], torch.Tensor], ratio: float, domain: str, device: str) -> None:
    torch.manual_seed(3)
    with torch.device(device):
        x = make()
    state, form = LOWERINGS[DOMAIN, "RandomState"].function(x)
    given = (x, ratio) if domain else (x, ratio, True)
    name = "PackedDropout" if domain else "Dropout"
    mask = LOWERINGS[domain, name].function(*given, outputs=2)[1]
    rest = _generator_state(device)
    again = LOWERINGS[DOMAIN, "DropoutMask"].function(state, form, given[1], device=device, packed=int(bool(domain)))
    assert torch.equal(again, mask) and (again.stride() == mask.stride() or domain)
    assert form.untyped_storage().device.type == "meta" and torch.equal(_generator_state(device), rest)
