"""What kernels allocate within a call is what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.execute.torch.workspace import workspace

aten = torch.ops.aten


def image(channels: int, side: int, of: int = 1) -> torch.Tensor:
    """Some channels of an image that has ``of`` times as many."""
    return torch.randn(16, channels * of, side, side)[:, :channels]


def convolution(before: int, after: int, side: int, stride: int = 1, transposed: bool = False, of: int = 1) -> Any:
    weight = torch.randn(before, after, 2, 2) if transposed else torch.randn(after, before, 3, 3)
    settings = [[stride] * 2, [int(not transposed)] * 2, [1, 1], transposed, [0, 0], 1]
    return image(before, side, of), weight, settings


def forward(*sizes: Any, bias: bool = False, **named: Any) -> Callable[[], tuple[Any, ...]]:
    def call() -> tuple[Any, ...]:
        x, weight, settings = convolution(*sizes, **named)
        return aten.convolution.default, (x, weight, torch.randn(sizes[1]) if bias else None, *settings)

    return call


def backward(*sizes: Any, mask: tuple[bool, bool] = (True, True), **named: Any) -> Callable[[], tuple[Any, ...]]:
    def call() -> tuple[Any, ...]:
        x, weight, settings = convolution(*sizes, **named)
        dy = torch.randn_like(aten.convolution(x, weight, None, *settings))
        return aten.convolution_backward.default, (dy, x, weight, [sizes[1]], *settings, [*mask, True])

    return call


def normalization(of: int = 1) -> tuple[Any, ...]:
    c = torch.rand(16) + 1
    return aten.native_batch_norm_backward.default, (
        image(16, 32),
        image(16, 32, of),
        c,
        c,
        c,
        c,
        c,
        True,
        1e-5,
        [True] * 3,
    )


def layer_normalization(transposed: bool) -> tuple[Any, ...]:
    x, w = torch.randn(16, 128, 256), torch.randn(256)
    _, mean, scale = aten.native_layer_norm(x, [256], w, w, 1e-5)
    dy = torch.randn(128, 16, 256).transpose(0, 1) if transposed else torch.randn_like(x)
    return aten.native_layer_norm_backward.default, (dy, x, [256], mean, scale, w, w, [True] * 3)


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "convolution": forward(16, 32, 32),
    "of an image": forward(3, 16, 64),
    "of channels that fill no block": forward(84, 168, 4),
    "of a part": forward(16, 32, 32, of=2),
    "transposed": forward(32, 16, 32, stride=2, transposed=True),
    "transposed with bias": forward(32, 16, 32, transposed=True, bias=True),
    "gradients": backward(32, 16, 32),
    "gradients of many channels": backward(256, 256, 4),
    "gradients that threads share": backward(64, 64, 16, mask=(False, True)),
    "gradients of few rows for a weight": backward(128, 128, 8, mask=(False, True)),
    "gradients of channels that fill no block": backward(42, 84, 16),
    "gradients of a part": backward(32, 16, 32, of=2),
    "gradients of transposed": backward(32, 16, 32, stride=2, transposed=True),
    "batch normalization": normalization,
    "batch normalization of a part": lambda: normalization(2),
    "layer normalization": lambda: layer_normalization(False),
    "layer normalization of what lies in another order": lambda: layer_normalization(True),
    "dropout": lambda: (aten.native_dropout.default, (torch.randn(16, 128, 256), 0.1, True)),
    "gradient of dropout": lambda: (
        aten.native_dropout_backward.default,
        (torch.randn(16, 128, 256), torch.rand(16, 128, 256) > 0.1, 1.1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="measured for kernels of AVX512")
def test_what_a_call_needs_at_once(name: str) -> None:
    function, args = CALLS[name]()
    found = function(*args)
    results = [found] if isinstance(found, torch.Tensor) else [t for t in found if t is not None]
    told = max(workspace(function, args, found), sum(t.nbytes for t in results))
    assert peak_of(lambda: function(*args)) == pytest.approx(told, rel=0.02, abs=2**15)
