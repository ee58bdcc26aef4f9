"""Conditions on inputs under which a captured graph is what the module computes: what its code asked of their sizes.

And of their order in memory, of who needs their gradient, and of whether two are one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch

from onnxtrain.capture.free_numbers import taken_to_be
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.size_questions import decides, settled
from onnxtrain.capture.symbolic_sizes import Assumed, Axis, expression_of

_ATEN = torch.ops.aten
_VIEWS_OR_COPIES = frozenset(
    (
        *(_ATEN.contiguous.default, _ATEN.flatten.using_ints, _ATEN.ravel.default, _ATEN.reshape.default),
        _ATEN.reshape_as.default,
    )
)
Form = tuple[tuple[bool, tuple[int, ...]], ...]
Repeated = tuple[tuple[int, int], ...]
Order = tuple[bool, ...]


def form_of(tensors: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor]) -> Form:
    """Whether gradients are enabled; of each tensor whether it requires one, and its strides if not contiguous.

    Args:
        tensors: the inputs.
        parameters: the module's; how they lie in memory is not asked.
    """
    forms = ((t.requires_grad, () if t.is_contiguous() else t.stride()) for t in tensors)
    return ((torch.is_grad_enabled(), ()), *forms, *((p.requires_grad, ()) for p in parameters))


def order_of(tensors: Sequence[torch.Tensor]) -> Order:
    """Of each floating tensor whether its axes lie in memory in their order, on which that of outputs depends."""
    return tuple(_is_in_order(t) for t in tensors if t.is_floating_point())


def _is_in_order(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return True
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if step and size != 1]
    return steps == sorted(steps, reverse=True)


def repeated_among(tensors: Sequence[torch.Tensor]) -> Repeated:
    """The positions of floating tensors that come again, each with that of its first time; of others nobody asks."""
    first: dict[int, int] = {}
    places = [(i, first.setdefault(id(t), i)) for i, t in enumerate(tensors) if t.is_floating_point()]
    return tuple((i, place) for i, place in places if i != place) if len(first) < len(places) else ()


@dataclasses.dataclass(frozen=True)
class SizeGuards:
    """What the module and torch asked of the input sizes, with the answers they got while the module was traced.

    A size that became a number (in a tensor, as a number of steps or parts) is a condition that it has this value.

    Args:
        conditions: relations between symbols, all true for the sizes of the capture.
        symbols: for each symbol, one input axis that has this size.
        form: of the inputs (``form_of``), where the module asked for it.
        repeated: the inputs that come again (``repeated_among``).
        order: of the inputs in memory (``order_of``), where outputs have one.
    """

    conditions: tuple[sympy.Basic, ...]
    symbols: tuple[tuple[sympy.Symbol, Axis], ...]
    form: Form | None = None
    repeated: Repeated = ()
    order: Order | None = None

    def hold(self, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether every branch goes the same way for inputs of these sizes."""
        values = {symbol: sympy.Integer(sizes[position][axis]) for symbol, (position, axis) in self.symbols}
        return all(settled(condition, values) not in (None, sympy.false) for condition in self.conditions)

    def have_form(self, tensors: Sequence[torch.Tensor], module: torch.nn.Module) -> bool:
        """Whether inputs come again and lie as they did, and all is of the form that the module was told, if any."""
        is_of_form = self.form is None or self.form == form_of(tensors, module.parameters())
        lies_so = self.order is None or self.order == order_of(tensors)
        return is_of_form and lies_so and self.repeated == repeated_among(tensors)

    def broken_by(self, sizes: Sequence[Sequence[int]]) -> frozenset[Axis]:
        """The input axes of which a condition is made that does not hold for inputs of these sizes."""
        axes = dict(self.symbols)
        broken = [c for c in self.conditions if not SizeGuards((c,), self.symbols).hold(sizes)]
        return frozenset(axes[s] for condition in broken for s in condition.free_symbols)  # type: ignore[index]


def size_guards(
    program: torch.export.ExportedProgram,
    assumed: Assumed,
    form: Form | None = None,
    repeated: Repeated = (),
    order: Order | None = None,
) -> SizeGuards:
    """What was asked of sizes while a module was captured.

    Args:
        program: the captured program.
        assumed: what was taken to be so besides.
        form: of the inputs, where that was asked for.
        repeated: those that come again.
        order: of the inputs in memory, where outputs have one.
    """
    users = set(program.graph_signature.user_inputs)
    inputs = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in users]
    symbols: dict[sympy.Symbol, Axis] = {}
    environment = None
    for position, tensor in enumerate(inputs):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                symbols.setdefault(size.node.expr, (position, axis))
                environment = size.node.shape_env
    if environment is None:
        return SizeGuards((), (), form, repeated, order)
    written = list(_written_later(program))
    copied = [source for source, made in written if memory_of(source) != memory_of(made)]
    lengths = {expression_of(d) for x in copied for d in (*x.shape, *x.stride())}
    not_one = assumed.not_one.union(*map(sympy.Mul.make_args, lengths))
    asked = [environment.simplify(g.expr) for g in environment.guards if written or _decides(g)]
    asked += [environment.simplify(relation) for relation in sorted(assumed.of_memory if written else (), key=str)]
    asked += [environment.replace(relation) for relation in sorted(assumed.answered, key=str)]
    asked += [sympy.Ne(environment.simplify(size), 1) for size in sorted(not_one, key=str) if not size.is_number]
    conditions = dict.fromkeys(c for c in asked if c.free_symbols and c.free_symbols <= set(symbols))
    needed = {s for condition in conditions for s in condition.free_symbols}
    axes = tuple((s, axis) for s, axis in symbols.items() if s in needed)
    return SizeGuards(tuple(conditions), axes, form, repeated, order)


def environment_of(program: torch.export.ExportedProgram) -> Any:
    """torch's environment of the symbols in a program's sizes; None where there are none."""
    sizes = (d for n in program.graph.nodes for d in getattr(n.meta.get("val"), "shape", ()))
    return next((d.node.shape_env for d in sizes if isinstance(d, torch.SymInt)), None)


def taken_for_content(program: torch.export.ExportedProgram) -> frozenset[sympy.Symbol]:
    """The symbols that sizes which depend on content were taken to be where they met; a size of 1 would broadcast."""
    environment = environment_of(program)
    if environment is None:
        return frozenset()
    content = environment.is_unbacked_symint
    both = [r.free_symbols for r in taken_to_be(environment) if any(map(content, r.free_symbols))]
    return frozenset(s for symbols in both for s in symbols if isinstance(s, sympy.Symbol) and not content(s))


def _written_later(program: torch.export.ExportedProgram) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is copied or viewed, as it lies in memory, and the result: where one of them is written to after that."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for call in _calls_of(program.graph_module):
        first = next((n.meta.get("val") for n in call.all_input_nodes[:1]), None)
        if call.target in _VIEWS_OR_COPIES:
            made.append((first, call.meta["val"]))  # type: ignore[arg-type]
        elif call.target._schema.is_mutable:  # type: ignore[union-attr]
            memory = memory_of(first)
            yield from (pair for pair in made if memory in map(memory_of, pair))


def _calls_of(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The recorded calls of operators, those of regions at their place among the others."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            yield node
        elif node.op == "get_attr":
            part = getattr(module, str(node.target), None)
            yield from _calls_of(part) if isinstance(part, torch.fx.GraphModule) else ()


def _decides(guard: Any) -> bool:
    place = guard.sloc.framework_loc
    return decides(guard.expr, getattr(place, "name", ""), getattr(place, "filename", None) or "")
