"""Which calls a captured graph can serve: everything that capture looked at, looked at again at every call.

What a graph depends on is read in lists that C code compares: tens of microseconds for a Transformers model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from onnxtrain.capture import (
    OWN,
    Autocast,
    Captured,
    Kind,
    Numbers,
    Schema,
    are_told,
    asks_length,
    attribute,
    attributes_carried,
    attributes_of,
    can_be_counted,
    class_of,
    configurations_of,
    device_types,
    flatten,
    may_change,
    named_parameters,
)
from onnxtrain.ortmodule.unread import Unread
from onnxtrain.ortmodule.values import form_of, is_compared, is_immutable, told_apart, told_by_identity
from onnxtrain.ortmodule.zero_shards import shape_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BLIND = {
    torch.nn.Linear: ("in_features", "out_features"),
    torch.nn.Identity: (),
    torch.nn.ModuleList: (),
    torch.nn.ModuleDict: (),
    torch.nn.Sequential: (),
}  # and their own attributes: nothing depends on them
PARTS = ("dtypes", "constant tensors", "devices", "what is in a list or dict", "the form of its state")
_STAMPS = frozenset(("architectures", "dtype"))  # save_pretrained writes them; dtypes of parameters are compared anyway


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the module, flattened; calls that are equal can share a capture if the sizes fit.

    Args:
        schema: structure of the arguments, and their values where they are not tensors.
        inputs: dtype, rank and device of each tensor.
        state: number of the module's state, see ``Inspector.found``.
        ambient: what torch's own switches say: autocast, default dtype, determinism.
        tensors: the input tensors in order.
    """

    schema: Schema
    inputs: tuple[Hashable, ...]
    state: int
    ambient: Hashable
    tensors: list[torch.Tensor] = dataclasses.field(compare=False, repr=False)

    @property
    def form(self) -> Call:
        """The same without the tensors, to be kept: what is kept with them would hold a batch as long as a graph."""
        return dataclasses.replace(self, tensors=[])

    def is_but_for_state(self, other: Call) -> bool:
        """Whether it differs from another call in the module's state alone, if at all."""
        return dataclasses.replace(self, state=other.state) == other


class _Structure(NamedTuple):
    """What a module is made of: changes of it are rare, and looked for by counts and identities."""

    kinds: Hashable  # class, parameter names and buffer names of each submodule
    modules: tuple[int, ...]
    hooks: Hashable
    shapes: tuple[torch.Size, ...]
    classes: tuple[Hashable, ...]  # of parameters and buffers: shards have the shape of the whole
    labels: tuple[tuple[str, ...], ...]  # names of the attributes that are compared
    ties: tuple[int, ...]  # for each parameter and buffer, the first that is the same tensor


class Found(NamedTuple):
    """What a module is at one time: its structure, the values of its attributes by owner, and ``PARTS``."""

    structure: _Structure
    values: Sequence[Sequence[Any]]
    rest: tuple[Sequence[Any], ...]


class Inspector:
    """Reads of a module and a call what decides which graph serves it.

    Watched are: the submodules and parameters there are; the modes; attributes of modules and of the configuration
    objects they hold, tensors that are no buffers among them; hooks; dtypes and devices. What is in lists and dicts is
    compared where it is read (``contents``).

    Args:
        module: the user's module.
        ignored: names of attributes that are not watched.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str] = ()) -> None:
        self.module, self._ignored = module, frozenset(ignored)
        self._states: dict[Found, int] = {}
        self._last: Found | None = None
        self._told: tuple[tuple[Hashable, ...], ...] = ()  # what was told of its values
        self._state = -1
        self._left: set[tuple[int, str]] = set()
        self._read: set[tuple[type, str]] = set()
        self._unread = Unread()
        self._filled: dict[tuple[int, Any], tuple[Any, bool]] = {}  # of lists and dicts of which a call leaves more
        self._flat: dict[tuple[int | str, ...], tuple[Schema, list[str]]] = {}
        self._device_types = device_types()
        self._may_move = len(self._device_types) > 1
        self._watch()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Numbers) -> Call:
        """Flatten a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            numbers: for a structure, the positions of numbers that travel as tensors.

        Raises:
            UnsupportedDataError: an input has a type that a graph cannot take.
        """
        known = self._flat.get((len(args), *kwargs))
        if known is not None and all(map(torch.is_tensor, (*args, *kwargs.values()))):
            schema, order = known
            tensors = [*args, *[kwargs[name] for name in order]]
        else:
            tensors, schema = self._flatten(args, kwargs, numbers)
        inputs = tuple([(t.dtype, t.dim(), t.device) for t in tensors])
        return Call(schema, inputs, self.state(), self._ambient(), tensors)

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Numbers
    ) -> tuple[list[torch.Tensor], Schema]:
        """Flatten a call of any structure; one of tensors alone is remembered, it comes at every step."""
        given = self.ordered(kwargs)
        tensors, schema = flatten((args, given), numbers=numbers)
        if all(map(torch.is_tensor, (*args, *kwargs.values()))):
            self._flat[(len(args), *kwargs)] = schema, list(given)
        return tensors, schema

    def ordered(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments in an order of ours; after them, as they come, those of which the module sees the order."""
        forward = self.module.forward
        named = named_parameters(getattr(forward, "__func__", forward))
        return {n: kwargs[n] for n in (*sorted(named.intersection(kwargs)), *(n for n in kwargs if n not in named))}

    def state(self) -> int:
        """A number for the module's state: the same whenever the module is the same again."""
        if (
            self._hook_count != RemovableHandle.next_id
            or self._children != self._known_children
            or any(self._empty)
            or list(map(len, self._sized)) != self._sizes
            or not all(map(operator.le, self._unread_names, self._unread_tables))
            or not _same(self._tables, self._known_tables)
        ):
            self._watch()
        try:
            found = self._found()
        except KeyError:  # one attribute is gone, and there is another
            self._watch()
            found = self._found()
        if not _are_the_same(found, self._last):
            if self._last is not None and _has_other_parts(found, self._last):
                self._watch()
                found = self._found()
            told = _told(found, self._last, self._told, self._apart)
            frozen = found._replace(values=told, rest=tuple(map(tuple, found.rest)))
            self._last, self._told, self._state = found, told, self._states.setdefault(frozen, len(self._states))
        return self._state

    def _found(self) -> Found:
        """What the module is now."""
        types = [p.dtype for p in self._owned]
        rest = types, self._tensors(), self._devices(), self._content(), self._forms()
        return Found(self._structure, [read() for read in self._reads], rest)

    def _tensors(self) -> list[Hashable]:
        """Tensors of attributes, which graphs read: which ones, and of what form."""
        held = [t for t in (read() for read in self._constants) if isinstance(t, torch.Tensor)]
        return list(map(told_by_identity, held))

    def _content(self) -> list[Hashable]:
        """What a call may ask of what it extends: whether there is something in a list, or how much, or the keys."""
        found = [(attribute(owner, name), is_asked) for (_, name), (owner, is_asked) in self._filled.items()]
        return [(type(x), tuple(x) if isinstance(x, dict) else _length(x, is_asked)) for x, is_asked in found]

    def _forms(self) -> list[Hashable]:
        """What state is but for its content, which is an input of graphs."""
        return [form_of(attribute(owner, name), self._own) for (_, name), owner in self._carried.items()]

    def _devices(self) -> list[torch.device]:
        return list({p.device for p in self._owned}) if self._may_move else []

    def _ambient(self) -> Hashable:
        autocast = [Autocast.current(t) for t in self._device_types if torch.is_autocast_enabled(t)]
        return tuple(autocast), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    def _watch(self) -> None:
        """Look the module through: what is there to be compared at every call."""
        modules = [m.__dict__.get("_wrapped", m) for m in self.module.modules()]  # an ORTModule stands for its module
        tables = [m.__dict__ for m in modules]
        self._children = [t["_modules"] for t in tables if t["_modules"]]
        self._known_children = [dict(t) for t in self._children]
        self._tables = [t[kind] for t in tables for kind in ("_parameters", "_buffers") if t[kind]]
        self._known_tables = [dict(t) for t in self._tables]
        self._empty = [t[kind] for t in tables for kind in ("_modules", "_parameters", "_buffers") if not t[kind]]
        self._owned = [p for t in self._tables for p in t.values() if p is not None]
        owners = [m for m in modules if not _is_blind(m)]
        hooks = [t[name] for t in tables[1:] for name in _HOOKS]  # the root's own run outside the graph
        self._carried = attributes_carried(self.module)
        self._sets_tensors = not all(can_be_counted(attribute(owner, n)) for (_, n), owner in self._carried.items())
        settings = configurations_of(modules, self._is_left_out)
        self._sized = [*tables, *map(_table_of, settings), *(h for h in hooks if h)]
        self._sizes = list(map(len, self._sized))
        self._hook_count = RemovableHandle.next_id  # torch counts every hook that is registered anywhere
        watched = [*owners, *settings]
        self._own = {id(t) for t in self._owned} if self._carried else frozenset()
        held = [(w, n) for w in (*modules, *settings) for n, v in attributes_of(w).items() if _is_kept(n, v)]
        held = [(w, n) for w, n in held if not (self._is_only_left(w, n) or (id(w), n) in self._carried)]
        held = [(w, n) for w, n in held if not self._is_unread(w, n)]
        self._constants = [functools.partial(attribute, w, n) for w, n in held]
        labels = [tuple(n for n, v in attributes_of(w).items() if self._is_watched(w, n, v)) for w in watched]
        self._reads = [_reader(w, n) for n, w in zip(labels, watched, strict=True) if n]
        self._apart = frozenset(map(id, settings))  # they are told by what they hold, each of which is compared
        self._labels, self._owners = [n for n in labels if n], [w for n, w in zip(labels, watched, strict=True) if n]
        kinds = tuple((type(m), tuple(m._parameters), tuple(m._buffers)) for m in modules)
        left = self._left - self._carried.keys()
        kinds += tuple(n for w in watched for n, v in attributes_of(w).items() if (id(w), n) in left and v is not None)
        unread = self._unread.among(watched)
        kinds += tuple(unread)  # a graph may ask whether they are there
        pairs = [(frozenset(names), _table_of(w).keys()) for names, w in zip(unread, watched, strict=True) if names]
        self._unread_names, self._unread_tables = [names for names, _ in pairs], [keys for _, keys in pairs]
        live = tuple(tuple(n for n, hook in h.items() if not getattr(hook, "is_over", False)) for h in hooks if h)
        shapes, classes = tuple(map(shape_of, self._owned)), tuple(map(class_of, self._owned))
        self._structure = _Structure(
            kinds, tuple(map(id, modules)), live, shapes, classes, tuple(self._labels), _ties(self._owned)
        )

    def leaves(self, captured: Captured) -> None:
        """A graph sets attributes at every call: which tensors or numbers they are is no longer watched, only whether.

        Unless a graph reads them.
        """
        self._read |= captured.read
        self._unread.learn(captured, self.module)
        for place in captured.left:
            owner = place.owner(self.module)
            if place.kind is Kind.SET:
                self._left.add((id(owner), place.name))
            elif place.kind in (Kind.UPDATE, Kind.EXTEND):
                part = self.module.get_submodule(place.path)
                is_asked = any(asks_length(x, place.attribute) for x in (owner, part, self.module))
                if is_asked or place.kind is Kind.UPDATE or not attribute(owner, place.name):
                    self._filled[id(owner), place.name] = owner, is_asked
        self._watch()

    def look_again(self) -> None:
        """What is compared is another from now on: a number of an attribute is an input of graphs, or no longer."""
        self._watch()

    def _is_watched(self, owner: Any, name: str, value: Any) -> bool:
        """Whether an attribute of a module or of a configuration is compared."""
        is_another_matter = name in self._ignored or name in _stamps(owner) or self._is_unread(owner, name)
        if name in OWN or is_another_matter or not is_compared(value):
            return False
        return not ((id(owner), name) in self._carried or (may_change(value) and self._is_only_left(owner, name)))

    def _is_unread(self, owner: Any, name: str) -> bool:
        """Whether no graph reads an attribute, and what is put there can be no part of state that graphs set anew."""
        return not self._sets_tensors and self._unread.holds(owner, name)

    def _is_left_out(self, owner: Any, name: str) -> bool:
        """Whether what an attribute has is not looked at: no graph reads it, or, by other ways, what is in it."""
        return self._is_unread(owner, name) and not are_told(attribute(owner, name))

    def _is_only_left(self, owner: Any, name: str) -> bool:
        """Whether graphs set an attribute and none of them reads it."""
        return (id(owner), name) in self._left and (type(owner), name) not in self._read

    def found(self, state: int) -> Found:
        """What the module was in a state."""
        return next(found for found, number in self._states.items() if number == state)

    def attributes(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """The owners of attributes that are compared, each with their names, in the order of ``Found.values``."""
        return zip(self._owners, self._labels, strict=True)


def _are_the_same(found: Found, known: Found | None) -> bool:
    """Whether nothing is another: of attributes not even one that is equal."""
    if known is None or found.structure is not known.structure:
        return False
    chain = itertools.chain.from_iterable
    return all(map(operator.is_, chain(found.values), chain(known.values))) and found.rest == known.rest


def _told(
    found: Found, known: Found | None, told: tuple[tuple[Hashable, ...], ...], apart: Collection[int]
) -> tuple[tuple[Hashable, ...], ...]:
    """What tells the values of attributes apart, by owner; of an owner that is as it was, what was told of it."""
    if known is None or found.structure is not known.structure:
        return tuple([tuple([_told_value(x, apart) for x in values]) for values in found.values])
    triples = zip(found.values, known.values, told, strict=True)
    changed = ((t, a if not all(map(operator.is_, a, b)) else None) for a, b, t in triples)
    return tuple([t if a is None else tuple([_told_value(x, apart) for x in a]) for t, a in changed])


def _told_value(value: Any, apart: Collection[int]) -> Hashable:
    """What tells a value apart; of an object whose attributes are compared its class, if they are all of it."""
    return type(value) if id(value) in apart and dataclasses.is_dataclass(value) else told_apart(value)


def _has_other_parts(found: Found, known: Found) -> bool:
    """Whether something is another that has, or had, more to be watched than itself."""
    if found.structure is not known.structure:
        return False  # it was looked through
    pairs = zip(itertools.chain.from_iterable(found.values), itertools.chain.from_iterable(known.values), strict=True)
    changed = [x for pair in pairs if pair[0] is not pair[1] for x in pair]
    return not all(map(is_immutable, changed)) or len(found.rest[1]) != len(known.rest[1])


def _same(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether lists hold the same; comparing stops at identity, or fails where a tensor or array is another."""
    try:
        return found == known
    except (RuntimeError, ValueError):
        return False


def _length(held: Any, is_asked: bool) -> int | bool:
    """How much is in a list; unless that is asked, whether there is something."""
    return len(held or ()) if is_asked else bool(held)


def _ties(owned: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor, the place of the first that is the same: weights that are tied are one input of a graph."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(owned))


def _is_blind(module: torch.nn.Module) -> bool:
    """Whether a module has no attributes but those of its class, of which nothing depends."""
    own = _BLIND.get(type(module))
    return own is not None and not vars(module).keys() - OWN.union(own, ("training",))


def _table_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object; empty where its class has places for them."""
    return getattr(owner, "__dict__", {})


def _is_kept(name: str, value: Any) -> bool:
    """Whether an attribute is a tensor that is none of torch's own tables'."""
    return isinstance(value, torch.Tensor) and name not in OWN


def _reader(owner: Any, names: tuple[str, ...]) -> Callable[[], Sequence[Any]]:
    """Gives the values of attributes."""
    table = attributes_of(owner)
    if table is not _table_of(owner):
        return lambda: [getattr(owner, name, None) for name in names]
    if len(names) == 1:
        return lambda: (table.get(names[0]),)
    return functools.partial(operator.itemgetter(*names), table)


def _stamps(configuration: Any) -> frozenset[str]:
    """Attributes of a configuration that saving the model sets."""
    return _STAMPS if hasattr(type(configuration), "save_pretrained") else frozenset()
