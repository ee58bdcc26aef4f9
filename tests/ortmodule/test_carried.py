"""State that a forward pass reads and sets anew: as eager does, at every call, by one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import InTurn, steps_with_state
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError, GradientError


class Held:
    def __init__(self) -> None:
        self.state = torch.ones(3)


class Net(nn.Module):
    """A product, and what a function does with state beside it."""

    def __init__(self, do: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.do = nn.Linear(3, 3), do
        self.state: Any = torch.ones(3)
        self.pair: Any = (torch.ones(3), torch.zeros(3))
        self.later: Any = None
        self.table: dict[str, Any] = {"state": torch.ones(3), "steps": 2}
        self.items, self.held = [torch.ones(3), torch.zeros(3)], Held()
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x, self.linear(x))

    def all_state(self) -> list[Tensor]:
        held = self.state, self.pair, self.later, self.table, self.items, self.held.state, self.buffer
        return [x for x in pytree.tree_leaves(held) if isinstance(x, Tensor)]


def _mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


def _averaged(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state = 0.9 * m.state + 0.1 * _mean(x)
    return y * m.state


def _read_before_it_is_set(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y = y * m.state
    m.state = _mean(y)
    return y


def _in_training_alone(m: Net, x: Tensor, y: Tensor) -> Tensor:
    if m.training:
        m.state = m.state.lerp(_mean(x), 0.1)
    return y - m.state


def _without_gradients(m: Net, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.state = m.state * 0.5 + y.mean(0)
    return y + m.state


def _a_pair(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.pair = tuple((a + _mean(x)).tanh() for a in m.pair)
    return y * m.pair[0] - m.pair[1]


def _one_of_a_pair(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.pair = (m.pair[0], m.pair[1] + _mean(x))
    return y * m.pair[0] - m.pair[1]


def _exchanged(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.pair = m.pair[::-1]
    m.state, m.buffer = m.buffer * 2, m.state + 1
    return y * m.pair[0] - m.pair[1] + m.state


def _set_up_by_the_first_call(m: Net, x: Tensor, y: Tensor) -> Tensor:
    if m.later is None:
        m.later = torch.zeros(3), torch.ones(1, 3)
    m.later = m.later[0] + _mean(y), m.later[1] * 0.9
    return y * m.later[0] + m.later[1]


def _remembered(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y = y if m.later is None else y + m.later
    m.later = _mean(y)
    return y


def _forgotten_at_times(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y = y if m.later is None else y + m.later
    m.later = _mean(y) if m.training else None
    return y


def _in_a_dict(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.table["state"] = m.table["state"] * 0.5 + _mean(x)
    return y * m.table["state"] * m.table["steps"]


def _in_another_dict(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.table = {**m.table, "state": m.table["state"] * 0.5 + _mean(x)}
    return y * m.table["state"] * m.table["steps"]


def _in_a_list(m: Net, x: Tensor, y: Tensor) -> Tensor:
    for i in range(len(m.items)):
        m.items[i] = m.items[i] + _mean(x)
    return y * m.items[0] - m.items[1]


def _in_another_list(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.items = [x * 0.9 for x in m.items]
    return y * m.items[0] - m.items[1]


def _the_latest_in_a_list(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.items.append(_mean(y))
    m.items = m.items[-3:]
    return y + torch.stack(m.items).mean(0)


def _on_an_object(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.held.state = m.held.state * 0.5 + _mean(x)
    return y * m.held.state


def _looked_at(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state = m.state + _mean(x).abs()
    return y if m.state.sum() > 5 else y * m.state


def _returned(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    m.state = m.state + 1
    return y, m.state


def _a_part(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state = torch.cat([m.state[1:], _mean(x)[:1]])
    return y * m.state


def _drawn(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state = F.dropout(m.state, 0.5, m.training) + 0.5
    return y * m.state


def _both(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """One tensor that is changed in place, and one that is set anew."""
    m.items[0] *= 0.9
    m.state = m.state * 0.5 + m.items[0]
    return y * m.state


def _changed_first(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.mul_(0.9)
    m.pair[0][0] += 1.0
    m.state, m.pair = m.state + _mean(x), (m.pair[0].tanh(), m.pair[1])
    return y * m.state + m.pair[0]


def _changed_in_place_at_times(m: Net, x: Tensor, y: Tensor) -> Tensor:
    if m.training:
        m.state = m.state * 0.5 + 1
    else:
        m.state.mul_(0.5)
    return y * m.state


CHANGES = (
    *(_averaged, _read_before_it_is_set, _in_training_alone, _without_gradients, _a_pair, _one_of_a_pair, _exchanged),
    *(_set_up_by_the_first_call, _remembered, _forgotten_at_times, _in_a_dict, _in_another_dict, _in_a_list),
    *(_in_another_list, _on_an_object, _looked_at, _returned, _a_part, _drawn, _both),
    *(_changed_first, _changed_in_place_at_times, _the_latest_in_a_list),
)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("do", CHANGES, ids=lambda do: do.__name__.strip("_").replace("_", " "))
def test_as_eager(do: Callable[[Any, Tensor, Tensor], Any], backend: str) -> None:
    if do is _drawn and backend != "torch":
        pytest.skip("other random numbers")
    net = Net(do)
    eager = copy.deepcopy(net)
    expected = steps_with_state(eager.all_state, eager, 9)
    wrapped = ORTModule(net, options=Options(summary=False, backend=backend))
    torch.testing.assert_close(steps_with_state(net.all_state, wrapped, 9), expected)
    assert "eager PyTorch" not in wrapped.explain()
    assert len(wrapped.explain().split("\ngraph ")) <= 6


def test_tensors_of_before_keep_their_content() -> None:
    """Each call sets a new tensor, so who has kept one has what it was."""
    net = Net(_averaged)
    eager = copy.deepcopy(net)
    wrapped = ORTModule(net, options=Options(summary=False))
    kept: list[list[Tensor]] = [[], []]
    for step in range(4):
        x = torch.full((2, 3), float(step))
        for called, module, found in ((eager, eager, kept[0]), (wrapped, net, kept[1])):
            found.append(module.state)
            called(x)
    torch.testing.assert_close(kept[1], kept[0])
    assert len({id(t) for t in kept[1]}) == 4
    assert "4 calls, 1 graph\n" in wrapped.explain()


def test_another_content_or_form_that_the_user_sets_is_read() -> None:
    net = Net(_averaged)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    x = torch.randn(4, 3)
    for state in (torch.zeros(3), torch.ones(1), torch.full((4, 3), 2.0), torch.ones(3), torch.ones(3).double()):
        for _ in range(2):
            net.state, eager.state = state, state.clone()
            if state.dtype == torch.float64:
                x, net, eager = x.double(), net.double(), eager.double()
            torch.testing.assert_close(wrapped(x), eager(x))
            torch.testing.assert_close(net.state, eager.state)
    assert "10 calls, 4 graphs\n" in wrapped.explain()


def test_the_state_may_be_one_of_the_module() -> None:
    """Set back to a buffer, which a graph reads as such; to a parameter, which is trained."""
    net = Net(_averaged)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    for step in range(6):
        for module, called in ((eager, eager), (net, wrapped)):
            if step % 2 == 0:
                module.state = module.buffer
                module.buffer += 1
            module.zero_grad()
            called(torch.ones(2, 3)).sum().backward()
        torch.testing.assert_close(net.state, eager.state)
        torch.testing.assert_close(net.buffer, eager.buffer)
        torch.testing.assert_close(net.linear.weight.grad, eager.linear.weight.grad)


def test_what_is_changed_in_place_is_the_tensor_that_is_there() -> None:
    """Not what an earlier call had in its place; where another attribute has it too, that is said."""
    net = Net(_changed_in_place_at_times)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    kept: list[list[Tensor]] = [[], []]
    for step in range(8):
        x = torch.full((2, 3), float(step))
        for called, module, found in ((eager, eager, kept[0]), (wrapped, net, kept[1])):
            found.append(module.state)
            called.train(step % 4 < 2)
            called(x)
    torch.testing.assert_close(kept[1], kept[0])
    net.later = net.state[:2]
    with pytest.raises(CaptureError, match=r"(?s)sets state anew at one time.*source: .*test_carried.*cure"):
        wrapped(x)


class Recurrent(nn.Module):
    """A recurrent layer that goes on where it stopped: truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 2)
        self.hidden: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(2, x.shape[0], 8), torch.zeros(2, x.shape[0], 8)
        y, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(t.detach() for t in hidden)
        return self.head(y)


@pytest.mark.parametrize(
    "options", [{}, {"memory_budget": "min"}, {"segments": 2}, {"verify": True}], ids=lambda o: next(iter(o), "")
)
def test_a_recurrent_layer_that_goes_on(options: Mapping[str, Any]) -> None:
    net = Recurrent()
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False, **options))
    for step in range(8):
        if step == 5:
            net.hidden = eager.hidden = None
        x = torch.randn(3, 4 + step % 3, 4)
        for called in (eager, wrapped):
            called.zero_grad()
            called(x).square().mean().backward()
        for (name, one), other in zip(net.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(net.hidden, eager.hidden)


def _detached_where_it_is_read(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.pair = tuple(t.detach() for t in m.pair)
    m.pair = (m.pair[0] * y.mean(0)).tanh(), m.pair[1] + x.mean(0)
    return y * m.pair[0] + m.pair[1]


def _read_without_gradients(m: Net, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        before = m.state * 0.5
    m.state = (before * y.mean(0)).tanh()
    return y * m.state + m.later if m.later is not None else y * m.state


@pytest.mark.parametrize("do", [_detached_where_it_is_read, _read_without_gradients])
def test_state_with_a_history_that_is_not_read(do: Callable[[Any, Tensor, Tensor], Any]) -> None:
    test_as_eager(do, "torch")


def _with_its_history(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state = (m.state * y.mean(0)).tanh()
    m.later = m.later if m.later is None or m.training else m.later.detach()
    return y * m.state


@pytest.mark.parametrize(
    "options",
    [{}, {"backend": "onnxruntime"}, {"memory_budget": "min"}, {"segments": 2}, {"verify": True}],
    ids=lambda o: next(iter(o), ""),
)
@pytest.mark.parametrize("calls", [2, 3])
def test_backpropagation_through_the_calls(calls: int, options: Mapping[str, Any]) -> None:
    """One loss of several calls: its gradient goes through the state from call to call."""
    net = Net(_with_its_history)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False, **options))
    for step in range(4):
        batches = torch.randn(calls, 4 + step, 3)
        for called, module in ((eager, eager), (wrapped, net)):
            module.state = torch.ones(3)
            module.zero_grad()
            torch.stack([called(x).square().mean() for x in batches]).sum().backward()
        torch.testing.assert_close(net.linear.weight.grad, eager.linear.weight.grad)
        torch.testing.assert_close(net.state, eager.state)
    with pytest.raises(RuntimeError, match="a second time"):
        for called in (eager, eager):
            called(batches[0]).sum().backward()
    with pytest.raises(GradientError, match="a second time"):
        for called in (wrapped, wrapped):
            called(batches[0]).sum().backward()


def test_layers_that_are_alike_have_state_of_their_own() -> None:
    net = InTurn(Net(_averaged) for _ in range(8))
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False))
    for size in (3, 4, 3):
        x = torch.randn(size, 3)
        torch.testing.assert_close(wrapped(x), eager(x))
    for one, other in zip(net.layers, eager.layers, strict=True):
        torch.testing.assert_close(one.state, other.state)
    assert "3 calls, 1 graph\n" in wrapped.explain()


def test_a_copy_has_its_own() -> None:
    net = Net(_averaged)
    wrapped, x = ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    wrapped(x)
    other = copy.deepcopy(wrapped)
    torch.testing.assert_close(other(x), wrapped(x))
    torch.testing.assert_close(other(x), wrapped(x))


@pytest.mark.parametrize("do", [_averaged, _a_pair, _in_a_dict, _set_up_by_the_first_call])
def test_a_graph_that_is_kept_has_it_too(do: Callable[[Any, Tensor, Tensor], Any], tmp_path: Path) -> None:
    """The next process takes the graph and does not trace: another wrapper of an equal module does so here."""
    net = Net(do)
    others = [copy.deepcopy(net), copy.deepcopy(net)]
    expected = steps_with_state(net.all_state, net, 9)
    for other in others:
        wrapped = ORTModule(other, options=Options(summary=False, cache_dir=tmp_path))
        torch.testing.assert_close(steps_with_state(other.all_state, wrapped, 9), expected)
    assert "not traced: taken from the graph cache" in wrapped.explain()


def _beside_buffers_in_place(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state.mul_(0.5)
    m.buffer += 1
    return y + m.buffer - m.state


def _beside_buffers(m: Net, x: Tensor, y: Tensor) -> Tensor:
    m.state, m.pair = m.state * 0.5, (m.pair[0] - 1, m.pair[0])
    m.buffer = m.buffer + 1
    return y + m.buffer - m.state * m.pair[1]


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "reference"])
@pytest.mark.parametrize("do", [_beside_buffers_in_place, _beside_buffers])
def test_no_buffer_is_taken_for_state(do: Callable[[Any, Tensor, Tensor], Any], backend: str) -> None:
    """With gradients and without: of one form, they could be taken for each other."""
    net = Net(do)
    eager, wrapped = copy.deepcopy(net), ORTModule(net, options=Options(summary=False, backend=backend))
    for step in range(6):
        x = torch.randn(3, 3)
        with torch.set_grad_enabled(step % 2 == 1):
            torch.testing.assert_close(wrapped(x), eager(x))
        torch.testing.assert_close(net.all_state(), eager.all_state())


def test_one_that_has_a_history_and_is_changed_in_place_is_refused() -> None:
    def do(m: Net, x: Tensor, y: Tensor) -> Tensor:
        m.state.add_(1)  # changed
        m.state = (m.state * y.mean(0)).tanh()
        return y * m.state

    wrapped, x = ORTModule(Net(do), options=Options(summary=False)), torch.randn(4, 3)
    wrapped(x)
    with pytest.raises(CaptureError, match=r"sets state anew .* though it has a history"):
        wrapped(x)


def test_a_part_that_is_gone_has_no_state() -> None:
    net = InTurn([Net(_averaged), Net(_on_an_object)])
    eager, wrapped, x = copy.deepcopy(net), ORTModule(net, options=Options(summary=False)), torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), eager(x))
    net.layers = net.layers[:1]
    eager.layers = eager.layers[:1]
    torch.testing.assert_close(wrapped(x), eager(x))
    torch.testing.assert_close(wrapped(x), eager(x))


def test_a_layer_that_has_two_names() -> None:
    """Then torch.export gives others in the places of all layers, which are not to be asked what is read."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.state = nn.Sequential(*[nn.Linear(3, 3), nn.Tanh()] * 2), torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x * self.state)
            self.state = x.detach().mean(0)
            return y

    module = Twice()
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    ours, theirs = (
        steps_with_state(lambda m=m: [m.state], called, 5) for m, called in ((module, wrapped), (eager, eager))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("same", [Tensor.flatten, Tensor.contiguous, Tensor.float, lambda t: t.to(t.dtype)])
def test_what_was_state_is_changed_through_a_function_that_gives_it_back(same: Callable[[Tensor], Tensor]) -> None:
    def do(m: Net, x: Tensor, y: Tensor) -> Tensor:
        before, m.state = m.state, _mean(x)
        y = y - before
        same(before).add_(-2)
        return y

    module = Net(do)
    eager, wrapped = copy.deepcopy(module), ORTModule(module)
    ours, theirs = (steps_with_state(m.all_state, called, 5) for m, called in ((module, wrapped), (eager, eager)))
    torch.testing.assert_close(ours, theirs)
