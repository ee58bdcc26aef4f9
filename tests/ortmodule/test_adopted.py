"""Tensors that are no buffers and that a forward pass changes in place: as eager does, at every call."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import InTurn, steps_with_state
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError

MEAN = torch.ones(3)
TABLE = {"mean": torch.ones(3)}


@pytest.fixture(autouse=True)
def _as_at_the_start() -> Iterator[None]:
    _start()
    yield


def _start() -> None:
    MEAN.fill_(1.0)
    TABLE["mean"].fill_(1.0)


class Held:
    def __init__(self) -> None:
        self.state = torch.ones(3)


class Net(nn.Module):
    """A product, and what a function does with state beside it."""

    def __init__(self, do: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(3, 3), do
        self.state, self.count, self.flags = torch.ones(3), torch.zeros((), dtype=torch.int64), torch.ones(3) > 0
        self.mean, self.variance = torch.zeros(3), torch.ones(3)
        self.table, self.items, self.held = {"state": torch.ones(3)}, [torch.ones(3)], Held()
        self.queue, self.place = torch.zeros(8, 3), torch.zeros(1, dtype=torch.int64)
        self.part = self.state[:2]

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x, self.linear(x))

    def all_state(self) -> list[Tensor]:
        own = [self.state, self.count, self.flags, self.mean, self.variance, self.queue, self.place, self.part]
        return [*own, self.table["state"], *self.items, self.held.state, MEAN, TABLE["mean"]]


def _added(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.add_(1)
    return y * m.state


def _added_of_the_input(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y = y * m.state.clone()
    m.state.mul_(0.9).add_(x.detach().mean(0))
    return y


def _added_by_an_operator(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state += x.detach().mean(0)
    m.count += 1
    return y * m.state / m.count


def _item_set(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state[0] = x.detach().sum()
    m.state[x.detach().mean(0) > 0] = 5.0
    return y * m.state


def _copied(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.copy_(x.detach().mean(0))
    return y * m.state


def _without_gradients(m: Net, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.lerp_(x.mean(0), 0.1)
    return y - m.state


def _out(m: Net, x: Tensor, y: Tensor) -> Tensor:
    torch.add(m.state, 1, out=m.state)
    return y * m.state


def _through_a_view(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.view(3)[1:].add_(1)
    return y * m.state


def _seen_by_a_view(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.add_(1)
    return y[:, :2] * m.part


def _data(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.data = 0.9 * m.state + 0.1 * x.detach().mean(0)
    return y + m.state


def _data_in_place(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    m.mean.detach().copy_(m.state)
    return y - m.mean


def _several(m: Net, x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_add_([m.state, m.mean], 1.0)
    F.relu(m.mean, inplace=True)
    m.flags.logical_not_()
    return y * m.state + m.mean * m.flags


def _batch_norm(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.batch_norm(y, m.mean, m.variance, training=m.training)


def _in_collections(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.table["state"] += x.detach().mean(0)
    m.items[0] *= 0.9
    m.held.state.sub_(0.1)
    return y * m.table["state"] * m.items[0] + m.held.state


def _global(m: Net, x: Tensor, y: Tensor) -> Tensor:
    global MEAN
    MEAN *= 0.9
    TABLE["mean"] += x.detach().mean(0)
    return y * MEAN + TABLE["mean"]


def _queue(m: Net, x: Tensor, y: Tensor) -> Tensor:
    places = (torch.arange(x.shape[0]) + m.place) % 8
    m.queue[places] = x.detach()
    m.place[0] = (m.place[0] + x.shape[0]) % 8
    return y @ m.queue.clone().t()


def _before_a_look(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.add_(x.detach().mean(0))
    return y * m.state if y.sum() > 0 else y - m.state


def _looked_at(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.count.add_(1)
    return y * 2 if m.count > 3 else y


def _in_training_alone(m: Net, x: Tensor, y: Tensor) -> Tensor:
    if m.training:
        m.state.lerp_(x.detach().mean(0), 0.1)
    return y - m.state


def _returned(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    m.state.add_(1)
    return y.tanh(), m.state


def _returned_and_not_read(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.tanh(), MEAN


CHANGES = (
    *(_added, _added_of_the_input, _added_by_an_operator, _item_set, _copied, _without_gradients, _out),
    *(_through_a_view, _seen_by_a_view, _data, _data_in_place, _several, _batch_norm, _in_collections, _global),
    *(_queue, _before_a_look, _looked_at, _in_training_alone, _returned, _returned_and_not_read),
)


@pytest.mark.parametrize("do", CHANGES, ids=lambda do: do.__name__.strip("_").replace("_", " "))
def test_as_eager(do: Callable[[Any, Tensor, Tensor], Any]) -> None:
    net = Net(do)
    if do is _data:
        net.part = torch.zeros(2)  # the view of what it was before
    eager, identities = copy.deepcopy(net), [id(t) for t in net.all_state()]
    expected = steps_with_state(eager.all_state, eager, 6)
    _start()
    wrapped = ORTModule(net, options=Options(summary=False))
    torch.testing.assert_close(steps_with_state(net.all_state, wrapped, 6), expected)
    assert [id(t) for t in net.all_state()] == identities
    assert "eager PyTorch" not in wrapped.explain()


def _seeds(m: Net, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return y * torch.rand(3)


def test_a_seed_that_is_set_is_set_by_eager(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(_seeds)
    wrapped, x = ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), net(x))
    assert caplog.text.count("the forward pass calls torch.manual_seed") == 1
    assert f"{__file__}:" in caplog.text


def test_layers_that_are_alike_have_state_of_their_own() -> None:
    """Of so many layers some are not traced where they only compute; these are all traced."""
    net = InTurn(Net(_added_of_the_input) for _ in range(8))
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    for size in (3, 4, 3):
        x = torch.randn(size, 3)
        torch.testing.assert_close(wrapped(x), eager(x))
    for one, other in zip(net.layers, eager.layers, strict=True):
        torch.testing.assert_close(one.state, other.state)


def test_a_copy_changes_its_own() -> None:
    net = Net(_added)
    wrapped, x = ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    wrapped(x)
    other = copy.deepcopy(wrapped)
    torch.testing.assert_close(other(x), wrapped(x))
    assert net.state.tolist() == [3.0] * 3


def test_another_tensor_in_its_place_is_the_one_that_is_changed() -> None:
    net = Net(_added)
    wrapped, x = ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    wrapped(x)
    before, net.state = net.state, torch.zeros(3)
    torch.testing.assert_close(wrapped(x), net.linear(x))
    assert before.tolist() == [2.0] * 3 and net.state.tolist() == [1.0] * 3


def test_what_others_write_is_read() -> None:
    net = Net(_added)
    wrapped, x = ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    wrapped(x)
    net.state.fill_(4.0)
    torch.testing.assert_close(wrapped(x), net.linear(x) * 5)
    assert "2 calls, 1 graph\n" in wrapped.explain()


def test_one_that_is_trained_is_refused() -> None:
    def do(m: Net, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            m.state.mul_(0.9)
        return y * m.state

    net = Net(do)
    net.state.requires_grad_()
    with pytest.raises(CaptureError, match="trained"):
        ORTModule(net, options=Options(summary=False))(torch.randn(4, 3))
    assert net.state.tolist() == [1.0] * 3


def _rolls(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.recent.append(y.detach().mean(0))
    return y + torch.stack(list(m.recent)).mean(0)


def test_a_queue_of_tensors_is_refused() -> None:
    """Never a number that eager does not give."""
    net = Net(_rolls)
    net.recent = collections.deque(maxlen=3)  # type: ignore[assignment]
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    with pytest.raises(CaptureError, match=f"(?s)recent.*source: .*{__file__.rpartition('/')[2]}:.*buffer"):
        for _ in range(3):
            x = torch.randn(4, 3)
            torch.testing.assert_close(wrapped(x), eager(x))


@pytest.mark.parametrize("do", [_added_of_the_input, _in_collections, _global])
def test_a_graph_that_is_kept_changes_them_too(do: Callable[[Any, Tensor, Tensor], Any], tmp_path: Path) -> None:
    """The next process takes the graph and does not trace: another wrapper of an equal module does so here."""
    net = Net(do)
    others = [copy.deepcopy(net), copy.deepcopy(net)]
    expected = steps_with_state(net.all_state, net, 6)
    for other in others:
        _start()
        wrapped = ORTModule(other, options=Options(summary=False, cache_dir=tmp_path))
        torch.testing.assert_close(steps_with_state(other.all_state, wrapped, 6), expected)
        assert "6 calls, 2 graphs\n" in wrapped.explain()
    assert "not traced: taken from the graph cache" in wrapped.explain()
