"""Numbers that a forward pass reads and changes, as temperatures that are annealed: as eager does, at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import captures, steps_with_state
from torch import Tensor, nn

from onnxtrain import Options, ORTModule


class Net(nn.Module):
    """A product, and what a function does with numbers beside it."""

    def __init__(self, do: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(3, 3), do
        self.steps, self.rate, self.ema, self.log = 0, 1.0, torch.ones(3), []

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x, self.linear(x))

    def state(self) -> list[Tensor]:
        numbers = [self.steps, self.rate, *self.log]
        assert {type(x) for x in numbers} <= {int, float}
        return [torch.tensor(float(x), dtype=torch.float64) for x in numbers]


def _annealed(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y = F.softmax(y / m.rate, -1)
    if m.training:
        m.rate = max(0.5, m.rate * 0.9)
    return y


def _warmed_up(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += 1
    return y * min(1.0, m.steps / 4)


def _with_bias_correction(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += 1
    m.ema = 0.9 * m.ema + 0.1 * x.detach().mean(0)
    return y - m.ema / (1 - 0.9**m.steps)


def _every_third(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += 1
    return y.relu() if m.steps % 3 == 0 else y.tanh()


def _both(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps, m.rate = m.steps + 2, m.rate / (m.steps + 1)
    return y * m.rate + m.steps


def _counted_alone(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += len(x)
    return y


def _logged(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += 1
    m.log.append(m.steps)
    return y


def _sum_of_a_loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.rate += y.square().mean().item()
    return y * m.rate


def _returned(m: Net, x: Tensor, y: Tensor) -> Any:
    m.steps += 1
    return y, torch.tensor(m.steps) * 2


def _twice(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.steps += 1
    y = y * m.steps
    m.steps += 1
    return y - m.steps


MANY = [_annealed, _warmed_up, _with_bias_correction, _every_third, _both, _counted_alone, _logged, _twice, _returned]
MANY += [_sum_of_a_loss]


def _name(do: Any) -> str:
    return getattr(do, "__name__", str(do)).strip("_")


@pytest.mark.parametrize("options", [Options(summary=False), Options(summary=False, verify=True)], ids=["", "verify"])
@pytest.mark.parametrize("do", MANY, ids=_name)
def test_a_number_that_calls_count(do: Callable[[Any, Tensor, Tensor], Any], options: Options) -> None:
    torch.manual_seed(0)
    net = Net(do)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options)
    ours, theirs = (steps_with_state(m.state, called, 9) for m, called in ((net, wrapped), (eager, eager)))
    torch.testing.assert_close(ours, theirs)
    assert captures(wrapped) <= 5


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
@pytest.mark.parametrize("do", [_annealed, _warmed_up, _both, _every_third], ids=_name)
def test_other_backends(do: Callable[[Any, Tensor, Tensor], Any], backend: str) -> None:
    torch.manual_seed(0)
    net = Net(do)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, Options(summary=False, backend=backend))
    ours, theirs = (steps_with_state(m.state, called, 6) for m, called in ((net, wrapped), (eager, eager)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_number_that_somebody_else_sets_between_calls() -> None:
    net = Net(_annealed)
    eager, wrapped, x = copy.deepcopy(net), ORTModule(net), torch.randn(4, 3)
    for rate in (1.0, 0.8, 3, 2.0):
        net.rate = eager.rate = rate
        torch.testing.assert_close(wrapped(x), eager(x))
        assert net.rate == eager.rate and type(net.rate) is type(eager.rate)


def test_layers_that_count() -> None:
    """All numbers are found by one trace."""

    class Counting(nn.Linear):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x) / self.steps

    module = nn.Sequential(*(Counting(3, 3) for _ in range(5)))
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    steps = [steps_with_state(list, called, 5) for called in (wrapped, eager)]
    torch.testing.assert_close(*steps)
    assert [m.steps for m in module] == [m.steps for m in eager] == [5] * 5  # type: ignore[union-attr]


def test_numbers_that_decide_how_much_is_computed() -> None:
    """Each is a path; after eight of them calls run in eager PyTorch, and the line is named."""

    def repeated(m: Net, x: Tensor, y: Tensor) -> Tensor:
        m.steps += 1
        for _ in range(m.steps):
            y = y.tanh()
        return y

    net = Net(repeated)
    eager, wrapped = copy.deepcopy(net), ORTModule(net)
    ours, theirs = (steps_with_state(m.state, called, 11) for m, called in ((net, wrapped), (eager, eager)))
    torch.testing.assert_close(ours, theirs)
    assert captures(wrapped) <= 16 and "test_counted.py" in wrapped.explain()


@pytest.mark.parametrize("do", [_annealed, _every_third], ids=_name)
def test_a_graph_that_is_kept_has_it_too(do: Callable[[Any, Tensor, Tensor], Any], tmp_path: Path) -> None:
    net = Net(do)
    others = [copy.deepcopy(net), copy.deepcopy(net)]
    expected = steps_with_state(net.state, net, 7)
    for other in others:
        wrapped = ORTModule(other, Options(summary=False, cache_dir=tmp_path))
        torch.testing.assert_close(steps_with_state(other.state, wrapped, 7), expected)


def test_a_number_in_a_branch_of_a_module_that_is_copied() -> None:
    net = Net(_warmed_up)
    eager, wrapped = copy.deepcopy(net), ORTModule(net)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(wrapped(x), eager(x))
        wrapped, eager = copy.deepcopy(wrapped), copy.deepcopy(eager)
    assert wrapped.module.steps == 3
