"""Views that were written to: what the tensors have become that they are views of."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._functorch import predispatch
from torch.fx import Node

from onnxtrain.capture.lowering.complex_views import conjugated, scattered, whole_of
from onnxtrain.capture.lowering.records import arguments_of, given_for, name_of
from onnxtrain.capture.lowering.strides import inverted, order_of_view
from onnxtrain.capture.lowering.writer import Writer
from onnxtrain.capture.parts_at import PART_AT
from onnxtrain.errors import CaptureError

aten = torch.ops.aten
_SHAPES = frozenset(
    (
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"),
        *("ravel", "unsqueeze_", "squeeze_", "contiguous", "alias", "detach", "to", "expand", "expand_as"),
    )
)
_SPLITS = frozenset(("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"))
_SPLITS_BY_NAME = {"hsplit": 1, "vsplit": 0, "dsplit": 2}  # whose axis is in the name


class WrittenViews:
    """Puts the contents of views where they are views.

    Args:
        writer: where contents are written to.
        issue: writes a call: its operator, positional and keyword arguments.
        content: what a recorded tensor contains now.
    """

    def __init__(self, writer: Writer, issue: Callable[..., Any], content: Callable[[Any], Any]) -> None:
        self._writer, self._issue, self._content = writer, issue, content

    def whole(self, view: Node, parent: Node, content: Any) -> Any:
        """The content of what a view is a view of, once the view has another."""
        if parent is given_for(view) and parent.meta["val"].numel() == view.meta["val"].numel():
            return self._call(aten.reshape.default, (content, self._writer.sizes(self._content(parent))))
        if not isinstance(view.target, torch._ops.OpOverload) or parent not in view.all_input_nodes:
            raise refused_view(view)
        name, above, call = name_of(view.target), self._content(parent), self._call
        given = {k: torch.fx.map_arg(v, self._content) for k, v in arguments_of(view).items()}
        if (where := self._place(name, above, given)) is not None:
            return self._scatter(where[0], above, content, *where[1:])
        if view.target is PART_AT:
            return call(aten.index_copy.default, (above, given["dim"], given["index"], content))
        if name == "unfold" and _are_apart(view, parent):
            return self._of_windows(above, content, given["dimension"], given["size"], given["step"])
        if (order := order_of_view(name, given, parent.meta["val"].dim())) is not None:
            made = call(aten.permute.default, (content, inverted(order)))
            return conjugated(name, made, call)
        if (made := whole_of(name, above, content, call)) is not None:
            return made
        if view.target is aten.view.dtype and parent.meta["val"].itemsize == view.meta["val"].itemsize:
            return call(aten.view.dtype, (content, parent.meta["val"].dtype))
        if (
            name in _SHAPES
            and view.target is not aten.view.dtype
            and parent.meta["val"].numel() == view.meta["val"].numel()
        ):
            return call(aten.reshape.default, (content, self._writer.sizes(above)))
        raise refused_view(view)

    def _place(self, name: str, above: Any, given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The operator that puts a part in its place, and where that is; None of what is no part along axes.

        Args:
            name: of the operator that makes the part.
            above: what it is a part of.
            given: the operator's arguments, by name.
        """
        if name == "select":
            return aten.select_scatter.default, given["dim"], given["index"]
        if name == "slice":
            bounds = given.get("start"), given.get("end"), given.get("step", 1)
            return aten.slice_scatter.default, given.get("dim", 0), *bounds
        if name == "narrow":
            dim, start = given["dim"], given["start"]
            if _is_negative(start):  # told from the end, which is 0 for a slice
                start = self._sum(self._writer.sizes(above)[dim], start)
            return aten.slice_scatter.default, dim, start, self._sum(start, given["length"])
        if name in ("diagonal", "linalg_diagonal"):
            axes = (0, 1) if name == "diagonal" else (-2, -1)
            return aten.diagonal_scatter.default, given.get("offset", 0), *map(given.get, ("dim1", "dim2"), axes)
        return None

    def _of_windows(self, above: Any, content: Any, dimension: int, size: int, step: int) -> Any:
        """The tensor that windows were cut from: the places that are first in them, then those that are second, ..."""
        axis = dimension % above.meta["val"].dim()
        length = self._product(self._writer.sizes(content)[axis], step)
        for place in range(size):
            column = self._call(aten.select.int, (content, -1, place))
            where = (axis, place, self._sum(length, place), step)
            above = self._scatter(aten.slice_scatter.default, above, column, *where)
        return above

    def several(self, part: Node, parts: Node, content: Any) -> Any:
        """The tensor that was split, where one part of it has another content."""
        above = self._content(parts.args[0])
        index: Any = part.args[1]
        dim = _axis_of_parts(parts)
        if dim is None:
            raise refused_view(parts)
        if name_of(parts.target) == "unbind":
            return self._scatter(aten.select_scatter.default, above, content, dim, index)
        sizes = [self._size_of_part(parts, i, dim) for i in range(index + 1)]
        start = functools.reduce(self._sum, sizes[:-1], 0)
        return self._scatter(aten.slice_scatter.default, above, content, dim, start, self._sum(start, sizes[-1]))

    def _size_of_part(self, parts: Node, index: int, dim: int) -> Any:
        size = parts.meta["val"][index].shape[dim]
        if isinstance(size, int):
            return size
        return self._writer.call(aten.sym_size.int, (self._writer.part(self._content(parts), index), dim))

    def _scatter(self, target: Any, above: Any, part: Any, dim: int | None, *rest: Any) -> Any:
        return scattered(target, above, part, dim, rest, self._call)

    def _sum(self, first: Any, second: Any) -> Any:
        return self._computed(operator.add, first, second)

    def _product(self, first: Any, second: Any) -> Any:
        return self._computed(operator.mul, first, second)

    def _computed(self, compute: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
        """A number of two, of which some are calls."""
        is_number = not isinstance(first, Node) and not isinstance(second, Node)
        return compute(first, second) if is_number else self._writer.call(compute, (first, second))

    def _call(self, target: Any, args: tuple[Any, ...]) -> Any:
        return self._issue(target, args, {})


def _is_negative(number: Any) -> bool:
    """Whether a number is; one that depends on sizes is where it was when its call was recorded: torch guards it."""
    value = number.meta["val"] if isinstance(number, Node) else number
    hint = value.node.hint if isinstance(value, torch.SymInt) else value
    return hint is not None and hint < 0


def _are_apart(windows: Node, whole: Node) -> bool:
    """Whether windows of one known size share no element."""
    given = arguments_of(windows)
    sizes = (given["size"], given["step"])
    return whole.meta["val"].dim() > 0 and all(isinstance(s, int) for s in sizes) and given["step"] >= given["size"]


def _axis_of_parts(parts: Node) -> int | None:
    """The axis that a call has split a tensor along; None where it did something else."""
    name, whole = name_of(parts.target), parts.args[0].meta["val"]  # type: ignore[union-attr]
    if name in _SPLITS_BY_NAME:
        return 0 if name == "hsplit" and whole.dim() == 1 else _SPLITS_BY_NAME[name]
    return arguments_of(parts).get("dim", 0) % whole.dim() if name in _SPLITS else None


def refused_view(view: Node) -> CaptureError:
    """The error for a write to a view that has no other form."""
    called = "torch.vmap" if view.target is predispatch._remove_batch_dim else view.target
    return CaptureError(
        f"the forward pass writes to what {called} returns, which shares memory with another tensor",
        cure="write to a copy, y = x.clone(), or make a new tensor with torch.where, torch.cat or index_put",
    )
