"""An assigned ``forward``: what is put around the graph stays outside, what replaces the forward pass is captured."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


class GraphForward(functools.partial[Any]):
    """``forward`` of an ORTModule: runs the graph; once another forward has replaced it, the one that it stands for.

    Attributes:
        assigned: the forward among the wrapped module's own attributes; None where it is its class's.
        replaced: what it stands for, once it was replaced.
    """

    assigned: Callable[..., Any] | None = None
    replaced: Callable[..., Any] | None = None

    @classmethod
    def of(cls, owner: torch.nn.Module, run: Callable[..., Any], wrapped: torch.nn.Module) -> GraphForward:
        """That of an ORTModule.

        Args:
            owner: the ORTModule.
            run: runs a call of it from its graph.
            wrapped: the wrapped module.
        """
        made = functools.update_wrapper(cls(run, owner), wrapped.forward)
        made.assigned = vars(wrapped).get("forward")
        return made  # type: ignore[return-value]

    @property
    def owner(self) -> torch.nn.Module:
        """The ORTModule."""
        return self.args[0]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a call."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def is_around(value: Any, owner: torch.nn.Module, wrapped: torch.nn.Module) -> bool:
    """Whether a callable is put around the forward of an ORTModule, rather than in its place.

    It is where it says so (``__wrapped__``), and where it holds that forward, unless it is a method of the module: a
    function of the module is a forward of its own, and what it calls is the former one.
    """
    if any(_is_of(made, owner) for made in _declared(value)):
        return True
    if isinstance(value, types.MethodType) and (value.__self__ is owner or value.__self__ is wrapped):
        return False
    return any(_is_of(made, owner) for made in _reached(value))


def bound_to(wrapped: torch.nn.Module, value: Any, owner: torch.nn.Module) -> Any:
    """The callable as the wrapped module's: bound to it where it was bound to the ORTModule."""
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return types.MethodType(value.__func__, wrapped)
    return value


def _is_of(value: Any, owner: torch.nn.Module) -> bool:
    return isinstance(value, GraphForward) and value.owner is owner


def _declared(value: Any) -> Iterator[Any]:
    """A callable, and what it says it is a form of."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        yield value
        names = ("__func__",) if isinstance(value, types.MethodType) else ("__wrapped__", "func")
        value = next((found for name in names if callable(found := getattr(value, name, None))), None)


def _reached(value: Any) -> Iterator[Any]:
    """The callables that a callable holds, directly or through others: in closures, defaults, attributes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | torch.nn.Module):
            continue
        seen.add(id(value))
        yield value
        waiting += [held for held in _held(value) if callable(held)]


def _held(value: Any) -> list[Any]:
    """What a callable holds."""
    if isinstance(value, GraphForward):
        return []
    if isinstance(value, types.MethodType):
        return [value.__func__, *_attributes(value.__self__)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    cells = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
    defaults = [*(getattr(value, "__defaults__", None) or ()), *(getattr(value, "__kwdefaults__", None) or {}).values()]
    return [*cells, *defaults, *_attributes(value)]


def _attributes(value: Any) -> list[Any]:
    return [] if isinstance(value, type | torch.nn.Module) else list(getattr(value, "__dict__", {}).values())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
