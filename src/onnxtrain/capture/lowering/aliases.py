"""Tensors that share memory: what one of them is written, the others read, in a graph where nothing is written."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from onnxtrain.capture.lowering.functional import functional_of, is_view_in_place, written_by
from onnxtrain.capture.lowering.open_views import OpenViews
from onnxtrain.capture.lowering.records import arguments_of, given_for, memory_of
from onnxtrain.capture.lowering.strides import (
    inverted,
    is_empty,
    offset_of,
    order_in_memory,
    refuse_beyond,
    refused_strides,
)
from onnxtrain.capture.lowering.types import passes_gradient
from onnxtrain.capture.lowering.writer import Writer
from onnxtrain.capture.lowering.written_views import WrittenViews, refused_view
from onnxtrain.capture.parts_at import PART_AT

aten = torch.ops.aten


class Aliases:
    """The recorded tensors, by the memory they share, and what their content is now.

    A tensor is one of these: the first of its memory, or a view of another. Writing to a view makes a new content of
    what it is a view of, and so on to the first; other views are made again from there when they are read.

    Args:
        writer: where contents are written to.
        issue: writes a call: its operator, positional and keyword arguments, and what it returned.
    """

    def __init__(self, writer: Writer, issue: Callable[..., Any]) -> None:
        self._writer, self._issue = writer, issue
        self._content: dict[Node, Any] = {}
        self._parents: dict[Node, Node] = {}
        self._cut: set[Node] = set()  # those whose gradient ends there, which their parents have
        self._own: dict[Node, Any] = {}  # what was written to those detached, whose gradient others do not have
        self._hooked: dict[Node, Any] = {}  # views whose gradient passes through hooks, and their content without these
        self._seen: dict[Node, int] = {}
        self._writes: dict[int, int] = {}
        self._first: dict[int, Node] = {}
        self._open = OpenViews(self._first, self._views_above)
        self._written = WrittenViews(writer, issue, self.content)

    def add(self, node: Node, content: Any) -> None:
        """A recorded call, or input, has this content."""
        self._content[node] = content
        self._open.add(node)
        memory = memory_of(node.meta.get("val"))
        if memory is None:
            return
        self._seen[node] = self._writes.get(memory, 0)
        sources = [given] if (given := given_for(node)) else node.all_input_nodes
        known = (source for source in sources if source in self._content)  # those within a vmap are not
        parent = next((a for a in known if memory_of(a.meta.get("val")) == memory), None)
        if parent is None and node.op == "call_function":
            parent = self._first.get(memory)
        self._first.setdefault(memory, node)
        if parent is None or parent is node:
            return
        if isinstance(parent.meta["val"], torch.Tensor) or parent in self._parents:  # not one of several results
            self._parents[node] = parent

    def same(self, node: Node, as_node: Node, content: Any = None) -> None:
        """A recorded value is another one, under another name; now, where that is said, with this content."""
        known = self.content(as_node)
        self._content[node] = known if content is None else content
        if content is not None and content is not known:
            self._cut.add(node)
        memory = memory_of(as_node.meta.get("val"))
        if memory is not None:
            self._parents[node], self._seen[node] = as_node, self._writes.get(memory, 0)

    def content(self, node: Any) -> Any:
        """What a recorded tensor contains now; numbers are themselves."""
        if not isinstance(node, Node):
            return node
        memory = memory_of(node.meta.get("val"))
        now = 0 if memory is None else self._writes.get(memory, 0)
        if memory is not None and self._seen[node] != now and node in self._parents:
            parent = self._parents[node]
            above = self.content(parent)
            is_same = _is_same(node, parent) and node.target is not aten.detach.default
            made = above if is_same else self._again(node, parent, above)
            self._content[node] = self._with_gradient_of(self._own[node], made) if node in self._own else made
            self._seen[node] = now
        return self._content[node]

    def _again(self, view: Node, parent: Node, above: Any) -> Any:
        """A view of what has another content now."""
        if parent is given_for(view):
            return self._again_of_several(view)
        if parent not in view.all_input_nodes:
            raise refused_view(view)
        if view.target is operator.getitem:
            return self._writer.part(above, view.args[1])  # type: ignore[arg-type]
        if is_strided(view.target):
            return self.strided(view, is_again=True)
        target, args, kwargs = view.target, view.args, dict(view.kwargs)
        if is_view_in_place(target):
            target, args, kwargs = functional_of(view, written_by(target))
        args, kwargs = self.contents((args, kwargs))
        return self._issue(target, args, kwargs, view.meta.get("val"))

    def _again_of_several(self, part: Node) -> Any:
        """A view that was made of one of several tensors together with views of the others."""
        parts: Any = part.args[0]
        args, kwargs = self.contents((parts.args, dict(parts.kwargs)))
        return self._writer.part(self._issue(parts.target, args, kwargs, parts.meta.get("val")), part.args[1])  # type: ignore[arg-type]

    def strided(self, view: Node, is_again: bool = False) -> Any:
        """A view that is told by strides, of the first tensor of its memory as it lies there.

        What it is called on may be a part of that. What it reads beyond this part gets no gradient, in PyTorch too; but
        there, once the memory is written to, the view is one of all the memory.
        """
        given = arguments_of(view)
        first, is_detached = given["self"], False
        while first in self._parents:
            is_detached |= first.target is aten.detach.default or first in self._cut
            first = self._parents[first]
        order = order_in_memory(first.meta["val"])
        part = given["self"].meta["val"]
        if order is None or is_empty(part) or part.dtype != first.meta["val"].dtype:  # it reads others
            raise refused_strides()
        offset = given.get("storage_offset")
        if offset is None and any(above.target is PART_AT for above in self._views_above(given["self"])):
            raise refused_strides()
        offset = offset_of(part) if offset is None else self.content(offset)
        refuse_beyond(given["size"], given["stride"], offset, first.meta["val"])
        memory = self.content(first)
        if is_detached:
            memory = self._call(aten.detach.default, (memory,))
        if order != list(range(len(order))):
            memory = self._call(aten.permute.default, (memory, order))
        flat = self._call(aten.reshape.default, (memory, [-1]))
        where = (*self.contents((given["size"], given["stride"])), offset)
        is_hooked = any(view in self._hooked for view in self._views_above(given["self"]))
        if is_hooked and not is_detached:
            flat = self._with_part(flat, given["self"], self._places_of(given["self"], first, order, flat))
        read = self._call(aten.as_strided.default, (flat, *where))
        if is_detached or is_hooked or is_again or _is_all_of(given["self"], first):
            return read
        own = self._call(aten.as_strided.default, (self._elements_of(given["self"], first, order, flat), *where))
        return self._call(aten.where.self, (own, read, self._call(aten.detach.default, (read,))))

    def _with_part(self, flat: Any, part: Node, places: Any) -> Any:
        """A memory through which the elements of a part of it alone get gradients, which pass through its hooks."""
        if 0 in part.meta["val"].stride():  # of elements that are read twice each gets half
            raise refused_strides()
        own = self._call(aten.reshape.default, (self.content(part), [-1]))
        return self._call(aten.index_put.default, (self._call(aten.detach.default, (flat,)), [places], own))

    def _elements_of(self, part: Node, first: Node, order: list[int], flat: Any) -> Any:
        """For each element of a memory whether a part of it has it."""
        places = self._places_of(part, first, order, flat)
        on = {"device": first.meta["val"].device}
        nothing = self._issue(aten.full.default, ([self._writer.count(flat)], False), on)
        return self._call(aten.index_fill.int_Scalar, (nothing, 0, places, True))

    def _places_of(self, part: Node, first: Node, order: list[int], flat: Any) -> Any:
        """Where in a memory the elements of a part of it are."""
        axes = [self._writer.sizes(self.content(first))[i] for i in order]
        every = self._issue(aten.arange.default, (self._writer.count(flat),), {"device": first.meta["val"].device})
        places = self._call(aten.reshape.default, (every, axes))
        numbered = self._numbered(first, self._call(aten.permute.default, (places, inverted(order))))
        return self._call(aten.reshape.default, (numbered.content(part), [-1]))

    def _numbered(self, first: Node, places: Any) -> Aliases:
        """The same views, of a memory whose elements are their places in it."""
        memory, numbered = memory_of(first.meta["val"]), copy.copy(self)
        assert memory is not None, "tensors have memory"
        now = self._writes.get(memory, 0) + 1
        numbered._writes = {memory: now}
        numbered._content, numbered._seen = {**self._content, first: places}, {**self._seen, first: now}
        numbered._issue = lambda target, args, kwargs, _=None: self._issue(target, args, kwargs)
        return numbered

    def hook(self, view: Node, content: Any) -> None:
        """A view's gradient passes through hooks, and so that of what is made of it, until its memory is written to."""
        self._hooked.setdefault(view, self.content(view))
        self._content[view] = content

    def past_hooks(self, memory: int) -> bool:
        """Whether views of a memory had hooks: a change of it is none of them, and they are views of what it gives."""
        passed = [view for view in self._hooked if memory_of(view.meta["val"]) == memory]
        if passed:
            self._writes[memory] = self._writes.get(memory, 0) + 1
        for view in passed:
            self._content[view], self._seen[view] = self._hooked.pop(view), self._writes[memory]
        return bool(passed)

    def given(self, structure: Any, written: Sequence[Node]) -> Any:
        """The contents of a call's arguments, of which it writes to some; these are read as they are without hooks."""
        nodes: list[Any] = []
        torch.fx.map_arg(structure, nodes.append)
        found = [self.content(node) for node in nodes]
        for node in written:
            memory = memory_of(node.meta.get("val"))
            if memory is not None and self.past_hooks(memory) and node in nodes:
                found[nodes.index(node)] = self.content(node)
        contents = iter(found)
        return torch.fx.map_arg(structure, lambda _: next(contents))

    def write(self, node: Node, content: Any) -> None:
        """A recorded tensor is written to."""
        memory = memory_of(node.meta.get("val"))
        assert memory is not None, "tensors have memory"
        self._open.refuse(node, self._content)
        self.past_hooks(memory)
        written: dict[Any, Any] = {node: content}
        current: Any = node
        while current in self._parents:
            parent: Any = self._parents[current]
            if not isinstance(parent.meta["val"], torch.Tensor):
                content, parent = self._written.several(current, parent, content), parent.args[0]
            elif current.target is aten.detach.default:
                self._own[current] = content
                content = self._call(aten.detach.default, (content,))
            elif not _is_same(current, parent):
                if current.target is aten.view.dtype:
                    self._own[current] = content
                content = self._written.whole(current, parent, content)
            written[parent], current = content, parent
        self._writes[memory] = self._writes.get(memory, 0) + 1
        for changed, now in written.items():
            self._content[changed], self._seen[changed] = now, self._writes[memory]

    def _views_above(self, node: Node) -> Iterator[Node]:
        """A tensor, what it is a view of, and so on."""
        current: Node | None = node
        while current is not None:
            yield current
            current = self._parents.get(current)

    def _with_gradient_of(self, other: Any, content: Any) -> Any:
        """A content without gradient, through which the gradient passes to another: 1 for each finite element of it."""
        if not passes_gradient(other):
            return content
        finite = self._call(aten.where.ScalarOther, (self._call(aten.isfinite.default, (other,)), other, 0.0))
        nothing = self._call(aten.sub.Tensor, (finite, self._call(aten.detach.default, (finite,))))
        return self._call(aten.add.Tensor, (content, nothing))

    def _call(self, target: Any, args: tuple[Any, ...]) -> Any:
        return self._issue(target, args, {})

    def contents(self, structure: Any) -> Any:
        """A structure of recorded values, with what they contain now."""
        return torch.fx.map_arg(structure, self.content)


def is_of_size(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes, the same symbols among them."""
    return tuple(map(str, value.shape)) == tuple(map(str, other.shape))


def is_strided(target: Any) -> bool:
    """Whether an operator reads the memory of a tensor, of which it is told sizes and strides."""
    return target in (aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default)


def _is_same(view: Node, of: Node) -> bool:
    a, b = view.meta.get("val"), of.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (
        (a.dtype, a.is_conj(), a.is_neg()) == (b.dtype, b.is_conj(), b.is_neg())
        and is_of_size(a, b)
        and tuple(map(str, a.stride())) == tuple(map(str, b.stride()))
        and str(a.storage_offset()) == str(b.storage_offset())
    )


def _is_all_of(view: Node, first: Node) -> bool:
    """Whether a view has all elements of the first tensor of its memory, or none of them has a gradient."""
    value, whole = view.meta["val"], first.meta["val"]
    if not (whole.is_floating_point() or whole.is_complex()) or view is first:
        return True
    return str(value.numel()) == str(whole.numel()) and order_in_memory(value) is not None
