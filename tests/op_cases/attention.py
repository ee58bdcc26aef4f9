"""Attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, x


def _attention() -> list[Case]:
    def attend(scale: float, causal: bool = False) -> Callable[..., Tensor]:
        return lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, is_causal=causal, scale=scale)

    q, k = x(2, 3, 5, 4), x(2, 3, 6, 4)
    return [
        Case("ScaledDotProductAttention", (q, k, k), attend(0.5), {"scale": 0.5}, DOMAIN),
        Case("CausalScaledDotProductAttention", (q, q, q), attend(0.7, True), {"scale": 0.7}, DOMAIN),
        Case(
            "MaskedScaledDotProductAttention", (q, k, k, np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9)),
            lambda q, k, v: attend(0.5)(q, k, v, torch.tensor(np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9), dtype=q.dtype)),
            {"scale": 0.5}, DOMAIN,
        ),
    ]  # fmt: skip


CASES = [*_attention()]
