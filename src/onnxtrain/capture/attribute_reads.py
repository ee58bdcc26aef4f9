"""Which attributes a forward pass reads while it is traced: their classes have descriptors for them meanwhile."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.replaced import ABSENT, replaced
from onnxtrain.capture.source_lines import is_foreign, is_librarys

Attribute: TypeAlias = tuple[type, str]
_OWN = frozenset(torch.nn.Module().__dict__)
OWN = _OWN - {"training"}
_COLLECTIONS = (list, dict, set, collections.deque)
NAMESPACES = ("types", "argparse")  # of Python, whose classes are no one's: what is in them counts as read
_DEPTH = 3  # how deep configuration objects are looked into


class _Watched:
    """An attribute of which every read is told.

    Args:
        name: of the attribute.
        otherwise: what the class has under this name; ``ABSENT`` where it has nothing.
        tell: is given the owner.
        told: is given an owner whose attribute is set.
        instead: gives what is read, of the owner and the attribute's value.
    """

    def __init__(
        self,
        name: str,
        otherwise: Any,
        tell: Callable[[Any], None],
        told: Callable[[Any], None] | None = None,
        instead: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._name, self._otherwise, self._tell, self._told, self._instead = name, otherwise, tell, told, instead

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is not None:
            self._tell(owner)
            if self._name in vars(owner):
                value = vars(owner)[self._name]
                return value if self._instead is None else self._instead(owner, value)
        if self._otherwise is ABSENT:
            raise AttributeError(self._name)
        return self._otherwise.__get__(owner, kind) if hasattr(self._otherwise, "__get__") else self._otherwise

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value
        if self._told is not None:
            self._told(owner)

    def __delete__(self, owner: Any) -> None:
        del vars(owner)[self._name]


def watched(
    kind: type,
    name: str,
    tell: Callable[[Any], None],
    told: Callable[[Any], None] | None = None,
    instead: Callable[[Any, Any], Any] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Within it every read of an attribute is told, and that it is set.

    Args:
        kind: the class of the owners.
        name: of the attribute.
        tell: is given the owner before the attribute is read.
        told: is given the owner after the attribute is set.
        instead: gives what is read, of the owner and the attribute's value; without it that value.
    """
    otherwise = inspect.getattr_static(kind, name, ABSENT)
    return replaced((kind, name, _Watched(name, otherwise, tell, told, instead)))


class Reads:
    """The attributes of a module, and of the objects that it holds, that are read: collections, numbers and tensors.

    Args:
        module: the module.

    Attributes:
        found: the classes and names of those that are read; not what is only read after the call has set it.
        set: the identities and names of those that are set.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        owners = owners_of(module)
        kinds = {(type(x), n) for x in owners for n, v in vars(x).items() if n not in _OWN and _may_change(v)}
        self._wanted = [(kind, name) for kind, name in kinds if can_be_watched(kind, name)]
        self.set: set[tuple[int, str]] = set()
        self.found: set[Attribute] = {(kind, name) for kind, name in kinds if kind.__module__ in NAMESPACES}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read and set within it."""
        with contextlib.ExitStack() as stack:
            for kind, name in self._wanted:
                read, put = functools.partial(self._read, (kind, name)), functools.partial(self._put, name)
                stack.enter_context(watched(kind, name, read, put))
            yield

    def _read(self, attribute: Attribute, owner: Any) -> None:
        name = attribute[1]
        if (id(owner), name) not in self.set and name in vars(owner) and _may_change(vars(owner)[name]):
            self.found.add(attribute)

    def _put(self, name: str, owner: Any) -> None:
        self.set.add((id(owner), name))

    def is_forgotten(self, owner: Any, name: str) -> bool:
        """Whether an attribute was set, and what it was before was not read."""
        return (id(owner), name) in self.set and (type(owner), name) not in self.found


def can_be_watched(kind: type, name: str) -> bool:
    """Whether reads of an attribute are noted: it is of no library's class, and no property."""
    is_propertys = hasattr(inspect.getattr_static(kind, name, None), "__set__")
    return not (is_foreign(kind.__module__) or is_propertys)


def are_settings(value: Any) -> bool:
    """Whether a value is an object that has attributes, of a class of no library's."""
    home = type(value).__module__
    is_users = home in NAMESPACES or not (is_foreign(home) or is_librarys(home))
    return is_users and _is_configuration(value)


def owners_of(module: torch.nn.Module) -> list[Any]:
    """The parts of a module, and the configuration objects that they hold."""
    parts = [m.__dict__.get("_wrapped", m) for m in module.modules()]  # an ORTModule stands for its module
    return [*parts, *configurations(map(vars, parts))]


def is_collection(value: Any) -> bool:
    """Whether a value is one whose content can change while it stays the same object."""
    if isinstance(value, tuple):
        return any(map(is_collection, value))
    return isinstance(value, _COLLECTIONS) or is_array(value)


def is_scalar(value: Any) -> bool:
    """Whether a value is a number or a truth value."""
    return isinstance(value, int | float)


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return is_scalar(value) and not isinstance(value, bool)


def _may_change(value: Any) -> bool:
    """Whether a call may leave something in a value, or another one in its place."""
    return is_collection(value) or is_scalar(value) or isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy."""
    return (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")


def configurations(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """The objects that modules hold, and those that these hold: configurations.

    Args:
        tables: the attributes of the modules.
    """
    seen: dict[int, Any] = {}
    level = list(tables)
    for _ in range(_DEPTH):
        held = [v for table in level for n, v in table.items() if n not in OWN and _is_configuration(v)]
        level = [vars(v) for v in {id(v): v for v in held}.values() if id(v) not in seen]
        seen |= {id(v): v for v in held}
    return list(seen.values())


def _is_configuration(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | torch.Tensor | type) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)
