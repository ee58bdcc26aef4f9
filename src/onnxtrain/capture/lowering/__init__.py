"""A recorded program → one whose calls have translations: nothing is written to, regions are dissolved, types agree.

Each call is taken as the user's code made it. Where our translations or torch.onnx's know it, it stays; else it is
replaced by the calls that torch makes of it, and those by theirs. What cannot be taken apart stays whole: torch itself
runs it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from onnxtrain.capture import aten
from onnxtrain.capture.lowering.aliases import Aliases, arguments_of, is_of_size, name_of
from onnxtrain.capture.lowering.expansions import expansion
from onnxtrain.capture.lowering.functional import functional_of, is_view_in_place, returns_also, written_by
from onnxtrain.capture.lowering.types import Region, cast_for_autocast, cast_to, is_cast_by_autocast, promoted
from onnxtrain.capture.lowering.writer import ORIGINS, Writer, identify_sizes
from onnxtrain.capture.source_lines import user_place
from onnxtrain.errors import CaptureError

_ops = torch.ops.aten
_CHECKS = frozenset(
    (
        *("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_functional_assert_async"),
        *("sym_constrain_range_for_size", "sym_constrain_range"),
    )
)
_GRADIENTS, _AUTOCAST = torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast
_SAME = {_ops.item.default: _ops._local_scalar_dense.default}  # taken apart, an item would be another number
Verdict = Callable[[Node], bool | None]


class _UnknownCallError(Exception):
    """A call has no translation and is made of nothing that has."""


class Lowering:
    """Writes the calls of one module anew.

    Args:
        module: the recorded calls.
        verdict: whether a call has a translation; False where it has a wrong one, None where it has none.
        whole: operators that are not taken apart.

    Attributes:
        kept: calls of the new graph that stay whole.
    """

    def __init__(self, module: GraphModule, verdict: Verdict, whole: Collection[Any]) -> None:
        self._module, self._verdict, self._whole = module, verdict, whole
        self._writer, self._region = Writer(module), Region()
        self._depth, self._takes_parts = 0, False
        self._bodies: dict[str, GraphModule] = {}
        self._casts: dict[Any, bool] = {}
        self._left: dict[Any, list[tuple[Node, Any]]] = {}  # of each region: what it returns, and the content of that
        self.kept: set[Node] = set()

    def lowered(self) -> GraphModule:
        """The module with its new graph.

        Raises:
            CaptureError: a call can neither be translated nor stay whole.
        """
        graph = self._writer.graph
        inputs = [n for n in self._module.graph.nodes if n.op == "placeholder"]
        results = self._walk(self._module, list(map(self._input, inputs)))
        graph.output(results)
        _remove_unread_numbers(graph)
        made = GraphModule(self._module, graph)
        made.meta.update(self._module.meta)
        for name, body in self._bodies.items():
            setattr(made, name, body)
        return made

    def _input(self, node: Node) -> Node:
        made = self._writer.graph.placeholder(str(node.target))
        made.meta.update(node.meta)
        return made

    def _walk(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        """Write the calls of a graph whose inputs are these; gives back its results."""
        aliases = Aliases(self._writer, self._item, self._issue)
        for node, given in zip(_inputs_of(module), inputs, strict=True):
            aliases.add(node, given)
        return self._calls(module, aliases)

    def _calls(self, module: GraphModule, aliases: Aliases) -> Any:
        result: Any = None
        for node in module.graph.nodes:
            if node.op == "get_attr":
                aliases.add(node, self._attribute(module, node))
            elif node.op == "call_function":
                with self._writer.at(node), _at_line(node):
                    self._recorded(node, aliases)
            elif node.op == "output":
                result = aliases.contents(node.args[0])
        return result

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        value = getattr(module, str(node.target))
        if isinstance(value, GraphModule):
            return value
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _UnknownCallError(f"constant {node.target}")
        kwargs = {"dtype": value.dtype, "device": value.device}
        return self._issue(_ops.full.default, (list(value.shape), value.item()), kwargs)

    def _recorded(self, node: Node, aliases: Aliases) -> None:
        """Write a recorded call."""
        target: Any = node.target
        if target in (_GRADIENTS, _AUTOCAST):
            self._dissolve(node, aliases)
        elif target is operator.getitem and node.args[0] in self._left:
            inner, content = self._left[node.args[0]][node.args[1]]  # type: ignore[index]
            aliases.same(node, inner, content)
        elif target is operator.getitem:
            aliases.add(node, self._item(aliases.content(node.args[0]), node))  # type: ignore[arg-type]
        elif not isinstance(target, torch._ops.OpOverload):
            aliases.add(node, self._foreign(node, aliases))
        elif name_of(target) in _CHECKS:
            return
        elif target is _ops.size.default:
            aliases.add(node, self._sizes(aliases.content(node.args[0])))  # type: ignore[arg-type]
        elif _moves_statistics(node):
            self._normalize(node, aliases)
        elif written := written_by(target):
            self._write(node, written, aliases)
        else:
            args, kwargs = aliases.contents((node.args, dict(node.kwargs)))
            aliases.add(node, self._issue(_SAME.get(target, target), args, kwargs, node.meta.get("val")))

    def _sizes(self, tensor: Node) -> tuple[Any, ...]:
        sizes = enumerate(tensor.meta["val"].shape)
        call, target = self._writer.call, _ops.sym_size.int
        return tuple(s if isinstance(s, int) else call(target, (tensor, i), val=s) for i, s in sizes)

    def _item(self, source: Any, node: Node) -> Any:
        index: Any = node.args[1]
        if isinstance(source, tuple | list):
            return source[index]
        return self._writer.call(operator.getitem, (source, index), val=node.meta.get("val"))

    def _foreign(self, node: Node, aliases: Aliases) -> Node:
        """Write a call of Python's, or of an operator with bodies."""
        args, kwargs = aliases.contents((node.args, dict(node.kwargs)))
        pairs = zip(args, node.args, strict=True)
        given = tuple(self._body(now, name) if isinstance(now, GraphModule) else now for now, name in pairs)
        return self._writer.call(node.target, given, kwargs, node.meta.get("val"))

    def _body(self, body: GraphModule, name: Any) -> Node:
        inner = Lowering(body, self._verdict, self._whole)
        self._bodies[str(name.target)] = inner.lowered()
        self.kept |= inner.kept
        made = self._writer.graph.get_attr(str(name.target))
        made.meta.update(name.meta)
        return made

    def _dissolve(self, node: Node, aliases: Aliases) -> None:
        """Write the calls of a region in which gradients or autocast were switched."""
        before = self._region
        if node.target is _GRADIENTS:
            (on, body), given = node.args[:2], node.args[2:]
            self._region = Region(bool(on), before.autocast)
        else:
            device, dtype, on, _, body = node.args[:5]
            given = node.args[5:]
            self._region = Region(before.gradients, (device, dtype or torch.get_autocast_dtype(device), bool(on)))  # type: ignore[arg-type]
        content = aliases.content(body)  # type: ignore[arg-type]
        for inner, outer in zip(_inputs_of(content), given, strict=True):
            aliases.same(inner, outer) if isinstance(outer, Node) else aliases.add(inner, outer)
        results = self._calls(content, aliases)
        (returned,) = (n.args[0] for n in content.graph.nodes if n.op == "output")
        stopped = before.gradients and not self._region.gradients
        self._region = before
        left = [self._stopped(r) if stopped else r for r in results]
        self._left[node] = list(zip(returned, left, strict=True))

    def _stopped(self, result: Any) -> Any:
        value = result.meta["val"] if isinstance(result, Node) else None
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return self._writer.call(_ops.detach.default, (result,), val=value) if is_float else result

    def _write(self, node: Node, written: Sequence[str], aliases: Aliases) -> None:
        """Write the call that returns what an in-place one writes; the tensor is that from now on."""
        changed = arguments_of(node)[written[0]]
        target, args, kwargs = functional_of(node, written)
        if is_view_in_place(node.target):
            args, kwargs = aliases.contents((args, kwargs))
            return aliases.add(node, self._issue(target, args, kwargs, node.meta.get("val")))
        if name_of(node.target) in ("copy_", "fill_") and isinstance(args[1], Node):
            made = aliases.content(args[1])
        else:
            args, kwargs = aliases.contents((args, kwargs))
            made = self._issue(target, args, kwargs)
        if returns_also(target):
            return self._write_beside(node, [arguments_of(node)[w] for w in written], made, aliases)
        old = changed.meta["val"]
        if not isinstance(made, Node) or not isinstance(made.meta["val"], torch.Tensor):
            made = self._issue(_ops.full_like.default, (aliases.content(changed), made), {})
        made = cast_to(self._writer, made, old.dtype)
        if not is_of_size(made.meta["val"], old):
            made = self._issue(_ops.expand_as.default, (made, aliases.content(changed)), {}, old)
        aliases.write(changed, made if self._region.gradients else self._stopped(made))
        aliases.same(node, changed)

    def _write_beside(self, node: Node, changed: Sequence[Node], made: Any, aliases: Aliases) -> None:
        """Take apart what an operator returned, the last of it what it writes to arguments."""
        count = len(made.meta["val"]) if isinstance(made, Node) else len(made)
        parts = [self._part(made, i) for i in range(count)]
        for tensor in reversed(changed):
            aliases.write(tensor, parts.pop())
        aliases.add(node, parts[0] if len(parts) == 1 else tuple(parts))

    def _normalize(self, node: Node, aliases: Aliases) -> None:
        """Write a batch normalization, whose running statistics torch moves out of sight."""
        named = arguments_of(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        given = aliases.contents(tuple(named[n] for n in names))
        made = self._issue(_ops._native_batch_norm_legit_functional.default, given, {})
        result, mean, variance = (self._part(made, i) for i in (0, 3, 4))
        aliases.add(node, result)
        aliases.write(named["running_mean"], mean)
        aliases.write(named["running_var"], variance)

    def _part(self, made: Any, index: int) -> Any:
        if isinstance(made, tuple):
            return made[index]
        return self._writer.call(operator.getitem, (made, index), val=made.meta["val"][index])

    def _issue(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any = None) -> Any:
        """Write a call, or what it is made of.

        Args:
            target: the operator.
            args: positional arguments.
            kwargs: keyword arguments.
            made: what it returns for tensors without content, where that is known.

        Raises:
            CaptureError: a call of the user's has no translation, and cannot stay whole.
        """
        if target in self._writer.origins:
            raise _UnknownCallError(target)  # it is made of itself
        with self._writer.from_operator(target):
            mark = self._writer.mark()
            try:
                return self._translatable(target, args, kwargs, made)
            except _UnknownCallError as error:
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
        except _UnknownCallError:
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
        if is_cast_by_autocast(target.name(), self._region.key):
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
            _UnknownCallError: there is nothing.
        """
        if target in self._whole:
            if (node := self._kept_whole(target, args, kwargs, made)) is not None:
                return node
            return self._apart(target, args, kwargs)
        key = self._region.key
        if is_cast_by_autocast(target.name(), key):
            args, kwargs = self._cast(target, args, kwargs, made)
        elif key and self._looks_inside(target, args, kwargs):
            return self._apart(target, args, kwargs)
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
            raise _UnknownCallError(target)
        if not verdict:
            self.kept.add(node)
        return node

    def _cast(self, target: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> tuple[Any, Any]:
        if made is None:
            with self._region.enter():
                made = self._writer.result(target, args, kwargs)
        return cast_for_autocast(self._writer, args, kwargs, made)

    def _apart(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Write what a call is made of, autocast's casts among it."""
        found = self._expansion(target, args, kwargs)
        if found is None:
            raise _UnknownCallError(target)
        before, self._region = self._region, Region(self._region.gradients)
        self._depth += 1
        try:
            made = self._walk(*found)
            return tuple(made) if isinstance(made, list) else made
        finally:
            self._depth -= 1
            self._region = before

    def _expansion(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[GraphModule, list[Any]] | None:
        looked_at = is_cast_by_autocast(target.name(), self._region.key)
        with Region().enter() if looked_at else self._region.enter():
            return expansion(self._writer, target, args, kwargs)

    def _looks_inside(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether autocast casts something that a call is made of."""
        if not target._can_decompose():
            return False
        leaves = [n.meta.get("val") for n in pytree.tree_leaves((args, dict(kwargs))) if isinstance(n, Node)]
        key = (target, self._region, tuple(v.dtype for v in leaves if isinstance(v, torch.Tensor)))
        if key not in self._casts:
            cast = self._expansion(target, args, kwargs)
            self._casts[key] = cast is not None and _calls_of(cast[0]) != self._calls_without_autocast(
                target, args, kwargs
            )
        return self._casts[key]

    def _calls_without_autocast(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any] | None:
        try:
            with Region().enter():
                plain = expansion(self._writer, target, args, kwargs)
        except RuntimeError:  # operands of two types
            return None
        return None if plain is None else _calls_of(plain[0])


@contextlib.contextmanager
def _at_line(node: Node) -> Iterator[None]:
    """Within it errors name the user's line of a recorded call."""
    try:
        yield
    except CaptureError as error:
        place = user_place(node.meta.get("stack_trace") or "")
        source = error.source or ("" if place is None else "{}:{}".format(*place))
        raise CaptureError(error.what, node=error.node, source=source, cure=error.cure) from error.__cause__


def _calls_of(module: GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def _inputs_of(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _moves_statistics(node: Node) -> bool:
    if node.target is not _ops.batch_norm.default:
        return False
    named = arguments_of(node)
    return bool(named["training"]) and isinstance(named["running_mean"], Node)


def _remove_unread_numbers(graph: torch.fx.Graph) -> None:
    """Without the numbers that only checks read."""
    for node in reversed(list(graph.nodes)):
        is_number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        if node.op == "call_function" and is_number and not node.users:
            graph.erase_node(node)


__all__ = ["ORIGINS", "Lowering"]
