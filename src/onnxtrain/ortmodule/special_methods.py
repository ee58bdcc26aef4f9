"""Special methods of a wrapped class: Python looks them up on the type, so the wrapper's type has to have them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

_OPERATORS = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_OTHERS = (
    "abs aenter aexit aiter anext await bool bytes ceil complex contains delitem enter eq exit float floor format ge "
    "getitem gt hash index int invert iter le len length_hint lt missing ne neg next pos repr reversed round setitem "
    "str trunc"
)
SPECIAL = frozenset(
    [f"__{kind}{name}__" for name in _OPERATORS.split() for kind in ("", "r", "i")]
    + [f"__{name}__" for name in _OTHERS.split()]
)
_DERIVED: WeakKeyDictionary[type, dict[type, type]] = WeakKeyDictionary()


def class_for(wrapper: type, wrapped: type) -> type:
    """The class of a wrapper of modules of a class: derived from the wrapper's, with the special methods of theirs.

    These are all that the class has beyond those of ``torch.nn.Module``, and no others: an ORTModule of a
    ``Sequential`` has a length, one of a ``Linear`` does not. Its ``forward`` has the signature of theirs.

    Args:
        wrapper: the wrapper's class.
        wrapped: the class of the wrapped module.
    """
    known = _DERIVED.setdefault(wrapped, {})
    if wrapper not in known:
        content: dict[str, Any] = {"__module__": wrapper.__module__, "__qualname__": wrapper.__qualname__}
        content |= {"__doc__": wrapper.__doc__, "forward": _class_forward(wrapped)}
        content |= {name: _forwarded(name, found) for name, found in special_methods(wrapped).items()}
        if "__delitem__" in content:  # a Sequential without an item has another table
            content["_modules"] = property(lambda self: vars(self)["_wrapped"]._modules)
        known[wrapper] = type(wrapper)(wrapper.__name__, (wrapper,), content)
    return known[wrapper]


def special_methods(wrapped: type) -> dict[str, Any]:
    """The special methods that a class of modules has beyond those of ``torch.nn.Module``."""
    classes = [base for base in wrapped.__mro__ if base not in torch.nn.Module.__mro__]
    names = {name for base in classes for name in vars(base) if name in SPECIAL}
    return {name: getattr(wrapped, name) for name in sorted(names)}


def _forwarded(name: str, method: Any) -> Any:
    """A special method of a wrapper that calls the wrapped module's; None where a class has turned it off."""
    if not callable(method):
        return method

    @functools.wraps(method)
    def forward(self: Any, *args: Any) -> Any:
        module = self.__dict__["_wrapped"]
        result = getattr(type(module), name)(module, *args)
        return self if result is module else result

    return forward


def _class_forward(wrapped: type) -> Callable[..., Any]:
    @functools.wraps(inspect.getattr_static(wrapped, "forward"))  # torch.jit's cannot be had of a class
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        module = self.__dict__["_wrapped"]
        if "forward" in vars(module):  # which replaced the class's
            return type(module).forward(module, *args, **kwargs)
        return self._run(*args, **kwargs)

    return forward
