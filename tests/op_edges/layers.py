"""Attributes and second outputs of matrix products, normalizations, losses, attention and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from op_table import Case, Tensor, index, positive, x

from onnxtrain.ir.graphs import DOMAIN


def _products() -> list[Case]:
    return [
        Case("MatMul", (x(4), x(2, 4, 5)), torch.matmul, label="row-batch"),
        Case("MatMul", (x(3, 4), x(2, 4, 5)), torch.matmul, label="left-matrix"),
        Case("MatMul", (x(1, 3, 4), x(2, 4, 5)), torch.matmul, label="one"),
        Case("MatMul", (x(2, 1, 3, 4), x(6, 4, 5)), torch.matmul, label="both-broadcast"),
        Case("Gemm", (x(4, 3), x(4, 5)), lambda a, b: a.T @ b, {"transA": 1}, label="a-transposed"),
        Case("Gemm", (x(3, 4), x(4, 5)), lambda a, b: 0.3 * (a @ b), {"alpha": 0.3}, label="alpha"),
        Case("Gemm", (x(3, 4), x(4, 5), x()), lambda a, b, c: a @ b + c, label="scalar-bias"),
        Case("Gemm", (x(3, 4), x(4, 5), x(1, 5)), lambda a, b, c: 0.5 * (a @ b) - c, {"alpha": 0.5, "beta": -1.0},
             label="both"),
        Case("Gemm", (x(3, 4), x(4, 5), x(5)), lambda a, b, c: a @ b + 0 * c, {"beta": 0.0}, label="beta-0"),
        Case("Linear", (x(3, 4), x(5, 4), x(5)), F.linear, domain=DOMAIN, label="matrix"),
        Case("Linear", (x(2, 3, 6, 4), x(5, 4), x(5)), F.linear, domain=DOMAIN, label="rank4"),
        Case("LinearWithoutBias", (x(3, 4), x(5, 4)), F.linear, domain=DOMAIN, label="matrix"),
    ]  # fmt: skip


def _normalizations() -> list[Case]:
    def layer_norm(eps: float = 1e-5, outputs: int = 1) -> Callable[..., Any]:
        def run(a: Tensor, w: Tensor, b: Tensor) -> Any:
            over = tuple(range(-w.dim(), 0))
            mean = a.mean(over, True)
            inv_std = (a.var(over, correction=0, keepdim=True) + eps).rsqrt()
            return (
                ((a - mean) * inv_std * w + b, mean, inv_std)[:outputs]
                if outputs > 1
                else F.layer_norm(a, w.shape, w, b, eps)
            )

        return run

    def by_statistics(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Tensor:
        m, v, w, b = (t[:, None] for t in (m, v, w, b))
        return (a - m) * (v + 1e-5).rsqrt() * w + b

    def training(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.batch_norm(a, None, None, w, b, True)
        mean, variance = a.detach().mean((0, 2)), a.detach().var((0, 2), correction=0)
        return y, 0.8 * m.detach() + 0.2 * mean, 0.8 * v.detach() + 0.2 * variance

    statistics = (x(4, 3, 5), positive(3), x(3), x(3), positive(3))
    return [
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), layer_norm(0.1), {"epsilon": 0.1}, label="epsilon"),
        Case("LayerNormalization", (x(2, 3, 4), x(3, 4), x(3, 4)), layer_norm(), {"axis": -2}, label="axis-2"),
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), layer_norm(outputs=3), outputs=3, label="statistics"),
        Case("BatchNormalization", statistics, by_statistics, label="statistics"),
        Case("BatchNormalization", statistics, training, {"training_mode": 1, "momentum": 0.8}, outputs=3,
             frozen=(3, 4), label="training"),
    ]  # fmt: skip


def _losses() -> list[Case]:
    def entropy(**given: Any) -> Callable[..., Tensor]:
        return lambda s, i, w=None: F.cross_entropy(s, i.long(), w, **given)

    def likelihood(**given: Any) -> Callable[..., Tensor]:
        return lambda s, i, w=None: F.nll_loss(s, i.long(), w, **given)

    def with_log_prob(s: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(s, i), F.log_softmax(s, 1)

    plain, deep = (x(6, 5), index(6, high=5)), (x(3, 5, 4), index(3, 4, high=5))
    ignored, spread = {"ignore_index": 2}, {"reduction": "none"}
    outside = np.array([0, -100, 4, -100, 1, 2], np.int64)
    rows = [
        Case("SoftmaxCrossEntropyLoss", plain, with_log_prob, outputs=2, label="log-prob"),
        Case("SoftmaxCrossEntropyLoss", (x(6, 5, low=-200.0, high=200.0), plain[1]), entropy(), label="wide"),
        Case("SoftmaxCrossEntropyLoss", (x(6, 5), index(6, high=5, dtype="int32")), entropy(), label="int32"),
        Case("SoftmaxCrossEntropyLoss", (x(6, 5), outside), lambda s: F.cross_entropy(s, torch.tensor(outside)),
             {"ignore_index": -100}, label="outside"),
        Case("SoftmaxCrossEntropyLoss", (*deep, positive(5)), entropy(ignore_index=2), ignored, frozen=(2,),
             label="weights-ignore"),
        Case("SoftmaxCrossEntropyLoss", (x(2, 5, 3, 4), index(2, 3, 4, high=5)), entropy(reduction="none"), spread,
             label="rank4"),
        Case("NegativeLogLikelihoodLoss", (*deep, positive(5)), likelihood(), frozen=(2,), label="weights"),
        Case("NegativeLogLikelihoodLoss", (*deep, positive(5)), likelihood(ignore_index=2, reduction="none"),
             {**ignored, **spread}, frozen=(2,), label="weights-none"),
        Case("NegativeLogLikelihoodLoss", plain, likelihood(reduction="sum"), {"reduction": "sum"}, label="sum"),
    ]  # fmt: skip
    return rows


def _attention() -> list[Case]:
    def attend(scale: float, causal: bool = False, mask: Any = None) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            added = None if mask is None else torch.tensor(mask).to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, scale=scale)

        return run

    def with_sum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = 0.5 * q @ k.mT
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    q, k, v = x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7)
    scale = {"scale": 0.5}
    padding = np.zeros((2, 1, 1, 6))
    padding[0, ..., 4:] = padding[1, ..., 1:] = -np.inf
    return [
        Case("ScaledDotProductAttention", (q, k, k), attend(1.0), {}, DOMAIN, label="default"),
        Case("ScaledDotProductAttention", (q, k, v), attend(0.5), scale, DOMAIN, label="wide-values"),
        Case("ScaledDotProductAttention", (q, k, k), with_sum, scale, DOMAIN, 2, label="log-sum-exp"),
        Case("CausalScaledDotProductAttention", (q, k, k), attend(0.5, True), scale, DOMAIN, label="rectangular"),
        Case("CausalScaledDotProductAttention", (k, k, v), attend(0.5, True), scale, DOMAIN, label="wide-values"),
        Case("MaskedScaledDotProductAttention", (q, k, k, padding), attend(0.5, mask=padding), scale, DOMAIN,
             label="padding"),
        Case("MaskedScaledDotProductAttention", (q, k, v, padding), attend(0.5, mask=padding), scale, DOMAIN,
             label="wide-values"),
    ]  # fmt: skip


def _convolutions() -> list[Case]:
    """Padding that is known only at run time, because the sizes are symbols."""

    def same(a: Tensor, kernel: int, stride: int, upper: bool) -> tuple[int, int]:
        total = max((-(-a.shape[-1] // stride) - 1) * stride + kernel - a.shape[-1], 0)
        return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)

    def conv(upper: bool) -> Callable[..., Tensor]:
        return lambda a, w: F.conv1d(F.pad(a, same(a, 3, 2, upper)), w, stride=2)

    def mean(a: Tensor) -> Tensor:
        pads = same(a, 3, 2, True)
        counts = F.avg_pool1d(F.pad(torch.ones_like(a), pads), 3, 2)
        return F.avg_pool1d(F.pad(a, pads), 3, 2) / counts

    window = {"kernel_shape": [3], "strides": [2], "auto_pad": "SAME_UPPER"}
    return [
        Case("Conv", (x(2, 3, 8), x(4, 3, 3)), conv(True), {"strides": [2], "auto_pad": "SAME_UPPER"}, static=(1,),
             label="same-upper"),
        Case("Conv", (x(2, 3, 8), x(4, 3, 3)), conv(False), {"strides": [2], "auto_pad": "SAME_LOWER"}, static=(1,),
             label="same-lower"),
        Case("AveragePool", (x(2, 3, 8),), mean, window, label="same"),
        Case("MaxPool", (x(2, 3, 8),), lambda a: F.max_pool1d(F.pad(a, same(a, 3, 2, True), value=-9.0), 3, 2),
             window, label="same"),
        Case("MaxPool", (x(2, 3, 9, 9),), lambda a: F.max_pool2d(a, 2, 2, 0, 2),
             {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2]}, label="dilated"),
    ]  # fmt: skip


ROWS = [*_products(), *_normalizations(), *_losses(), *_attention(), *_convolutions()]
