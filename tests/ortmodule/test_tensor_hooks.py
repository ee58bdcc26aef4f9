"""Hooks of submodules that only compute on tensors are part of the graph by themselves; others are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import captures, pair, same_step
from transformers import GPT2Config, GPT2LMHeadModel

from onnxtrain import Options, ORTModule, check
from onnxtrain.errors import CaptureError, ModuleError
from onnxtrain.ortmodule.tensor_hooks import is_of_tensors_only


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def each(module: Any, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(item.float() for item in output)
    return sum([output.relu() * n for n in (1, 2)])


def in_place(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    output += args[0].mean()
    return output.clamp_(min=-1.0)


def times(factor: float) -> Callable[..., Any]:
    return lambda module, args, output: output * factor


TAKEN: dict[str, Callable[..., Any]] = {
    "a flag": lambda module, args, output: output.requires_grad_(True),
    "a method": lambda module, args, output: output.sigmoid(),
    "a function": lambda module, args, output: F.gelu(output, approximate="tanh"),
    "a longer name": lambda module, args, output: torch.nn.functional.silu(output).to(torch.float32),
    "structures": each,
    "in place": in_place,
    "its own parameters": lambda module, args, output: output + module.weight.sum() * module.bias,
    "a number that is held": times(3.0),
    "nothing": lambda *args: None,
}


@pytest.mark.parametrize("hook", TAKEN.values(), ids=TAKEN)
def test_hooks_of_tensors_are_part_of_the_graph(hook: Callable[..., Any]) -> None:
    assert is_of_tensors_only(hook, torch.nn.Linear(4, 4))
    wrapped, eager = pair(Net())
    same_step(wrapped, eager, x())
    handles = [m.second.register_forward_hook(hook) for m in (wrapped, eager)]
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 2
    for handle in handles:
        handle.remove()
    same_step(wrapped, eager, x())


def test_so_are_pre_hooks() -> None:
    wrapped, eager = pair(Net())
    for module in (wrapped, eager):
        module.second.register_forward_pre_hook(lambda module, args: (args[0].exp(),))
        module.first.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs}), with_kwargs=True)
    same_step(wrapped, eager, x())


SEEN: list[Any] = []
COUNTS: Counter[str] = Counter()
SCALE = 2.0


def counts(module: Any, args: Any, output: Any) -> None:
    module.calls = 1


def flag(module: Any, args: Any, output: Any) -> None:
    output.requires_grad = True


def stores(module: Any, args: Any, output: Any) -> None:
    COUNTS["calls"] += 1


def global_number(module: Any, args: Any, output: Any) -> None:
    global SCALE
    SCALE = 3.0


def cuts(module: Any, args: Any, output: Any) -> None:
    output[:, 0] = 0


def collects(seen: list[Any] = []) -> Callable[..., Any]:  # noqa: B006
    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal seen
        seen = [*seen, output]

    return hook


def default(module: Any, args: Any, output: Any, seen: list[Any] = []) -> None:  # noqa: B006
    seen += [output]


def weights(module: Any, args: Any, output: Any) -> None:
    module.weight.data.mul_(0.5)


def weights_by_name(module: Any, args: Any, output: Any) -> None:
    weight = module.weight
    weight += output.mean()


def renamed(module: Any, args: Any, output: Any) -> None:
    same = module
    same.half()


def held(tensor: torch.Tensor) -> Callable[..., Any]:
    return lambda module, args, output: output + tensor


REFUSED: dict[str, Callable[..., Any]] = {
    "a list outside": lambda module, args, output: SEEN.append(output),
    "a number outside": lambda module, args, output: output * SCALE,
    "print": lambda module, args, output: print(output.shape),
    "an attribute": counts,
    "an item": stores,
    "an attribute of a tensor": flag,
    "a part of the output": cuts,
    "a global name": global_number,
    "a name of the function around": collects(),
    "a default": default,
    "a tensor that is held": held(torch.ones(4)),
    "the module's weights": weights,
    "the module's weights by a name": weights_by_name,
    "the module by a name": renamed,
    "the module's flags": lambda module, args, output: module.requires_grad_(False),
    "other attributes": lambda module, args, output: output * module.gain,
    "other modules": lambda module, args, output: torch.nn.Tanh()(output),
    "a number of a tensor": lambda module, args, output: output * output.max().item(),
    "a gradient hook": lambda module, args, output: output.register_hook(print),
    "a saved gradient": lambda module, args, output: output.retain_grad(),
    "a function with effects": lambda module, args, output: torch.manual_seed(0),
    "an import": lambda module, args, output: __import__("os"),
    "an object": Counter,
    "any arguments": lambda *args: args[0].half(),
    "a generator": lambda module, args, output: (yield output),
}


@pytest.mark.parametrize("hook", REFUSED.values(), ids=REFUSED)
def test_other_hooks_are_named(hook: Callable[..., Any]) -> None:
    assert not is_of_tensors_only(hook, torch.nn.Linear(4, 4))
    wrapped = ORTModule(Net())
    wrapped.second.register_forward_hook(hook)
    with pytest.raises(ModuleError, match="submodule second has a forward hook") as raised:
        wrapped(x())
    assert "hooks='trace'" in raised.value.cure
    assert not check(wrapped, x())


def test_the_policies() -> None:
    for policy, hook, fits in (
        ("error", TAKEN["a method"], False),
        ("auto", TAKEN["a method"], True),
        ("auto", held(torch.ones(4)), False),
        ("trace", held(torch.ones(4)), True),
    ):
        wrapped = ORTModule(Net(), options=Options(hooks=policy))
        wrapped.second.register_forward_hook(hook)
        assert bool(check(wrapped, x())) is fits, policy


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_input_gradients(frozen: bool, reentrant: bool) -> None:
    """As Transformers and PEFT prepare a model for gradient checkpointing."""
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes))
    wrapped, eager = pair(model.train(), lazy_outputs=False)
    for module in (wrapped, eager):
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        module.enable_input_require_grads()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not frozen or "attn.c_proj" in name)
    for _ in range(2):
        ids = torch.randint(50, (3, 8))
        same_step(wrapped, eager, input_ids=ids, labels=ids, loss=lambda output: output.loss)
    assert captures(wrapped) == 1
    wrapped.disable_input_require_grads()


class Hooked(torch.nn.Module):
    """Registers hooks of gradients."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.how = torch.nn.Linear(4, 4), how
        self.seen: list[torch.Tensor] = []

    def keep(self, gradient: torch.Tensor) -> None:
        self.seen.append(gradient.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if "used before" in self.how:
            y = y[:, :2] if "a view" in self.how else y
            x = y.exp() * y.shape[0]
            if self.how == "used before, and changed":
                y[0] *= 2
            elif self.how == "used before, for a gradient":
                (x,) = torch.autograd.grad(x.sum(), y, create_graph=True)
        elif self.how == "of a view":
            y = y[:, :2]
        elif self.how == "of a view without gradients":
            part = y[0]
            with torch.no_grad():
                part.register_hook(lambda g: g * 2)
        elif self.how == "of a view, changed through data":
            part = y[:, :2]
            part.register_hook(self.keep)
            y.data.mul_(2)
            return part.sum()
        elif self.how == "of complex numbers seen in part":
            torch.fft.rfft(y)[0].register_hook(lambda g: g * 2)
        if self.how == "retained":
            y.retain_grad()
        elif self.how == "of an input":
            x.register_hook(lambda g: g * 2)
        elif self.how == "reads the call's":
            mask = x > 0
            y.register_hook(lambda g: g * mask)
        elif y.requires_grad:
            handle = y.register_hook(lambda g: g * 2)
            if self.how == "removed":
                handle.remove()
            y.register_hook(self.keep)
            y.register_hook(lambda g: g + 1)
        if self.how == "written to":
            y += 1
            y[:, 0] *= 3
        return (y.sin() * y).sum() + x.sum()


@pytest.mark.parametrize("how", ["", "of a view", "written to", "used before", "a view, used before"])
def test_hooks_of_gradients_are_called_in_order(how: str) -> None:
    wrapped, eager = pair(Hooked(how))
    for rows in (5, 3, 1):
        same_step(wrapped, eager, torch.randn(rows, 4, requires_grad=True))
    torch.testing.assert_close(wrapped.seen, eager.seen)
    assert len(eager.seen) == 3


Hook = Callable[[torch.Tensor], torch.Tensor]  # registers hooks, and returns the tensor that has them


def _after(view: Hook, change: Callable[..., object]) -> Callable[..., torch.Tensor]:
    def code(h: torch.Tensor, x: torch.Tensor, hooked: Hook) -> torch.Tensor:
        v = hooked(view(h))
        before = v * 2
        change(h, v, x)
        return (v * h[: len(v), : v.shape[1]]).sum() + before.sum() + v.t().sum()

    return code


HOOKS_OF_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "and the whole is read": _after(lambda h: h[:, :2], lambda h, v, x: None),
    "the whole is changed": _after(lambda h: h[:, :2], lambda h, v, x: h.add_(x)),
    "the view is changed": _after(lambda h: h[:, :2], lambda h, v, x: v.add_(x[:, :2])),
    "a view of it is changed": _after(lambda h: h[:, :2], lambda h, v, x: v.t().add_(x[:, :2].t())),
    "multiplied by itself": _after(lambda h: h[:, :2], lambda h, v, x: h.copy_(v.repeat(1, 2))),
    "changed without gradient": _after(lambda h: h[:, :2], lambda h, v, x: v.detach().mul_(3)),
    "changed twice": _after(lambda h: h[:, :2], lambda h, v, x: (h.add_(1), v.add_(x[:, :2]))),
    "transposed": _after(lambda h: h.t().t(), lambda h, v, x: None),
    "of what a call made": lambda h, x, hooked: hooked(torch.inner(h, x)).sin().sum(),
    "of what a call made, changed": lambda h, x, hooked: hooked(torch.inner(h, x)).add_(1).exp().sum(),
    "of a part, read by strides": lambda h, x, hooked: hooked(h[:, :2]).as_strided((3,), (1,)).sin().sum() + h.sum(),
    "of the whole, a part read by strides": lambda h, x, hooked: hooked(h)[:, :2].as_strided((2,), (1,)).exp().sum(),
    "of a part, and of that": lambda h, x, hooked: hooked(hooked(h[1:])[:, :2]).as_strided((2, 1), (1, 1)).exp().sum(),
    "of two parts": lambda h, x, hooked: (
        torch.cat([hooked(p) * n for n, p in enumerate(h.chunk(2, 1))]).sum() + h.sum()
    ),
    "of the whole, changed and hooked again": lambda h, x, hooked: (hooked(hooked(h).mul_(2)) * x).sum(),
    "changed and hooked again": lambda h, x, hooked: (hooked(hooked(h[:, :2]).mul_(2)) * x[:, :2]).sum() + h.sum(),
    "changed as a part of the whole, and hooked again": _after(
        lambda h: h[:, :2], lambda h, v, x: (h.add_(x), v.register_hook(lambda g: g * 5))
    ),
    "of a view of a view": lambda h, x, hooked: (hooked(hooked(h.view(-1)).view(h.shape)) * h).sum(),
    "of the whole and of a part": lambda h, x, hooked: (hooked(hooked(h)[:, :2]) * x[:, :2]).sum() + h.sum(),
}


@pytest.mark.parametrize("name", HOOKS_OF_VIEWS)
def test_hooks_of_views_see_what_is_computed_from_these(name: str) -> None:
    """Not the gradient of what they are views of, nor of what the memory is changed to; of several, in any order."""
    if name.startswith("changed as a part") and torch.__version__ >= (2, 15):  # type: ignore[operator]
        pytest.skip("PyTorch registers the later hook anew from 2.15 on")

    class Viewed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.seen: list[torch.Tensor] = []

        def hooked(self, v: torch.Tensor) -> torch.Tensor:
            v.register_hook(lambda g: self.seen.append(g.clone()))
            v.register_hook(lambda g: g * 3)
            return v

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return HOOKS_OF_VIEWS[name](self.first(x), x, self.hooked)

    wrapped, eager = pair(Viewed())
    for rows in (5, 3):
        same_step(wrapped, eager, torch.randn(rows, 4))
    ours, theirs = (sorted(m.seen, key=lambda g: g.abs().sum().item()) for m in (wrapped, eager))
    torch.testing.assert_close(ours, theirs)


class Spectrum(torch.nn.Module):
    """Registers hooks of complex gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.fft.rfft(self.first(x))
        squares = h * h
        h.register_hook(lambda g: g * (2 + 1j))
        h.register_hook(lambda g: self.seen.append(g.clone()))
        h.register_hook(lambda g: g.conj())
        return torch.fft.irfft(squares, n=4).sum() + (h.real * x[:, :3]).sum()


def test_hooks_of_complex_gradients() -> None:
    wrapped, eager = pair(Spectrum())
    for rows in (5, 3):
        same_step(wrapped, eager, torch.randn(rows, 4))
    torch.testing.assert_close(wrapped.seen, eager.seen)


Registering = Callable[[torch.nn.Module, torch.Tensor], object]  # given a module and what its first layer gave
_GRAPH = torch.autograd.graph


class Registers(torch.nn.Module):
    """Registers a hook of another kind."""

    def __init__(self, register: Registering) -> None:
        super().__init__()
        self.first, self.register = torch.nn.Linear(4, 4), register

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.register(self, y)
        return y.sin().sum()


def _saving(module: torch.nn.Module, y: torch.Tensor) -> None:
    with _GRAPH.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        y.exp()


OTHER_HOOKS: dict[str, tuple[Registering, str]] = {
    "before a node": (lambda m, y: y.grad_fn.register_prehook(lambda g: (g[0] * 2,)), "hook of a node of autograd"),
    "after a node": (lambda m, y: y.grad_fn.register_hook(lambda g, h: None), "hook of a node of autograd"),
    "of a parameter's node": (
        lambda m, y: y.grad_fn.next_functions[0][0].register_hook(lambda g, h: None),
        "hook of a node of autograd",
    ),
    "of several": (lambda m, y: _GRAPH.register_multi_grad_hook((y, y.exp()), print), "of several tensors at once"),
    "of any": (lambda m, y: _GRAPH.register_multi_grad_hook((y,), print, mode="any"), "of several tensors at once"),
    "of what was added up": (lambda m, y: m.first.bias.register_post_accumulate_grad_hook(print), "was added up"),
    "of what is saved": (_saving, "hooks of what autograd saves"),
}


@pytest.mark.parametrize("name", OTHER_HOOKS)
def test_hooks_that_would_be_dropped_are_refused(name: str) -> None:
    register, said = OTHER_HOOKS[name]
    with pytest.raises(CaptureError, match=said) as caught:
        ORTModule(Registers(register))(torch.randn(3, 4))
    assert __file__ in caught.value.source and caught.value.cure


def test_nodes_of_autograd_are_looked_at_and_what_is_saved_may_be_elsewhere() -> None:
    def look(module: torch.nn.Module, y: torch.Tensor) -> None:
        z = y.exp()
        node: Any = z.grad_fn
        assert isinstance(node, _GRAPH.Node) and node.name() in repr(node) and len(node.next_functions) > 0
        assert node == z.grad_fn and hash(node) == hash(z.grad_fn) and x().grad_fn is None
        with _GRAPH.save_on_cpu():
            y.mul_(2)

    same_step(*pair(Registers(look)), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("used before, and changed", "used and changed before"),
        ("used before, for a gradient", "or differentiated"),
        ("of a view without gradients", "under torch.no_grad"),
        ("of an input", "an input or a parameter"),
        ("reads the call's", "reads a tensor of the forward pass"),
        ("removed", "removes a hook"),
        ("retained", "keep its gradient"),
        ("of a view, changed through data", "a view of which has a hook"),
        ("of complex numbers seen in part", "of a view of complex numbers"),
    ],
)
def test_hooks_of_gradients_that_a_graph_cannot_call_are_refused(how: str, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        ORTModule(Hooked(how))(torch.randn(3, 4, requires_grad=True))
    assert __file__ in caught.value.source and caught.value.cure


def test_hooks_that_the_modules_own_library_registers() -> None:
    """Transformers' hooks for hidden states stay where the first call has put them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2}
    wrapped, eager = pair(GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)))
    ids = torch.randint(50, (3, 9))
    for is_training, asked in ((True, True), (False, True), (True, False), (False, False), (True, True)):
        wrapped.train(is_training), eager.train(is_training)
        found, known = (m(ids, output_hidden_states=asked, use_cache=False) for m in (wrapped, eager))
        torch.testing.assert_close(found.logits, known.logits)
        torch.testing.assert_close(found.hidden_states, known.hidden_states)
