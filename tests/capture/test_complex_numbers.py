"""Complex numbers that are written in place, viewed and detached: values and gradients are eager's, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from parity import Calls
from torch import Tensor, nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError

Result = tuple[Tensor, ...]


def _without_gradient(x: Tensor) -> Result:
    with torch.no_grad():
        spectrum = torch.fft.fft(x)
    return spectrum, spectrum.abs() * x


def _detached(x: Tensor) -> Result:
    spectrum = torch.fft.fft(x)
    return spectrum.detach(), spectrum.detach().real * x + spectrum.data.imag * spectrum.imag


def _modes_written(x: Tensor) -> Result:
    """As in neural operators."""
    made = torch.zeros(x.shape[0], x.shape[1] // 2 + 1, dtype=torch.complex128)
    made[:, :2] = torch.fft.rfft(x)[:, :2] * (0.5 + 1j)
    made[0] += made[1]
    made.narrow(1, 1, 1).mul_(2j)
    return torch.fft.irfft(made, n=x.shape[1]), made


def _real_numbers_written(x: Tensor) -> Result:
    made = torch.fft.fft(x)
    made[0], made[:, 1] = x[1], 3
    made += x
    made[x > 0] = 2.0
    real = x.clone()
    real.copy_(made.detach() * x)
    return made, torch.zeros_like(made).copy_(x * 2), real


def _overwritten(x: Tensor) -> Result:
    made, other = torch.fft.fft(x), torch.fft.fft(x)
    made[:, 1:].zero_()
    return made, other.zero_(), torch.fft.fft(x).fill_(2.5)


def _parts_written(x: Tensor) -> Result:
    made = torch.fft.fft(x)
    made.real.mul_(2)
    made.imag[:, 1] = x[:, 0]
    torch.view_as_real(made)[0].mul_(x[1].unsqueeze(-1))
    return made, made.conj().imag


def _pairs_written(x: Tensor) -> Result:
    pairs = torch.stack([x, x * 2], -1)
    numbers = torch.view_as_complex(pairs)
    numbers.mul_(2j)
    return pairs, numbers


def _conjugates_read(x: Tensor) -> Result:
    made = torch.complex(x, x * 2)
    conjugate, minus = made.conj(), made.conj().imag
    made.mul_(1j)
    return conjugate, minus, made


def _conjugates_written(x: Tensor) -> Result:
    made, other = torch.complex(x, x * 2), torch.complex(x, x + 1)
    made.conj()[1:].mul_(1j)
    other.mH[:, 0].mul_(2j)
    own = made.conj().resolve_conj()
    own.add_(1j)
    return made, other, own


CODES: dict[str, Callable[[Tensor], Result]] = {
    code.__name__.strip("_").replace("_", " "): code
    for code in (
        _without_gradient,
        _detached,
        _modes_written,
        _real_numbers_written,
        _overwritten,
        _parts_written,
        _pairs_written,
        _conjugates_read,
        _conjugates_written,
    )
}


class Weighted(nn.Module):
    """A function of an input times a weight."""

    def __init__(self, code: Callable[[Tensor], Result]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self._code = code

    def forward(self, x: Tensor) -> Result:
        return self._code(x * self.weight)


def _step(module: nn.Module, size: int) -> tuple[list[Tensor], list[bool], list[Tensor | None]]:
    torch.manual_seed(size)
    module.zero_grad()
    x = torch.randn(size, 4, dtype=torch.float64, requires_grad=True)
    made = module(x)
    trained = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in made if y.requires_grad]
    sum((y * torch.randn(y.shape, dtype=y.dtype)).sum() for y in trained).backward()
    (weight,) = module.parameters()
    return [y.detach().resolve_conj() for y in made], [y.requires_grad for y in made], [x.grad, weight.grad]


@pytest.mark.parametrize("name", CODES)
def test_as_eager(name: str) -> None:
    eager = Weighted(CODES[name])
    wrapped = ORTModule(copy.deepcopy(eager))
    for size in (3, 5):
        ours, theirs = _step(wrapped, size), _step(eager, size)
        assert ours[1] == theirs[1], "requires_grad"
        torch.testing.assert_close(ours[0] + ours[2], theirs[0] + theirs[2], rtol=1e-11, atol=1e-12)


def test_numbers_that_onnx_does_not_have() -> None:
    """Complex numbers of two halves."""
    with pytest.raises(CaptureError, match=r"complex32|chalf|to\."):
        ORTModule(Calls(lambda x: x.chalf().real.float()))(torch.randn(3, 4))
