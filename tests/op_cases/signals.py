"""Fourier transforms, windows and filters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from op_cases.case import Case, Tensor, exactly, x


def _transform(
    a: Tensor, length: int | None = None, axis: int = -2, inverse: bool = False, half: bool = False
) -> Tensor:
    at = axis % a.dim()
    z = torch.complex(a[..., 0], a[..., 1] if a.shape[-1] == 2 else torch.zeros_like(a[..., 0]))
    made = (torch.fft.ifft if inverse else torch.fft.fft)(z, length, at)
    kept = made.shape[at] // 2 + 1 if half else made.shape[at]
    return torch.view_as_real(made).narrow(at, 0, kept)


def _dft() -> list[Case]:
    def at(axis: int, length: int | None = None, inverse: bool = False, half: bool = False):
        return lambda a: _transform(a, length, axis, inverse, half)

    pairs, real, first = x(3, 5, 6, 2), x(3, 5, 6, 1), np.array(1)
    return [
        Case("DFT", (pairs,), lambda a: _transform(a)),
        Case("DFT", (real, None, first), at(1), label="real"),
        Case("DFT", (real, None, first), at(1, half=True), {"onesided": 1}, label="onesided"),
        Case("DFT", (x(2, 6, 1), np.array(8)), at(-2, 8, half=True), {"onesided": 1}, label="onesided-padded"),
        Case("DFT", (pairs, None, first), at(1, inverse=True), {"inverse": 1}, label="inverse"),
        Case("DFT", (pairs, np.array(4), first), at(1, 4), label="cut"),
        Case("DFT", (pairs, np.array(8), np.array(-2)), at(2, 8, inverse=True), {"inverse": 1}, label="inverse-padded"),
    ]


def _stft() -> list[Case]:
    def frames(a: Tensor, window: Tensor | None, length: int, step: int, half: bool = True) -> Tensor:
        cut = a.unfold(1, length, step)
        cut = cut if window is None else cut * (window if a.dim() == 2 else window[None, None, None])
        pairs = cut.unsqueeze(-1) if a.dim() == 2 else cut.transpose(-1, -2)
        return _transform(pairs, half=half)

    step = np.array(3)
    return [
        Case("STFT", (x(2, 14), step, x(6)), lambda a, w: frames(a, w, 6, 3)),
        Case("STFT", (x(2, 14), step, None, np.array(5)), lambda a: frames(a, None, 5, 3), label="no-window"),
        Case("STFT", (x(2, 14, 1), step, x(4), np.array(4)), lambda a, w: frames(a[..., 0], w, 4, 3), label="one-channel"),
        Case("STFT", (x(2, 11, 2), step, x(4)), lambda a, w: frames(a, w, 4, 3, False), {"onesided": 0}, label="pairs"),
    ]  # fmt: skip


def _constants() -> list[Case]:
    def window(function: Any, *given: float) -> Callable[..., Tensor]:
        return lambda n, periodic=True: function(int(n), periodic, *given, dtype=torch.float32)

    def filters(a: Tensor) -> Tensor:
        """One bin after the other, as ONNX's operator says it."""
        first, last = (2595 * math.log10(1 + v / 700) for v in (20.0, 4000.0))
        mel = [first + i * (last - first) / 8 for i in range(8)]
        edges = [int(17 * 700 * (10 ** (m / 2595) - 1) // 8000) for m in mel]
        made = torch.zeros(9, 6)
        for i, (lower, centre, upper) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
            for j in range(lower, centre + 1):
                made[j, i] = (j - lower) / (centre - lower) if centre > lower else 1.0
            for j in range(centre, upper):
                made[j, i] = (upper - j) / (upper - centre)
        return made

    size = exactly(np.array(9))
    mel = (np.array(16), np.array(8000), np.array(20.0, np.float32), np.array(4000.0, np.float32))
    return [
        Case("HannWindow", (size,), window(torch.hann_window), differentiable=False),
        Case("HammingWindow", (size,), window(torch.hamming_window, 25 / 46, 21 / 46), differentiable=False),
        Case("BlackmanWindow", (size,), window(torch.blackman_window), differentiable=False),
        Case("HannWindow", (size,), lambda n: torch.hann_window(int(n), False), {"periodic": 0}, label="symmetric", differentiable=False),
        Case("MelWeightMatrix", (exactly(np.array(6)), *mel), filters, differentiable=False),
    ]  # fmt: skip


CASES = [*_dft(), *_stft(), *_constants()]
