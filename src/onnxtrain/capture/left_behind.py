"""What a forward pass leaves on the module: buffers that it assigns, attributes that it sets, lists that it extends.

A graph changes no Python object. So all that a traced call wrote is found and taken back; tensors become outputs of the
graph, and after each call they are put where eager PyTorch leaves them. Marks, other objects and hooks, which are no
matter of a graph, are as after one call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.attribute_reads import Attribute, Reads, can_be_watched, is_number, is_scalar
from onnxtrain.capture.schema import SYMBOLS, flatten
from onnxtrain.errors import CaptureError, NumberError, SetUpError, UnsupportedDataError

_OWN = frozenset(torch.nn.Module().__dict__)
_TABLES = frozenset(n for n, v in vars(torch.nn.Module()).items() if isinstance(v, dict)) - {
    "_parameters",
    "_buffers",
    "_modules",
}
_ABSENT = object()


class Kind(enum.Enum):
    """How something is left.

    An attribute is set to tensors or to a number, to another constant than it had, or to one where there was none; a
    buffer is set; a list is extended, or gets another content; entries of a dict are set.
    """

    SET = "set"
    FLIP = "flip"
    MARK = "mark"
    BUFFER = "buffer"
    EXTEND = "extend"
    FILL = "fill"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is left: the path of a submodule, the name of its attribute, and how."""

    path: str
    name: str
    kind: Kind

    @property
    def label(self) -> str:
        """As the user would write it: ``layers.0.loss``."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a call wrote.

    Args:
        buffers: new contents of buffers, by name.
        left: what else there is now, by place; a buffer that is of another form now is among it.
        reformed: what is wrong with such a buffer, by name, where the call reads what it was.
    """

    buffers: Mapping[str, torch.Tensor]
    left: Mapping[Place, Any]
    reformed: Mapping[str, CaptureError]


class Watch:
    """Sees what is written to a module and its submodules from now on.

    Args:
        module: the module.
        ignored: names of attributes that do not concern the forward pass; what is written to them is left out.
        names: of parameters and buffers by identity, which others may stand for now (``names_of``).
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str] = (), names: Mapping[int, str] | None = None
    ) -> None:
        self._ignored = _OWN.union(ignored)
        self._module, self._names = module, dict(names or {})
        self._modules = list(module.named_modules())
        self._attributes = [dict(m.__dict__) for _, m in self._modules]
        self._buffers = [dict(m._buffers) for _, m in self._modules]
        self._parts = [tuple(map(dict, _tables_of_parts(m))) for _, m in self._modules]
        self._content = {
            id(v): (v, v.copy()) for table in self._attributes for n, v in table.items() if _is_collection(n, v)
        }
        self._hooks = [
            (table[n], table[n].copy()) for table in self._attributes for n in _TABLES if table.get(n) is not None
        ]

    def changes(self, reads: Reads | None = None) -> Changes:
        """What was written.

        Args:
            reads: what was read and set meanwhile; a number that was not read may be any.

        Raises:
            NumberError: a number was changed, which a graph would not change again.
            SetUpError: there are layers or parameters that were not there.
        """
        self.refuse_parts()
        buffers: dict[str, torch.Tensor] = {}
        reformed: dict[str, CaptureError] = {}
        left: dict[Place, Any] = {}
        self._names |= names_of(self._module)
        for (path, module), before, known in zip(self._modules, self._attributes, self._buffers, strict=True):
            prefix = f"{path}." if path else ""
            for name, new in module._buffers.items():
                old = known.get(name, _ABSENT)
                if new is old:
                    continue
                if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _are_of_same_form(old, new):
                    buffers[prefix + name] = new
                    continue
                left[Place(path, name, Kind.BUFFER)] = new
                if isinstance(old, torch.Tensor):
                    reformed[prefix + name] = _reforms(module, prefix + name, old, new)
            for name, new in module.__dict__.items():
                if name in self._ignored:
                    continue
                if is_scalar(new) and reads is not None and reads.is_forgotten(module, name):
                    left[Place(path, name, Kind.SET)] = new  # be it what it was: other calls may set another one
                else:
                    left |= self._left(module, path, name, before.get(name, _ABSENT), new)
        return Changes(buffers, {place: value for place, value in left.items() if _can_be_left(value)}, reformed)

    def refuse_parts(self) -> None:
        """Raise SetUpError where there are layers or parameters that were not there."""
        made = []
        for (path, module), tables in zip(self._modules, self._parts, strict=True):
            for before, now in zip(tables, _tables_of_parts(module), strict=True):
                fresh = [n for n, part in now.items() if part is not None and before.get(n) is not part]
                made += [(module, Place(path, n, Kind.SET)) for n in fresh]
        if made:
            module, first = made[0]
            labels = [place.label for _, place in made]
            raise SetUpError(labels, f"sets {', '.join(labels)}: a layer or a parameter", _line(module, first.name))

    def _left(self, module: torch.nn.Module, path: str, name: str, old: Any, new: Any) -> dict[Place, Any]:
        if new is not old:
            if _is_another_number(old, new):
                raise _counts(module, Place(path, name, Kind.SET).label, name, old, new)
            if (is_number(old) and is_number(new) and old == new) or self._are_the_same_weights(old, new):
                return {}
            kind = Kind.SET if _holds_tensors(new) else Kind.MARK if old is _ABSENT else Kind.FLIP
            return {Place(path, name, kind): new}
        _, content = self._content.get(id(new), (new, None))
        if content is None:
            return {}
        table, now = _entries(content), _entries(new)
        for key in (k for k in table if k in now and _is_another_number(table[k], now[k])):
            raise _counts(module, f"{Place(path, name, Kind.SET).label}[{key!r}]", name, table[key], now[key])
        if isinstance(content, dict):
            changed = {k: v for k, v in new.items() if k not in content or content[k] is not v}
            return {Place(path, name, Kind.UPDATE): changed} if changed else {}
        return _left_in_list(Place(path, name, Kind.EXTEND), content, new)

    def _are_the_same_weights(self, old: Any, new: Any) -> bool:
        """Whether both hold the same of the module's parameters and buffers: the list that recurrent layers keep."""
        pairs = itertools.zip_longest(pytree.tree_leaves(old), pytree.tree_leaves(new))
        names = [(self._names.get(id(a)), self._names.get(id(b))) for a, b in pairs]
        return type(old) is type(new) and bool(names) and all(a == b is not None for a, b in names)

    def take_back(self) -> Callable[[], None]:
        """The module as it was; gives back what does again all that was written but for tensors."""
        again: list[Callable[[], None]] = []
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            new = {n: v for n, v in module.__dict__.items() if n not in _OWN and before.get(n, _ABSENT) is not v}
            constants = {n: v for n, v in new.items() if n not in self._ignored and not _holds_tensors(v)}
            if constants:
                again.append(functools.partial(module.__dict__.update, constants))
        for table, content in self._hooks:
            if table != content:
                again.append(functools.partial(_fill, table, table.copy()))
                _fill(table, content)
        for (_, module), before in zip(self._modules, self._parts, strict=True):
            for table, content in zip(_tables_of_parts(module), before, strict=True):
                _fill(table, content)
        for (_, module), attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            for name in [n for n in module.__dict__ if n not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for collection, content in self._content.values():
            if isinstance(collection, dict):
                _fill(collection, content)
            else:
                collection[:] = content

        def settle() -> None:
            for do in again:
                do()

        return settle


def _tables_of_parts(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the layers of a module; torch.export gives others for a layer that has two names."""
    return module.__dict__["_parameters"], module.__dict__["_modules"]


def _entries(collection: list[Any] | dict[Any, Any]) -> dict[Any, Any]:
    return collection if isinstance(collection, dict) else dict(enumerate(collection))


def _left_in_list(place: Place, content: list[Any], new: list[Any]) -> dict[Place, Any]:
    """What a list has more than it had, or all that it has.

    Raises:
        CaptureError: some of it is what it had, at which a graph does not look.
    """
    if len(new) >= len(content) and all(map(operator.is_, content, new)):
        more = new[len(content) :]
        return {place: more} if more else {}
    if {*map(id, content)} & {*map(id, new)}:
        raise CaptureError(
            f"the forward pass changes a part of the list {place.label}; a graph would not look what else is in it",
            cure=f"let it set a new one, self.{place.name} = [...], or change it outside of forward",
        )
    return {dataclasses.replace(place, kind=Kind.FILL): list(new)}


def _fill(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)


def owned_by(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name; those that have several names under each."""
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))


def plain_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that are attributes of a module or its submodules, and neither parameters nor buffers."""
    return [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]


def names_of(module: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter and buffer by its identity."""
    return {id(tensor): name for name, tensor in owned_by(module).items()}


def _holds_tensors(value: Any) -> bool:
    """Whether there are tensors, or sizes, in a value that can be left."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, (torch.Tensor, *SYMBOLS)) for x in leaves)


def leave(module: torch.nn.Module, places: Iterable[Place], values: Iterable[Any]) -> None:
    """Put on a module what a call of it leaves there."""
    for place, value in zip(places, values, strict=True):
        owner = module.get_submodule(place.path)
        if place.kind is Kind.EXTEND:
            getattr(owner, place.name).extend(value)
        elif place.kind is Kind.FILL:
            getattr(owner, place.name)[:] = value
        elif place.kind is Kind.UPDATE:
            getattr(owner, place.name).update(value)
        elif place.kind is Kind.BUFFER:
            owner._buffers[place.name] = value
        else:
            owner.__dict__[place.name] = value


def refuse_read(
    module: torch.nn.Module, places: Sequence[Place], read: Iterable[torch.Tensor], attributes: Collection[Attribute]
) -> None:
    """Raise CaptureError where a call changes an attribute that holds a tensor which it read: a graph reads that again.

    Args:
        module: the module, as it was before the call.
        places: what the call leaves.
        read: the tensors that are neither parameters nor buffers.
        attributes: those that it read; a tensor of one that it did not may have been found elsewhere, too.
    """
    memories = {t.untyped_storage().data_ptr() for t in read if t.numel()}
    for place in (p for p in places if p.kind is not Kind.BUFFER):  # those are inputs of a graph
        owner = module.get_submodule(place.path)
        if can_be_watched(type(owner), place.name) and (type(owner), place.name) not in attributes:
            continue
        leaves = pytree.tree_leaves(getattr(owner, place.name, None))
        held = (t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel())
        if any(t.untyped_storage().data_ptr() in memories for t in held):
            raise CaptureError(
                f"the forward pass reads a tensor of {place.label} and leaves another there: state that is no buffer",
                source=_line(owner, place.name),
                cure=f"make it a buffer: self.register_buffer({place.name!r}, ...) with its first content",
            )


def _is_collection(name: str, value: Any) -> bool:
    return name not in _OWN and type(value) in (list, dict)


def _is_another_number(old: Any, new: Any) -> bool:
    return is_number(old) and is_number(new) and old != new


def _can_be_left(value: Any) -> bool:
    """Whether a value can be given back: tensors, numbers, text and structures of them."""
    try:
        flatten(value, "output")
    except UnsupportedDataError:
        return False
    return True


def _are_of_same_form(old: torch.Tensor, new: torch.Tensor) -> bool:
    return tuple(new.shape) == tuple(old.shape) and new.dtype == old.dtype


def _reforms(module: torch.nn.Module, name: str, old: torch.Tensor, new: Any) -> CaptureError:
    became = f"a {new.dtype} of {tuple(new.shape)}" if isinstance(new, torch.Tensor) else f"{type(new).__name__}"
    return CaptureError(
        f"the forward pass reads and assigns the buffer {name}, a {old.dtype} of {tuple(old.shape)}, "
        f"which becomes {became}",
        source=_line(module, name.rpartition(".")[2]),
        cure="keep its shape and type, or keep it outside of the module and pass it as an input",
    )


def _counts(module: torch.nn.Module, label: str, name: str, old: Any, new: Any) -> NumberError:
    return NumberError(
        f"the forward pass changes the number {label} from {old} to {new}; a graph would not do so again",
        source=_line(module, name),
        cure=f"make it a buffer, self.register_buffer({name!r}, torch.tensor({old})), or count outside of forward; "
        f"where nothing is computed from it, Options(ignored_attributes=({name!r},))",
    )


def _line(module: torch.nn.Module, name: str) -> str:
    """Where the code of a module's class sets an attribute; empty where that is not found."""
    pattern = re.compile(rf"\.{re.escape(name)}(\[[^]]*\])?\s*([-+*/@|&]|//|\*\*)?=[^=]")
    return next((f"{file}:{line}" for file, line, text in _code(type(module)) if pattern.search(text)), "")


def _code(kind: type) -> Iterator[tuple[str, int, str]]:
    """The lines of a class's methods but for its constructor, with their places."""
    methods: list[Callable[..., Any]] = [f for n, f in vars(kind).items() if inspect.isfunction(f) and n != "__init__"]
    for method in methods:
        try:
            lines, first = inspect.getsourcelines(method)
        except (OSError, TypeError):
            continue
        for offset, text in enumerate(lines):
            yield method.__code__.co_filename, first + offset, text
