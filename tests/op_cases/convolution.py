"""Convolution, pooling, batch statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
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

    def onnx_norm(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Any:
        mean, variance = a.mean((0, 2, 3)), a.var((0, 2, 3), correction=0)
        return F.batch_norm(a, None, None, w, b, True, 0.0, 1e-3), 0.8 * m + 0.2 * mean, 0.8 * v + 0.2 * variance

    def by_formula(a: Tensor, *given: Tensor) -> Tensor:
        w, b, m, v = (t.reshape(-1, 1) for t in given)
        return (a - m) * (v + 1e-5).rsqrt() * w + b

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
        Case("Conv", (x(2, 9, 5, 6), x(4, 9, 1, 1), x(4)), F.conv2d, static=(1, 2), label="point"),
        Case("Conv", (x(2, 8, 5, 6), x(3, 8, 1, 1)), lambda a, w: F.conv2d(a, w, None, (2, 1), (1, 0)),
             {"pads": [1, 0, 1, 0], "strides": [2, 1]}, static=(1,), label="point strided"),
        Case("Conv", (x(2, 16, 6, 9), x(6, 8, 2, 3), x(6)), lambda a, w, b: F.conv2d(a, w, b, 2, (1, 2), (1, 2), 2),
             {"pads": [1, 2, 1, 2], "strides": [2, 2], "dilations": [1, 2], "group": 2}, static=(1, 2), label="wide"),
        Case("Conv", (x(2, 8, 10), x(4, 8, 3)), lambda a, w: F.conv1d(a, w, None, 1, 1), pads(1, 1), static=(1,),
             label="wide 1d"),
        Case("Conv", (x(2, 8, 7, 9), x(16, 1, 3, 2), x(16)), lambda a, w, b: F.conv2d(a, w, b, 1, (2, 0), (2, 3), 8),
             {"pads": [2, 0, 2, 0], "dilations": [2, 3], "group": 8}, static=(1, 2), label="turned"),
        Case("Conv", (x(2, 8, 5), x(8, 1, 2)), lambda a, w: F.conv1d(a, w, None, 1, 2, 1, 8),
             {**pads(1, 2), "group": 8}, static=(1,), label="padding beyond the kernel"),
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
        Case("BatchNormalization", (x(4, 3, 5), positive(3), x(3), x(3), positive(3)), by_formula, label="statistics"),
        Case("BatchNormalization", (x(4, 3, 5, 2), positive(3), x(3), x(3), positive(3)), onnx_norm,
             {"training_mode": 1, "momentum": 0.8, "epsilon": 1e-3}, outputs=3, label="training"),
    ]  # fmt: skip


def _padded() -> list[Case]:
    """Convolutions whose padding is not stated, or not plain."""

    def same(lower: bool, step: int, *reach: int) -> Callable[[Tensor], Tensor]:
        def run(a: Tensor) -> Tensor:
            flat: list[int] = []
            for size, r in zip(reversed(a.shape[2:]), reversed(reach), strict=True):
                total = max((-(-size // step) - 1) * step + r - size, 0)
                small, large = total // 2, total - total // 2
                flat += [large, small] if lower else [small, large]
            return F.pad(a, flat)

        return run

    def cut(y: Tensor, *ends: tuple[int, int]) -> Tensor:
        """Elements taken from both ends of each spatial axis."""
        return F.pad(y, [-e for pair in reversed(ends) for e in pair])

    up, low = {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}
    image, kernel = x(2, 3, 8, 7), x(4, 3, 3, 4)
    rows = [
        Case("Conv", (image, kernel), lambda a, w: F.conv2d(same(False, 1, 3, 4)(a), w), up, static=(1,), label="same"),
        Case("Conv", (image, kernel, x(4)), lambda a, w, b: F.conv2d(same(True, 2, 3, 4)(a), w, b, 2),
             {**low, "strides": [2, 2]}, static=(1, 2), label="same-lower"),
        Case("Conv", (image, kernel), lambda a, w: F.conv2d(same(False, 3, 3, 4)(a), w, None, 3),
             {**up, "strides": [3, 3]}, static=(0, 1), label="same-static"),
        Case("Conv", (image, kernel), lambda a, w: F.conv2d(a, w, None, 2), {"auto_pad": "VALID", "strides": [2, 2]},
             static=(1,), label="valid"),
        Case("Conv", (x(2, 4, 9), x(6, 2, 3)), lambda a, w: F.conv1d(same(False, 2, 5)(a), w, None, 2, 0, 2, 2),
             {**up, "strides": [2], "dilations": [2], "group": 2}, static=(1,), label="same-1d"),
        Case("Conv", (x(1, 2, 5, 4, 6), x(4, 1, 2, 3, 2)), lambda a, w: F.conv3d(a, w, None, 1, (1, 1, 0), 1, 2),
             {"pads": [1, 1, 0, 1, 1, 0], "group": 2}, static=(1,), label="3d-grouped"),
    ]  # fmt: skip
    small, flat = x(2, 3, 4, 5), x(3, 2, 3, 3)
    return [
        *rows,
        Case("ConvTranspose", (small, flat), lambda a, w: cut(F.conv_transpose2d(a, w, None, 2), (0, 1), (0, 1)),
             {**up, "strides": [2, 2]}, static=(1,), label="same"),
        Case("ConvTranspose", (small, flat, x(2)), lambda a, w, b: cut(F.conv_transpose2d(a, w, b), (1, 1), (1, 1)),
             low, static=(1, 2), label="same-lower"),
        Case("ConvTranspose", (small, flat), lambda a, w: F.conv_transpose2d(a, w, None, 2),
             {"auto_pad": "VALID", "strides": [2, 2]}, static=(1,), label="valid"),
        Case("ConvTranspose", (small, flat), lambda a, w: cut(F.conv_transpose2d(a, w, None, 2), (1, 1), (2, 1)),
             {"output_shape": [7, 8], "strides": [2, 2]}, static=(1,), label="output_shape"),
        Case("ConvTranspose", (small, flat), lambda a, w: cut(F.conv_transpose2d(a, w, None, 2), (0, 1), (1, 1)),
             {**up, "output_shape": [8, 9], "strides": [2, 2]}, static=(1,), label="output_shape-upper"),
        Case("ConvTranspose", (small, flat), lambda a, w: cut(F.conv_transpose2d(a, w), (0, 2), (1, 0)),
             {"pads": [0, 1, 2, 0]}, static=(1,), label="uneven"),
        Case("ConvTranspose", (x(1, 4, 3, 2, 3), x(4, 1, 2, 3, 2)),
             lambda a, w: F.conv_transpose3d(a, w, None, 2, 1, (1, 0, 1), 2, 1),
             {"pads": [1] * 6, "strides": [2, 2, 2], "output_padding": [1, 0, 1], "group": 2}, static=(0, 1), label="3d"),
        Case("ConvTranspose", (small, flat), lambda a, w: F.conv_transpose2d(a, w, None, 1, 1, 1, 1, 2),
             {"pads": [1] * 4, "output_padding": [1, 1], "dilations": [2, 2]}, static=(1,), label="dilated"),
    ]  # fmt: skip


def _pooling() -> list[Case]:
    def pads(n: int, p: int) -> dict[str, Any]:
        return {"pads": [p] * 2 * n}

    def size(k: int, *, n: int = 2, step: int = 1) -> dict[str, Any]:
        return {"kernel_shape": [k] * n, "strides": [step] * n}

    def max_with_indices(a: Tensor) -> Any:
        y, i = F.max_pool2d(a, 2, 2, return_indices=True)
        planes = torch.arange(a.shape[0] * a.shape[1]).reshape(*a.shape[:2], 1, 1)
        return y, i + planes * a.shape[2] * a.shape[3]

    def column_major(a: Tensor) -> Any:
        y, i = max_with_indices(a)
        height, width = a.shape[2:]
        plane = i // (height * width) * (height * width)
        return y, plane + (i % width) * height + (i - plane) // width

    def lp(a: Tensor, p: int, window: int, step: int, apart: int = 1) -> Tensor:
        ones = torch.ones(a.shape[1], 1, *[window] * (a.dim() - 2), dtype=a.dtype)
        convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[a.dim()]
        return convolve(a.abs() ** p, ones, None, step, 0, apart, a.shape[1]) ** (1 / p)

    def unpool(a: Tensor, *shape: int) -> Tensor:
        flat = torch.zeros(int(np.prod(shape)), dtype=a.dtype)
        return flat.scatter(0, torch.tensor(places.reshape(-1)), a.reshape(-1)).reshape(shape)

    image = distinct(2, 3, 8, 7)
    places = np.array([[[[1, 6], [9, 15]], [[16, 22], [27, 29]]]], np.int64)
    return [
        Case("MaxPool", (image,), max_with_indices, size(2, step=2), outputs=2, label="indices"),
        Case("MaxPool", (image,), column_major, {**size(2, step=2), "storage_order": 1}, outputs=2, label="column-major"),
        Case("MaxPool", (distinct(1, 2, 5, 4, 6),), lambda a: F.max_pool3d(a, 2, 2, (1, 0, 1)),
             {**size(2, n=3, step=2), "pads": [1, 0, 1] * 2}, label="3d"),
        Case("MaxPool", (image,), lambda a: F.max_pool2d(a, 2, 1, 0, 3), {**size(2), "dilations": [3, 3]}, label="dilated"),
        Case("MaxPool", (image,), lambda a: F.max_pool2d(F.pad(a, (0, 1, 0, 0), value=-1e9), 2, 2),
             {**size(2, step=2), "auto_pad": "SAME_UPPER"}, label="same"),
        Case("MaxPool", (image,), lambda a: F.max_pool2d(F.pad(a, (1, 0, 0, 0), value=-1e9), 2, 2),
             {**size(2, step=2), "auto_pad": "SAME_LOWER"}, static=(0,), label="same-lower"),
        Case("MaxPool", (image,), lambda a: F.max_pool2d(a, 2, 2), {**size(2, step=2), "auto_pad": "VALID"}, label="valid"),
        Case("MaxPool", (image,), lambda a: F.max_pool2d(F.pad(a, (1, 0, 0, 1), value=-1e9), 2),
             {**size(2, step=2), "pads": [0, 1, 1, 0]}, label="uneven"),
        Case("AveragePool", (x(1, 2, 5, 4, 6),), lambda a: F.avg_pool3d(a, 2, 2, 1, False, False),
             {**size(2, n=3, step=2), **pads(3, 1)}, label="3d"),
        Case("AveragePool", (x(1, 2, 9),), lambda a: a.unfold(2, 4, 2)[..., ::3].mean(-1),
             {"kernel_shape": [2], "strides": [2], "dilations": [3]}, label="dilated"),
        Case("AveragePool", (image,), lambda a: F.avg_pool2d(F.pad(a, (0, 1, 0, 0)), 2, 2)
             * torch.tensor([1, 1, 1, 2], dtype=a.dtype), {**size(2, step=2), "auto_pad": "SAME_UPPER"}, label="same"),
        Case("AveragePool", (image,), lambda a: F.avg_pool2d(F.pad(a, (1, 0, 0, 0)), 2, 2),
             {**size(2, step=2), "auto_pad": "SAME_LOWER", "count_include_pad": 1}, label="same-lower"),
        Case("AveragePool", (x(2, 3, 9),), lambda a: F.avg_pool1d(a, 3, 2, 1, True, True),
             {**size(3, n=1, step=2), **pads(1, 1), "ceil_mode": 1, "count_include_pad": 1}, label="ceil-padded"),
        Case("AveragePool", (image,), lambda a: F.avg_pool2d(F.pad(a, (1, 0, 0, 2)), 3),
             {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [0, 1, 2, 0], "count_include_pad": 1}, label="uneven"),
        Case("LpPool", (image,), lambda a: lp(a, 2, 3, 2), size(3, step=2)),
        Case("LpPool", (image,), lambda a: lp(F.pad(a, (1, 1, 1, 1)), 3, 2, 1, 2),
             {**size(2), **pads(2, 1), "dilations": [2, 2], "p": 3}, label="dilated"),
        Case("LpPool", (distinct(2, 3, 9),), lambda a: lp(F.pad(a, (0, 1)), 1, 2, 2),
             {**size(2, n=1, step=2), "p": 1, "auto_pad": "SAME_UPPER"}, label="same"),
        Case("LpPool", (distinct(1, 2, 4, 5, 3),), lambda a: lp(a, 2, 2, 1), size(2, n=3), label="3d"),
        Case("GlobalLpPool", (image,), lambda a: a.square().sum((2, 3), True).sqrt()),
        Case("GlobalLpPool", (distinct(2, 3, 5),), lambda a: (a.abs() ** 3).sum(2, True) ** (1 / 3), {"p": 3}, label="p3"),
        Case("GlobalLpPool", (distinct(2, 3, 5),), lambda a: a.abs().sum(2, True), {"p": 1}, label="p1"),
        Case("MaxUnpool", (x(1, 2, 2, 2), places), lambda a: unpool(a, 1, 2, 4, 4), size(2, step=2)),
        Case("MaxUnpool", (x(1, 2, 2, 2), places, np.array([1, 2, 5, 4])), lambda a: unpool(a, 1, 2, 5, 4), size(2, step=2),
             label="output_shape"),
    ]  # fmt: skip


def _read(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Bilinear values of (channels, height, width) at real coordinates, zeros around it."""
    height, width = image.shape[1:]
    made = torch.zeros(image.shape[0], *y.shape, dtype=image.dtype)
    for i in (0, 1):
        for j in (0, 1):
            row, column = y.detach().floor() + i, x.detach().floor() + j
            weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            picked = image[:, row.long().clamp(0, height - 1), column.long().clamp(0, width - 1)]
            made = made + torch.where(inside, picked * weight, 0.0)
    return made


def _deformed(step: int, pad: int, apart: int, group: int, offsets: int) -> Callable[..., Tensor]:
    """Deformable convolution by loops over samples, offset groups and places of the kernel."""

    def run(a: Tensor, w: Tensor, o: Tensor, b: Tensor | None = None, m: Tensor | None = None) -> Tensor:
        count, width = w.shape[2] * w.shape[3], w.shape[3]
        rows, columns = (torch.arange(n, dtype=a.dtype) * step - pad for n in o.shape[2:])
        images = []
        for n in range(a.shape[0]):
            taps = []
            for k in range(count):
                parts = []
                for g, plane in enumerate(a[n].chunk(offsets)):
                    at = (g * count + k) * 2
                    y = o[n, at] + rows.view(-1, 1) + (k // width) * apart
                    x_ = o[n, at + 1] + columns + (k % width) * apart
                    part = _read(plane, y, x_)
                    parts.append(part if m is None else part * m[n, g * count + k])
                taps.append(torch.cat(parts))
            images.append(torch.stack(taps, 1).flatten(0, 1))
        samples = torch.stack(images)
        return F.conv2d(samples, w.reshape(w.shape[0], -1, 1, 1), b, groups=group)

    return run


def _deformable() -> list[Case]:
    image, flat = x(2, 4, 5, 6), x(2, 1 * 4 * 2, 4, 5, low=-1.7, high=1.7)
    return [
        Case("DeformConv", (image, x(3, 4, 2, 2), flat), _deformed(1, 0, 1, 1, 1), static=(1,)),
        Case("DeformConv", (image, x(4, 2, 2, 3), x(2, 2 * 6 * 2, 4, 3, low=-1.7, high=1.7), x(4), x(2, 2 * 6, 4, 3)),
             _deformed(2, 2, 2, 2, 2),
             {"strides": [2, 2], "pads": [2, 2, 2, 2], "dilations": [2, 2], "group": 2, "offset_group": 2},
             static=(1, 3), label="grouped"),
    ]  # fmt: skip


def _causal() -> list[Case]:
    def moved(a: Tensor, w: Tensor, b: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen = F.pad(a, (w.shape[2] - 1, 0)) if past is None else torch.cat((past, a), 2)
        return F.conv1d(seen, w, b, groups=w.shape[0]), seen[:, :, a.shape[2] :]

    def active(a: Tensor, w: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        y, state = moved(a, w, None, past)
        return F.silu(y), state

    a, w, b, past = x(2, 4, 6), x(4, 1, 3), x(4), x(2, 4, 2)
    silu, op = {"activation": "silu"}, "CausalConvWithState"
    return [
        Case(op, (a, w), moved, opset=27, static=(1,), outputs=2),
        Case(op, (a, w, b), lambda a, w, b: F.silu(moved(a, w, b)[0]), silu, opset=27, static=(1,), label="silu"),
        Case(op, (a, w, b, past), moved, opset=27, static=(1,), label="past", outputs=2),
        Case(op, (a, w, None, past), active, {"activation": "swish"}, opset=27, static=(1,), label="swish", outputs=2),
        Case(op, (x(2, 4, 2), x(4, 1, 5)), moved, opset=27, static=(1,), label="short", outputs=2),
    ]  # fmt: skip


CASES = [*_convolution(), *_padded(), *_pooling(), *_deformable(), *_causal()]
