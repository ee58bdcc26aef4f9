"""Random numbers: torch's own, so ``torch.manual_seed`` decides them and not the seed that a node states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
_WORD = 16  # elements that kernels read at once at most, where memory begins at a multiple of them


@lowering("RandomNormal")
def random_normal(
    *,
    shape: Sequence[int],
    device: torch.device,
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
) -> Tensor:
    """Normally distributed numbers of a mean and a standard deviation."""
    return torch.randn(tuple(shape), dtype=torch_dtype(dtype), device=device).mul_(scale).add_(mean)


@lowering("RandomNormalLike")
def random_normal_like(
    x: Tensor, *, dtype: int, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    """The same in the shape of another tensor."""
    return torch.randn(x.shape, dtype=torch_dtype(dtype), device=x.device).mul_(scale).add_(mean)


@lowering("RandomUniform")
def random_uniform(
    *,
    shape: Sequence[int],
    device: torch.device,
    dtype: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    seed: float | None = None,
) -> Tensor:
    """Numbers of an interval, all equally likely."""
    return torch.rand(tuple(shape), dtype=torch_dtype(dtype), device=device).mul_(high - low).add_(low)


@lowering("RandomUniformLike")
def random_uniform_like(
    x: Tensor, *, dtype: int, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Tensor:
    """The same in the shape of another tensor."""
    return torch.rand(x.shape, dtype=torch_dtype(dtype), device=x.device).mul_(high - low).add_(low)


@lowering("Bernoulli")
def bernoulli(x: Tensor, *, dtype: int, seed: float | None = None) -> Tensor:
    """1 with the probability that x states, else 0."""
    return torch.bernoulli(x).to(torch_dtype(dtype))


@lowering("Multinomial")
def multinomial(x: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """Classes drawn, with replacement, by the logarithms of their probabilities (batch, classes)."""
    return torch.multinomial(x.float().softmax(-1), sample_size, replacement=True).to(torch_dtype(dtype))


@lowering("RandomState", domain=DOMAIN)
def random_state(x: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the generator of x's device, on the host; a meta tensor that lies in memory as x does."""
    state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state(x.device)
    return state, _laid_as(x, torch.device("meta"))


@lowering("DropoutMask", domain=DOMAIN, host=(2,))
def dropout_mask(state: Tensor, form: Tensor, ratio: float, *, device: str, packed: int = 0) -> Tensor:
    """The mask that dropout drew when the generator had a state, which it has no longer afterwards.

    On the host the mask alone is drawn, in the order in which it lies in memory; elsewhere by dropout itself, as which
    numbers a place has there is decided by its kernel.
    """
    place = torch.device(device)
    on_host = place.type == "cpu"
    with torch.random.fork_rng([] if on_host else [place]):
        if on_host:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, place)
        if not on_host or not 0.0 < ratio < 1.0:
            return torch.native_dropout(_laid_as(form, place), ratio, True)[1]
        if packed:
            return drawn_mask(form.numel(), ratio).view(form.shape)
        return torch.empty_like(form, dtype=torch.bool, device=device).bernoulli_(1.0 - ratio)


def _laid_as(x: Tensor, device: torch.device) -> Tensor:
    """Memory without content in which a tensor lies as x does: in its order, and as far from the words kernels read."""
    offset = x.storage_offset() % _WORD
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.empty(offset + span, dtype=x.dtype, device=device).as_strided(x.shape, x.stride(), offset)


def drawn_mask(count: int, ratio: float) -> Tensor:
    """A flat mask (count) that is true with probability ``1 - ratio``, by torch's generator of the host.

    Of a random byte, ``byte < n`` is true with probability n / 256. What is missing to the exact probability comes from
    a few places made true beside, whose distances are geometrically distributed. One draw of eight bytes serves eight
    elements: several times as fast as one of ``bernoulli_`` for each.
    """
    level = (1.0 - ratio) * 256
    whole = int(level)
    numbers = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.uint8)[:count].lt_(whole) if whole < 256 else numbers.view(torch.uint8)[:count].fill_(1)
    if level > whole and count:
        kept.index_fill_(0, _places(count, (level - whole) / (256 - whole)), 1)
    return kept.view(torch.bool)


def _places(count: int, chance: float) -> Tensor:
    """Each of ``range(count)`` with that chance, independently: ascending."""
    expected = count * chance
    enough = int(expected + 6 * math.sqrt(expected) + 8)
    at = torch.empty(enough, dtype=torch.int64).geometric_(chance).cumsum(0)
    while bool(at[-1] <= count):
        more = torch.empty(enough, dtype=torch.int64).geometric_(chance).cumsum(0)
        at = torch.cat((at, more + at[-1]))
    return at[at <= count] - 1
