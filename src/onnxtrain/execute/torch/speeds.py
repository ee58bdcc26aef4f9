"""What a machine can do at most, measured: products of matrices, and bytes that are moved."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from onnxtrain.execute.torch.timing import seconds_of

_SECONDS = 0.1  # that a measurement takes, about
_BYTES = 2**26  # of a tensor that no cache holds
_SIDE = {"cpu": 1024}  # of square matrices


class Speeds:
    """How fast a device is.

    Args:
        device: named as in torch.

    Attributes:
        bandwidth: bytes a second that a sum of two large tensors reads and writes.
        products: for each element type that was asked for, operations a second in a product of two large matrices.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.products: dict[str, float] = {}
        a, b, out = (torch.ones(_BYTES // 4, device=device) for _ in range(3))
        self.bandwidth = 3 * _BYTES / _shortest(lambda: torch.add(a, b, out=out), device)

    def of_products(self, dtype: torch.dtype) -> float:
        """Floating point operations a second in a product of large matrices; a multiply-add is two."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.products:
            side = _SIDE.get(torch.device(self._device).type, 4096)
            a, b = (torch.full((side, side), 0.5, dtype=dtype, device=self._device) for _ in range(2))
            self.products[name] = 2 * side**3 / _shortest(lambda: torch.mm(a, b), self._device)
        return self.products[name]


@torch.no_grad()
def _shortest(call: Callable[[], object], device: str) -> float:
    """The shortest time of a call, in seconds."""
    found, until = list[float](), time.perf_counter() + _SECONDS
    while len(found) < 3 or time.perf_counter() < until:
        found.append(seconds_of(call, device))
    return min(found)
