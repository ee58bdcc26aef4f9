"""What a forward pass may read beside its module and its inputs: global names, closures, attributes of classes.

Nothing is run for it: what code mentions is looked up where it would find it, in the functions that it can reach. Of
libraries only plain values are told, switches say: their functions and tables do not change.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onnxtrain.capture.attribute_reads import (
    Attribute,
    are_settings,
    attributes_of,
    configurations,
    items_of,
    owners_of,
)
from onnxtrain.capture.descriptions import PLAIN
from onnxtrain.capture.mentions import (
    OF_ATTRIBUTES,
    OF_CLOSURES,
    OF_GLOBALS,
    mentions_in,
    names_in,
    stores_in,
)
from onnxtrain.capture.source_lines import codes_within, is_foreign, is_librarys, is_users, line_that_changes, lines_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
WITHIN = "what is in "
_OPAQUE = (type, torch.Tensor, torch.nn.Module)  # whose attributes are looked up elsewhere
_WHOLES = frozenset(("__dict__", "__getstate__", "copy", "deepcopy", "dumps", "pickle", "vars"))  # read all attributes
_BY_NAMES = frozenset(("__getattribute__", "attrgetter", "eval", "exec", "getattr", "methodcaller"))  # any
_ADDING = frozenset(("add", "append", "appendleft", "extend", "insert", "put", "put_nowait", "update"))
_OF_NO_CALL = frozenset(  # methods that a forward pass does not lead to, but for the first two where it names the class
    (
        "__init__",
        "__new__",
        "__del__",
        "__deepcopy__",
        "__dir__",
        "__getstate__",
        "__reduce__",
        "__repr__",
        "__setstate__",
    )
)
_Key = tuple[int, str]  # the identity of a table or a cell, and the name there


UNSET: Any = type("Unset", (), {"__slots__": ()})()  # what there is under a name that nobody has set


class Named(NamedTuple):
    """A value that has a name in Python code.

    Args:
        label: what a person would call it.
        read: gives it; None where there is none any longer.
        write: gives the name another value; None where it is a library's, or no one's.
        is_librarys: whether it is one of a library.
        is_unset: whether it is a name that code sets, under which there was nothing; ``read`` gives ``UNSET`` then.
    """

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None
    is_librarys: bool = False
    is_unset: bool = False

    @property
    def name(self) -> str:
        """The name alone."""
        return re.split("[.: ]+", self.label)[-1]


def named_by(module: torch.nn.Module) -> list[Named]:
    """What the code that a module's forward pass can reach mentions.

    Args:
        module: the module.
    """
    return _walk(module).run()


def line_that_writes(module: torch.nn.Module, name: str) -> str:
    """Where code that a module's forward pass can reach sets a name, or something in what it names; empty if nowhere.

    Args:
        module: the module.
        name: a global one, one of a closure, or an attribute.
    """
    walk = _walked(module)
    return line_that_changes(itertools.chain.from_iterable(map(lines_of, walk.functions)), rf"\b{re.escape(name)}\b")


def is_read(module: torch.nn.Module, name: str) -> bool:
    """Whether code that a module's forward pass can reach does more to what a name names than to add to it.

    Args:
        module: the module.
        name: a global one, one of a closure, or an attribute.
    """
    walk = _walked(module)
    paths = [mention.path for code in walk.codes() for mention in mentions_in(code)]
    after = [b for path in paths for a, b in itertools.pairwise((*path, "")) if a == name]
    return not after or not _ADDING.issuperset(after)  # an argument's default is not looked up by its name


def unread(module: torch.nn.Module, found: frozenset[Attribute]) -> frozenset[Attribute]:
    """The attributes of users' classes that a call has not read; none where code may read all of an object at once.

    Args:
        module: the module.
        found: those of which no read was noted.
    """
    if not found:
        return found
    walk = _walked(module)
    if not _BY_NAMES.isdisjoint(itertools.chain.from_iterable(code.co_names for code in walk.codes())):
        walk.see_methods()
        walk.run()
    is_whole = any(not _WHOLES.isdisjoint((*c.co_names, *_texts(c.co_consts))) for c in walk.codes())
    return frozenset() if is_whole else found


def _texts(constants: Sequence[Any]) -> list[str]:
    return [x for x in constants if isinstance(x, str)]


def _walked(module: torch.nn.Module) -> _Walk:
    """A walk that has come to all that a module's forward pass can reach."""
    walk = _walk(module)
    walk.run()
    return walk


def _walk(module: torch.nn.Module) -> _Walk:
    """A walk that begins at what a module's forward pass calls."""
    owners = owners_of(module)
    walk = _Walk(list(map(attributes_of, owners)))
    for owner in owners:
        walk.see(type(owner))
        if isinstance(owner, torch.nn.Module):
            hooks = itertools.chain.from_iterable(vars(owner)[name].values() for name in _HOOKS)
            for code in (vars(owner).get("forward", type(owner).forward), *(() if owner is module else hooks)):
                walk.see(code)
    return walk


class _Walk:
    """Goes through the functions that some code can reach.

    Args:
        attributes: of the objects whose functions may be called.

    Attributes:
        functions: those of users that it has come to.
    """

    def __init__(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        self._objects = attributes
        self.functions: list[types.FunctionType] = []
        self._waiting: list[types.FunctionType] = []
        self._seen: dict[int, Any] = {}  # alive, so that no identity comes again
        self._classes: dict[type, None] = {}
        self._attributes: dict[str, None] = {}  # names of attributes that are mentioned
        self._found: dict[_Key, Named] = {}
        self._stored: dict[str, None] = {}  # names of attributes that are set, of whatever
        self._unset: dict[_Key, Named] = {}

    def codes(self) -> Iterator[types.CodeType]:
        """That of the functions that it has come to, and of those within them."""
        return itertools.chain.from_iterable(codes_within(f.__code__) for f in self.functions)

    def see_methods(self) -> None:
        """All functions of the classes that it has come to may be called."""
        for kind in list(self._classes):
            for value in list(vars(kind).values()):
                self._see_in(value, (*_FUNCTIONS, property, staticmethod, classmethod))

    def run(self) -> list[Named]:
        """What is mentioned in all that can be reached."""
        looked: set[tuple[type, str]] = set()
        while True:
            while self._waiting:
                self._function(self._waiting.pop())
            for table in self._objects:
                for name in self._attributes.keys() & table.keys():
                    self._see_in(table[name], (*_FUNCTIONS, type))
            pairs = [(c, n) for c in self._classes for n in self._attributes if n in vars(c) and (c, n) not in looked]
            if not pairs and not self._waiting:
                for kind, name in itertools.product(self._classes, self._stored):
                    self._sets(kind, name, kind.__qualname__)
                return [*self._found.values(), *self._unset.values()]
            looked.update(pairs)
            for kind, name in pairs:
                write = functools.partial(setattr, kind, name)
                self._name(vars(kind), kind.__module__, f"{kind.__qualname__}.", (name,), write)

    def see(self, value: Any) -> None:
        """Something that may be called, or whose class has what may be."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, type):  # which may be called
            self._see_class(value, () if issubclass(value, torch.nn.Module) else ("__init__", "__new__"))
        elif isinstance(value, types.FunctionType):
            self._waiting.append(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.see(part)
        elif (inner := _within(value)) is not None:
            self.see(inner)
        elif not is_foreign(type(value).__module__):
            self._see_class(type(value))

    def _see_class(self, kind: type, more: Sequence[str] = ()) -> None:
        """A class of which there may be objects; Python calls some of its methods by itself."""
        self._classes.update((c, None) for c in kind.__mro__ if not is_foreign(c.__module__))
        for name, code in itertools.chain.from_iterable(map(_special, kind.__mro__)):
            if name not in _OF_NO_CALL or name in more:
                self.see(code)

    def _see_in(self, value: Any, kinds: tuple[type, ...] = (object,)) -> None:
        """Something that may be called, or a collection of such: a table of functions, say."""
        if isinstance(value, kinds):
            self.see(value)
        for _, held in items_of(value):
            if type(held) not in PLAIN:
                self._see_in(held)

    def _function(self, function: types.FunctionType) -> None:
        """What a function mentions that may run, and those within it."""
        home, code = str(function.__module__), function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for cell in cells.values():
            self.see(_content(cell))  # a decorator's wrapper holds what it wraps
        if is_foreign(home) or not is_users(code.co_filename):
            return
        if is_librarys(home):
            names = names_in
        else:
            names = mentions_in
            self.functions.append(function)
            self._defaults(function, home)
            self._stores(function, cells)
        for kind, path in itertools.chain.from_iterable(map(names, codes_within(code))):
            (name, *rest), table = path, function.__globals__
            self._attributes.update(dict.fromkeys(path[kind not in OF_ATTRIBUTES :]))
            if kind in OF_GLOBALS and name in table:
                self._name(table, home, "", path)
            elif kind in OF_CLOSURES and name in cells and not is_librarys(home):
                read, write = functools.partial(_content, cells[name]), functools.partial(_fill, cells[name])
                self._value((id(cells[name]), name), Named(f"{function.__qualname__}: {name}", read, write), home, rest)

    def _defaults(self, function: types.FunctionType, home: str) -> None:
        """What arguments are where a call does not say: one object for all calls."""
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        given = function.__defaults__ or ()
        held = {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}
        for name, value in held.items():
            if type(value) not in PLAIN:
                read = functools.partial(held.get, name)
                named = Named(f"{function.__qualname__}: {name}", read, None, is_librarys(home))
                self._value((id(function), name), named, home, ())

    def _stores(self, function: types.FunctionType, cells: Mapping[str, types.CellType]) -> None:
        """What a function sets: global names, attributes of what a name names, and of what it does not say."""
        table = function.__globals__
        for kind, (name, *rest) in itertools.chain.from_iterable(map(stores_in, codes_within(function.__code__))):
            if kind == "STORE_GLOBAL":
                self._sets(table, name, "")
            elif not rest:
                self._stored[name] = None
            else:
                owner = _content(cells[name]) if name in cells else table.get(name)
                for step in rest[:-1]:
                    owner = inspect.getattr_static(owner, step, None)
                self._sets(owner, rest[-1], ".".join((name, *rest[:-1])))

    def _sets(self, owner: Any, name: str, label: str) -> None:
        """A name is set, under which there may be nothing: of a user's function, class or module, or a global one."""
        if not isinstance(owner, dict | types.FunctionType | type | types.ModuleType):
            return
        held = owner if isinstance(owner, dict) else vars(owner)
        home = owner.__name__ if isinstance(owner, types.ModuleType) else str(held.get("__module__", ""))
        home = str(getattr(owner, "__module__", home)) if isinstance(owner, types.FunctionType) else home
        if name in held or (not isinstance(owner, dict) and (is_librarys(home) or is_foreign(home))):
            return
        read, write = functools.partial(held.get, name, UNSET), functools.partial(_set, owner, name)
        named = Named(".".join(filter(None, (label, name))), read, write, is_unset=True)
        self._unset.setdefault((id(owner), name), named)

    def _name(
        self,
        table: Mapping[str, Any],
        home: str,
        prefix: str,
        path: Sequence[str],
        write: Callable[[Any], None] | None = None,
    ) -> None:
        """A name of a table is mentioned, and attributes of what it names."""
        name, *rest = path
        if not name.startswith("__") or name == "__call__":
            if is_librarys(home):
                write = None
            elif write is None and isinstance(table, dict):
                write = functools.partial(table.__setitem__, name)
            named = Named(prefix + name, functools.partial(table.get, name), write, is_librarys(home))
            self._value((id(table), name), named, home, rest)

    def _value(self, key: _Key, named: Named, home: str, rest: Sequence[str]) -> None:
        value = named.read()
        self.see(value) if is_librarys(home) else self._see_in(value)
        is_module = isinstance(value, types.ModuleType)
        is_opaque = is_foreign(value.__name__) if is_module else isinstance(value, _OPAQUE)
        inner = {} if is_opaque else getattr(value, "__dict__", {})
        if type(value) in PLAIN if is_librarys(home) else not is_module:
            self._found.setdefault(key, named)
        if rest and rest[0] in inner:
            self._name(inner, value.__name__ if is_module else home, f"{named.label}.", rest)
        elif are_settings(value) and not is_librarys(home):
            for held in configurations([{named.label: value}]):  # code has it as a whole
                read = functools.partial(attributes_of, held)
                self._found.setdefault((id(held), ""), Named(f"{WITHIN}{named.label}", read))


def _special(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods of a user's class that Python calls by itself: ``__getitem__``."""
    if not (is_foreign(kind.__module__) or is_librarys(kind.__module__)):
        for name, value in vars(kind).items():
            if name.startswith("__") and isinstance(value, types.FunctionType):
                yield name, value


def _set(owner: Any, name: str, value: Any) -> None:
    """Set a global name or an attribute; ``UNSET`` takes it away."""
    if value is UNSET:
        owner.pop(name, None) if isinstance(owner, dict) else delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _within(value: Any) -> Any:
    """The function in a method, a property, or what else is made of one."""
    held = (getattr(value, name, None) for name in ("__func__", "fget", "__wrapped__"))
    return next((x for x in held if callable(x)), None)


def _content(cell: types.CellType) -> Any:
    """What a variable of an enclosing function is; None where it is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value
