"""One call: what has a translation in its place, written with the casts that torch makes out of sight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from onnxtrain.capture import aten
from onnxtrain.capture.lowering.expansions import expansion
from onnxtrain.capture.lowering.types import (
    Region,
    cast_for_autocast,
    cast_to,
    is_cast_by_autocast,
    of_default_type,
    promoted,
    stated,
)
from onnxtrain.capture.lowering.writer import Writer, identify_sizes
from onnxtrain.capture.parts_at import PART_AT
from onnxtrain.capture.source_lines import user_line
from onnxtrain.errors import CaptureError, OnnxTrainError, first_line

_SAME = {
    torch.ops.aten.item.default: torch.ops.aten._local_scalar_dense.default,  # taken apart, it would be another number
    PART_AT: torch.ops.aten.index_select.default,
}
Verdict: TypeAlias = Callable[[Node], bool | None]
Walk: TypeAlias = Callable[[GraphModule, Sequence[Any]], Any]
_REPORT = 'report this model; until then Options(fallback="eager") runs it in eager PyTorch'


class UnknownCallError(Exception):
    """A call has no translation and is made of nothing that has."""


class Calls:
    """Writes calls.

    Args:
        writer: where to.
        verdict: whether a call has a translation; False where it has a wrong one, None where it has none.
        whole: operators that are not taken apart.
        walk: writes the calls of a graph whose inputs are these, and gives back its results.

    Attributes:
        region: what is in force where calls are written now.
        kept: calls of the new graph that stay whole.
    """

    def __init__(self, writer: Writer, verdict: Verdict, whole: Container[Any], walk: Walk) -> None:
        self._writer, self._verdict, self._whole, self._walk = writer, verdict, whole, walk
        self._depth, self._takes_parts = 0, False
        self._casts: dict[Any, bool] = {}
        self.region = Region()
        self.kept: set[Node] = set()

    def issue(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any = None) -> Any:
        """Write a call, or what it is made of.

        Args:
            target: the operator.
            args: positional arguments.
            kwargs: keyword arguments.
            made: what it returns for tensors without content, where that is known.

        Raises:
            CaptureError: a call of the user's has no translation, and cannot stay whole.
        """
        target = _SAME.get(target, target)
        if target in self._writer.origins:
            raise UnknownCallError(target)  # it is made of itself
        kwargs = stated(self._writer, target, args, kwargs, made)
        with self._writer.from_operator(target):
            mark = self._writer.mark()
            try:
                return self._translatable(target, args, kwargs, made)
            except UnknownCallError as error:
                self._writer.take_back(mark)
                if self._depth and not self._takes_parts:
                    raise
                if (node := self._kept_whole(target, args, kwargs, made)) is not None:
                    return node
                if self._depth:
                    raise
                with self._taking_parts():
                    return self._in_parts(target, args, kwargs, made, error)

    def _in_parts(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any, error: Exception) -> Any:
        try:
            return self._translatable(target, args, kwargs, made)
        except UnknownCallError:
            raise CaptureError(
                f"there is no translation of {target}: {error}",
                node=str(target),
                cure="keep that part outside the wrapped module",
            ) from error

    @contextlib.contextmanager
    def _taking_parts(self) -> Iterator[None]:
        """Within it the parts of a call stay whole, since the call cannot."""
        self._takes_parts = True
        try:
            yield
        finally:
            self._takes_parts = False

    def _kept_whole(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> Node | None:
        mark = self._writer.mark()
        if is_cast_by_autocast(target.name(), self.region.key):
            args, kwargs = self._cast(target, args, kwargs, made)
        node = self._writer.call(target, args, kwargs, made)
        if aten.can_be_node(node):
            self.kept.add(node)
            return node
        self._writer.take_back(mark)
        return None

    def _translatable(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> Any:
        """Write what has a translation.

        Raises:
            UnknownCallError: there is nothing.
        """
        if target in self._whole:
            if (node := self._kept_whole(target, args, kwargs, made)) is not None:
                return node
            return self._apart(target, args, kwargs)
        key = self.region.key
        if is_cast_by_autocast(target.name(), key):
            args, kwargs = self._cast(target, args, kwargs, made)
        elif key and self._looks_inside(target, args, kwargs):
            return self._apart(target, args, kwargs)
        args, kwargs = of_default_type(self._writer, target, args, kwargs, made)
        if (wider := promoted(self._writer, target, args, kwargs)) is not None:
            return cast_to(self._writer, self._known(*wider[:3]), wider[3])
        result = self._known(target, args, kwargs, made)
        identify_sizes(result, made)
        return result

    def _known(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any = None) -> Any:
        """Write a call if it has a translation, else what it is made of."""
        node = self._writer.call(target, args, kwargs, made)
        verdict = self._verdict(node)
        if verdict is None:
            self._writer.graph.erase_node(node)
            return self._apart(target, args, kwargs)
        if not verdict and self._depth and not self._takes_parts:
            raise UnknownCallError(target)
        if not verdict:
            self.kept.add(node)
        return node

    def _cast(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> tuple[Any, Any]:
        if made is None:
            with self.region.enter():
                made = self._writer.result(target, args, kwargs)
        return cast_for_autocast(self._writer, args, kwargs, made)

    def _apart(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Write what a call is made of, autocast's casts among it."""
        found = self._expansion(target, args, kwargs)
        if found is None:
            raise UnknownCallError(target)
        before, self.region = self.region, Region(self.region.gradients)
        self._depth += 1
        try:
            made = self._walk(*found)
            return tuple(made) if isinstance(made, list) else made
        finally:
            self._depth -= 1
            self.region = before

    def _expansion(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[GraphModule, list[Any]] | None:
        looked_at = is_cast_by_autocast(target.name(), self.region.key)
        with Region().enter() if looked_at else self.region.enter():
            return expansion(self._writer, target, args, kwargs)

    def _looks_inside(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether autocast casts something that a call is made of."""
        if not target._can_decompose():
            return False
        leaves = [n.meta.get("val") for n in pytree.tree_leaves((args, dict(kwargs))) if isinstance(n, Node)]
        key = (target, self.region, tuple(v.dtype for v in leaves if isinstance(v, torch.Tensor)))
        if key not in self._casts:
            cast = self._expansion(target, args, kwargs)
            self._casts[key] = cast is not None and _calls_of(cast[0]) != self._calls_without_autocast(
                target, args, kwargs
            )
        return self._casts[key]

    def _calls_without_autocast(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any] | None:
        with Region().enter():
            plain = expansion(self._writer, target, args, kwargs)  # None where operands are of two types
        return None if plain is None else _calls_of(plain[0])


@contextlib.contextmanager
def at_line(node: Node) -> Iterator[None]:
    """Within it errors name the user's line of a recorded call.

    Raises:
        CaptureError: writing it raised what is not an error of ours, which is a fault here.
    """
    try:
        yield
    except CaptureError as error:
        raise CaptureError(
            error.what, node=error.node, source=error.source or _line_of(node), cure=error.cure
        ) from error.__cause__
    except (OnnxTrainError, UnknownCallError):
        raise
    except Exception as error:
        what = f"a call cannot be written into the graph: {type(error).__name__}: {first_line(error)}"
        raise CaptureError(what, node=str(node.target), source=_line_of(node), cure=_REPORT) from error


def _line_of(node: Node) -> str:
    return user_line(node.meta.get("stack_trace") or "")


def _calls_of(module: GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]
