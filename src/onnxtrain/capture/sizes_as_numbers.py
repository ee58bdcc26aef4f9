"""Sizes are Python's numbers while a module is traced, where torch's symbols are not; and tensors are of their types.

A symbol has another text than the number, is no key, no ``int``, and knows less arithmetic. Where the answer needs the
number itself (a text, a key), the size becomes one, which is a guard; but code that is prepared for sizes which are no
keys (``except TypeError``, as einops) gets them.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import expects, is_between, is_foreign, is_users

KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@contextlib.contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """Within it the user's code, and no other, takes sizes for numbers."""
    texts = [(kind, name, _of_number(kind, name)) for kind in KINDS for name in ("__repr__", "__format__", "__hash__")]
    answers = [(kind, name, _answered(getattr(kind, name))) for kind in (torch.SymInt, torch.SymFloat) for name in _ASK]
    classes = [(kind, "__getattribute__", _attribute) for kind in KINDS]
    with replaced(*texts, *answers, *classes, *_ARITHMETIC), _kinds_of_numbers():
        yield


def _of_number(kind: type, name: str) -> Callable[..., Any]:
    """A special method that answers the user for the number, and others for the symbol."""
    whole = getattr(kind, name)

    def asked(self: Any, *args: Any) -> Any:
        frame = sys._getframe(1)
        is_asked = is_users(frame.f_code.co_filename) and not (name == "__hash__" and expects(frame, TypeError))
        return getattr(KINDS[kind], name)(KINDS[kind](self), *args) if is_asked else whole(self, *args)

    return asked


def _attribute(self: Any, name: str) -> Any:
    """Its class is that of the number where the user asks: ``isinstance`` and ``case int()`` read it too."""
    if name != "__class__":
        return object.__getattribute__(self, name)
    asking = sys._getframe(1)
    while is_between(asking.f_code.co_filename) and asking.f_back is not None:
        asking = asking.f_back
    return _class_of(self, asking) if is_users(asking.f_code.co_filename) else type(self)


def _answered(ask: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison that gives the user True or False, unless a tensor's content decides."""

    def asked(self: Any, other: Any) -> Any:
        answer = ask(self, other)
        is_open = not isinstance(answer, torch.SymBool) or free_unbacked_symbols(answer)
        return answer if is_open or not is_users(sys._getframe(1).f_code.co_filename) else bool(answer)

    return asked


def _divmod(self: Any, other: Any) -> tuple[Any, Any]:
    return self // other, self % other


def _divmod_by(self: Any, other: Any) -> tuple[Any, Any]:
    return other // self, other % self


def _power(self: Any, exponent: Any, modulus: Any = None) -> Any:
    return _POWER(self, exponent) if modulus is None else pow(int(self), int(exponent), int(modulus))


def _rounded(self: Any, digits: int | None = None) -> Any:
    return _ROUND(self) if digits is None else round(float(self), digits)


def _remainder(self: Any, other: Any) -> Any:
    """Of floats as a number: torch takes it for a whole one."""
    is_whole = not isinstance(self, torch.SymFloat) and not isinstance(other, float | torch.SymFloat)
    return _MOD(self, other) if is_whole else float(self) % float(other)


def _remainder_of(self: Any, other: Any) -> Any:
    is_whole = not isinstance(self, torch.SymFloat) and not isinstance(other, float | torch.SymFloat)
    return _MOD_OF(self, other) if is_whole else float(other) % float(self)


def _shift(self: Any, count: Any) -> Any:
    return self * 2**count


def _shift_back(self: Any, count: Any) -> Any:
    return self // 2**count


def _by_bits(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: getattr(int, name)(int(self), int(other))


def _as_array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    return np.asarray(KINDS[type(self)](self), dtype)


_SIZE: Any = torch.SymInt
_POWER, _MOD, _MOD_OF, _ROUND = _SIZE.__pow__, _SIZE.__mod__, _SIZE.__rmod__, torch.SymFloat.__round__
_ASK = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_BITS = ("__and__", "__or__", "__xor__", "__rand__", "__ror__", "__rxor__", "__rlshift__", "__rrshift__")
_ARITHMETIC: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (torch.SymInt, "__divmod__", _divmod),
    (torch.SymInt, "__rdivmod__", _divmod_by),
    (torch.SymInt, "__invert__", lambda self: -self - 1),
    (torch.SymInt, "__pow__", _power),
    (torch.SymInt, "__lshift__", _shift),
    (torch.SymInt, "__rshift__", _shift_back),
    *((torch.SymInt, name, _by_bits(name)) for name in _BITS),
    *((kind, "__mod__", _remainder) for kind in (torch.SymInt, torch.SymFloat)),
    *((kind, "__rmod__", _remainder_of) for kind in (torch.SymInt, torch.SymFloat)),
    (torch.SymFloat, "__round__", _rounded),
    (torch.SymFloat, "is_integer", lambda self: float(self).is_integer()),
    (torch.SymBool, "__float__", lambda self: float(bool(self))),
    (torch.SymBool, "__index__", lambda self: int(bool(self))),
    *((kind, "__array__", _as_array) for kind in KINDS),
)


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) or (type(value) in KINDS and isinstance(KINDS[type(value)](), kinds))


class _Number(type):
    """The class of what stands for ``int`` or ``float``: itself in all but calls with a tensor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = cls.__mro__[1]
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return getattr(torch.Tensor, f"__{kind.__name__}__")(args[0])
        return kind(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return _is_instance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[1]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[1])


# What may stand for ``int`` and ``float`` in a module, by the method that asks a tensor for one.
NUMBERS = {f"__{kind.__name__}__": _Number(kind.__name__, (kind,), {}) for kind in (int, float)}


def _class_of(value: Any, asking: types.FrameType) -> type:
    """The class of a value, or of the number that a size is: what stands for it in the module that asks."""
    found = KINDS.get(type(value), type(value))
    stated = asking.f_globals.get(found.__name__) if found in (int, float) else None
    return stated if isinstance(stated, _Number) else found


class _Kind(type):
    """The class of what stands for ``type``: itself in all but calls with a size, or a tensor without content."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return type(*args, **kwargs)
        if isinstance(args[0], FakeTensor):
            return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else torch.Tensor
        return _class_of(args[0], sys._getframe(1))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


_NAMES = {"isinstance": _is_instance, "type": _Kind("type", (type,), {})}


@contextlib.contextmanager
def _kinds_of_numbers() -> Iterator[None]:
    """In modules that may be the user's a size is an instance of what its number is."""
    modules = [m for n, m in list(sys.modules.items()) if not is_foreign(n)]
    tables = [vars(m) for m in modules if isinstance(m, types.ModuleType)]
    changed = [(table, name) for table in tables for name in _NAMES if name not in table]
    for table, name in changed:
        table[name] = _NAMES[name]
    try:
        yield
    finally:
        for table, name in changed:
            if table.get(name) is _NAMES[name]:
                del table[name]


__all__ = ["KINDS", "NUMBERS", "sizes_as_numbers"]
