"""One step of a wrapped module beside the same step of the module itself, in eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from onnxtrain import Options, ORTModule
from onnxtrain.engine.bound import BoundGraph, Chosen

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
NOISE = 1e-5  # gradients this far below the largest are rounding noise in eager too
ZERO = 1e-8  # this far below the largest a gradient is 0 (the bias of a key; eager's softmax is always float32)
EPSILON = 5e-7  # of the largest: rounding errors of the terms that a gradient is the sum of (float32 keeps 1.2e-7)


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.function(*operands)


class Applied(torch.nn.Module):
    """A function of an input and one weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self._function = torch.nn.Parameter(torch.ones(1)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x * self.weight)


class InTurn(torch.nn.Module):
    """Layers, each called with what the one before gives."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def pair(module: torch.nn.Module, **options: Any) -> tuple[ORTModule, torch.nn.Module]:
    """The module wrapped, and a copy of it for eager PyTorch."""
    return ORTModule(module, options=Options(**options)), copy.deepcopy(module)


def captures(wrapped: ORTModule) -> int:
    """How many graphs were captured."""
    sessions = wrapped.__dict__["_ort_sessions"]
    return 0 if sessions is None else len(sessions.entries)


@contextlib.contextmanager
def choices() -> Iterator[list[Chosen]]:
    """The graphs that were chosen inside the block, with the rows that they compute."""
    found, choose = [], BoundGraph.choose

    def noted(self: BoundGraph, *args: Any) -> Chosen:
        found.append(choose(self, *args))
        return found[-1]

    with mock.patch.object(BoundGraph, "choose", noted):
        yield found


def default_loss(output: Any) -> torch.Tensor:
    """The sum of squares of everything differentiable."""
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.double().square().sum() for t in leaves]).sum()


def steps_with_state(
    state: Callable[[], list[torch.Tensor]], called: torch.nn.Module, count: int
) -> list[list[torch.Tensor]]:
    """What some steps give, in training and not, with the state that there is after each.

    Args:
        state: gives it.
        called: a module of one input of three features, the first of whose outputs is trained.
        count: how many steps.
    """
    torch.manual_seed(1)
    found = []
    for step in range(count):
        called.train(step % 3 != 2)
        x = torch.randn(3 + step % 2, 3, generator=torch.Generator().manual_seed(step)).requires_grad_()
        made = called(x)
        made = made if isinstance(made, tuple) else (made,)
        made[0].square().sum().backward()
        assert x.grad is not None
        found.append([t.detach().clone() for t in (*made, x.grad, *state())])
    return found


def same_step(
    wrapped: ORTModule,
    eager: torch.nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] = default_loss,
    may_be_zeros: bool = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Run both, compare outputs (their types too) and all gradients, those of inputs included; returns the outputs.

    Where eager has no gradient there is none, or it ``may_be_zeros``.
    """
    given = [_own_copy((args, kwargs)) for _ in range(2)]
    outputs, gradients = [], []
    for module, (own_args, own_kwargs) in zip((wrapped, eager), given, strict=True):
        module.zero_grad()
        output = module(*own_args, **own_kwargs)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(output)):
            loss(output).backward()
        outputs.append(output)
        leaves = [t for t in pytree.tree_leaves((own_args, own_kwargs)) if isinstance(t, torch.Tensor) and t.is_leaf]
        gradients.append({n: p.grad for n, p in module.named_parameters()} | dict(enumerate(t.grad for t in leaves)))
    same(*outputs)
    for name, theirs in gradients[1].items():
        ours = gradients[0][name]
        if theirs is None or ours is None:
            is_zeros = may_be_zeros and theirs is None and ours is not None and not ours.any()
            assert ours is theirs or is_zeros, f"gradient of {name}: {ours}, not {theirs}"
        else:
            torch.testing.assert_close(ours, theirs, msg=lambda text, n=name: f"gradient of {n}: {text}", **TOLERANCE)
    return outputs[0], outputs[1]


def same(ours: Any, theirs: Any) -> None:
    """Equal structures of equal types with close tensors."""
    assert type(ours) is type(theirs)
    a, structure = pytree.tree_flatten(ours)
    b, expected = pytree.tree_flatten(theirs)
    assert structure == expected
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y) or isinstance(y, torch.nn.Parameter)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.requires_grad == y.requires_grad
            torch.testing.assert_close(x, y, **TOLERANCE)
        else:
            assert x == y


def check_losses(ours: float, eager: float, exact: float) -> None:
    """A loss close to eager's, and no farther than twice its distance from the loss in double precision."""
    assert abs(ours - eager) <= 1e-4 * abs(eager)
    assert abs(ours - exact) <= 2 * abs(eager - exact) + 1e-6 * abs(exact)


def check_gradients(ours: dict, eager: dict, exact: dict) -> None:
    """Gradients of parameters by name: close to eager's, and about as close to those in double precision."""
    assert list(ours) == list(eager)
    largest = max(p.grad.abs().max().item() for p in exact.values() if p.grad is not None)
    assert [n for n, p in ours.items() if p.grad is None] == [n for n, p in eager.items() if p.grad is None]
    for name, right in exact.items():
        if right.grad is None:
            continue
        scale = right.grad.abs().max().item() + NOISE * largest
        ours_error = (ours[name].grad.double() - right.grad).abs().max().item()
        if right.grad.abs().max() <= ZERO * largest:
            assert ours_error <= EPSILON * largest, (name, ours_error, largest)
            continue
        eager_error = (eager[name].grad.double() - right.grad).abs().max().item()
        difference = (ours[name].grad - eager[name].grad).abs().max().item()
        assert difference <= 1e-4 * scale, (name, difference, scale)
        noise = 4e-6 * scale + EPSILON * largest
        assert ours_error <= 2 * eager_error + noise, (name, ours_error, eager_error, scale, largest)


def _own_copy(data: Any) -> Any:
    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_() if t.requires_grad else t

    return pytree.tree_map_only(torch.Tensor, copied, data)
