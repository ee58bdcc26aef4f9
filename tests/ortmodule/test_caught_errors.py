"""Errors that there are only while a module is traced: code that catches them goes the way of eager PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from parity import captures
from torch import Tensor

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError


def _branch(x: Tensor, ids: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum() > 0 else x + 1
    except RuntimeError:
        return x * 0


def _all_errors(x: Tensor, ids: Tensor) -> Tensor:
    try:
        return x[:, : int(ids.max())]
    except:  # noqa: E722
        return x * 0


def _suppressed(x: Tensor, ids: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = x * ids.float().mean().item()
    return x


def _in_between(x: Tensor, ids: Tensor) -> Tensor:
    try:
        try:
            most = int(ids.max())
            return x / most if most > 3 else x
        except ValueError as error:
            raise RuntimeError("no") from error
    except RuntimeError:
        return x * 0


def _an_array(x: Tensor, ids: Tensor) -> Tensor:
    try:
        return x * float(ids.numpy().sum())
    except Exception:
        return x * 0


def _seeded(x: Tensor, ids: Tensor) -> Tensor:
    try:
        torch.manual_seed(3)
        return x + torch.rand(1)
    except Exception:
        return x * 0


def _counted(x: Tensor, ids: Tensor) -> Tensor:
    try:
        return x.sum() * torch.bincount(ids, minlength=3)
    except RuntimeError as error:
        if "device" in str(error):
            raise RuntimeError("move it") from error
        raise


def _own_error(x: Tensor, ids: Tensor) -> Tensor:
    try:
        if x.sum() > 0:
            raise ValueError
        return x
    except ValueError:
        return -x


def _view_or_copy(x: Tensor, ids: Tensor) -> Tensor:
    try:
        return x.view(7, 11)
    except RuntimeError:
        return x * 3


class Catching(torch.nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.run = torch.nn.Parameter(torch.ones(4)), run

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.run(x * self.weight, ids)


@pytest.mark.parametrize(
    "run",
    [_branch, _all_errors, _suppressed, _in_between, _an_array, _seeded, _counted, _own_error, _view_or_copy],
)
def test_code_that_catches_goes_the_way_of_eager(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Catching(run)
    wrapped, eager = ORTModule(module), Catching(run)
    generator = torch.Generator().manual_seed(0)
    for size in (3, 5, 3, 4, 6):
        x, ids = torch.randn(size, 4, generator=generator), torch.randint(1, 6, (size,), generator=generator)
        made, wanted = wrapped(x, ids), eager(x, ids)
        torch.testing.assert_close(made, wanted)
        made.sum().backward()
        wanted.sum().backward()
    torch.testing.assert_close(module.weight.grad, eager.weight.grad)


def test_errors_that_eager_raises_too_need_no_rehearsal() -> None:
    wrapped = ORTModule(Catching(_view_or_copy))
    for size in (3, 5):
        wrapped(torch.randn(size, 4), torch.ones(size))
    assert captures(wrapped) == 1


def test_what_no_trace_can_tell_is_refused_where_code_would_catch_it() -> None:
    def address(x: Tensor, ids: Tensor) -> Tensor:
        try:
            return x * (ids.data_ptr() % 3)
        except Exception:
            return x * 0

    with pytest.raises(CaptureError, match=r"test_caught_errors\.py"):
        ORTModule(Catching(address))(torch.randn(3, 4), torch.ones(3))
