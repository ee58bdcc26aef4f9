"""What is in the structures that a call takes and gives: dictionaries, lists, tuples, dataclasses, namespaces."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

Leaf = tuple[str, Any]


def parts(value: Any) -> dict[str, Any] | None:
    """What a container holds, by place; None for anything else."""
    if isinstance(value, dict):
        return {f"[{key!r}]": held for key, held in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{index}]": held for index, held in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        return {f".{name}": held for name, held in vars(value).items()}
    return None


def leaves(value: Any, place: str = "") -> Iterator[Leaf]:
    """All that is in a structure, with where it is."""
    held = parts(value)
    if held is None:
        yield place, value
    for name, inner in (held or {}).items():
        yield from leaves(inner, f"{place}{name}")


def containers(value: Any) -> list[tuple[str, str]]:
    """The types of a structure, from the outside in."""
    name = "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return [(name, ""), *(pair for held in (parts(value) or {}).values() for pair in containers(held))]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of the same kinds with other leaves."""
    if isinstance(value, tuple):
        held = [mapped(v, change) for v in value]
        return value._make(held) if hasattr(value, "_make") else tuple(held)  # type: ignore[attr-defined]
    if isinstance(value, list):
        return [mapped(v, change) for v in value]
    if parts(value) is None:
        return change(value)
    made = copy.copy(value)
    entries = made if isinstance(made, dict) else vars(made)
    for name, held in list(entries.items()):
        entries[name] = mapped(held, change)
    return made
