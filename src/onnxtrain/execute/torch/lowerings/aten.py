"""Any ATen operator by name, and its gradient as torch takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@lowering("ATen", domain=DOMAIN, view=True)
def aten(*inputs: Tensor, operator: str, overload: str, arguments: str, keywords: str, outputs: int = 1) -> Any:
    """Call the operator with its recorded arguments."""
    made = _call(inputs, operator, overload, arguments, keywords)
    return made if outputs == 1 else tuple(made)


@lowering("ATenGrad", domain=DOMAIN)
def aten_grad(
    *operands: Tensor | None, operator: str, overload: str, arguments: str, keywords: str, inputs: int, outputs: int = 1
) -> Any:
    """Run the operator again under autograd and take its vector-Jacobian product."""
    given, dys = operands[:inputs], operands[inputs:]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) if x is not None else None for x in given]
        made = _call(leaves, operator, overload, arguments, keywords)
        results = list(made) if isinstance(made, tuple | list) else [made]
        pairs = [(y, dy) for y, dy in zip(results, dys, strict=False) if dy is not None and y.requires_grad]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        ys, seeds = [y for y, _ in pairs], [dy for _, dy in pairs]
        found = iter(torch.autograd.grad(ys, wanted, seeds, allow_unused=True) if ys else [None] * len(wanted))
    gradients = [next(found) if x is not None and x.requires_grad else None for x in leaves]
    filled = [torch.zeros_like(x) if g is None and x is not None else g for g, x in zip(gradients, given, strict=True)]
    return filled[0] if outputs == 1 else tuple(filled[:outputs])


def _call(inputs: Sequence[Tensor | None], operator: str, overload: str, arguments: str, keywords: str) -> Any:
    called = _overload(operator, overload)
    args = [_decode(a, inputs) for a in json.loads(arguments)]
    args = [_number(a, str(p.type)) for a, p in zip(args, called._schema.arguments, strict=False)]
    kwargs = {k: _decode(a, inputs) for k, a in json.loads(keywords).items()}
    return called(*args, **kwargs)


def _overload(operator: str, overload: str) -> Any:
    namespace, name = operator.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name.split(".")[0]), overload)


def _number(argument: Any, kind: str) -> Any:
    """A size that the graph computes is a tensor; where the operator takes numbers it is made one."""
    return argument.tolist() if isinstance(argument, Tensor) and "Tensor" not in kind else argument


def _decode(argument: Any, inputs: Sequence[Tensor | None]) -> Any:
    if isinstance(argument, list):
        return [_decode(a, inputs) for a in argument]
    if isinstance(argument, dict):
        if "input" in argument:
            return inputs[argument["input"]]
        if "default" in argument:  # what a call of another operator has left out
            operator, overload, position = argument["default"]
            return _overload(operator, overload)._schema.arguments[position].default_value
        return _named(argument["text"])
    return argument


def _named(text: str) -> Any:
    """A dtype, device, layout or memory format from its printed form."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return torch.device(text)
