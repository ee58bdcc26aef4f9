"""Operators that move data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from op_cases.case import Case, Given, Tensor, distinct, exactly, index, ints, x


def _shape() -> list[Case]:
    return [
        Case("Reshape", (x(2, 3, 4), ints(0, -1)), lambda a: a.reshape(2, 12)),
        Case("Reshape", (x(2, 12), ints(2, 3, -1)), lambda a: a.reshape(2, 3, 4), label="split"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.flatten(1)),
        Case("Transpose", (x(2, 3, 4),), lambda a: a.permute(1, 2, 0), {"perm": [1, 2, 0]}),
        Case("Transpose", (x(2, 3),), lambda a: a.T, label="default"),
        Case("Squeeze", (x(2, 1, 4, 1), ints(1, -1)), lambda a: a.reshape(2, 4)),
        Case("Unsqueeze", (x(2, 4), ints(0, -1)), lambda a: a.reshape(1, 2, 4, 1)),
        Case("Expand", (x(3, 1), ints(2, 3, 4)), lambda a: a.expand(2, 3, 4)),
        Case("Tile", (x(2, 3), ints(2, 3)), lambda a: a.repeat(2, 3)),
        Case("Concat", (x(2, 3), x(2, 5)), lambda a, b: torch.cat((a, b), 1), {"axis": 1}),
        Case("Concat", (x(2, 3), x(4, 3), x(5, 3)), lambda *a: torch.cat(a, 0), {"axis": -2}, label="three"),
        Case("Split", (x(2, 6), ints(2, 4)), lambda a: a.split((2, 4), 1), {"axis": 1}, outputs=2),
        Case("Split", (x(7, 2),), lambda a: a.split((3, 3, 1), 0), {"num_outputs": 3}, outputs=3, label="uneven", static=(0,)),
        Case("Split", (x(6, 2),), lambda a: a.split(2, 0), outputs=3, label="opset13", static=(0,), opset=13),
        Case("Slice", (x(5, 6), ints(1), ints(4), ints(1)), lambda a: a[:, 1:4]),
        Case("Slice", (x(5, 6), ints(0, 2), ints(9, 5), ints(0, 1)), lambda a: a[:, 2:5], label="two"),
        Case("Slice", (x(5, 6), ints(-4), ints(-1), ints(0)), lambda a: a[-4:-1], label="negative"),
        Case("Slice", (x(5, 6), ints(1), ints(6), ints(1), ints(2)), lambda a: a[:, 1:6:2], label="steps"),
        Case("Slice", (x(5, 6), ints(4), ints(-9), ints(0), ints(-1)), lambda a: a.flip(0), label="reverse"),
        Case("Pad", (x(2, 3), ints(1, 0, 2, 1), np.array(0.5)), lambda a: F.pad(a, (0, 1, 1, 2), value=0.5)),
        Case("Pad", (x(4, 5), ints(-1, 0, 0, 2)), lambda a: F.pad(a, (0, 2, -1, 0)), label="cut"),
        Case("Trilu", (x(4, 5),), torch.triu),
        Case("Trilu", (x(4, 5), np.array(1)), lambda a: a.tril(1), {"upper": 0}, label="lower"),
        Case("Shape", (x(3, 4),), lambda a: torch.tensor(a.shape), differentiable=False),
        Case("Size", (x(3, 4),), lambda a: torch.tensor(a.numel()), differentiable=False),
    ]  # fmt: skip


def _views() -> list[Case]:
    return [
        Case("Reshape", (x(0, 3), ints(3, 0)), lambda a: a.reshape(3, 0), {"allowzero": 1}, label="allowzero", static=(0,)),
        Case("Reshape", (x(2, 3, 4), ints(0, 0, 2, -1)), lambda a: a.reshape(2, 3, 2, 2), label="zeros"),
        Case("Reshape", (x(1, 1), ints()), lambda a: a.reshape(()), label="scalar"),
        Case("Reshape", (x(), ints(1, 1)), lambda a: a.reshape(1, 1), label="from-scalar"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.reshape(1, 24), {"axis": 0}, label="axis0"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.reshape(6, 4), {"axis": -1}, label="negative"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.reshape(24, 1), {"axis": 3}, label="last"),
        Case("Transpose", (x(2, 3, 4, 5),), lambda a: a.permute(3, 1, 0, 2), {"perm": [3, 1, 0, 2]}, label="four"),
        Case("Squeeze", (x(1, 3, 1),), lambda a: a.reshape(3), label="all"),
        Case("Unsqueeze", (x(3, 4), ints(-4, 2)), lambda a: a.reshape(1, 3, 1, 4), label="mixed"),
        Case("Expand", (x(3, 4), ints(2, 1, 1, 4)), lambda a: a.expand(2, 1, 3, 4), label="ones"),
        Case("Expand", (x(3, 1), ints(4)), lambda a: a.expand(3, 4), label="shorter"),
        Case("Expand", (x(), ints(2, 3)), lambda a: a.expand(2, 3), label="scalar"),
        Case("Expand", (x(2, 3), ints(1, 1)), lambda a: a * 1.0, label="nothing"),
        Case("Tile", (x(2, 1, 3), ints(1, 4, 2)), lambda a: a.repeat(1, 4, 2), label="three"),
        Case("Tile", (x(3), ints(1)), lambda a: a * 1.0, label="once"),
        Case("Concat", (x(2, 3),), lambda a: a * 1.0, {"axis": 0}, label="single"),
        Case("Concat", (x(2, 3, 1), x(2, 3, 4)), lambda a, b: torch.cat((a, b), -1), {"axis": -1}, label="last"),
        Case("Trilu", (x(2, 4, 5), np.array(-2)), lambda a: a.triu(-2), label="below"),
        Case("Trilu", (x(4, 4), np.array(9)), lambda a: a.tril(9), {"upper": 0}, label="far"),
    ]  # fmt: skip


def _splits() -> list[Case]:
    return [
        Case("Split", (x(2, 8),), lambda a: a.split(3, 1), {"num_outputs": 3, "axis": -1}, outputs=3, label="last", static=(0,)),
        Case("Split", (x(6, 2),), lambda a: a.split(2, 0), {"num_outputs": 3}, outputs=3, label="even", static=(0,)),
        Case("Split", (x(2, 3, 4), ints(1, 2)), lambda a: a.split((1, 2), 1), {"axis": -2}, outputs=2, label="negative"),
        Case("Split", (x(4, 3), ints(4)), lambda a: a * 1.0, outputs=1, label="single"),
        Case("Split", (x(5, 3), ints(0, 5)), lambda a: a.split((0, 5), 0), outputs=2, label="nothing"),
    ]  # fmt: skip


def _slices() -> list[Case]:
    a, last = x(5, 6, 7), np.iinfo(np.int64).max
    return [
        Case("Slice", (a, ints(-2), ints(last), ints(-1)), lambda a: a[:, :, -2:], label="tail"),
        Case("Slice", (a, ints(1, 0), ints(-1, 4)), lambda a: a[1:-1, 0:4], label="no-axes"),
        Case("Slice", (a, ints(5, -1), ints(0, -9), ints(1, 2), ints(-2, -3)), lambda a: a.flip(1, 2)[:, 0:5:2, ::3], label="back"),
        Case("Slice", (a, ints(3, -6), ints(1, 5), ints(0, 1), ints(-1, 4)), lambda a: a[2:4].flip(0)[:, 0:5:4], label="both"),
        Case("Slice", (a, ints(3), ints(2), ints(0)), lambda a: a[3:2], label="empty"),
        Case("Slice", (a, ints(-9), ints(-99), ints(0), ints(-2)), lambda a: a[:1], label="before-the-first"),
        Case("Slice", (a, ints(-9), ints(-99), ints(0), ints(-2)), lambda a: a[:1], label="before-the-first-static", static=(0,)),
        Case("Slice", (a, ints(-99), ints(99), ints(0), ints(2)), lambda a: a[::2], label="clamped"),
        Case("Slice", (a, exactly(np.array([1, -3])), exactly(np.array([4, 6])), ints(0, 2)), lambda a, s, e: a[1:4, :, -3:6],
             label="run-time"),
    ]  # fmt: skip


def _pads() -> list[Case]:
    def ends(name: str, *flat: int) -> Callable[[Tensor], Tensor]:
        return lambda a: F.pad(a.unsqueeze(0), flat, mode=name).squeeze(0)

    a = x(2, 4, 5)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    rows = []
    for mode, name in names.items():
        rows += [
            Case("Pad", (a, ints(0, 1, 2, 0, 3, 1)), ends(name, 2, 1, 1, 3), {"mode": mode}, label=mode),
            Case("Pad", (a, ints(2, 0), None, ints(-1)), ends(name, 2, 0, 0, 0), {"mode": mode}, label=f"{mode}-axes"),
            Case("Pad", (a, ints(1, 2, 0, 3), None, ints(2, 1)), ends(name, 1, 0, 2, 3), {"mode": mode}, label=f"{mode}-two"),
            Case("Pad", (a, ints(0, 0, -1, 0, 0, 2)), lambda a, n=name: ends(n, 0, 2, 0, 0)(a[:, :, 1:]), {"mode": mode},
                 label=f"{mode}-cut"),
        ]  # fmt: skip
    return [
        *rows,
        Case("Pad", (a, ints(0, 0), None, ints(1)), lambda a: a * 1.0, {"mode": "reflect"}, label="reflect-nothing"),
        Case("Pad", (a, ints(6, 7), None, ints(1)), lambda a: a[:, (torch.arange(-6, 11) % 4)], {"mode": "wrap"}, label="wrap-twice"),
        Case("Pad", (a, ints(0, 6, 0, 0, 9, 0)), ends("replicate", 0, 0, 6, 9), {"mode": "edge"}, label="edge-far"),
        Case("Pad", (x(1, 3), ints(2, 1), None, ints(0)), lambda a: a.expand(4, 3), {"mode": "edge"}, label="edge-one"),
        Case("Pad", (x(2, 3), ints(1, 2), None, ints(-1)), lambda a: F.pad(a, (1, 2)), label="axes"),
        Case("Pad", (x(2, 3), ints(-1, 2, 1, -1), None, ints(1, 0)), lambda a: F.pad(a[:1, 1:], (0, 1, 2, 0)), label="both"),
        Case("Pad", (x(2, 3), ints(1, 0, -1, 1), x()), lambda a, v: torch.cat((torch.cat((v.expand(1, 3), a[:1])), v.expand(2, 1)), 1), label="learned-value"),
    ]  # fmt: skip


def _images() -> list[Case]:
    def crd(a: Tensor, b: int) -> Tensor:
        n, c, h, w = a.shape
        return a.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)

    def unshuffle(a: Tensor, b: int) -> Tensor:
        n, c, h, w = a.shape
        y = F.pixel_unshuffle(a, b)
        return y.reshape(n, c, b * b, h // b, w // b).transpose(1, 2).reshape(y.shape)

    def reversed_steps(a: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return torch.stack([torch.cat((a[:n, i].flip(0), a[n:, i])) for i, n in enumerate(lengths)], 1)

    col = x(2, 3 * 4, 12)
    return [
        Case("DepthToSpace", (x(2, 8, 3, 4),), lambda a: crd(a, 2), {"blocksize": 2}),
        Case("DepthToSpace", (x(2, 18, 2, 4),), lambda a: F.pixel_shuffle(a, 3), {"blocksize": 3, "mode": "CRD"}, label="CRD"),
        Case("SpaceToDepth", (x(2, 3, 4, 6),), lambda a: unshuffle(a, 2), {"blocksize": 2}),
        Case(
            "SpaceToDepth", (x(2, 3, 4, 6),), lambda a: F.pixel_unshuffle(a, 2), {"blocksize": 2, "mode": "CRD"},
            label="CRD", opset=28,
        ),
        Case("ReverseSequence", (x(4, 3, 2), ints(4, 1, 3)), lambda a: reversed_steps(a, (4, 1, 3))),
        Case("ReverseSequence", (x(3, 4, 2), ints(2, 4, 3)), lambda a: reversed_steps(a.transpose(0, 1), (2, 4, 3)).transpose(0, 1),
             {"batch_axis": 0, "time_axis": 1}, label="batch-first"),
        Case("CenterCropPad", (x(5, 4, 3), ints(2, 7, 3)), lambda a: F.pad(a[1:3], (0, 0, 1, 2))),
        Case("CenterCropPad", (x(6, 4, 3), ints(3, 6), ), lambda a: F.pad(a[1:4], (1, 2)), {"axes": [0, -1]}, label="axes"),
        Case("CenterCropPad", (x(7, 3), ints(2, 8)), lambda a: F.pad(a[2:4], (2, 3)), label="odd"),
        Case("Col2Im", (col, ints(4, 5), ints(2, 2)), lambda a: F.fold(a, (4, 5), (2, 2))),
        Case("Col2Im", (x(2, 3 * 6, 6), ints(5, 6), ints(2, 3)),
             lambda a: F.fold(a, (5, 6), (2, 3), (1, 2), (1, 1), (2, 2)),
             {"dilations": [1, 2], "pads": [1, 1, 1, 1], "strides": [2, 2]}, label="all"),
        Case("Col2Im", (x(2, 3 * 2, 4), ints(5), ints(2)), lambda a: F.fold(a, (1, 5), (1, 2)).squeeze(2), label="1d"),
    ]  # fmt: skip


def _computed() -> list[Case]:
    """Shapes, sizes and pads that are known only when the graph runs."""

    def given(*content: int) -> Given:
        return exactly(np.array(content))

    return [
        Case("Reshape", (x(2, 6), given(3, -1)), lambda a, s: a.reshape(3, 4), label="run-time", static=(1,)),
        Case("Expand", (x(3, 1), given(2, 1, 4)), lambda a, s: a.expand(2, 3, 4), label="run-time", static=(1,)),
        Case("Tile", (x(2, 3), given(2, 3)), lambda a, r: a.repeat(2, 3), label="run-time", static=(1,)),
        Case("Split", (x(6, 2), given(1, 5)), lambda a, s: a.split((1, 5)), outputs=2, label="run-time", static=(1,)),
        Case("Pad", (x(2, 3), given(1, 0, 2, 1)), lambda a, p: F.pad(a, (0, 1, 1, 2)), label="run-time", static=(1,)),
        Case("Pad", (x(4, 3), given(1, 0, 2, 1)), lambda a, p: F.pad(a[None], (0, 1, 1, 2), mode="reflect")[0], {"mode": "reflect"},
             label="reflect-run-time", static=(1,)),
        Case("Trilu", (x(4, 5), exactly(np.array(1))), lambda a, k: a.triu(1), label="run-time"),
        Case("CenterCropPad", (x(5, 3), given(2, 6)), lambda a, s: F.pad(a[1:3], (1, 2)), label="run-time", static=(1,)),
        Case("ReduceSum", (x(2, 3, 4), given(-1, 0)), lambda a, d: a.sum((0, 2), True), label="run-time", static=(1,)),
        Case("ReduceMax", (distinct(2, 3, 4), given(1)), lambda a, d: a.amax(1, True), label="run-time", static=(1,)),
        Case("CumSum", (x(3, 4), exactly(np.array(1))), lambda a, d: a.cumsum(1), label="run-time"),
        Case("TopK", (distinct(3, 6), given(2)), lambda a, k: tuple(a.topk(2, -1)), outputs=2, label="run-time", static=(1,)),
        Case("OneHot", (index(3, high=4), exactly(np.array(5)), x(2)), lambda i, d, v: v[F.one_hot(i, 5)], label="run-time"),
        Case("Squeeze", (x(2, 1, 3), ints(-2)), lambda a: a.reshape(2, 3), label="negative"),
    ]  # fmt: skip


CASES = [*_computed(), *_shape(), *_views(), *_splits(), *_slices(), *_pads(), *_images()]
