"""Tensors that are made of others, as the weights that torchao quantizes: a graph is given their parts.

While a module is traced, such parameters are attributes of it, and what reads one (``reads_parts``) reads its parts,
which are borrowed (``found_elsewhere``) and found on the module again before every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onnxtrain.capture.replaced import ABSENT, replaced
from onnxtrain.errors import CaptureError

_READERS: set[Callable[..., Any]] = set()


def is_made_of_others(value: object) -> bool:
    """Whether a value is a tensor that is made of others."""
    return is_traceable_wrapper_subclass(value)


def is_shard(value: torch.Tensor) -> bool:
    """Whether a tensor is made of what this process has of it, and of what others have."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # which takes half a second to import
    return tensors is not None and isinstance(value, tensors.DTensor)


@dataclasses.dataclass(frozen=True)
class Made:
    """How a tensor is made of its parts.

    Args:
        kind: its class.
        parts: a name for each part, and how that one is made of others where it is.
        settings: what else its class makes it of.
        size: its sizes.
        stride: its strides.
    """

    kind: Any
    parts: tuple[tuple[str, Made | None], ...]
    settings: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, whole: torch.Tensor) -> Made:
        """How a tensor is made."""
        names, settings = whole.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = ((name, getattr(whole, name)) for name in names)
        made = tuple((n, cls.of(x) if is_made_of_others(x) else None) for n, x in parts)
        return cls(type(whole), made, settings, whole.shape, whole.stride())

    def __str__(self) -> str:
        """The same text for all that are made alike, in each process."""
        parts = ", ".join(f"{name}: {made}" if made else name for name, made in self.parts)
        form = f"{[*self.size]} {[*self.stride]} {self.settings!r}"
        return f"{self.kind.__module__}.{self.kind.__qualname__}({parts}) {form}"

    def names(self, before: str = "") -> list[str]:
        """The names of all parts that are made of no others; they lead to them from the whole."""
        pairs = ((before + name, made) for name, made in self.parts)
        return [leaf for name, made in pairs for leaf in (made.names(f"{name}.") if made else [name])]

    def whole(self, parts: Iterator[torch.Tensor]) -> Any:
        """The tensor, of parts in the order of ``names``."""
        inner = {name: made.whole(parts) if made else next(parts) for name, made in self.parts}
        return self.kind.__tensor_unflatten__(inner, self.settings, self.size, self.stride)


def parts(whole: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor is made of, in the order of ``Made.names``."""
    return [_part(whole, name) for name in Made.of(whole).names()]


def _part(whole: Any, name: str) -> torch.Tensor:
    for step in name.split("."):
        whole = getattr(whole, step)
    return whole


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that a parameter or buffer of a module is made of.

    Args:
        path: of the submodule.
        leaf: the name of the parameter there.
        name: leads to the part.
    """

    path: str
    leaf: str
    name: str

    def of(self, module: torch.nn.Module) -> torch.Tensor:
        """The one that a module has now."""
        return _part(getattr(module.get_submodule(self.path), self.leaf), self.name)


def parts_of(module: torch.nn.Module) -> dict[int, Part]:
    """The tensors that a module's parameters and buffers are made of, by identity."""
    found = ((path, leaf, t, Made.of(t).names()) for path, _, _, leaf, t in _wholes(module))
    return {id(_part(whole, name)): Part(path, leaf, name) for path, leaf, whole, names in found for name in names}


def _wholes(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, dict[str, Any], str, torch.Tensor]]:
    """The parameters and buffers that are made of others: path and submodule, the table there, name, and tensor."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for leaf, tensor in table.items():
                if tensor is not None and is_made_of_others(tensor):
                    yield path, owner, table, leaf, tensor


def as_attributes(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, parameters and buffers that are made of others are attributes: torch.export would take them apart."""
    found = [*_wholes(module)]
    away = [(table, leaf, ABSENT) for _, _, table, leaf, _ in found]
    return replaced(*away, *((vars(owner), leaf, whole) for _, owner, _, leaf, whole in found))


def refuse_wrappers(owned: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise where a tensor is made of others, and a graph cannot be given its parts.

    Args:
        owned: the parameters and buffers of a module by name; those that are not trained can be given so.
        inputs: what its call is given, by what it is called.

    Raises:
        CaptureError: one is.
    """
    for name, tensor in (*owned.items(), *inputs.items()):
        is_weight = name in owned and not is_shard(tensor) and not tensor.requires_grad
        if is_made_of_others(tensor) and not is_weight:
            trained = " and trained" if tensor.requires_grad else ""
            raise CaptureError(
                f"{name} is a {type(tensor).__name__}, a tensor made of others{trained}, which a graph cannot take",
                cure="make it a plain tensor, or a weight that is not trained; or let HierarchicalORTModule leave such "
                "layers in eager PyTorch",
            )


def class_of(owned: torch.Tensor) -> Hashable:
    """The class of a parameter or buffer, and how it is made of others where it is.

    Of a parameter and a buffer a plain tensor's, which ``functional_call`` puts in the place of both.
    """
    if is_made_of_others(owned) and not is_shard(owned):
        return str(Made.of(owned))
    return torch.Tensor if type(owned) is torch.nn.Parameter else type(owned)


def reads_parts(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say that what takes the place of a function of torch reads the parts of what it is given."""

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        _READERS.add(function)
        return made

    return register


def refuse_read(function: Callable[..., Any], whole: torch.Tensor) -> None:
    """Raise where a function is given a tensor that is made of others, and does not read its parts.

    Raises:
        CaptureError: it does not.
    """
    if function not in _READERS:
        name = getattr(function, "__name__", str(function))
        raise CaptureError(
            f"{name} is given a {type(whole).__name__}, a tensor made of others, which a graph takes as the weight "
            "of a linear layer alone",
            cure="quantize linear layers alone: filter_fn of torchao's quantize_; or let HierarchicalORTModule leave "
            "this layer in eager PyTorch",
        )
