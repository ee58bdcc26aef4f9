"""What a forward pass leaves on the module: buffers that it assigns, attributes that it sets, lists that it extends.

A graph changes no Python object. So all that a traced call wrote is found and taken back; tensors become outputs of the
graph, and after each call they are put where eager PyTorch leaves them. Marks, other objects and hooks, which are no
matter of a graph, are as after one call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.attribute_reads import (
    Attribute,
    Reads,
    attribute,
    attributes_of,
    can_be_watched,
    is_number,
    is_scalar,
    may_hold,
    settings_of,
)
from onnxtrain.capture.held_content import HeldContent
from onnxtrain.capture.left_in_collections import LeftInCollections, is_another_number
from onnxtrain.capture.owned_tensors import OWN, names_of
from onnxtrain.capture.places import Kind, Place, fill, line_that_sets, put, take
from onnxtrain.capture.reached_code import line_that_writes
from onnxtrain.capture.schema import SYMBOLS, can_be_counted, flatten
from onnxtrain.capture.source_lines import is_librarys
from onnxtrain.capture.taken_items import TakenItems, refused
from onnxtrain.errors import CaptureError, NumberError, SetUpError, UnsupportedDataError

_TABLES = frozenset(n for n, v in vars(torch.nn.Module()).items() if isinstance(v, dict)) - {
    "_parameters",
    "_buffers",
    "_modules",
}
_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a call wrote.

    Args:
        left: what there is now, by place; another buffer is among it, and the content of another parameter of the same
            form.
        parameters: such parameters, by place.
        reformed: what is wrong with a buffer of another form, by name, where the call reads what it was.
    """

    left: Mapping[Place, Any]
    parameters: Mapping[Place, torch.nn.Parameter]
    reformed: Mapping[str, CaptureError]


class Watch:
    """Sees what is written to a module and its submodules from now on.

    Args:
        module: the module.
        ignored: names of attributes that do not concern the forward pass; what is written to them is left out.
        names: of parameters and buffers by identity, which others may stand for now (``names_of``).
        owners: the tensors in whose place others are now, by the identities of these.
        counted: the attributes that hold numbers which graphs set at each call.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str] = (),
        names: Mapping[int, str] | None = None,
        owners: Mapping[int, torch.Tensor] | None = None,
        counted: Collection[Place] = (),
    ) -> None:
        self._counted = counted
        self._ignored, self._replaced = OWN.union(ignored), owners or {}
        self._module, self._names = module, dict(names or {})
        self._modules = list(module.named_modules())
        held = [(Place(path, "", Kind.SET, steps), o, table) for path, steps, o, table in settings_of(module)]
        parts = [(Place(path, "", Kind.SET), m, m.__dict__) for path, m in self._modules]
        self._owners = [(place, owner, dict(table)) for place, owner, table in (*parts, *held)]  # with what they have
        tables = [(place, table) for place, _, table in self._owners]
        self._held = HeldContent(tables, self._ignored)
        self._taken = [(place, TakenItems(self._reachable(table))) for place, table in tables]
        self._buffers = [dict(m._buffers) for _, m in self._modules]
        self._parts = [tuple(map(dict, _tables_of_parts(m))) for _, m in self._modules]
        self._collections = LeftInCollections(module, tables, self._ignored)
        self._hooks = [
            (vars(m)[n], vars(m)[n].copy()) for _, m in self._modules for n in _TABLES if vars(m).get(n) is not None
        ]

    def changes(self, reads: Reads | None = None) -> Changes:
        """What was written.

        Args:
            reads: what was read and set meanwhile; a number that was not read may be any.

        Raises:
            NumberError: a number was changed, which a graph would not change again.
            SetUpError: there are layers or parameters that were not there, or other objects in a dict.
        """
        parameters = {place: part for place, part, before in self._parts_made() if _is_parameter_anew(before, part)}
        self.refuse_parts(parameters)
        if (changed := self._held.changed()) is not None:
            raise self._counts(*changed)
        if (more := self._held.holds_more()) is not None:
            raise CaptureError(
                f"the forward pass leaves a tensor in {more[1]}; a graph would not do so again",
                source=self._line(more[0]),
                cure="leave it in an attribute that is a list or a dict; where a later call reads it, in a buffer",
            )
        if reads is not None:
            self._refuse_iterators(reads)
        self._names |= names_of(self._module)
        left, reformed = self._buffers_set()
        left |= {place: parameter.detach() for place, parameter in parameters.items()}
        left |= self._attributes_set(reads)
        lost = [place for place, value in left.items() if not _can_be_left(value)]
        if made := [place for place in lost if place.kind is Kind.UPDATE]:
            labels = [place.label for place in made]
            raise SetUpError(labels, f"puts an object in {', '.join(labels)}", self._line(made[0]))
        left = {place: value for place, value in left.items() if place not in lost}
        return Changes(left, parameters, reformed)

    def _attributes_set(self, reads: Reads | None) -> dict[Place, Any]:
        """What attributes are set to, or have more in their collections.

        Raises:
            NumberError: some are numbers that were changed; it has the places of all.
        """
        left: dict[Place, Any] = {}
        counting: list[NumberError] = []
        for place, owner, before in self._owners:
            for name, now in attributes_of(owner).items():
                old, new = before.get(name, _ABSENT), self._replaced.get(id(now), now)
                is_forgotten = reads is not None and reads.is_forgotten(owner, name) and is_scalar(new)
                if name in self._ignored or (new is old and new not in self._collections and not is_forgotten):
                    continue
                own = dataclasses.replace(place, name=name)
                if is_forgotten:
                    left[own] = new  # be it what it was: other calls may set another one
                    continue
                with _collected(counting):
                    left |= self._left(owner, own, old, new, reads)
        for place, held in self._collections.inner():
            with _collected(counting):
                left |= self._collections.left(place, held, self._replaced, self._counts, self._counted)
        if counting:
            raise NumberError.of_all(counting)
        return left

    def _buffers_set(self) -> tuple[dict[Place, Any], dict[str, CaptureError]]:
        """Buffers that are others now, and what is wrong with those that are of another form."""
        reformed: dict[str, CaptureError] = {}
        left: dict[Place, Any] = {}
        for (path, module), known in zip(self._modules, self._buffers, strict=True):
            prefix = f"{path}." if path else ""
            for name, new in module._buffers.items():
                old = known.get(name, _ABSENT)
                if new is old:
                    continue
                left[Place(path, name, Kind.BUFFER)] = new
                if isinstance(old, torch.Tensor) and not _is_of_same_form(old, new):
                    reformed[prefix + name] = _reforms(module, prefix + name, old, new)
        return left, reformed

    def _reachable(self, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """What may hold an iterator, and is none itself: of these the reads are known."""
        return [(n, v) for n, v in may_hold(table) if n not in self._ignored and not isinstance(v, Iterator)]

    def _refuse_iterators(self, reads: Reads) -> None:
        """Raise CaptureError where a call reads an iterator: a graph would not take its next."""
        for place, owner, table in self._owners:
            for name, value in table.items():
                if name not in self._ignored and isinstance(value, Iterator) and reads.is_read(owner, name):
                    own = dataclasses.replace(place, name=name)
                    raise refused(own.label, self._line(own))
        for place, taken in self._taken:
            if (found := taken.taken()) is not None:
                own = dataclasses.replace(place, name=found[0])
                raise refused(own.label + found[1].removeprefix(found[0]), self._line(own))

    def _parts_made(self) -> Iterator[tuple[Place, Any, Any]]:
        """The layers and parameters that were not there, with their places and what was there."""
        for (path, module), tables in zip(self._modules, self._parts, strict=True):
            for before, now in zip(tables, _tables_of_parts(module), strict=True):
                for name, part in now.items():
                    if part is not None and before.get(name) is not part:
                        yield Place(path, name, Kind.PARAMETER), part, before.get(name)

    def refuse_parts(self, but: Collection[Place] = ()) -> None:
        """Raise SetUpError where there are layers or parameters that were not there, but at some places."""
        if made := [place for place, _, _ in self._parts_made() if place not in but]:
            labels = [place.label for place in made]
            line = line_that_sets(type(made[0].owner(self._module)), made[0].name)
            raise SetUpError(labels, f"sets {', '.join(labels)}: a layer or a parameter", line)

    def _left(self, owner: Any, place: Place, old: Any, new: Any, reads: Reads | None) -> dict[Place, Any]:
        if new is not old:
            if place in self._counted:
                return {place: new}
            is_read = reads is not None and reads.is_read(owner, place.name)
            if is_another_number(old, new) or (is_read and can_be_counted(old) and isinstance(new, SYMBOLS)):
                raise self._counts(place, place.label, old, new)
            if (is_number(old) and is_number(new) and old == new) or self._are_the_same_weights(old, new):
                return {}
            is_state = is_read and old is not _ABSENT and old is not None
            if is_state and not (_holds_tensors(new) or _can_be_left(new) or _are_equal(old, new)):
                raise self._is_state(place)
            is_first = old is _ABSENT or (old is None and is_librarys(type(owner).__module__))
            kind = Kind.SET if _holds_tensors(new) else Kind.MARK if is_first else Kind.FLIP
            return {dataclasses.replace(place, kind=kind): new}
        return self._collections.left(place, new, self._replaced, self._counts, self._counted)

    def _counts(self, place: Place, label: str, old: Any, new: Any) -> NumberError:
        return NumberError(
            f"the forward pass changes the number {label} from {old} to {new}; a graph would not do so again",
            source=self._line(place),
            cure=f"make it a buffer, self.register_buffer({place.attribute!r}, torch.tensor({old})), or count outside "
            f"of forward; where nothing is computed from it, Options(ignored_attributes=({place.attribute!r},))",
            places=[place] if label == place.label else [],
        )

    def _is_state(self, place: Place) -> CaptureError:
        return CaptureError(
            f"the forward pass reads {place.label} and sets it to something else; a graph would not do so again",
            source=self._line(place),
            cure="set it outside of forward, or let a text tell which it is; where nothing is computed from it, "
            f"Options(ignored_attributes=({place.attribute!r},))",
        )

    def _line(self, place: Place) -> str:
        """Where code sets an attribute: that of its owner, or of a module that may hold it."""
        kinds = dict.fromkeys((type(place.owner(self._module)), *(type(m) for _, m in self._modules)))
        line = next(filter(None, (line_that_sets(kind, place.attribute) for kind in kinds)), "")
        return line or line_that_writes(self._module, place.attribute)

    def _are_the_same_weights(self, old: Any, new: Any) -> bool:
        """Whether both hold the same of the module's parameters and buffers: the list that recurrent layers keep."""
        pairs = itertools.zip_longest(pytree.tree_leaves(old), pytree.tree_leaves(new))
        names = [(self._names.get(id(a)), self._names.get(id(b))) for a, b in pairs]
        return type(old) is type(new) and bool(names) and all(a == b is not None for a, b in names)

    def take_back(self) -> Callable[[], None]:
        """The module as it was; gives back what does again all that was written but for tensors."""
        again: list[Callable[[], None]] = []
        for _, owner, before in self._owners:
            now = dict(attributes_of(owner))
            new = {n: v for n, v in now.items() if before.get(n, _ABSENT) is not v}
            constants = {n: v for n, v in new.items() if n not in self._ignored and not _holds_tensors(v)}
            if constants:
                again.append(functools.partial(put, owner, constants))
            if new or len(now) != len(before):
                put(owner, before)
                take(owner, now.keys() - before.keys())
        self._held.take_back()
        for table, content in self._hooks:
            if table != content:
                again.append(functools.partial(fill, table, table.copy()))
                fill(table, content)
        for (_, module), before in zip(self._modules, self._parts, strict=True):
            for table, content in zip(_tables_of_parts(module), before, strict=True):
                fill(table, content)
        for (_, module), buffers in zip(self._modules, self._buffers, strict=True):
            fill(module._buffers, buffers)
        self._collections.take_back()

        def settle() -> None:
            for do in again:
                do()

        return settle


@contextlib.contextmanager
def _collected(errors: list[NumberError]) -> Iterator[None]:
    """Errors of numbers are kept: one is raised for all of them."""
    try:
        yield
    except NumberError as error:
        errors.append(error)


def _tables_of_parts(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the layers of a module; torch.export gives others for a layer that has two names."""
    return module.__dict__["_parameters"], module.__dict__["_modules"]


def _are_equal(old: Any, new: Any) -> bool:
    try:
        return bool(old == new)
    except Exception:  # what the class of either raises
        return False


def _holds_tensors(value: Any) -> bool:
    """Whether there are tensors, or sizes, in a value that can be left."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, (torch.Tensor, *SYMBOLS)) for x in leaves)


def places_read(
    module: torch.nn.Module, places: Sequence[Place], read: Iterable[torch.Tensor], attributes: Collection[Attribute]
) -> list[Place]:
    """Where a call leaves something in the place of a tensor that it read: state, which a graph would read again.

    Args:
        module: the module, as it was before the call.
        places: what the call leaves.
        read: the tensors that are neither parameters nor buffers.
        attributes: those that it read; a tensor of one that it did not may have been found elsewhere, too.
    """
    memories = {t.untyped_storage().data_ptr() for t in read if t.numel()}
    found = []
    for place in (p for p in places if p.kind is not Kind.BUFFER):  # those are inputs of a graph
        owner = place.owner(module)
        name = place.name
        if isinstance(name, str) and can_be_watched(type(owner), name) and (type(owner), name) not in attributes:
            continue
        leaves = pytree.tree_leaves(attribute(owner, name))
        held = (t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel())
        if any(t.untyped_storage().data_ptr() in memories for t in held):
            found.append(place)
    return found


def line_that_leaves(module: torch.nn.Module, place: Place) -> str:
    """Where code leaves something: that of the owner's class, or else what the module's can reach."""
    return line_that_sets(type(place.owner(module)), place.attribute) or line_that_writes(module, place.attribute)


def refuse_read(module: torch.nn.Module, places: Sequence[Place]) -> None:
    """Raise CaptureError where a call leaves something in the place of a tensor that it read (``places_read``)."""
    for place in places:
        raise CaptureError(
            f"the forward pass reads a tensor of {place.label} and leaves another there: state that is no buffer",
            source=line_that_leaves(module, place),
            cure=f"make it a buffer: self.register_buffer({place.attribute!r}, ...) with its first content",
        )


def _can_be_left(value: Any) -> bool:
    """Whether a value can be given back: tensors, numbers, text and structures of them."""
    try:
        flatten(value, "output")
    except UnsupportedDataError:
        return False
    return True


def _is_parameter_anew(old: Any, new: Any) -> bool:
    """Whether both are parameters that only their content tells apart."""
    are_parameters = isinstance(old, torch.nn.Parameter) and isinstance(new, torch.nn.Parameter)
    return are_parameters and old.requires_grad == new.requires_grad and _is_of_same_form(old, new)


def _is_of_same_form(old: torch.Tensor, new: Any) -> bool:
    return isinstance(new, torch.Tensor) and tuple(new.shape) == tuple(old.shape) and new.dtype == old.dtype


def _reforms(module: torch.nn.Module, name: str, old: torch.Tensor, new: Any) -> CaptureError:
    became = f"a {new.dtype} of {tuple(new.shape)}" if isinstance(new, torch.Tensor) else f"{type(new).__name__}"
    return CaptureError(
        f"the forward pass reads and assigns the buffer {name}, a {old.dtype} of {tuple(old.shape)}, "
        f"which becomes {became}",
        source=line_that_sets(type(module), name.rpartition(".")[2]),
        cure="keep its shape and type, or keep it outside of the module and pass it as an input",
    )
