"""Subscribers see each tensor once per step and direction, on plain modules and on ORTModule."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from onnxtrain import Options, ORTModule
from onnxtrain.errors import BackendError, HookError
from onnxtrain.utils.hooks import GlobalSubscriberManager, SubscriberBase, SubscriberManager, inspect_activation


class Net(torch.nn.Module):
    """A layer whose second output nobody reads, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.again = Two(), torch.nn.Linear(4, 4)

    def forward(self, x):
        used, _ = self.first(x)
        return inspect_activation("middle", self.again(self.again(used))).square().mean()


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight).relu(), x.sum(-1)


class Recorder(SubscriberBase):
    """Keeps what it is shown."""

    def __init__(self, *limits, seen=None):
        super().__init__(*limits)
        self.seen = [] if seen is None else seen

    def _keep(self, what, states, index, tensor):
        assert type(tensor) is torch.Tensor, "a fake tensor was observed"
        self.seen.append((what, states.global_states.execution_step, states.name, states.call, index, tensor.clone()))
        return tensor

    def pre_forward_tensor_apply_impl(self, states, module, index, tensor):
        return self._keep("input", states, index, tensor)

    def post_forward_tensor_apply_impl(self, states, module, index, tensor):
        return self._keep("output", states, index, tensor)

    def pre_backward_tensor_apply_impl(self, states, module, index, gradient):
        return self._keep("output gradient", states, index, gradient)

    def post_backward_tensor_apply_impl(self, states, module, index, gradient):
        return self._keep("input gradient", states, index, gradient)

    def inspect_activation_apply(self, states, tensor):
        self._keep("point", states, 0, tensor)

    def inspect_gradient_apply(self, states, gradient):
        self._keep("point gradient", states, 0, gradient)


def keys(recorder):
    return [event[:-1] for event in recorder.seen]


def train(model, steps=2, size=3):
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(size + step, 4)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def manager():
    yield GlobalSubscriberManager
    for subscription in list(GlobalSubscriberManager.subscriptions):
        subscription.unsubscribe()


def subscribed(manager, module, when, *subscribers):
    """An ORTModule of the module with a subscription made before wrapping, after it, or after the first step."""
    if when == "before":
        subscription = manager.subscribe(module, subscribers)
        return ORTModule(module), subscription
    wrapped = ORTModule(module)
    if when == "captured":
        train(wrapped)
    return wrapped, manager.subscribe(wrapped, subscribers)


@pytest.mark.parametrize("when", ["before", "after", "captured"])
def test_ortmodule_shows_what_eager_shows(manager, when):
    eager, ours, theirs = Net(), Recorder(), Recorder()
    plain = copy.deepcopy(eager)
    with manager.subscribe(eager, [theirs]) as subscription:
        expected = train(eager)
        assert subscription.states.global_states.execution_step == 2
    wrapped, subscription = subscribed(manager, plain, when, ours)
    found = train(wrapped)
    assert subscription.states.global_states.execution_step == 2
    assert sorted(keys(ours)) == sorted(keys(theirs)) and len(set(keys(ours))) == len(keys(ours))
    assert [k for k in keys(ours) if "gradient" not in k[0]] == [k for k in keys(theirs) if "gradient" not in k[0]]
    eagers = {event[:-1]: event[-1] for event in theirs.seen}
    for *key, tensor in ours.seen:
        torch.testing.assert_close(tensor, eagers[tuple(key)])
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_what_is_shown(manager):
    seen, module = Recorder(), Net()
    manager.subscribe(module, [seen])
    train(module, steps=1)
    assert keys(seen)[:4] == [
        ("input", 0, "Net_0", 0, 0),
        ("input", 0, "Two_1", 0, 0),
        ("output", 0, "Two_1", 0, 0),
        ("output", 0, "Two_1", 0, 1),
    ]
    shown = dict(zip(keys(seen), (event[-1] for event in seen.seen), strict=True))
    assert shown["output gradient", 0, "Net_0", 0, 0].item() == 1.0
    assert shown["output", 0, "Two_1", 0, 1].shape == (3,), "an output that nobody reads"
    assert ("output gradient", 0, "Two_1", 0, 1) not in shown
    first, second = (shown["output", 0, "Linear_2", call, 0] for call in (0, 1))
    torch.testing.assert_close(module.again(first), second)
    torch.testing.assert_close(shown["point", 0, "middle", 0, 0], second)
    torch.testing.assert_close(shown["point gradient", 0, "middle", 0, 0], second / 6)
    torch.testing.assert_close(shown["output gradient", 0, "Linear_2", 0, 0], second / 6 @ module.again.weight)


def test_subscribers_are_called_in_order_and_within_their_steps():
    seen = []
    first, second = Recorder(1, 3, seen=seen), Recorder(2, seen=seen)
    module = torch.nn.Linear(4, 4)
    SubscriberManager().subscribe(module, [first, second])
    for _ in range(4):
        module(torch.ones(1, 4))
    steps = [event[1] for event in seen if event[0] == "output"]
    assert steps == [1, 2, 2, 3]


def test_limits_hold_in_the_graph():
    seen = Recorder(1, 2)
    wrapped, _ = subscribed(SubscriberManager(), Net(), "after", seen)
    train(wrapped, steps=3)
    assert {event[1] for event in seen.seen} == {1} and "output gradient" in {event[0] for event in seen.seen}


def test_a_backward_belongs_to_the_step_of_its_forward():
    for wrap in (lambda m: m, ORTModule):
        seen, module = Recorder(), wrap(Net())
        SubscriberManager().subscribe(module, [seen])
        losses = [module(torch.ones(2, 4)) for _ in range(2)]
        for loss in losses:
            loss.backward()
        steps = [event[1] for event in seen.seen if event[:1] + event[2:3] == ("output gradient", "Two_1")]
        assert steps == [0, 1]


def test_steps_are_counted_where_only_a_part_is_subscribed():
    seen, module = Recorder(), torch.nn.Sequential(Net())
    subscription = SubscriberManager().subscribe(module[0], [seen])
    train(ORTModule(module), steps=3)
    assert subscription.states.global_states.execution_step == 3
    assert {event[1] for event in seen.seen if event[0] == "output gradient"} == {0, 1, 2}


def test_after_unsubscribe_nothing_is_seen_and_the_graph_has_no_probes():
    seen = Recorder()
    wrapped, subscription = subscribed(SubscriberManager(), Net(), "after", seen)
    train(wrapped)
    assert "onnxtrain::probe" in wrapped.graph()
    subscription.unsubscribe()
    seen.seen.clear()
    train(wrapped)
    assert not seen.seen and "onnxtrain::probe" not in wrapped.graph(), wrapped.explain()


def test_a_subscription_ends_with_its_module(manager):
    module, x = Net(), torch.ones(2)
    subscription = manager.subscribe(module, [Recorder()])
    train(module)
    assert manager.subscriptions and inspect_activation("alive", x) is not x
    del module
    gc.collect()
    assert not subscription.is_active and not manager.subscriptions and inspect_activation("gone", x) is x


def test_what_has_ended_is_not_kept_by_its_module():
    module = Net()
    subscription = SubscriberManager().subscribe(module, [Recorder()])
    subscription.unsubscribe()
    ended = weakref.ref(subscription)
    del subscription
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_not_subscribed(copied):
    seen, module = Recorder(), Net()
    subscription = SubscriberManager().subscribe(module, [seen])
    train(copied(module))
    assert not seen.seen and subscription.states.global_states.execution_step == 0


def test_a_checkpoint_shows_each_tensor_once():
    for reentrant in (False, True):
        seen, module = Recorder(), Net()
        SubscriberManager().subscribe(module, [seen])
        x = torch.ones(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(module.first, x, use_reentrant=reentrant)[0].sum().backward()
        assert len(set(keys(seen))) == len(keys(seen)) and {event[3] for event in seen.seen} == {0}
        assert {event[0] for event in seen.seen} == {"input", "output", "output gradient", "input gradient"}


@pytest.mark.parametrize("verify", [False, True])
def test_a_forward_that_runs_again_is_not_seen_again(manager, verify):
    """The first backward through an output that was not expected to get one runs the forward pass a second time."""

    class LossAndMore(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = inspect_activation("y", self.layer(x))
            return y.mean(), y

    seen, module = Recorder(), ORTModule(LossAndMore(), options=Options(verify=verify))
    manager.subscribe(module, [seen])
    module(torch.ones(2, 4))[1].sum().backward()
    assert len(set(keys(seen))) == len(keys(seen))
    assert {("point", 0, "y", 0, 0), ("point gradient", 0, "y", 0, 0)} < set(keys(seen))


def test_module_methods_change_arguments_and_outputs():
    class Doubles(SubscriberBase):
        def pre_forward_module_apply_impl(self, states, module, args, kwargs):
            return tuple(2 * a for a in args), kwargs

        def post_forward_outmost_module_apply_impl(self, states, module, args, outputs):
            return args, outputs + 1

    module = torch.nn.Sequential(torch.nn.Identity())
    SubscriberManager().subscribe(module, [Doubles()])
    x = torch.ones(2, 4)
    torch.testing.assert_close(module(x), 4 * x + 1)
    torch.testing.assert_close(ORTModule(module)(x), 4 * x + 1)


def test_module_methods_with_limits_are_refused_in_a_graph():
    class Limited(SubscriberBase):
        def pre_forward_module_apply_impl(self, states, module, args, kwargs):
            return args, kwargs

    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    SubscriberManager().subscribe(module, [Limited(1)])
    assert module(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(HookError, match="some steps only"):
        ORTModule(module)(torch.ones(1, 4))


def test_tensor_methods_may_not_change_values():
    class Changes(SubscriberBase):
        def post_forward_tensor_apply_impl(self, states, module, index, tensor):
            return tensor * 2

    module = torch.nn.Linear(4, 4)
    SubscriberManager().subscribe(module, [Changes()])
    with pytest.raises(HookError, match="post_forward_tensor_apply returned another tensor"):
        module(torch.ones(1, 4))


def test_what_cannot_be_subscribed():
    with pytest.raises(HookError, match="needs a torch"):
        SubscriberManager().subscribe(torch.relu, [])
    with pytest.raises(HookError, match="object is no subscriber"):
        SubscriberManager().subscribe(torch.nn.Linear(1, 1), [object()])


def test_onnxruntime_says_that_it_cannot():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    SubscriberManager().subscribe(module, [Recorder()])
    with pytest.raises(BackendError, match=r"onnxtrain::probe(.|\n)*backend='torch'"):
        ORTModule(module, options=Options(backend="onnxruntime"))(torch.ones(1, 4))


def test_inspect_activation_costs_nothing_without_subscribers():
    x = torch.ones(2)
    assert inspect_activation("x", x) is x


def test_second_derivatives_pass_a_probe(manager):
    class Square(torch.nn.Module):
        def forward(self, x):
            return inspect_activation("square", x**3)

    module, x = Square(), torch.tensor(2.0, requires_grad=True)
    manager.subscribe(module, [Recorder()])
    (first,) = torch.autograd.grad(module(x), x, create_graph=True)
    assert torch.autograd.grad(first, x)[0].item() == 12.0
