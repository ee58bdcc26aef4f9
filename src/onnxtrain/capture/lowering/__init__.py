"""A recorded program → one whose calls have translations: nothing is written to, regions are dissolved, types agree.

Each call is taken as the user's code made it. Where our translations or torch.onnx's know it, it stays; else it is
replaced by the calls that torch makes of it, and those by theirs. What cannot be taken apart stays whole: torch itself
runs it.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from onnxtrain.capture.lowering.aliases import Aliases, is_of_size, is_strided
from onnxtrain.capture.lowering.batched import GRADIENTS, Batched, batched, prepares, unbatched, writes_to_inputs
from onnxtrain.capture.lowering.calls import Calls, UnknownCallError, Verdict, at_line
from onnxtrain.capture.lowering.complex_views import is_complex
from onnxtrain.capture.lowering.expansions import expansion
from onnxtrain.capture.lowering.functional import functional_of, is_out, is_view_in_place, returns_also, written_by
from onnxtrain.capture.lowering.records import arguments_of, memory_of, name_of
from onnxtrain.capture.lowering.strides import order_in_memory, refused_strides
from onnxtrain.capture.lowering.types import Region, cast_to, may_have_gradient
from onnxtrain.capture.lowering.unread import mark_unread_draws, remove_unread_numbers
from onnxtrain.capture.lowering.writer import ORIGINS, Writer, values
from onnxtrain.capture.lowering.written_by_others import is_made
from onnxtrain.capture.python_op import recorded

_ops = torch.ops.aten
_CHECKS = frozenset(
    (
        *("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_functional_assert_async"),
        *("sym_constrain_range_for_size", "sym_constrain_range", "_linalg_check_errors"),
    )
)
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_FILLED = ("normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_")
_OVERWRITTEN = (*_FILLED, "fill_", "zero_", "copy_")  # nothing is left, yet it requires a gradient if it did: of zeros
_KEEPING = frozenset((_ops.batch_norm.default, _ops.clone.default))  # what reads statistics where nobody else does


class Lowering:
    """Writes the calls of one module anew.

    Args:
        module: the recorded calls.
        verdict: whether a call has a translation; False where it has a wrong one, None where it has none.
        whole: operators that are not taken apart.

    Attributes:
        kept: calls of the new graph that stay whole.
    """

    def __init__(self, module: GraphModule, verdict: Verdict, whole: Container[Any]) -> None:
        self._module, self._verdict, self._whole = module, verdict, whole
        self._writer = Writer(module)
        self._calls = Calls(self._writer, verdict, whole, self._walk)
        self._issue = self._calls.issue
        self._bodies: dict[str, GraphModule] = {}
        self._left: dict[Any, list[tuple[Node, Any]]] = {}  # of each region: what it returns, and the content of that
        self.kept = self._calls.kept

    def lowered(self) -> GraphModule:
        """The module with its new graph.

        Raises:
            CaptureError: a call can neither be translated nor stay whole.
        """
        graph = self._writer.graph
        results = self._walk(self._module, list(map(self._input, _inputs_of(self._module))))
        graph.output(results)
        remove_unread_numbers(graph)
        mark_unread_draws(graph)
        made = GraphModule(self._module, graph)
        made.meta.update(self._module.meta)
        for name, body in self._bodies.items():
            setattr(made, name, body)
        return made

    def _input(self, node: Node) -> Node:
        made = self._writer.graph.placeholder(str(node.target))
        made.meta.update(node.meta, val=self._writer.settled(node.meta.get("val")))
        return made

    def _walk(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        """Write the calls of a graph whose inputs are these; gives back its results."""
        aliases = Aliases(self._writer, self._issue)
        for node, given in zip(_inputs_of(module), inputs, strict=True):
            aliases.add(node, given)
        return self._written(module, aliases)

    def _written(self, module: GraphModule, aliases: Aliases) -> Any:
        result: Any = None
        regions = batched(module)
        inside = {node for region in regions.values() for node in region.nodes}
        for node in module.graph.nodes:
            if node in regions:
                self._map(regions[node], aliases)
            elif node in inside or prepares(node):
                continue
            elif node.op == "get_attr":
                aliases.add(node, self._attribute(module, node))
            elif node.op == "call_function":
                with self._writer.at(node), at_line(node):
                    self._recorded(node, aliases)
            elif node.op == "output":
                result = aliases.contents(node.args[0])
        return result

    def _map(self, region: Batched, aliases: Aliases) -> None:
        """Write the calls of a vmap with the axis that it hides."""
        shown = next((n for n in region.results if n.meta.get("stack_trace")), region.nodes[0])
        with self._writer.at(shown), at_line(shown):
            with self._calls.region.enter():
                module = unbatched(self._writer, region)
            before = self._calls.region
            self._calls.region = Region(before.gradients)  # autocast's casts are among the calls
            if writes_to_inputs(module):
                self._changing(module, region, aliases)
            else:
                made = self._walk(module, aliases.contents(region.inputs))
                for node, content in zip(region.results, made, strict=True):
                    aliases.add(node, content)
            self._calls.region = before

    def _changing(self, module: GraphModule, region: Batched, aliases: Aliases) -> None:
        """Write the calls of a vmap where what is changed in place is what the graph around it has."""
        for inner, outer in zip(_inputs_of(module), region.inputs, strict=True):
            aliases.same(inner, outer)
        self._written(module, aliases)
        (returned,) = (n.args[0] for n in module.graph.nodes if n.op == "output")
        for node, inner in zip(region.results, returned, strict=True):
            aliases.same(node, inner)

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        value = getattr(module, str(node.target))
        if isinstance(value, GraphModule):
            return value
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UnknownCallError(f"constant {node.target}")
        kwargs = {"dtype": value.dtype, "device": value.device}
        return self._issue(_ops.full.default, (list(value.shape), value.item()), kwargs)

    def _recorded(self, node: Node, aliases: Aliases) -> None:
        """Write a recorded call."""
        target: Any = node.target
        if target in (GRADIENTS, _AUTOCAST):
            self._dissolve(node, aliases)
        elif target is operator.getitem and node.args[0] in self._left:
            inner, content = self._left[node.args[0]][node.args[1]]  # type: ignore[index]
            aliases.same(node, inner, content)
        elif target is operator.getitem and (view := _hooked_view(node)):
            aliases.hook(view, self._writer.part(*aliases.contents(node.args)))
            aliases.same(node, view)
        elif target is operator.getitem:
            source, index = aliases.contents(node.args)
            aliases.add(node, self._writer.part(source, index))
        elif not isinstance(target, torch._ops.OpOverload):
            aliases.add(node, self._foreign(node, aliases))
        elif name_of(target) in _CHECKS:
            return
        elif target is _ops.size.default:
            aliases.add(node, tuple(self._writer.sizes(aliases.content(node.args[0]))))
        elif target is _ops.sym_numel.default:
            aliases.add(node, self._writer.count(aliases.content(node.args[0])))
        elif target is _ops.sym_stride.int:
            aliases.add(node, self._stride(node, aliases))
        elif is_strided(target):
            self._look(node, aliases.strided(node), aliases)
        elif _moves_statistics(node):
            self._normalize(node, aliases)
        elif written := written_by(target):
            self._write(node, written, aliases)
        elif not (_is_hidden_view(node) and self._taken_apart(node, aliases)):
            _refuse_strides_of_a_part(node)
            args, kwargs = aliases.contents((node.args, dict(node.kwargs)))
            aliases.add(node, self._issue(target, args, kwargs, node.meta.get("val")))

    def _stride(self, node: Node, aliases: Aliases) -> Any:
        """A stride of a recorded tensor: how many elements the axes have that lie within another."""
        tensor, axis = node.args
        recorded = tensor.meta["val"]  # type: ignore[union-attr]
        order = order_in_memory(recorded)
        if order is None:
            raise refused_strides("stride")
        within = order[order.index(int(axis) % recorded.dim()) + 1 :]  # type: ignore[call-overload]
        return self._writer.count(aliases.content(tensor), within)  # type: ignore[arg-type]

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
        before = self._calls.region
        if node.target is GRADIENTS:
            (on, body), given = node.args[:2], node.args[2:]
            self._calls.region = Region(bool(on), before.autocast)
        else:
            device, dtype, on, _, body = node.args[:5]
            given = node.args[5:]
            self._calls.region = Region(before.gradients, (device, dtype or torch.get_autocast_dtype(device), bool(on)))  # type: ignore[arg-type]
        content = aliases.content(body)  # type: ignore[arg-type]
        for inner, outer in zip(_inputs_of(content), given, strict=True):
            aliases.same(inner, outer) if isinstance(outer, Node) else aliases.add(inner, outer)
        results = self._written(content, aliases)
        (returned,) = (n.args[0] for n in content.graph.nodes if n.op == "output")
        stopped = before.gradients and not self._calls.region.gradients
        self._calls.region = before
        left = [self._stopped(r) if stopped else r for r in results]
        self._left[node] = list(zip(returned, left, strict=True))

    def _taken_apart(self, node: Node, aliases: Aliases) -> bool:
        """Write the views that a call is made of, if torch says them and the call need not stay whole."""
        if node.target in self._whole:
            return False
        with self._calls.region.enter():
            found = expansion(self._writer, node.target, node.args, node.kwargs)
        if found is None:
            return False
        module, given = found
        for inner, outer in zip(_inputs_of(module), given, strict=True):
            aliases.same(inner, outer)
        with self._writer.from_operator(node.target):
            results = self._written(module, aliases)
        (returned,) = (n.args[0] for n in module.graph.nodes if n.op == "output")
        if isinstance(results, tuple | list):
            self._left[node] = list(zip(returned, results, strict=True))
        else:
            aliases.same(node, returned)
        return True

    def _stopped(self, result: Any) -> Any:
        value = result.meta["val"] if isinstance(result, Node) else None
        stops = isinstance(value, torch.Tensor) and may_have_gradient(value)
        return self._writer.call(_ops.detach.default, (result,), val=value) if stops else result

    def _write(self, node: Node, written: Sequence[str], aliases: Aliases) -> None:
        """Write the call that returns what an in-place one writes; the tensor is that from now on."""
        named = arguments_of(node)
        each: Any = [named[w] for w in written]
        if is_list := isinstance(each[0], list | tuple):
            (each,) = each
        target, args, kwargs = functional_of(node, written)
        if is_view_in_place(node.target):
            args, kwargs = aliases.contents((args, kwargs))
            return self._look(node, self._issue(target, args, kwargs, node.meta.get("val")), aliases)
        if name_of(node.target) in ("copy_", "fill_", "zero_"):
            _, made = aliases.given((args[0], args[1] if len(args) > 1 else 0), each)
        else:
            args, kwargs = aliases.given((args, kwargs), each)
            if is_made(target):  # autograd does not see what it writes
                args = [a if n in written else self._stopped(a) for n, a in zip(named, args, strict=False)]
            made = self._issue(target, args, kwargs)
        if returns_also(target):
            return self._write_beside(node, each, made, aliases)
        if len(written) > 1 or is_list:
            return self._write_each(node, each, made, aliases)
        self._put(node, each[0], made, aliases)
        aliases.same(node, each[0])

    def _look(self, node: Node, made: Any, aliases: Aliases) -> None:
        """A memory is looked at in another way; in place, but for ``detach_``, torch makes its other views again."""
        memory = memory_of(node.meta["val"])
        if memory is not None and is_view_in_place(node.target) and name_of(node.target) != "detach_":
            aliases.past_hooks(memory)
        aliases.add(node, made)

    def _write_each(self, node: Node, changed: Sequence[Node], made: Any, aliases: Aliases) -> None:
        """Put each result of an operator in a tensor of its own: several ``out``, or the list of a ``_foreach_``."""
        for index, tensor in enumerate(changed):
            self._put(node, tensor, self._writer.part(made, index), aliases)
        self._left[node] = [(tensor, None) for tensor in changed]

    def _put(self, node: Node, changed: Node, made: Any, aliases: Aliases) -> None:
        """A recorded call puts a value in a tensor, which keeps its type, its device and its sizes."""
        name, old = name_of(node.target), changed.meta["val"]
        if name in _FILLED:  # by random numbers: what was there before gets no gradient
            made = self._stopped(made)
        if not isinstance(made, Node) or not isinstance(made.meta["val"], torch.Tensor):
            made = self._issue(_ops.full_like.default, (aliases.content(changed), made), {})
        made = self._of_type(self._on(made, old.device), old.dtype)
        if not is_of_size(made.meta["val"], old) and not is_out(node.target):  # which is resized
            made = self._issue(_ops.expand_as.default, (made, aliases.content(changed)), {}, old)
        if not self._calls.region.gradients:
            made = self._stopped(made)
        elif name in _OVERWRITTEN and may_have_gradient(old):
            never = self._issue(_ops.full.default, ([], False), {"dtype": torch.bool, "device": old.device})
            made = self._issue(_ops.where.self, (never, aliases.content(changed), made), {}, old)
        aliases.write(changed, made)

    def _on(self, made: Node, device: torch.device) -> Node:
        """A value on a device: the number in ``x[:, 0] = 1`` is a tensor on the CPU."""
        if made.meta["val"].device == device:
            return made
        return self._issue(_ops._to_copy.default, (made,), {"device": device})

    def _of_type(self, made: Node, dtype: torch.dtype) -> Node:
        if made.meta["val"].dtype != dtype and (dtype.is_complex or is_complex(made)):
            return self._issue(_ops._to_copy.default, (made,), {"dtype": dtype})  # which no node of ONNX casts
        return cast_to(self._writer, made, dtype)

    def _write_beside(self, node: Node, changed: Sequence[Node], made: Any, aliases: Aliases) -> None:
        """Take apart what an operator returned, the last of it what it writes to arguments."""
        count = len(made.meta["val"]) if isinstance(made, Node) else len(made)
        parts = [self._writer.part(made, i) for i in range(count)]
        for tensor in reversed(changed):
            aliases.write(tensor, parts.pop())
        aliases.add(node, parts[0] if len(parts) == 1 else tuple(parts))

    def _normalize(self, node: Node, aliases: Aliases) -> None:
        """Write a batch normalization, whose running statistics torch moves out of sight."""
        named = arguments_of(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        given = aliases.contents(tuple(named[n] for n in names))
        target = _ops._native_batch_norm_legit_functional.default
        made = self._issue(target, given, {}, self._normalized(target, given, node.meta["val"]))
        result, mean, variance = (self._writer.part(made, i) for i in (0, 3, 4))
        aliases.add(node, result)
        for statistic, moved in (("running_mean", mean), ("running_var", variance)):
            buffer = named[statistic]
            is_read = any(user.target not in _KEEPING for user in buffer.users)  # which has no gradient
            aliases.write(buffer, self._stopped(moved) if is_read else moved)

    def _normalized(self, target: Any, given: Sequence[Any], recorded: torch.Tensor) -> Any:
        """What a batch normalization returns: what was recorded, and statistics of the types of those of one channel.

        torch takes the call apart to find it, and computes with the symbolic sizes of an image on the way.
        """
        like, *others = values(given)
        with self._writer.symbolic():
            numbers = [x.new_empty(1) if isinstance(x, torch.Tensor) else x for x in others]
            small = like.new_empty((2, 1, *(1,) * (like.dim() - 2)))
        _, *statistics = self._writer.result(target, (small, *numbers), {})
        with self._writer.symbolic():
            return (recorded, *(x.new_empty(like.shape[1]) for x in statistics))


def _inputs_of(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _moves_statistics(node: Node) -> bool:
    """Whether it is a batch normalization that does; torch lets an empty row pass, which has no channels."""
    if node.target is not _ops.batch_norm.default:
        return False
    named = arguments_of(node)
    has_channels = named["input"].meta["val"].dim() > 1
    return has_channels and bool(named["training"]) and isinstance(named["running_mean"], Node)


def _is_hidden_view(node: Node) -> bool:
    """Whether a call returned memory of an argument though its operator promises none: ``einsum("ij->ji", x)`` does."""
    target: Any = node.target
    if any(made.alias_info is not None for made in target._schema.returns):
        return False
    memory = memory_of(node.meta.get("val"))
    return memory is not None and any(memory_of(a.meta.get("val")) == memory for a in node.all_input_nodes)


def _hooked_view(node: Node) -> Node | None:
    """The view that a part of a recorded call of Python's stands for from now on, with hooks for its gradient."""
    made: Any = node.args[0]
    if made.target is not torch.ops.onnxtrain.python_op.default:
        return None
    is_written = getattr(recorded(str(made.args[2])).call.function, "is_written", True)
    return None if is_written else made.args[0][0]


def _refuse_strides_of_a_part(node: Node) -> None:
    """What is written by strides is a copy of all the memory that a tensor is in.

    Raises:
        CaptureError: the tensor is a part of it, or lies there in another order.
    """
    if node.target is not _ops.as_strided_scatter.default:
        return
    whole = arguments_of(node)["self"].meta["val"]
    if order_in_memory(whole) != list(range(whole.dim())):
        raise refused_strides("as_strided_scatter")


__all__ = ["ORIGINS", "Lowering"]
