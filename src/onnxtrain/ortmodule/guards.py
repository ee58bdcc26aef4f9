"""Which calls a captured graph can serve: everything that capture looked at, looked at again at every call.

What a graph depends on is read in lists that C code compares: tens of microseconds for a Transformers model.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
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
    configurations,
    device_types,
    flatten,
    is_scalar,
    is_trained_leaf,
)
from onnxtrain.ir import shapes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_BLIND = (torch.nn.Linear, torch.nn.Identity, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_PARTS = ("dtypes", "constant tensors", "devices", "what is in a list or dict")
_STAMPS = frozenset(("architectures", "dtype"))  # save_pretrained writes them; dtypes of parameters are compared anyway


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the module, flattened; calls that are equal can share a capture if the sizes fit.

    Args:
        schema: structure of the arguments, and their values where they are not tensors.
        inputs: dtype, rank and device of each tensor.
        state: number of the module's state, see ``Inspector.changes``.
        ambient: what torch's own switches say: autocast, default dtype, determinism.
        tensors: the input tensors in order.
    """

    schema: Schema
    inputs: tuple[Hashable, ...]
    state: int
    ambient: Hashable
    tensors: list[torch.Tensor] = dataclasses.field(compare=False, repr=False)

    def is_but_for_state(self, other: Call) -> bool:
        """Whether it differs from another call in the module's state alone, if at all."""
        return dataclasses.replace(self, state=other.state) == other


class _Structure(NamedTuple):
    """What a module is made of: changes of it are rare, and looked for by counts and identities."""

    kinds: Hashable  # class, parameter names and buffer names of each submodule
    modules: tuple[int, ...]
    hooks: Hashable
    shapes: tuple[torch.Size, ...]
    classes: tuple[type, ...]  # of parameters and buffers: shards have the shape of the whole
    labels: tuple[tuple[str, ...], ...]  # names of the attributes that are compared
    generation: int  # how often an attribute was set that cannot be compared


class Inspector:
    """Reads of a module and a call what decides which graph serves it.

    Watched are: the submodules and parameters there are; the modes; plain attributes of modules and of the
    configuration objects they hold; tensors that are attributes but not buffers; hooks; dtypes and devices.

    Args:
        module: the user's module.
        ignored: names of attributes that are not watched.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str] = ()) -> None:
        self.module, self._ignored = module, frozenset(ignored)
        self._states: dict[Hashable, int] = {}
        self._last: list[Any] = []
        self._state = -1
        self._generation = 0
        self._left: set[tuple[int, str]] = set()
        self._read: set[tuple[type, str]] = set()
        self._filled: list[tuple[dict[str, Any], str]] = []  # lists and dicts of which a call leaves more
        self._flat: dict[tuple[str, ...], tuple[Schema, list[str]]] = {}
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
        known = None if args else self._flat.get(tuple(kwargs))
        if known is not None and all(map(torch.is_tensor, kwargs.values())):
            schema, order = known
            tensors = [kwargs[name] for name in order]
        else:
            tensors, schema = self._flatten(args, kwargs, numbers)
        inputs = tuple([(t.dtype, t.dim(), t.device) for t in tensors])
        return Call(schema, inputs, self.state(), self._ambient(), tensors)

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Numbers
    ) -> tuple[list[torch.Tensor], Schema]:
        """Flatten a call of any structure; a batch that is tensors by name is remembered, it comes at every step."""
        names = sorted(kwargs)
        tensors, schema = flatten((args, {name: kwargs[name] for name in names}), numbers=numbers)
        if not args and all(isinstance(v, torch.Tensor) for v in kwargs.values()):
            self._flat[tuple(kwargs)] = schema, names
        return tensors, schema

    def state(self) -> int:
        """A number for the module's state: the same whenever the module is the same again."""
        if (
            self._hook_count != RemovableHandle.next_id
            or self._children != self._known_children
            or any(self._empty)
            or list(map(len, self._sized)) != self._sizes
            or not _same(self._tables, self._known_tables)
        ):
            self._watch()
        found = self._found()
        if not _same(found, self._last):
            if not all(map(_is_comparable, found[1])):  # an attribute became a list or a tensor
                self._watch()
                found = self._found()
            frozen = tuple(tuple(part) if isinstance(part, list) else part for part in found)
            self._last, self._state = found, self._states.setdefault(frozen, len(self._states))
        return self._state

    def _found(self) -> list[Any]:
        """What the module is now: its structure, then values of attributes and ``_PARTS``."""
        values = [read(table) for read, table in self._reads]
        types = [p.dtype for p in self._owned]
        return [self._structure, values, types, self._tensors(), self._devices(), self._content()]

    def _tensors(self) -> list[Hashable]:
        """Tensors that became constants of the graph: which ones, and how often they were modified."""
        return [(id(t), t._version) for t in (d.get(n) for d, n in self._constants) if isinstance(t, torch.Tensor)]

    def _content(self) -> list[Hashable]:
        """What a call may ask of what it extends: whether there is something in a list, the keys of a dict."""
        found = (table.get(name) for table, name in self._filled)
        return [tuple(held) if isinstance(held, dict) else bool(held) for held in found]

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
        owners = [m for m in modules if type(m) not in _BLIND]
        hooks = [t[name] for t in tables[1:] for name in _HOOKS]  # the root's own run outside the graph
        self._sized = [*map(vars, owners), *(h for h in hooks if h)]
        self._sizes = list(map(len, self._sized))
        self._hook_count = RemovableHandle.next_id  # torch counts every hook that is registered anywhere
        held = [(m, n) for m in modules for n, v in vars(m).items() if isinstance(v, torch.Tensor) and n not in OWN]
        self._constants = [(vars(m), n) for m, n in held if not self._is_only_left(m, n)]
        watched = [*owners, *configurations(tables)]
        labels = [tuple(n for n, v in vars(w).items() if self._is_watched(w, n, v)) for w in watched]
        self._reads = [(operator.itemgetter(*n), vars(w)) for n, w in zip(labels, watched, strict=True) if n]
        self._labels = [n for n in labels if n]
        kinds = tuple((type(m), tuple(m._parameters), tuple(m._buffers)) for m in modules)
        kinds += tuple(n for t in tables for n in t if (id(t), n) in self._left and t[n] is not None)
        live = tuple(tuple(n for n, hook in h.items() if not getattr(hook, "is_over", False)) for h in hooks if h)
        shapes, classes = tuple(p.shape for p in self._owned), tuple(map(_class_of, self._owned))
        self._structure = _Structure(
            kinds, tuple(map(id, modules)), live, shapes, classes, tuple(self._labels), self._generation
        )

    def leaves(self, captured: Captured) -> None:
        """A graph sets attributes at every call: which tensors or numbers they are is no longer watched, only whether.

        Unless a graph reads them.
        """
        self._read |= captured.read
        if not captured.left and not self._left:
            return
        for place in captured.left:
            table = vars(self.module.get_submodule(place.path))
            if place.kind is Kind.SET:
                self._left.add((id(table), place.name))
            elif place.kind is Kind.UPDATE or (place.kind is Kind.EXTEND and not table[place.name]):
                self._filled.append((table, place.name))
        self._watch()

    def touch(self, name: str, value: Any) -> None:
        """An attribute was set whose value cannot be compared: graphs captured before do not serve any longer.

        Parameters are read at every call: FSDP2 sets gathered ones for each step.
        """
        if isinstance(value, torch.nn.Module | torch.nn.Parameter):
            return
        if name not in self._ignored and not _is_comparable(value):
            self._generation += 1
            self._watch()

    def _is_watched(self, owner: Any, name: str, value: Any) -> bool:
        """Whether an attribute of a module or of a configuration is compared."""
        if name in OWN or name in self._ignored or name in _stamps(owner) or not _is_comparable(value):
            return False
        return not (is_scalar(value) and self._is_only_left(owner, name))

    def _is_only_left(self, owner: Any, name: str) -> bool:
        """Whether graphs set an attribute and none of them reads it."""
        return (id(vars(owner)), name) in self._left and (type(owner), name) not in self._read

    def changes(self, first: int, second: int) -> list[str]:
        """What differs between two states of the module, for a person to read."""
        known = {number: frozen for frozen, number in self._states.items()}
        a, b = known[first], known[second]
        assert isinstance(a, tuple) and isinstance(b, tuple)
        if a[0] != b[0]:
            other = [name for name, x, y in zip(_Structure._fields, a[0], b[0], strict=True) if x != y]
            return [f"the module was altered: other {', '.join(other)}"]
        found = [name for name, x, y in zip(_PARTS, a[2:], b[2:], strict=True) if x != y]
        return [f"its {name} changed" for name in found] + list(self._changed_values(a[0].labels, a[1], b[1]))

    @staticmethod
    def _changed_values(labels: Sequence[tuple[str, ...]], old: Sequence[Any], new: Sequence[Any]) -> Iterator[str]:
        told: set[str] = set()
        for names, x, y in zip(labels, old, new, strict=True):
            pairs = [(names[0], x, y)] if len(names) == 1 else zip(names, x, y, strict=True)
            for name, before, after in pairs:
                text = f"attribute {name} was {before!r} and is {after!r}"
                if before != after and text not in told:
                    told.add(text)
                    yield text


def _same(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether lists hold the same; comparing stops at identity, or fails where a tensor or array is another."""
    try:
        return found == known
    except (RuntimeError, ValueError):
        return False


def _is_comparable(value: Any) -> bool:
    """Whether values of this type can be compared and hashed without surprise: plain ones, or by identity."""
    if isinstance(value, tuple):
        return all(map(_is_comparable, value))
    return isinstance(value, _PLAIN) or type(value).__eq__ is object.__eq__


def _stamps(configuration: Any) -> frozenset[str]:
    """Attributes of a configuration that saving the model sets."""
    return _STAMPS if hasattr(configuration, "save_pretrained") else frozenset()


def _class_of(owned: torch.Tensor) -> type:
    """The class of a parameter or buffer; of both a plain tensor's, which ``functional_call`` puts in its place."""
    return torch.Tensor if type(owned) is torch.nn.Parameter else type(owned)


def size_check(captured: Captured, module: torch.nn.Module) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A function that says whether the inputs of a call of a module fit a graph by their sizes.

    Constants are equal, each symbol is the same wherever it stands, none is 0 (of which torch takes no question), and
    every branch on a size goes the same way. What is changed in place is a leaf, or is none, as in the first call.
    """
    graph = captured.graph.model.graph
    constants: list[tuple[int, int, int]] = []
    symbols: dict[str, list[tuple[int, int]]] = {}
    expressions: list[tuple[int, int, shapes.Dim]] = []
    for position, value in enumerate(graph.inputs[: len(captured.graph.signature.user_inputs)]):
        for axis, dim in enumerate(shapes.known_dims(value)):
            if isinstance(dim, int):
                constants.append((position, axis, dim))
            elif dim.value is not None and dim.value.isidentifier():
                symbols.setdefault(dim.value, []).append((position, axis))
            else:
                expressions.append((position, axis, dim))
    groups = [places for places in symbols.values() if len(places) > 1]

    @functools.lru_cache(maxsize=4096)
    def hold(sizes: tuple[torch.Size, ...]) -> bool:
        if any(sizes[p][a] != size for p, a, size in constants):
            return False
        if any(sizes[first[0]][first[1]] == 0 for first, *_ in symbols.values()):
            return False
        for first, *others in groups:
            if any(sizes[p][a] != sizes[first[0]][first[1]] for p, a in others):
                return False
        if expressions and not _expressions_fit(sizes, symbols, expressions):
            return False
        return captured.guards.hold(sizes)

    def fits(tensors: Sequence[torch.Tensor]) -> bool:
        if any(is_trained_leaf(tensors[made.position]) != made.copied.is_leaf for made in captured.rewritten):
            return False
        return hold(tuple([t.shape for t in tensors])) and captured.guards.have_form(tensors, module)

    return fits


def _expressions_fit(
    sizes: Sequence[torch.Size],
    symbols: dict[str, list[tuple[int, int]]],
    expressions: list[tuple[int, int, shapes.Dim]],
) -> bool:
    known = {name: sizes[places[0][0]][places[0][1]] for name, places in symbols.items()}
    for position, axis, dim in expressions:
        assert not isinstance(dim, int), "numbers are compared as they are"
        if set(dim.free_symbols()) <= set(known) and _value(dim, known) != sizes[position][axis]:
            return False
    return True


def _value(dim: shapes.Dim, known: dict[str, int]) -> shapes.Dim | None:
    """A size for these others; None where it divides by one that is 0."""
    try:
        return dim if isinstance(dim, int) else dim.evaluate(known)
    except ZeroDivisionError:
        return None
