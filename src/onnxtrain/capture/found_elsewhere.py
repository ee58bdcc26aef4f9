"""Tensors that code finds elsewhere than on its module: in a list, in a dictionary, in a closure.

While a module is traced, it has others under the same names, without content. Who has kept a tensor of the module in
another place goes on reading that one, and a graph would hold the content that it has now: a constant that is not
trained. So what the module has under its name is put in its place. Tensors that are none of the module's are
**borrowed**: inputs of the graph as its parameters and buffers are, read at every call where they lie, and trained
where eager PyTorch would. One that the call changes in place is **adopted**: traced as if it were a buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from onnxtrain.capture.left_outside import GivenUpError
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.made_of_parts import is_made_of_others, parts, refuse_read

Tensors = Mapping[str, torch.Tensor]
_VIEWS = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))  # attributes that are tensors of the same content
_is_read_by_dynamo = torch.compiler.is_dynamo_compiling  # this code, where bodies of control flow are recorded


@dataclasses.dataclass
class Borrowed:
    """A tensor that a forward pass reads and that is neither its module's nor given to the call.

    Attributes:
        tensor: it.
        traced: what it is while the call is traced: a copy where it is of ``torch.inference_mode``.
        is_trained: whether a gradient is computed for it.
    """

    tensor: torch.Tensor
    traced: torch.Tensor
    is_trained: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Borrowed:
        """A tensor that was met."""
        if not tensor.is_inference():
            return cls(tensor, tensor)
        with _disable_current_modes():
            return cls(tensor, tensor.clone())


class AdoptedError(GivenUpError):
    """The forward pass changes a tensor in place that is no buffer of the module: it is to be traced as if it were.

    Attributes:
        tensor: it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("the forward pass changes a tensor of others in place")
        self.tensor = tensor


def largest_in_memory_of(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest of a tensor and those of others that are in its memory, and are changed with it."""
    return max([tensor, *in_memory_of(tensor, others)], key=torch.numel)


def in_memory_of(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of others that are in a tensor's memory; none without content is."""
    return [t for t in others if _is_in_memory(t) and _memory(t) == _memory(tensor)]


def by_memory(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of tensors that share a memory, of each memory that more than one has."""
    found: dict[int, list[str]] = {}
    with torch._C.DisableTorchFunction():  # a trace looks at every question that a tensor is asked
        for name, tensor in tensors.items():
            if _is_in_memory(tensor):
                found.setdefault(_memory(tensor), []).append(name)
    return [names for names in found.values() if len(names) > 1]


class FoundElsewhere:
    """What a module has while it is traced in the place of the tensors that it had; what else is read.

    Args:
        had: the parameters and buffers that the module had, by name.
        has: those that it has now.

    Attributes:
        borrowed: what is read of others, by identity.
        written: those of others that were to be changed in place.
    """

    def __init__(self, had: Tensors, has: Tensors) -> None:
        self._had = tuple(had.values())  # alive, so that no other tensor gets the identity of one
        self._now = {id(tensor): has[name] for name, tensor in had.items() if name in has}
        self._memories = {_memory(t): t for t in self._had if _is_in_memory(t)}
        self._known: dict[int, Any] = {id(t): t for t in has.values()}
        self._views: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}  # of others, by memory: view and whole
        self.borrowed: dict[int, Borrowed] = {}
        self.written: list[torch.Tensor] = []

    def made(self, value: Any, given: Iterable[Any], is_detached: bool) -> None:
        """A function returned a value: tensors with content are constants of the call, others may be views of others'.

        Args:
            value: it.
            given: the function's arguments.
            is_detached: whether it is the argument detached: in its memory, but no view for torch.
        """
        if _is_read_by_dynamo():
            return
        is_given = any(x is value for x in given)  # as ``contiguous`` gives what is so already
        if isinstance(value, torch.Tensor) and not (isinstance(value, FakeTensor) or is_given):
            self._known[id(value)] = value
        if others := [x for x in given if isinstance(x, torch.Tensor) and self._is_others(x)]:
            for view in pytree.tree_leaves(value):
                if isinstance(view, FakeTensor) and (is_detached or view._is_view()):
                    self._views[memory_of(view)] = view, others[0]

    def refuse_written(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Raise AdoptedError where one of the tensors that a function writes to is another's, or was before."""
        for tensor in () if _is_read_by_dynamo() else tensors:
            _, whole = self._views.get(memory_of(tensor), (None, tensor))
            if self._is_others(whole):
                self.written.append(whole if whole._base is None else whole._base)
        if self.written:
            raise AdoptedError(self.written[0])

    def _is_others(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is neither the module's nor made by the call."""
        if isinstance(tensor, FakeTensor) or id(tensor) in self._known or not _is_in_memory(tensor):
            return False
        return self._memories.get(_memory(tensor)) is None

    def now(self, func: Callable[..., Any], values: Iterable[Any]) -> list[Any]:
        """The arguments of a function, with what the module has in the place of what it had."""
        if _is_read_by_dynamo():
            return list(values)
        return [self._one(func, value) for value in values]

    def _one(self, func: Callable[..., Any], value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self.now(func, value))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or _asks(func):
            return value
        if is_made_of_others(value) and id(value) not in self._known:
            refuse_read(func, value)
            for part in parts(value):
                self._part(part)
            return value
        found = self._now.get(id(value))
        return self._part(value) if found is None else found

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory of one that the module had, in that of the one that it has; others as they are."""
        if id(value) in self._known or not _is_in_memory(value):
            return value
        owner = self._memories.get(_memory(value))
        is_view = value._is_view() or not value.requires_grad
        if owner is None or not is_view or owner.dtype != value.dtype or id(owner) not in self._now:
            if id(value) not in self.borrowed:
                self.borrowed[id(value)] = Borrowed.of(value)
            borrowed = self.borrowed[id(value)]
            borrowed.is_trained |= value.requires_grad and torch.is_grad_enabled()
            return borrowed.traced
        whole = self._now[id(owner)] if value.requires_grad else self._now[id(owner)].detach()
        if (value.shape, value.stride(), value.storage_offset()) == (
            owner.shape,
            owner.stride(),
            owner.storage_offset(),
        ):
            return whole
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def borrowed_among(constants: Mapping[str, Any], borrowed: Iterable[Borrowed]) -> dict[str, Borrowed]:
    """Which constants of a program are borrowed, by name.

    Args:
        constants: of the program; torch.export detaches them.
        borrowed: what its trace read.
    """
    places = {_place(b.traced): b for b in borrowed}
    held = {n: t for n, t in constants.items() if isinstance(t, torch.Tensor) and _is_in_memory(t)}
    return {n: places[_place(t)] for n, t in held.items() if _place(t) in places}


def _asks(func: Callable[..., Any]) -> bool:
    """Whether a function reads an attribute that says nothing of a tensor's content."""
    return func.__name__ == "__get__" and func.__self__.__name__ not in _VIEWS  # type: ignore[attr-defined]


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a place in memory tells: no wrapper of others, and not empty."""
    if isinstance(tensor, FakeTensor) or is_made_of_others(tensor):
        return False
    is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and tensor.numel() > 0


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _memory(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
