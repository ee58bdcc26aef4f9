"""One step of a wrapped module beside the same step of the module itself, in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain import Options, ORTModule

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def pair(module: torch.nn.Module, **options: Any) -> tuple[ORTModule, torch.nn.Module]:
    """The module wrapped, and a copy of it for eager PyTorch."""
    return ORTModule(module, options=Options(**options)), copy.deepcopy(module)


def captures(wrapped: ORTModule) -> int:
    """How many graphs were captured."""
    sessions = wrapped.__dict__["_sessions"]
    return 0 if sessions is None else len(sessions.entries)


def default_loss(output: Any) -> torch.Tensor:
    """The sum of squares of everything differentiable."""
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.double().square().sum() for t in leaves]).sum()


def same_step(
    wrapped: ORTModule,
    eager: torch.nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] = default_loss,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Run both, compare outputs (their types too) and all gradients, those of inputs included; returns the outputs."""
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
            assert (ours if theirs is None else theirs) is None or not (theirs if ours is None else ours).any(), name
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


def _own_copy(data: Any) -> Any:
    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_() if t.requires_grad else t

    return pytree.tree_map_only(torch.Tensor, copied, data)
