"""Operators of somebody else's that write to their arguments, as operators that return what these write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_OF_TORCH = frozenset(("aten", "prim", "prims"))
_LIBRARIES: list[torch.library.Library] = []  # what they define is there as long as they are
_MADE: set[Any] = set()


@functools.cache
def returning(target: Any, written: Sequence[str], name: str) -> Any:
    """An operator that runs another on copies of what that writes, and returns them after its results.

    Autograd does not see what such an operator writes: the gradient of a copy goes on to what was copied, and to
    nothing else.

    Args:
        target: the other operator.
        written: the names of the arguments that it writes to.
        name: of the operator that is made.

    Returns:
        None for an operator of torch's own, and where what is written may be no tensor, or is given by name alone.
    """
    schema = target._schema
    places = [i for i, a in enumerate(schema.arguments) if a.name in written]
    if target.namespace in _OF_TORCH or not all(_is_tensor(schema.arguments[i]) for i in places):
        return None

    def run(*given: Any, **named: Any) -> Any:
        copied = [x.clone() if i in places else x for i, x in enumerate(given)]
        made = target(*copied, **named)
        results = () if made is None else made if isinstance(made, tuple) else (made,)
        changed = [copied[i] for i in places]
        return (*results, *changed) if results or len(changed) > 1 else changed[0]

    library = torch.library.Library(target.namespace, "FRAGMENT")
    _LIBRARIES.append(library)
    full = f"{target.namespace}::{name}"
    library.define(_declaration(schema, name, len(places)))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        full, _backward(len(schema.returns), places, target), setup_context=_set_up, lib=library
    )
    found = getattr(getattr(torch.ops, target.namespace), name).default
    _MADE.add(found)
    return found


def is_made(target: Any) -> bool:
    """Whether an operator is one that ``returning`` made."""
    return target in _MADE


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) == "Tensor" and not argument.kwarg_only


def _declaration(schema: Any, name: str, count: int) -> str:
    arguments: list[str] = []
    for a in schema.arguments:
        if a.kwarg_only and "*" not in arguments:
            arguments.append("*")
        arguments.append(f"{a.type} {a.name}")
    returns = [str(r.type) for r in schema.returns] + ["Tensor"] * count
    return f"{name}({', '.join(arguments)}) -> ({', '.join(returns)})"


def _set_up(ctx: Any, inputs: Sequence[Any], *_: Any, **__: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.count = len(inputs)


def _backward(results: int, places: Sequence[int], target: Any) -> Any:
    def backward(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        if any(slope is not None for slope in slopes[:results]):
            raise NotImplementedError(f"{target} has no gradient, as no operator has that writes to its arguments")
        gone_on = dict(zip(places, slopes[results:], strict=True))
        return tuple(gone_on.get(i) for i in range(ctx.count))

    return backward
