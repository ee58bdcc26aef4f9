"""Where a forward pass leaves something: on its module, or on an object that the module holds."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from onnxtrain.capture.attribute_reads import Item, attribute, owner_at, slots_of
from onnxtrain.capture.source_lines import codes_within, line_that_changes, lines_of

LEFT = (list, dict, set, collections.deque)  # in which a graph leaves more, and in what is made of them


class Kind(enum.Enum):
    """How something is left.

    An attribute is set to tensors or to a number, to another constant than it had, or to one where there was none; a
    buffer is set, or a parameter to another one of its form; a list or a set is extended, or gets another content;
    entries of a dict are set.
    """

    SET = "set"
    FLIP = "flip"
    MARK = "mark"
    BUFFER = "buffer"
    PARAMETER = "parameter"
    EXTEND = "extend"
    FILL = "fill"
    UPDATE = "update"


LEFT_IN = frozenset((Kind.EXTEND, Kind.FILL, Kind.UPDATE))  # a collection


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is left: the path of a submodule, the name of its attribute, and how.

    Args:
        path: of the submodule.
        name: of the attribute; where it is a collection within one, its place there.
        kind: how it is left.
        steps: that lead from the submodule to an object or a collection that it holds, where the attribute is on that.
    """

    path: str
    name: Any  # a text, or an Item
    kind: Kind
    steps: tuple[str | Item, ...] = ()

    @property
    def label(self) -> str:
        """As the user would write it: ``layers.0.loss``."""
        return ".".join(filter(None, (self.path, *map(str, self.steps), str(self.name)))).replace(".[", "[")

    @property
    def attribute(self) -> str:
        """The name of the attribute, of which it may be within."""
        return next((str(step) for step in (self.name, *reversed(self.steps)) if not isinstance(step, Item)), "")

    def entry(self, key: Any) -> Place:
        """The place of what is in the collection that is here."""
        return Place(self.path, Item(key), Kind.SET, (*self.steps, self.name))

    def owner(self, module: torch.nn.Module) -> Any:
        """The submodule, or the object that it holds."""
        return owner_at(module.get_submodule(self.path), self.steps)

    def content(self, module: torch.nn.Module) -> Any:
        """What is there now."""
        return attribute(self.owner(module), self.name)


def leave(module: torch.nn.Module, places: Iterable[Place], values: Iterable[Any]) -> None:
    """Put on a module what a call of it leaves there."""
    for place, value in zip(places, values, strict=True):
        owner = place.owner(module)
        if place.kind in (Kind.EXTEND, Kind.UPDATE):
            add(attribute(owner, place.name), value)
        elif place.kind is Kind.FILL:
            fill(attribute(owner, place.name), value)
        elif place.kind is Kind.BUFFER:
            owner._buffers[place.name] = value
        elif place.kind is Kind.PARAMETER:
            is_trained = owner._parameters[place.name].requires_grad
            owner._parameters[place.name] = torch.nn.Parameter(value.detach(), is_trained)
        else:
            put(owner, {place.name: value})


def put(owner: Any, attributes: Mapping[Any, Any]) -> None:
    """Set attributes as they stand, whatever the owner's class does where they are set, or what is in a collection."""
    table = getattr(owner, "__dict__", {})
    slots = slots_of(type(owner))
    for name, value in attributes.items():
        if isinstance(name, Item):
            class_of(owner).__setitem__(owner, name.key, value)
        elif name in slots:
            object.__setattr__(owner, name, value)
        else:
            table[name] = value


def class_of(collection: Any) -> Any:
    """Python's own class that a collection is of, whose methods do what a class made of it may do in another way."""
    return next(kind for kind in (collections.OrderedDict, *LEFT) if isinstance(collection, kind))


def content_of(collection: Any) -> Any:
    """What is in a collection, as a dict, a set or a list."""
    kind = class_of(collection)
    if kind is collections.OrderedDict:
        return dict(kind.items(collection))
    return kind.copy(collection) if kind in (dict, set) else list(kind.__iter__(collection))


def holds(collection: Any, content: Any) -> bool:
    """Whether a collection has the very things in it, in this order; nothing is hashed, for sizes cannot be."""
    now = class_of(collection).__iter__(collection)
    if isinstance(collection, set):
        return {*map(id, now)} == {*map(id, content)}
    if isinstance(collection, dict) and list(map(id, dict.values(collection))) != list(map(id, dict.values(content))):
        return False
    return list(map(id, now)) == list(map(id, content))


def fill(collection: Any, content: Any) -> None:
    """Have a collection hold another content; it stays the same object."""
    class_of(collection).clear(collection)
    add(collection, content)


def add(collection: Any, content: Any) -> None:
    """Have a collection hold more, and in the places of a dict something else."""
    kind = class_of(collection)
    if isinstance(collection, dict):
        for key, value in content.items():  # Counter.update adds
            kind.__setitem__(collection, key, value)
    elif kind is set:
        kind.update(collection, content)
    else:
        kind.extend(collection, content)


def take(owner: Any, names: Iterable[str]) -> None:
    """Delete attributes, whatever the owner's class does where they are deleted."""
    for name in names:
        object.__delattr__(owner, name)


def line_that_sets(kind: type, name: str) -> str:
    """Where the code of a class sets an attribute, or changes what is in it; empty where that is not found."""
    return line_that_changes(_code(kind), rf"\.{re.escape(name)}\b")


def asks_length(owner: Any, name: str) -> bool:
    """Whether code of an owner's class that reads an attribute asks for a length, too."""
    functions = [f for kind in type(owner).__mro__ for f in vars(kind).values() if inspect.isfunction(f)]
    codes = (code for function in functions for code in codes_within(function.__code__))
    return any({"len", name} <= {*code.co_names} for code in codes)


def _code(kind: type) -> Iterator[tuple[str, int, str]]:
    """The lines of a class's methods but for its constructor, with their places."""
    methods = [f for n, f in vars(kind).items() if inspect.isfunction(f) and n != "__init__"]
    return itertools.chain.from_iterable(map(lines_of, methods))
