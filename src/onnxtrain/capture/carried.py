"""State that calls read and set anew: ``self.hidden = f(self.hidden)``, a tensor, or tensors in a collection.

Each call has other tensors there, so a graph has an input for each of them, which is found before every call where the
attribute holds it; what the call sets is an output that is left there (``left_behind``). One graph serves all state of
one form. While the module is traced it has buffers in the place of its state, which a call may change in place, too. A
tensor that is changed in place alone stays the same, and is adopted (``found_elsewhere``).

A number that calls read and change, ``self.steps += 1``, is such an input, too, and one that the program sets between
calls, ``model.beta = 0.1 * epoch``, from its second value on. A call looks at it before all else, as
at one that it reads out of a tensor: what comes of it is computed by the graph, or is a path (``replay``).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture.attribute_reads import attribute, can_be_watched, settings_of
from onnxtrain.capture.found_elsewhere import in_memory_of
from onnxtrain.capture.left_behind import line_that_leaves
from onnxtrain.capture.looks import COUNTED, Look
from onnxtrain.capture.owned_tensors import names_of
from onnxtrain.capture.places import LEFT, Kind, Place, fill, put
from onnxtrain.capture.schema import can_be_counted
from onnxtrain.capture.source_lines import is_librarys
from onnxtrain.errors import CaptureError

_PLACES: weakref.WeakKeyDictionary[torch.nn.Module, dict[Place, None]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Carried:
    """A tensor of state.

    Args:
        place: the attribute that holds it.
        index: among the leaves of what the attribute holds.
    """

    place: Place
    index: int

    def of(self, module: torch.nn.Module) -> torch.Tensor:
        """The one that a module has now; of a number a tensor without axes, as exact as Python's."""
        found = _leaves(module, self.place)[self.index]
        if isinstance(found, torch.Tensor):
            return found
        return torch.tensor(found, dtype=torch.float64 if type(found) is float else torch.int64)

    def look(self, module: torch.nn.Module) -> Look:
        """What a call sees first of the number that it is; of none where it is a tensor."""
        line = line_that_leaves(module, self.place)
        return Look(COUNTED, line or self.place.label, _held(module, self.place))


def carry(module: torch.nn.Module, places: Iterable[Place]) -> bool:
    """From now on attributes of a module hold state; whether there is one that did not, and holds a tensor to carry."""
    known, own = _PLACES.setdefault(module, {}), names_of(module)
    new = [
        dataclasses.replace(place, kind=Kind.SET) for place in places if place.kind not in (Kind.BUFFER, Kind.EXTEND)
    ]
    fresh = [p for p in new if p not in known and any(can_be_carried(x, own) for x in _leaves(module, p))]
    known.update(dict.fromkeys(fresh))
    return bool(fresh)


def count(module: torch.nn.Module, places: Iterable[Place]) -> bool:
    """From now on attributes hold numbers that calls count; whether there are some, and all do, and did not."""
    known, new = _PLACES.setdefault(module, {}), [dataclasses.replace(place, kind=Kind.SET) for place in places]
    if not new or any(p in known or not can_be_counted(_held(module, p)) for p in new):
        return False
    known.update(dict.fromkeys(new))
    return True


def count_no_longer(module: torch.nn.Module, places: Iterable[Place]) -> None:
    """From now on attributes hold no such numbers."""
    for place in places:
        del _PLACES[module][dataclasses.replace(place, kind=Kind.SET)]


def places_of(module: torch.nn.Module, attributes: Iterable[tuple[Any, str]]) -> list[Place]:
    """Where attributes are, given with their owners; empty where one is of a library's class, or not the module's."""
    found = {id(held.owner): (held.path, held.steps) for held in settings_of(module)}
    found |= {id(part): (path, ()) for path, part in module.named_modules()}
    pairs = list(attributes)
    if any(id(o) not in found or is_librarys(type(o).__module__) or not can_be_watched(type(o), n) for o, n in pairs):
        return []
    places = ((*found[id(owner)], name) for owner, name in pairs)
    return [Place(path, name, Kind.SET, steps) for path, steps, name in places]


def numbers_carried(module: torch.nn.Module) -> list[Carried]:
    """Those that are numbers."""
    return [c for c in carried_by(module) if can_be_counted(_held(module, c.place))]


def places_carried(module: torch.nn.Module) -> tuple[Place, ...]:
    """The attributes of a module that hold state; not of parts that it no longer has."""
    return tuple(place for place in _PLACES.get(module, ()) if _is_there(module, place))


def attributes_carried(module: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """The owners of these attributes, by their identities and the attributes' names."""
    owners = ((place.owner(module), place.name) for place in places_carried(module))
    return {(id(owner), name): owner for owner, name in owners}


def carried_by(module: torch.nn.Module) -> list[Carried]:
    """The tensors of a module's state that graphs have as inputs."""
    places = places_carried(module)
    own, held = names_of(module) if places else {}, ((place, _leaves(module, place)) for place in places)
    return [
        Carried(place, i)
        for place, leaves in held
        for i, x in enumerate(leaves)
        if can_be_carried(x, own) or can_be_counted(_held(module, place))
    ]


def can_be_carried(value: Any, owned: Collection[int]) -> bool:
    """Whether a value is a tensor of which graphs read the content alone.

    Args:
        value: it.
        owned: the identities of the module's parameters and buffers.
    """
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return False
    return id(value) not in owned and id(value._base) not in owned


@contextlib.contextmanager
def exchanged(module: torch.nn.Module, tensors: Mapping[Carried, Any]) -> Iterator[None]:
    """Within it a module has other tensors, or numbers, in the place of its state."""
    with contextlib.ExitStack() as stack:
        for place in dict.fromkeys(carried.place for carried in tensors):
            owner = place.owner(module)
            value = attribute(owner, place.name)
            leaves, spec = pytree.tree_flatten(value)
            made = pytree.tree_unflatten([tensors.get(Carried(place, i), x) for i, x in enumerate(leaves)], spec)
            if isinstance(value, LEFT) and made is not value:  # others may hold it, too
                stack.callback(fill, value, copy.copy(value))
                fill(value, made)
            else:
                stack.callback(put, owner, {place.name: value})
                put(owner, {place.name: made})
        yield


def refuse_written(
    module: torch.nn.Module, written: Mapping[Carried, torch.Tensor], others: Collection[torch.Tensor]
) -> None:
    """Raise CaptureError where a call changes state in place that has a history, or of which others have the memory.

    Args:
        module: the module.
        written: what is changed.
        others: what else the module holds, and what its call finds elsewhere.
    """
    for held, tensor in written.items():
        label, is_shared = held.place.label, bool(in_memory_of(tensor, others))
        if is_shared or tensor.requires_grad:
            why = "where somebody else has it, too" if is_shared else "though it has a history"
            raise CaptureError(
                f"the forward pass sets {label} anew at one time and changes it in place at another, {why}",
                source=line_that_leaves(module, held.place),
                cure=f"only set it anew: self.{held.place.name} = ...",
            )


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """After it a module has the state that it has now."""
    before = [(owner, name, attribute(owner, name)) for (_, name), owner in attributes_carried(module).items()]
    yield
    for owner, name, value in before:
        put(owner, {name: value})


def _is_there(module: torch.nn.Module, place: Place) -> bool:
    try:
        return place.owner(module) is not None
    except (AttributeError, LookupError, TypeError):
        return False


def _held(module: torch.nn.Module, place: Place) -> Any:
    return attribute(place.owner(module), place.name)


def _leaves(module: torch.nn.Module, place: Place) -> list[Any]:
    return pytree.tree_leaves(_held(module, place))
