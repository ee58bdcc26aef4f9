"""Which attributes a forward pass reads while it is traced: their classes have descriptors for them meanwhile."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import gc
import inspect
import numbers
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.descriptions import PLAIN
from onnxtrain.capture.replaced import ABSENT, replaced
from onnxtrain.capture.schema import SYMBOLS
from onnxtrain.capture.source_lines import is_foreign, is_librarys

Attribute: TypeAlias = tuple[type, str]
_OWN = frozenset(torch.nn.Module().__dict__)
OWN = _OWN - {"training"}
_COLLECTIONS = (list, dict, set, collections.deque, bytearray, array.array)
_NAMESPACES = ("types", "argparse")  # of Python, whose classes are no one's: what is in them counts as read
_WRAPPERS = frozenset(  # classes of Python that keep a collection in an attribute
    (
        *(collections.UserDict, collections.UserList, collections.ChainMap),
        *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    )
)
_DEPTH = 6  # how deep objects of nobody's library are looked into, and collections in each of them
_DEPTH_OF_LIBRARIES = 3  # how deep those of libraries are, whose inside is their own
_MANY = 1000  # items of a collection
_SIMPLE = frozenset((*PLAIN, torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter, types.FunctionType))


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
        held = [(type(x), n, v) for x in owners for n, v in attributes_of(x).items() if n not in _OWN]
        kinds = {(kind, name) for kind, name, value in held if _is_noted(value)}
        every = kinds | {(kind, name) for kind, name, _ in held if not is_librarys(kind.__module__)}
        self._wanted = {(kind, name) for kind, name in every if can_be_watched(kind, name)}
        self._noted, self._asked = kinds, set[Attribute]()
        self.set: set[tuple[int, str]] = set()
        self.found: set[Attribute] = {(k, n) for k, n in kinds if is_nobodys(k) or n in slots_of(k)}

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
        if (id(owner), name) not in self.set:
            self._asked.add(attribute)  # also where there is none: the class may have one, or another call
            if attribute in self._noted and name in vars(owner):
                self.found.add(attribute)

    def _put(self, name: str, owner: Any) -> None:
        self.set.add((id(owner), name))

    def unread(self) -> frozenset[Attribute]:
        """The attributes that no code has asked for before it set them: of any kind where the class is a user's own.

        Code of a library may read all of an object at once; of an object that was not used it has asked for nothing.
        """
        used = {kind for kind, _ in self._asked}
        return frozenset(a for a in self._wanted - self._asked if a[0] not in used or not is_librarys(a[0].__module__))

    def is_read(self, owner: Any, name: str) -> bool:
        """Whether an attribute was read before it was set."""
        return (type(owner), name) in self.found

    def is_forgotten(self, owner: Any, name: str) -> bool:
        """Whether an attribute was set, and what it was before was not read."""
        return (id(owner), name) in self.set and not self.is_read(owner, name)


def can_be_watched(kind: type, name: str) -> bool:
    """Whether reads of an attribute are noted: it is of no library's class, and no property."""
    is_propertys = hasattr(inspect.getattr_static(kind, name, None), "__set__")
    return not (is_foreign(kind.__module__) or is_propertys)


def are_settings(value: Any) -> bool:
    """Whether a value is an object that has attributes, of a class of no library's."""
    home = type(value).__module__
    is_users = is_nobodys(type(value)) or not (is_foreign(home) or is_librarys(home))
    return is_users and _is_configuration(value)


def is_nobodys(kind: type) -> bool:
    """Whether a class is one of Python's that holds what others put there."""
    return kind.__module__ in _NAMESPACES or kind in _WRAPPERS


def are_told(value: Any) -> bool:
    """Whether every attribute of an object is one whose reads are noted."""
    home = type(value).__module__
    return are_settings(value) and not (is_nobodys(type(value)) or is_foreign(home) or slots_of(type(value)))


def owners_of(module: torch.nn.Module) -> list[Any]:
    """The parts of a module, and the configuration objects that they hold."""
    parts = [m.__dict__.get("_wrapped", m) for m in module.modules()]  # an ORTModule stands for its module
    return [*parts, *configurations_of(parts)]


def is_collection(value: Any) -> bool:
    """Whether a value is one whose content can change while it stays the same object: a layer that is no part, too."""
    if isinstance(value, tuple):
        return any(map(is_collection, value))
    return isinstance(value, (*_COLLECTIONS, torch.nn.Module)) or is_array(value)


def inner_of(value: Any) -> list[Any]:
    """What a method or a partial function is bound to, and the dict that a read-only view of one shows."""
    if isinstance(value, types.MappingProxyType):
        return [held for held in gc.get_referents(value) if isinstance(held, dict)]
    return [getattr(value, name) for name in _bound_to(value)]


def is_scalar(value: Any) -> bool:
    """Whether a value is a number, of Python or of a library, or a truth value."""
    return isinstance(value, int | float | numbers.Number)


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return is_scalar(value) and not isinstance(value, bool)


def may_change(value: Any) -> bool:
    """Whether a call may leave something in a value, or another one in its place."""
    if is_collection(value) or is_scalar(value):
        return True
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(value))


def _is_noted(value: Any) -> bool:
    """Whether reads of a value are told: it may change, or be a function or a constant that a call exchanges."""
    is_elsewhere = isinstance(value, str | torch.nn.Module | type) or _is_configuration(value)
    return not is_elsewhere or may_change(value)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy."""
    return (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")


class Item(NamedTuple):
    """A step from a collection to what it holds."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


class Settings(NamedTuple):
    """An object that a part of a module holds.

    Args:
        path: of the part.
        steps: that lead from the part to the object: names of attributes, and items of collections.
        owner: the object.
        table: its attributes.
    """

    path: str
    steps: tuple[str | Item, ...]
    owner: Any
    table: Mapping[str, Any]


def settings_of(module: torch.nn.Module) -> list[Settings]:
    """The objects with attributes that a module's parts hold, and those that these hold: configurations, each once."""
    parts = ((path, m.__dict__.get("_wrapped", m)) for path, m in module.named_modules())
    return _settings_in([Settings(path, (), m, m.__dict__) for path, m in parts])


def configurations(tables: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The objects with attributes that tables of attributes hold, and those that these hold."""
    return [held.owner for held in _settings_in([Settings("", (), None, table) for table in tables])]


def configurations_of(
    owners: Iterable[Any], is_left_out: Callable[[Any, str], bool] = lambda owner, name: False
) -> list[Any]:
    """The objects with attributes that other ones hold, and those that these hold.

    Args:
        owners: those that hold them.
        is_left_out: whether an attribute of one of them all is passed over, with what only it leads to.
    """
    level = [Settings("", (), owner, attributes_of(owner)) for owner in owners]
    return [held.owner for held in _settings_in(level, is_left_out)]


def _settings_in(
    level: list[Settings], is_left_out: Callable[[Any, str], bool] = lambda owner, name: False
) -> list[Settings]:
    found: dict[int, Settings] = {}
    for depth in range(_DEPTH):
        new: dict[int, Settings] = {}
        for path, steps, owner, table in level:
            for name, value in may_hold(table):
                if is_left_out(owner, name):
                    continue
                for item, held in within(value):
                    is_deep = depth >= _DEPTH_OF_LIBRARIES or len(item) > 1
                    is_known = id(held) in found or id(held) in new
                    if not is_known and (are_settings if is_deep else _is_configuration)(held):
                        new[id(held)] = Settings(path, (*steps, name, *item), held, attributes_of(held))
        found |= new
        level = list(new.values())
    return list(found.values())


def may_hold(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The attributes that can hold something: no plain values, and none that torch's modules have."""
    return [(n, v) for n, v in table.items() if type(v) not in _SIMPLE and n not in OWN]


def items_of(value: Any) -> Iterable[tuple[tuple[Item, ...], Any]]:
    """What is in a list, tuple, queue or dict, with where, and nothing of a large one; what a function is bound to."""
    bound = _bound_to(value)
    if bound:
        return [((Item(name),), getattr(value, name)) for name in bound]
    if not isinstance(value, dict | list | tuple | collections.deque | types.MappingProxyType) or len(value) > _MANY:
        return ()
    if isinstance(value, types.MappingProxyType):
        pairs = value.items()
    else:
        pairs = dict.items(value) if isinstance(value, dict) else enumerate(value)
    return [((Item(key),), held) for key, held in pairs]


def _bound_to(value: Any) -> tuple[str, ...]:
    """The attributes of a method or a partial function that have what its code is given; none of anything else."""
    if isinstance(value, types.MethodType):
        return ("__self__",) if are_settings(value.__self__) else ()
    return ("func", "args", "keywords") if isinstance(value, functools.partial) else ()


def within(value: Any, around: tuple[Item, ...] = ()) -> Iterator[tuple[tuple[Item, ...], Any]]:
    """A value, and what is in collections within it, with where."""
    yield around, value
    for item, held in items_of(value) if len(around) < _DEPTH else ():
        if type(held) not in _SIMPLE:
            yield from within(held, (*around, *item))


def owner_at(part: Any, steps: Iterable[str | Item]) -> Any:
    """The object to which steps lead from a part of a module."""
    for step in steps:
        part = attribute(part, step)
    return part


def attributes_of(owner: Any) -> Mapping[str, Any]:
    """The attributes of an object: its dictionary, or what its class has places for."""
    slots = slots_of(type(owner))
    table = getattr(owner, "__dict__", {})
    return {**{n: getattr(owner, n) for n in slots if hasattr(owner, n)}, **table} if slots else table


def attribute(owner: Any, name: str | Item) -> Any:
    """An attribute as it stands on its owner, or what is in a collection; None where it is gone."""
    if not isinstance(name, Item):
        return attributes_of(owner).get(name)
    if name.key in _bound_to(owner):
        return getattr(owner, name.key)
    is_there = name.key in owner if isinstance(owner, dict) else name.key < len(owner)
    return owner[name.key] if is_there else None


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the places that a class of nobody's library has for attributes (``__slots__``)."""
    if issubclass(kind, tuple) or is_foreign(kind.__module__):
        return ()
    listed = [vars(c).get("__slots__", ()) for c in kind.__mro__]
    names = [n for slots in listed for n in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(n for n in dict.fromkeys(names) if not (n.startswith("__") and n.endswith("__")))


def _is_configuration(value: Any) -> bool:
    if type(value) in _SIMPLE or isinstance(value, (torch.nn.Module, torch.Tensor, type, *SYMBOLS)):
        return False
    if callable(value) and is_foreign(type(value).__module__):  # a function, and what Python makes of one
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))
