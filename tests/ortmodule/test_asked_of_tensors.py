"""What a forward pass asks of tensors but for their content: the graph is that of the answers, or another is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule

Tensor = torch.Tensor


def _result_type(x: Tensor) -> torch.dtype:
    with torch.no_grad():
        y = x.sum() / (x.norm() + 1)
    return torch.result_type(y, x.long())


ASKED: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "type": lambda module, x, y: type(x) is torch.Tensor and type(x) in (torch.Tensor,),
    "name of the type": lambda module, x, y: type(x).__name__ == "Tensor",
    "type of a parameter": lambda module, x, y: type(module.weight) is nn.Parameter,
    "instance": lambda module, x, y: isinstance(x, torch.Tensor) and isinstance(module.weight, nn.Parameter),
    "the same": lambda module, x, y: x is y,
    "the same by identity": lambda module, x, y: id(x) == id(y),
    "among others": lambda module, x, y: any(x is other for other in [y]),
    "needs a gradient": lambda module, x, y: x.requires_grad,
    "contiguous": lambda module, x, y: x.is_contiguous(),
    "contiguous when computed": lambda module, x, y: x.mT.mul(2).is_contiguous(),
    "strides": lambda module, x, y: x.stride() == (4, 1),
    "one stride": lambda module, x, y: x.stride(0) == 4,
    "bytes": lambda module, x, y: x.nbytes == 32,
    "equal to what may be of other sizes": lambda module, x, y: torch.equal(x[:, :1], x[:1, :1]) or x.equal(y[:1]),
    "the same memory": lambda module, x, y: x.is_set_to(x.view(x.shape)) and not x.is_set_to(x.mT),
    "type of a result": lambda module, x, y: torch.result_type(x, torch.ones((), dtype=torch.float64)) == x.dtype,
    "type of a result without gradients": lambda module, x, y: _result_type(x) == torch.float32,
    "a layer's result contiguous": lambda module, x, y: module.lstm(x.expand(3, -1, -1))[0].is_contiguous(),
    "sizes": lambda module, x, y: x.shape == y.shape and list(x.shape) == [2, 4] and 4 in x.shape,
    "type of the sizes": lambda module, x, y: type(x.shape) is torch.Size,
    "device": lambda module, x, y: x.device == torch.device("cpu") and not x.is_cuda and x.get_device() == -1,
}


class Asks(nn.Module):
    def __init__(self, question: Callable[[nn.Module, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self._question = question

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ self.weight) * (2.0 if self._question(self, x, y) else 3.0) + y).sum()


def _inputs() -> Iterator[tuple[Tensor, Tensor]]:
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    yield one, other
    yield one, one
    yield torch.randn(2, 4, requires_grad=True), other
    both = torch.randn(2, 4, requires_grad=True)
    yield both, both
    yield torch.randn(4, 2).T, other
    yield other, one
    yield torch.randn(3, 4), torch.randn(3, 4)
    yield torch.randn(1, 4), torch.randn(1, 4)  # its transpose is contiguous


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_that_of_the_call(name: str) -> None:
    module = Asks(ASKED[name])
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    for x, y in _inputs():
        outcomes = []
        for model in (wrapped, eager):
            memo: dict[int, object] = {}
            given = [copy.deepcopy(t, memo) if t.is_contiguous() else t for t in (x, y)]  # the same stays the same
            loss = model(*given)
            loss.backward()
            outcomes.append((loss, given[0].grad, given[1].grad))
        torch.testing.assert_close(*outcomes)
    torch.testing.assert_close(module.weight.grad, eager.weight.grad)


def test_what_is_not_asked_for_makes_no_further_graph() -> None:
    module = ORTModule(Asks(lambda module, x, y: True))
    for x, y in _inputs():
        module(x, y).backward()
    assert len(module.__dict__["_ort_sessions"].entries) == 2  # x and y, and one in both places
