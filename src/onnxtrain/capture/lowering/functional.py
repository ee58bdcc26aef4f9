"""In-place operators, and those that write to an ``out``, as operators that return what these write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.capture.lowering.records import name_of
from onnxtrain.capture.lowering.written_by_others import returning
from onnxtrain.errors import CaptureError

_ops = torch.ops.aten
_NAMED = {"normal_": _ops.normal_functional.default}  # the only one that is not named as the rule says
_CHOSEN = frozenset(("dtype", "layout", "device", "pin_memory"))  # by the caller, where no ``out`` is there to say it
_BESIDE = "_functional"  # how torch names what returns, besides its results, what another operator writes


@functools.cache
def written_by(target: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator writes to."""
    schema = target._schema
    if not schema.is_mutable:
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def is_view_in_place(target: Any) -> bool:
    """Whether an operator changes how a tensor is looked at, not what is in it."""
    return torch.Tag.inplace_view in target.tags


@functools.cache
def is_out(target: Any) -> bool:
    """Whether all that an operator writes to is what its results are to be put in: they may have other sizes."""
    written = [a for a in target._schema.arguments if a.name in written_by(target)]
    return bool(written) and all(a.is_out for a in written)


def functional_of(node: Node, written: Sequence[str]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that returns what a recorded one writes: operator and arguments.

    Raises:
        CaptureError: there is none.
    """
    target: Any = node.target
    found = _functional(target, tuple(written)) or returning(target, tuple(written), f"{name_of(target)}{_BESIDE}")
    if found is None:
        raise CaptureError(
            f"the forward pass calls {target}, which writes to its argument {' and '.join(written)}, and has no other "
            "form",
            node=str(target),
            cure="let the operator return new tensors, or wrap it in a torch.autograd.Function",
        )
    kwargs = {k: v for k, v in node.kwargs.items() if k not in written or not is_out(target)}
    left = target._schema.arguments[len(node.args) :]
    asked = {a.name for a in found._schema.arguments if not a.has_default_value()}
    kwargs |= {a.name: a.default_value for a in left if a.name in asked and a.name not in kwargs and not a.is_out}
    if _CHOSEN & set(_names_of(found)) - set(
        _names_of(target)
    ):  # what makes a tensor makes one like that which is there
        out: Any = node.kwargs[written[0]]
        kwargs |= {"dtype": out.meta["val"].dtype, "device": out.meta["val"].device}
    return found, tuple(node.args), kwargs


def returns_also(target: Any) -> bool:
    """Whether an operator returns, after its results, what another writes to its arguments."""
    return str(target._schema.name).endswith(_BESIDE) and len(target._schema.returns) > 1


@functools.cache
def _functional(target: Any, written: tuple[str, ...]) -> Any:
    namespace, name = target._schema.name.split("::")
    if name in _NAMED:
        return _NAMED[name]
    if is_out(target):
        same = (o for o in _overloads(namespace, name) if _asks_for_the_same(o, target, _CHOSEN))
        return next(same, None)
    if not name.endswith("_") or len(written) > 1:
        return next((o for o in _overloads(namespace, f"{name}{_BESIDE}") if _asks_for_the_same(o, target)), None)
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # __iand__ writes, __and__ returns
    others = _overloads(namespace, plain)
    named = [o for o in others if o._overloadname == target._overloadname and _types_of(o) == _types_of(target)]
    alike = [o for o in others if _asks_for_the_same(o, target)]
    return next(iter([*named, *alike]), None)


def _overloads(namespace: str, name: str) -> list[Any]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _asks_for_the_same(candidate: Any, target: Any, but: frozenset[str] = frozenset()) -> bool:
    """Whether an operator that writes nothing takes the same arguments, but for some that it takes besides."""
    if candidate._schema.is_mutable:
        return False
    besides = but - set(_names_of(target))
    pairs = [(n, t) for n, t in zip(_names_of(candidate), _types_of(candidate), strict=True) if n not in besides]
    return pairs == list(zip(_names_of(target), _types_of(target), strict=True))


def _names_of(target: Any) -> list[str]:
    return [a.name for a in target._schema.arguments if not a.is_out]


def _types_of(target: Any) -> list[str]:
    return [str(a.type) for a in target._schema.arguments if not a.is_out]
