"""Fourier transforms, and the windows and filters that come with them."""

from __future__ import annotations

import torch

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.registry import lowering

Tensor = torch.Tensor


@lowering("DFT", host=(1, 2))
def dft(x: Tensor, length: int | None = None, axis: int = -2, *, inverse: int = 0, onesided: int = 0) -> Tensor:
    """Complex numbers are pairs along the last axis; a real input has one number there."""
    at = axis % x.dim()
    z = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    if inverse:
        made = torch.fft.irfft(z, length, at) if onesided else torch.fft.ifft(z, length, at)
    elif onesided and not z.is_complex():
        made = torch.fft.rfft(z, length, at)
    else:
        made = torch.fft.fft(z, length, at)
        made = made.narrow(at, 0, made.shape[at] // 2 + 1) if onesided else made
    return torch.view_as_real(made).contiguous() if made.is_complex() else made.unsqueeze(-1)


@lowering("HannWindow", host=(0,))
def hann_window(size: int, *, device: torch.device, dtype: int, periodic: int = 1, **_: int) -> Tensor:
    """sin² over the window."""
    return torch.hann_window(size, bool(periodic), dtype=torch_dtype(dtype), device=device)


@lowering("HammingWindow", host=(0,))
def hamming_window(size: int, *, device: torch.device, dtype: int, periodic: int = 1, **_: int) -> Tensor:
    """A raised cosine with ONNX's 25/46."""
    coefficients = (25 / 46, 21 / 46)
    return torch.hamming_window(size, bool(periodic), *coefficients, dtype=torch_dtype(dtype), device=device)


@lowering("BlackmanWindow", host=(0,))
def blackman_window(size: int, *, device: torch.device, dtype: int, periodic: int = 1, **_: int) -> Tensor:
    """Two cosines."""
    return torch.blackman_window(size, bool(periodic), dtype=torch_dtype(dtype), device=device)


@lowering("MelWeightMatrix", host=(0, 1, 2))
def mel_weight_matrix(
    bins: int, length: int, rate: int, low: Tensor, high: Tensor, *, device: torch.device, dtype: int, **_: int
) -> Tensor:
    """Triangles (length // 2 + 1, bins) between the edges of the bins, which are equally wide in mel."""
    edges = torch.stack([low, high]).double().cpu()
    first, last = (2595 * torch.log10(1 + edges / 700)).tolist()
    mel = first + torch.arange(bins + 2, dtype=torch.float64) * ((last - first) / (bins + 2))
    places = torch.div((length + 1) * 700 * (10 ** (mel / 2595) - 1), rate, rounding_mode="floor")
    lower, centre, upper = places[:-2], places[1:-1], places[2:]
    row = torch.arange(length // 2 + 1, dtype=torch.float64).unsqueeze(1)
    rising = torch.where(centre > lower, (row - lower) / (centre - lower), (row == centre).double())
    falling = (upper - row) / (upper - centre)
    made = torch.where(row <= centre, rising * (row >= lower), torch.where(row < upper, falling, 0.0))
    return made.to(device, torch_dtype(dtype))
