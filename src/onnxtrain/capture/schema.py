"""What goes in and out of a module call: nested structures as flat tensors, and back."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import inspect
import re
import types
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from onnxtrain.errors import UnsupportedDataError

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, type, enum.Enum)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that a graph computes
_RECORDS = (
    *(types.SimpleNamespace, argparse.Namespace),
    *(torch.distributions.Distribution, torch.distributions.Transform),
)
_CACHES = "transformers.cache_utils"  # the module whose classes are taken apart: key-value caches and their layers
Keys: TypeAlias = tuple[Any, ...]
Numbers: TypeAlias = Mapping[pytree.TreeSpec, frozenset[int]]  # for a structure, which leaves are numbers as tensors


@dataclasses.dataclass(frozen=True)
class Schema:
    """A nested structure without its tensors; equal schemas can share a graph.

    Args:
        spec: the structure.
        constants: position and value of every leaf that is neither a tensor nor an object.
        objects: position, class and state of every leaf that is an object: a key-value cache, a batch, a distribution.
        computed: positions of leaves that are numbers computed of sizes or read out of tensors; they travel as tensors.
        numbers: positions of leaves that were numbers and are tensors now, so that their value may change.
        tensors: number of tensors in the structure.
        given: positions of leaves that are containers among the call's arguments, and the keys that lead there.
    """

    spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...] = dataclasses.field(compare=False)
    objects: tuple[tuple[int, type, Schema], ...]
    computed: frozenset[int]
    numbers: frozenset[int]
    tensors: int
    given: tuple[tuple[int, Keys], ...] = ()
    told: tuple[tuple[Any, ...], ...] = dataclasses.field(init=False, repr=False)  # 1 is equal to 1.0 and to True

    def __post_init__(self) -> None:
        object.__setattr__(self, "told", tuple([(index, *_told(value)) for index, value in self.constants]))

    def restore(
        self,
        tensors: Sequence[Any],
        find: Callable[[Keys], Any] = lambda keys: None,
        number: Callable[[int, Any], Any] = lambda index, tensor: tensor,
    ) -> Any:
        """The structure with these tensors in it, in order.

        Args:
            tensors: they.
            find: the container among the call's arguments that keys lead to.
            number: what stands where there was a number, of its position and the tensor that it is now.
        """
        if self.is_tensor:
            return tensors[0]
        return self._restore(iter(tensors), find, number)

    @functools.cached_property
    def is_tensor(self) -> bool:
        """Whether the structure is one tensor, and nothing around it."""
        return self.spec.is_leaf() and self.tensors == 1 and not (self.computed or self.numbers or self.objects)

    def _restore(self, tensors: Iterator[Any], find: Callable[[Keys], Any], number: Callable[[int, Any], Any]) -> Any:
        fixed = dict(self.constants) | {index: find(keys) for index, keys in self.given}
        opened = {index: (kind, state) for index, kind, state in self.objects}
        leaves = []
        for index in range(self.spec.num_leaves):
            if index in fixed:
                leaves.append(fixed[index])
            elif index in opened:
                kind, state = opened[index]
                leaves.append(_close(kind, state._restore(tensors, find, number)))
            else:
                tensor = next(tensors)
                if index in self.numbers:
                    tensor = number(index, tensor)
                is_number = index in self.computed and isinstance(tensor, torch.Tensor)
                leaves.append(tensor.item() if is_number else tensor)
        return pytree.tree_unflatten(leaves, self.spec)


def flatten(
    data: Any,
    role: str = "input",
    like: Schema | None = None,
    numbers: Numbers | None = None,
    given: Mapping[int, Keys] | None = None,
) -> tuple[list[torch.Tensor], Schema]:
    """The tensors of a nested structure in order, and the schema that restores it.

    Args:
        data: the structure.
        role: what it is, for the error message.
        like: a schema of the same structure; numbers that are computed there become tensors here.
        numbers: for a structure, the positions of numbers that become tensors.
        given: for the identity of a container among the call's arguments, the keys that lead to it.

    Raises:
        UnsupportedDataError: a leaf is neither a tensor, one of ``CONSTANTS``, nor an object of tensors.
    """
    known = given or {}
    sizes = (torch.Size,) if role == "output" else ()  # which torch takes apart as tuples and puts together as such
    is_apart = (lambda x: isinstance(x, sizes) or id(x) in known) if known or sizes else None
    leaves, spec = pytree.tree_flatten(data, is_apart)
    flat = _Flat(data, role, like, known)
    changing = frozenset(i for i in (numbers or {}).get(spec, ()) if can_be_counted(leaves[i]))
    for index, leaf in enumerate(leaves):
        if index in changing:
            flat.tensors.append(_as_scalar(leaf))
        else:
            flat.add(index, leaf)
    fixed = tuple(flat.constants), tuple(flat.objects)
    return flat.tensors, Schema(spec, *fixed, frozenset(flat.computed), changing, len(flat.tensors), tuple(flat.given))


class _Flat:
    """The leaves of a structure, by what becomes of them.

    Args:
        data: the structure.
        role: what it is, for the error message.
        like: a schema of the same structure.
        known: for the identity of a container among the call's arguments, the keys that lead to it.
    """

    def __init__(self, data: Any, role: str, like: Schema | None, known: Mapping[int, Keys]) -> None:
        self._data, self._role, self._known = data, role, known
        self._opened = {} if like is None else {index: state for index, _, state in like.objects}
        self.computed: set[int] = set() if like is None else set(like.computed)
        self.tensors: list[torch.Tensor] = []
        self.constants: list[tuple[int, Any]] = []
        self.objects: list[tuple[int, type, Schema]] = []
        self.given: list[tuple[int, Keys]] = []

    def add(self, index: int, leaf: Any) -> None:
        """Add the leaf at a position.

        Raises:
            UnsupportedDataError: it is neither a tensor, one of ``CONSTANTS``, nor an object of tensors.
        """
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf)
        elif id(leaf) in self._known:
            self.given.append((index, self._known[id(leaf)]))
        elif isinstance(leaf, SYMBOLS) or index in self.computed:
            self.tensors.append(_as_scalar(leaf))
            self.computed.add(index)
        elif isinstance(leaf, CONSTANTS):
            self.constants.append((index, leaf))
        elif (state := _open(leaf)) is not None:
            self._add_object(index, leaf, state)
        else:
            raise unsupported(leaf, self._role, self._data, index)

    def _add_object(self, index: int, leaf: Any, state: dict[str, Any]) -> None:
        try:
            tensors, schema = flatten(state, self._role, self._opened.get(index), given=self._known)
        except RecursionError:  # it holds itself
            raise unsupported(leaf, self._role, self._data, index) from None
        self.tensors += tensors
        self.objects.append((index, type(leaf), schema))


def _told(value: Any) -> tuple[Any, ...]:
    """What tells a constant from others that are equal, and of another kind."""
    return type(value), value.hex() if isinstance(value, float) else value


def can_be_counted(value: Any) -> bool:
    """Whether a value is a number of Python that a graph can have as an input."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _as_scalar(leaf: Any) -> torch.Tensor:
    """A number, or what stands for one, as a tensor without dimensions."""
    if isinstance(leaf, bool | torch.SymBool):
        return torch.scalar_tensor(torch.sym_ite(leaf, 1, 0), dtype=torch.bool)
    is_float = isinstance(leaf, float | torch.SymFloat)
    return torch.scalar_tensor(leaf, dtype=torch.float64 if is_float else torch.int64)


def is_opened(value: Any) -> bool:
    """Whether a value is an object of which the state is taken apart."""
    return _open(value) is not None


def _open(leaf: Any) -> dict[str, Any] | None:
    """The state of an object that is nothing but its attributes, or of a dict of a class of its own."""
    if isinstance(leaf, torch.Size):
        return {"sizes": tuple(leaf)}
    if isinstance(leaf, dict):
        return {"entries": dict(leaf), "attributes": dict(getattr(leaf, "__dict__", {}))}
    if isinstance(leaf, _RECORDS) or type(leaf).__module__ == _CACHES:
        return vars(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        return fields | {n: v for n, v in getattr(leaf, "__dict__", {}).items() if n not in fields and _can_cross(v)}
    if isinstance(leaf, UserDict):
        return {"data": dict(leaf.data)}
    return None


def _can_cross(value: Any) -> bool:
    """Whether a graph can take or return a value."""
    try:
        flatten(value)
    except UnsupportedDataError:
        return False
    return True


def _close(kind: type, state: dict[str, Any]) -> Any:
    """An object of a class with this state, made without its constructor."""
    if issubclass(kind, torch.Size):
        return kind(state["sizes"])
    if issubclass(kind, dict):
        made = kind.__new__(kind)
        dict.update(made, state["entries"])
        if state["attributes"]:
            made.__dict__.update(state["attributes"])
        return made
    made = kind.__new__(kind) if issubclass(kind, types.SimpleNamespace) else object.__new__(kind)
    if hasattr(made, "__dict__"):
        made.__dict__.update(state)
        return made
    for name, value in state.items():
        object.__setattr__(made, name, value)  # slots, of frozen dataclasses too
    return made


def unsupported(leaf: Any, role: str, data: Any, index: int) -> UnsupportedDataError:
    """The error for a leaf that cannot cross the graph's border; it says where in the structure it sits."""
    path = pytree.tree_flatten_with_path(data)[0][index][0]
    place = pytree.keystr(path[1:] if role == "input" else path)
    name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return UnsupportedDataError(
        f"the {role} at {place or 'the top'} is a {name}, which a graph cannot take or return",
        cure="pass tensors, numbers, strings, None, or lists, tuples and dicts of them (a mapping: module(**batch)), "
        "make the class a dataclass, or register it with torch.utils._pytree.register_pytree_node",
    )


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch stands for: a mapping by name, a tuple or list by position, else one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def is_batch(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what is given is a batch, rather than a call: one mapping, from the names of a function's parameters."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return False
    return bool(args[0]) and set(inspect.signature(forward).parameters).issuperset(args[0])


@functools.lru_cache(256)
def named_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters that a function has, ``*args`` and ``**kwargs`` not among them."""
    found = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def input_names(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    numbers: Collection[int] = (),
    taken: Collection[str] = (),
) -> list[str]:
    """A name for every tensor of a call, after the parameter it is bound to: ``input_ids``, ``batch_mask``.

    Args:
        forward: the function that is called.
        args: positional arguments.
        kwargs: keyword arguments.
        numbers: positions of numbers that are tensors.
        taken: names that weights have.
    """
    named = list(_positional(forward, len(args)))
    names: list[str] = []
    for index, (path, leaf) in enumerate(pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]):
        first = named[path[1].idx] if path[0].idx == 0 else str(path[1].key)
        rest = "".join(re.sub(r"\W+", "_", f"_{pytree.keystr((p,))}") for p in path[2:])
        name = re.sub(r"_+", "_", first + rest).strip("_")
        for _ in (leaf,) if index in numbers else flatten(leaf)[0]:
            names.append(_unique(name, {*names, *taken}))
    return names


def _positional(forward: Callable[..., Any], count: int) -> Sequence[str]:
    names: list[str] = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count)]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names + [f"input_{i}" for i in range(len(names), count)]


def _unique(name: str, taken: Collection[str]) -> str:
    if name not in taken:
        return name
    count = 1
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"
