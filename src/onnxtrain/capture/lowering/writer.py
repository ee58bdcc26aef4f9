"""A new graph of calls, written call by call; each result's type and shape are known as it is written."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from onnxtrain.capture.call_forms import Results, anew
from onnxtrain.capture.told_results import told

ORIGINS = "onnxtrain_origins"  # in a call's ``meta``: the operators it came from, the user's first
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn")


class Writer:
    """Writes calls into a graph.

    Args:
        root: the module that the graph belongs to; its attributes are those of the new graph's module.

    Attributes:
        graph: what was written.
        origins: the operators that the calls written now come from.
    """

    def __init__(self, root: GraphModule) -> None:
        self.graph = Graph()
        self.origins: tuple[Any, ...] = ()
        self._like: Node | None = None
        self._mode, self._results = _fake_mode(root), Results()

    @contextlib.contextmanager
    def at(self, like: Node) -> Iterator[None]:
        """Within it calls have the source line of a recorded one of the user's."""
        before = self._like
        if not self.origins:
            self._like = like
        try:
            yield
        finally:
            self._like = before

    @contextlib.contextmanager
    def from_operator(self, origin: Any) -> Iterator[None]:
        """Within it calls come from an operator, and from those that it comes from."""
        before = self.origins
        self.origins = (*before, origin)
        try:
            yield
        finally:
            self.origins = before

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, val: Any = None) -> Node:
        """Write a call.

        Args:
            target: the operator.
            args: positional arguments; calls of the graph stand for tensors.
            kwargs: keyword arguments.
            val: what it returns for tensors without content; found by calling it where this is None.
        """
        kwargs = dict(kwargs or {})
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else None
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name=name)
        if self._like is not None:
            node.meta.update((k, v) for k, v in self._like.meta.items() if k in _KEPT)
        node.meta[ORIGINS] = self.origins
        node.meta["val"] = self.settled(self.result(target, args, kwargs) if val is None else val)
        return node

    def settled(self, result: Any) -> Any:
        """What a call returns, with numbers for sizes that were found to be numbers after it was recorded."""
        return pytree.tree_map_only(torch.Tensor, self._settled, result)

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        recorded = tuple(tensor.shape)
        sizes = tuple(map(_number_of, recorded))
        if list(map(type, sizes)) == list(map(type, recorded)):
            return tensor
        with self.symbolic():
            return tensor.new_empty_strided(sizes, [_number_of(s) for s in tensor.stride()])

    def part(self, whole: Any, index: int) -> Any:
        """One of the results of a call of several."""
        if isinstance(whole, tuple | list):
            return whole[index]
        return self.call(operator.getitem, (whole, index), val=whole.meta["val"][index])

    def sizes(self, tensor: Node) -> list[Any]:
        """The sizes of a tensor: numbers, and calls for those that are symbols."""
        sizes, target = enumerate(tensor.meta["val"].shape), torch.ops.aten.sym_size.int
        return [s if isinstance(s, int) else self.call(target, (tensor, i), val=s) for i, s in sizes]

    def count(self, tensor: Node, axes: Collection[int] | None = None) -> Any:
        """How many elements a tensor has, or some of its axes alone: a number, or a call."""
        sizes = self.sizes(tensor)
        return functools.reduce(self._product, sizes if axes is None else [sizes[i] for i in sorted(axes)], 1)

    def _product(self, first: Any, second: Any) -> Any:
        if first == 1:
            return second
        numbers = isinstance(first, int) and isinstance(second, int)
        return first * second if numbers else self.call(operator.mul, (first, second))

    def result(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns for tensors without content."""
        given, named = values((args, kwargs))
        with self.symbolic():
            if not isinstance(target, torch._ops.OpOverload):
                return target(*given, **named)
            like = told(target, given, named)
            return self._results.of(target, given, named) if like is None else anew(like)

    @contextlib.contextmanager
    def symbolic(self) -> Iterator[None]:
        """Where tensors without content are computed with."""
        mode = contextlib.nullcontext() if self._mode is None else self._mode
        with mode, torch._dispatch.python.enable_python_dispatcher(), torch.no_grad():
            yield

    def mark(self) -> Node | None:
        """A place to return to: the last call that was written."""
        return next(iter(reversed(self.graph.nodes)), None)

    def take_back(self, mark: Node | None) -> None:
        """Remove what was written after a place."""
        for node in list(reversed(self.graph.nodes)):
            if node is mark:
                break
            self.graph.erase_node(node)


def values(structure: Any) -> Any:
    """A structure with what its calls return in their place."""
    return pytree.tree_map_only(Node, lambda n: n.meta["val"], structure)


def _number_of(size: Any) -> Any:
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known


def identify_sizes(result: Any, recorded: Any) -> None:
    """Let sizes that depend on content, which a call that is recorded once more makes anew, be those that they were."""
    pairs = zip(_sizes_of(values(result)), _sizes_of(recorded), strict=False)
    for now, before in pairs if recorded is not None else ():
        environment, size = now.node.shape_env, now.node.expr
        environment.pending_fresh_unbacked_symbols.clear()
        both = [isinstance(s, sympy.Symbol) and environment.is_unbacked_symint(s) for s in (size, before.node.expr)]
        if all(both) and size != before.node.expr:
            environment._rename_unbacked_to(size, before.node.expr)


def _sizes_of(value: Any) -> list[Any]:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]


def _fake_mode(module: GraphModule) -> Any:
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for leaf in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(leaf, torch._subclasses.FakeTensor):
                    return leaf.fake_mode
    return None
