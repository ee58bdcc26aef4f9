"""Tensors that a trace leaves outside of the module: in a table of a Python module, in the cache of a function.

They have no content, and who reads them later computes nothing. So they are taken out; what a call in eager PyTorch
leaves there is what the next trace finds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from onnxtrain.capture.source_lines import user_line
from onnxtrain.errors import CaptureError, note

_FunctionsCache = functools._lru_cache_wrapper


class GivenUpError(Exception):
    """Nothing is wrong with the module: it is to be traced in another way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        note(self)


class LeftOutsideError(CaptureError):
    """The forward pass leaves a tensor where a graph cannot leave it again.

    Args:
        where: what holds it.
        source: the line that made it.
        has_history: whether somebody may differentiate it.
        is_cache: whether it is made of sizes alone, so that others will be made as it is.
    """

    def __init__(self, where: Sequence[str], source: str, has_history: bool, is_cache: bool) -> None:
        super().__init__(
            f"the forward pass leaves a tensor outside of the module: in {', '.join(where)}",
            source=source,
            cure="keep it on the module: a buffer where a later call reads it, else an attribute",
        )
        self.has_history, self.is_cache = has_history, is_cache


def take_out_of_others(
    tracked: Mapping[torch.Tensor, Any], inputs: Collection[int], program: torch.export.ExportedProgram
) -> LeftOutsideError | None:
    """Take out what a trace has left outside of the module and of its program; says what it was.

    Args:
        tracked: what was recorded of the trace's tensors that there still are.
        inputs: the identities of its inputs.
        program: what was traced.
    """
    left = left_by(None, lambda: [t for t in tracked if id(t) not in inputs])
    if left:  # the bodies of loops know theirs
        parts = (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
        own = {id(x) for m in parts for n in m.graph.nodes for x in pytree.tree_leaves(n.meta.get("val"))}
        left = [t for t in left if id(t) not in own]
    nodes = [tracked[t].proxy.node for t in left]
    where = take_out(left)
    if not where:
        return None
    lines = [user_line(node.meta.get("stack_trace") or "") for node in nodes]
    has_history, is_cache = any(t.requires_grad for t in left), all(map(_is_made_of_sizes, nodes))
    return LeftOutsideError(where, next(filter(None, lines), ""), has_history, is_cache)


def take_out_refused(error: Exception, made: Collection[weakref.ref[torch.Tensor]]) -> None:
    """Take out what a trace has left that raised.

    Args:
        error: what it raised.
        made: its tensors.
    """
    if isinstance(error, GivenUpError):
        error.__traceback__ = None  # its frames hold tensors
    take_out(left_by(error, lambda: [t for find in made if (t := find()) is not None]))


def _is_made_of_sizes(node: torch.fx.Node) -> bool:
    """Whether a call is one of creation and arithmetic, with nothing but sizes of the inputs."""
    waiting, seen = [node], {node}
    while waiting:
        now = waiting.pop()
        is_random = torch.Tag.nondeterministic_seeded in getattr(now.target, "tags", ())
        if now._erased:  # nothing in the graph reads it, and what it was made of is not known any longer
            return False
        if is_random or (now.op == "placeholder" and isinstance(now.meta.get("val"), torch.Tensor)):
            return False
        before = () if now.target is torch.ops.aten.sym_size.int else now.all_input_nodes
        waiting += [n for n in before if n not in seen]
        seen |= set(before)
    return True


def left_by(refused: BaseException | None, alive: Callable[[], Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors without content that something outside of a trace holds.

    Args:
        refused: what the trace raised, whose stack holds tensors too.
        alive: gives the trace's tensors that there still are.
    """
    if refused is not None and _without_content(alive()):
        _empty_frames(refused)
    for generation in (1, 2):  # torch's control flow leaves circles; young ones where garbage waits
        if _without_content(alive()):
            gc.collect(generation)
    return _without_content(alive())


def _empty_frames(raised: BaseException) -> None:
    """Let go of the tensors without content in the frames of an exception and of those before it.

    A frame that is cleared still has its function, and that the variables of enclosing ones; and, before Python 3.13,
    the table that somebody who looked at its variables has made.
    """
    waiting, seen = [raised], {id(raised)}
    while waiting:
        now = waiting.pop()
        traceback.clear_frames(now.__traceback__)
        for frame, _ in traceback.walk_tb(now.__traceback__):
            dict(frame.f_locals)  # brings the table up to date
            for function in gc.get_referents(frame):
                for cell in getattr(function, "__closure__", None) or ():
                    if _without_content(pytree.tree_leaves(_content(cell))):
                        cell.cell_contents = None
        before = [e for e in (now.__cause__, now.__context__) if e is not None and id(e) not in seen]
        waiting += before
        seen |= set(map(id, before))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none
        return None


def _without_content(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if isinstance(t, FakeTensor)]


def take_out(tensors: list[torch.Tensor]) -> list[str]:
    """Remove tensors from all that Python code keeps them in: tables lose the entry, names become None.

    Returns:
        Where they were, but for caches of functions, which are empty now.
    """
    wanted: list[Any] = tensors
    passed: list[Any] = []  # what this function made, or has looked at
    where: list[str] = []
    names = _Names()
    while wanted:
        ids = set(map(id, wanted))
        holders = [h for h in gc.get_referrers(*wanted) if not any(h is p for p in (wanted, passed, *passed))]
        passed += [wanted, holders, *holders]
        where += filter(None, (_removed(h, ids, names) for h in holders))
        wanted = [h for h in holders if _is_record(h)]
    return list(dict.fromkeys(where))


def _is_record(holder: Any) -> bool:
    """Whether an object goes with the tensor in it."""
    return isinstance(holder, tuple) or dataclasses.is_dataclass(type(holder))


def _removed(holder: Any, ids: set[int], names: _Names) -> str:
    """Where an object held what has these identities, and does no longer; empty where that is no matter."""
    if isinstance(holder, _FunctionsCache):
        holder.cache_clear()  # the function computes it again
        return ""
    if isinstance(holder, types.CellType):
        holder.cell_contents = None
        return "a variable of an enclosing function"
    if isinstance(holder, dict):
        return _taken_from_table(holder, ids, names)
    if isinstance(holder, list | set | collections.deque):
        kept = [x for x in holder if id(x) not in ids]
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(kept)
        return names.of(holder) or f"a {type(holder).__name__}"
    if _is_record(holder) or isinstance(holder, types.FrameType | type):
        return ""
    return _taken_from_attributes(holder, ids)


def _taken_from_table(table: dict[Any, Any], ids: set[int], names: _Names) -> str:
    owner = _owner_of(table)
    if isinstance(owner, _FunctionsCache):
        return _removed(owner, ids, names)
    if owner is not None:
        return _taken_from_attributes(owner, ids)
    kept = [(k, v) for k, v in table.items() if id(v) not in ids]
    table.clear()
    for key, value in kept:
        table[int(key) if isinstance(key, torch.SymInt) else key] = value
    return names.of(table) or "a table"


def _taken_from_attributes(owner: Any, ids: set[int]) -> str:
    held = [n for n, v in getattr(owner, "__dict__", {}).items() if id(v) in ids]
    for name in held:
        setattr(owner, name, None)
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{held[0]}" if held else ""


def _owner_of(table: dict[Any, Any]) -> Any:
    """The Python module, class or object whose attributes are in a table, or the function that caches results there."""
    owners = gc.get_referrers(table)
    if "__module__" in table:
        return next((x for x in owners if isinstance(x, type)), None)
    return next((x for x in owners if isinstance(x, _FunctionsCache) or getattr(x, "__dict__", None) is table), None)


class _Names:
    """The names that Python modules, and classes in them, have for containers."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    def of(self, holder: Any) -> str:
        """The name of a container; empty where it has none."""
        if not self._found:
            for name, value in _names_of_all():
                self._found.setdefault(id(value), name)
        return self._found.get(id(holder), "")


def _names_of_all() -> Iterator[tuple[str, Any]]:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            yield f"{module.__name__}.{name}", value
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                yield from ((f"{value.__name__}.{n}", v) for n, v in vars(value).items())


__all__ = ["GivenUpError", "LeftOutsideError", "left_by", "take_out", "take_out_of_others", "take_out_refused"]
