"""Convolution, pooling, batch statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, Tensor, distinct, positive, x


def _convolution() -> list[Case]:
    def norm(training: bool) -> Callable[..., Any]:
        def run(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Any:
            m, v = m.detach().clone(), v.detach().clone()
            y = F.batch_norm(a, m, v, w, b, training, 0.1, 1e-5)
            return (y, m, v) if training else y

        return run

    def pads(n: int, p: int) -> dict[str, Any]:
        return {"pads": [p] * 2 * n}

    return [
        Case("Conv", (x(2, 3, 8, 9), x(4, 3, 3, 3), x(4)), lambda a, w, b: F.conv2d(a, w, b, 2, 1),
             {**pads(2, 1), "strides": [2, 2]}, static=(1, 2), label="strided"),
        Case("Conv", (x(2, 4, 7, 6), x(6, 2, 3, 2)), lambda a, w: F.conv2d(a, w, groups=2), {"group": 2},
             static=(1,), label="grouped"),
        Case("Conv", (x(2, 4, 9, 9), x(4, 1, 3, 3), x(4)), lambda a, w, b: F.conv2d(a, w, b, 1, 2, 2, 4),
             {**pads(2, 2), "dilations": [2, 2], "group": 4}, static=(1, 2), label="depthwise"),
        Case("Conv", (x(2, 3, 10), x(4, 3, 4)), lambda a, w: F.conv1d(a, w, stride=3), {"strides": [3]},
             static=(1,), label="1d"),
        Case("Conv", (x(1, 2, 4, 5, 6), x(3, 2, 2, 2, 2)), F.conv3d, static=(1,), label="3d"),
        Case("Conv", (x(2, 3, 6, 6), x(4, 3, 2, 2)), lambda a, w: F.conv2d(F.pad(a, (0, 1, 0, 1)), w),
             {"pads": [0, 0, 1, 1]}, static=(1,), label="uneven"),
        Case("ConvTranspose", (x(2, 3, 4, 5), x(3, 2, 3, 3)),
             lambda a, w: F.conv_transpose2d(a, w, stride=2, padding=1, output_padding=1),
             {**pads(2, 1), "strides": [2, 2], "output_padding": [1, 1]}, static=(0, 1)),
        Case("MaxPool", (distinct(2, 3, 8, 7),), lambda a: F.max_pool2d(a, 3, 2, 1),
             {**pads(2, 1), "kernel_shape": [3, 3], "strides": [2, 2]}),
        Case("MaxPool", (distinct(2, 3, 9),), lambda a: F.max_pool1d(a, 2), {"kernel_shape": [2], "strides": [2]},
             label="1d"),
        Case("AveragePool", (x(2, 3, 8, 7),), lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False),
             {**pads(2, 1), "kernel_shape": [3, 3], "strides": [2, 2]}),
        Case("AveragePool", (x(2, 3, 8, 7),), lambda a: F.avg_pool2d(a, 2, 1, 1),
             {**pads(2, 1), "kernel_shape": [2, 2], "count_include_pad": 1}, label="padded"),
        Case("GlobalAveragePool", (x(2, 3, 4, 5),), lambda a: a.mean((2, 3), True)),
        Case("GlobalMaxPool", (distinct(2, 3, 4, 5),), lambda a: a.amax((2, 3), True)),
        Case("Conv", (x(2, 4, 11, 12), x(6, 4, 2, 3), x(6)), lambda a, w, b: F.conv2d(a, w, b, 3), {"strides": [3, 3]},
             static=(1, 2), label="remainder"),
        Case("Conv", (x(3, 4, 12, 13), x(6, 2, 3, 2), x(6)), lambda a, w, b: F.conv2d(a, w, b, 2, (2, 1), (2, 3), 2),
             {"pads": [2, 1, 2, 1], "strides": [2, 2], "dilations": [2, 3], "group": 2}, static=(1, 2), label="all"),
        Case("ConvTranspose", (x(2, 4, 5, 6), x(4, 3, 3, 3), x(6)),
             lambda a, w, b: F.conv_transpose2d(a, w, b, (2, 1), 0, 0, 2, (1, 2)),
             {"strides": [2, 1], "dilations": [1, 2], "group": 2}, static=(0, 1, 2), label="grouped"),
        Case("ConvTranspose", (x(2, 3, 9), x(3, 4, 3), x(4)), lambda a, w, b: F.conv_transpose1d(a, w, b, 2, 1, 1),
             {"pads": [1, 1], "strides": [2], "output_padding": [1]}, static=(0, 1, 2), label="1d"),
        Case("MaxPool", (distinct(2, 3, 7, 8),), lambda a: F.max_pool2d(a, 2, 3, 1, ceil_mode=True),
             {**pads(2, 1), "kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1}, label="ceil"),
        Case("AveragePool", (x(2, 3, 9),), lambda a: F.avg_pool1d(a, 3, 2, 1, True, False),
             {**pads(1, 1), "kernel_shape": [3], "strides": [2], "ceil_mode": 1}, label="ceil"),
        Case("InstanceNormalization", (x(2, 3, 5, 4), positive(3), x(3)),
             lambda a, w, b: F.instance_norm(a, weight=w, bias=b, eps=1e-3), {"epsilon": 1e-3}),
        Case("BatchNormTraining", (x(4, 3, 5), positive(3), x(3), x(3), positive(3)), norm(True), domain=DOMAIN, outputs=3,
             frozen=(3, 4)),
        Case("BatchNormalization", (x(4, 3, 5), positive(3), x(3), x(3), positive(3)), norm(False), frozen=(3, 4)),
    ]  # fmt: skip


CASES = [*_convolution()]
