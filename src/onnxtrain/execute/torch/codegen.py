"""A plan as readable Python source that calls ATen: one line per node, values deleted where they die."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.execute.torch.dtypes import as_tensor
from onnxtrain.execute.torch.expressions import (
    NAMES,
    Names,
    constant_text,
    data_text,
    dim_text,
    is_known,
    itself_of,
    sizes_of,
    symbols_of,
)
from onnxtrain.execute.torch.memory import disordered, forks, is_in_input, mistakable, reusable, settled, turned
from onnxtrain.execute.torch.program import Program
from onnxtrain.execute.torch.registry import Lowering, needed_lowering
from onnxtrain.execute.torch.sizes_on_host import nodes_on_host
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import BODY, bodies_of, is_closed
from onnxtrain.ir.graphs import Plan, Signature, source_of
from onnxtrain.ir.python_calls import PythonCall, call_of
from onnxtrain.ir.traits import Trait, traits_of


class Writer:
    """Writes one graph as the body of a function.

    Args:
        graph: the graph.
        device: where it runs.
        needed: names of its outputs that must exist as tensors; all where it is None.
        sizes: those that the function returns.
        known: those that are given without a value of the graph.
        lower: says how a node runs.
    """

    def __init__(
        self,
        graph: ir.Graph,
        device: str,
        needed: Sequence[str] | None = None,
        sizes: Sequence[str] = (),
        known: Collection[str] = (),
        lower: Callable[[ir.Node], Lowering] = needed_lowering,
    ) -> None:
        self.graph, self.device = graph, device
        self.lines: list[str] = []
        self.scope: dict[str, Any] = dict(NAMES)
        self.ops = types.SimpleNamespace()
        self.scope["ops"] = self.ops
        self.calls: list[PythonCall] = []
        self.scope["calls"] = self.calls
        self.results = self._results(needed)
        self.lowerings = {n: lower(n) for n in graph if n.op_type != "Constant"}
        self.staying = {n for n in self.lowerings if Trait.STAYS & traits_of(n)}
        self.on_host = nodes_on_host(self.lowerings, set(self.results))
        self.as_numbers = {n: [i for i in range(len(n.inputs)) if self._is_known(n, i)] for n in self.lowerings}
        self._choose(set(sizes), known)
        self.bound: set[str] = set()
        self.given: set[ir.Value] = set()  # inputs whose memory may be overwritten
        self.after: dict[ir.Node | None, list[str]] = {}  # lines that follow a node, or come first
        self.around: dict[ir.Node, tuple[list[str], list[str]]] = {}  # lines right before it and right after
        self.instead: dict[ir.Value, str] = {}  # of constants that the caller gets in another form
        self.kept: dict[ir.Node, str] = {}  # nodes that keep something for their gradients, and these: where
        self.into: dict[str, str] = {}  # results that may be added to what the caller has, and where that is
        given = {"ops", "calls", "shards", "saved", "sizes", "inputs", "gradients", "made"}
        self.names = Names({*NAMES, *given, *self.symbols})

    def forward(self, plan: Plan, saved: Sequence[str], sizes: Sequence[str]) -> Program:
        """``forward(inputs) -> outputs, saved, sizes``."""
        signature = plan.signature
        self._unpack(self.graph.inputs, "inputs")
        self.lines += [f"{name} = []" for name in self.kept.values()]
        by_name = {str(v.name): v for v in [*self.graph.inputs, *self.results]}
        alone = self._put_in_order(signature, by_name)
        self._body(keep=set(self.graph.inputs), held={v for node in self.kept for v in node.outputs})
        outputs = [*signature.outputs, *signature.buffer_updates.values()]
        for value in filter(_is_constant, dict.fromkeys(by_name[n] for n in outputs)):
            self._give(value, self._own(value))
        self._set_apart([by_name[n] for n in signature.outputs], signature.views)
        for value in alone:
            self._give(value, f"in_order({self._given(value)})")
        names = [[self._given(by_name[n]) for n in part] for part in (outputs, saved)]
        lists = [f"[{', '.join(part)}]" for part in (names[0], [*names[1], *self.kept.values()])]
        self.lines.append(f"return {lists[0]}, {lists[1]}, ({''.join(s + ', ' for s in sizes)})")
        return self._program("forward", "inputs")

    def _put_in_order(self, signature: Signature, by_name: Mapping[str, ir.Value]) -> list[ir.Value]:
        """The outputs to put in order at the end; what several of them are views of is put so where it is made."""
        given = [] if signature.is_out_of_order else [by_name[n] for n in signature.user_inputs]
        ordered = {by_name[n] for n in signature.outputs if n in signature.in_order}
        outputs = [by_name[n] for n in signature.outputs]
        shared = forks(self.lowerings, outputs, signature.views)
        for value, group in shared.items():
            is_ordered = value in ordered if value in outputs else ordered.issuperset(group)
            found = None if is_ordered else (turned(self.lowerings, v, value) for v in group if v in ordered)
            order = [] if found is None else next((axes for axes in found if axes), None)
            if order is not None and disordered(self.nodes, self.lowerings, [value, *group], given):
                text = f"{self._tensor(value)} = in_order({', '.join((self._tensor(value), *map(str, order)))})"
                self.after.setdefault(value.producer(), []).append(text)
        together = {v for group in shared.values() for v in group}
        seen = {n for n in signature.views if n in by_name and is_in_input(self.lowerings, by_name[n])}
        rest = [by_name[n] for n in signature.outputs if n in signature.in_order and n not in seen]
        return disordered(self.nodes, self.lowerings, [v for v in rest if v not in together], given)

    def _set_apart(self, outputs: Sequence[ir.Value], views: Mapping[str, str]) -> None:
        """Lines that give the user's outputs memory of their own, where theirs may be that of others."""
        held = [*self.graph.inputs, *(v for n in self.nodes for v in n.inputs if v is not None and _is_constant(v))]
        for value, others in mistakable(self.nodes, self.lowerings, outputs, held, views).items():
            self._give(value, f"apart({', '.join((self._given(value), *dict.fromkeys(map(self._tensor, others))))})")

    def _own(self, value: ir.Value) -> str:
        """A result that whoever receives it may change: a copy of a constant, which the program keeps."""
        return f"{self._tensor(value)}.clone()" if _is_constant(value) else self._tensor(value)

    def _given(self, value: ir.Value) -> str:
        """The name of what the caller gets for a value; it may be another one than that of a constant."""
        return self.instead.get(value) or self._tensor(value)

    def _give(self, value: ir.Value, text: str) -> None:
        """A line that makes what the caller gets for a value."""
        if _is_constant(value):
            self.instead.setdefault(value, self.names.unique(str(value.name)))
        self.lines.append(f"{self._given(value)} = {text}")

    def backward(
        self, plan: Plan, saved: Sequence[ir.Value], sizes: Sequence[str], weights: Mapping[str, list[ir.Value]]
    ) -> Program:
        """``backward(saved, sizes, gradients, made)``: a generator that puts gradients into ``made`` by segment."""
        count = len(plan.saved)
        if sizes:
            self.lines.append(f"{', '.join(sizes)}, = sizes")
            self.bound |= set(sizes)
        self._unpack(saved, "saved", self.kept.values())
        self.lines.append("saved.clear()")
        self._unpack(self.graph.inputs[count:], "gradients")
        self.lines.append("gradients.clear()")
        if plan.gathering is not None:
            counts = tuple(len(group & plan.gradients.keys()) for group in plan.gathering.shards.groups)
            self.lines.append(f"shards.begin_backward({counts})")
        self.after = self._handed_over(plan, weights)
        self._body(keep=set())
        return self._program("backward", "saved, sizes, gradients, made")

    def _handed_over(self, plan: Plan, weights: Mapping[str, list[ir.Value]]) -> dict[ir.Node | None, list[str]]:
        """The lines that hand the gradients of each segment over, by the node that they follow.

        They follow the last one that touches the memory of a gradient or of its parameter: whoever receives it may
        change both.
        """
        results = {str(v.name): v for v in self.graph.outputs}
        order = {name: index for index, name in enumerate(plan.gradients)}
        given = [{n: results[plan.gradients[n]] for n in segment.gradients} for segment in plan.segments]
        touching = [[v for n, value in part.items() for v in (value, *weights[n])] for part in given]
        found: dict[ir.Node | None, list[str]] = {}
        for index, place in enumerate(settled(self.nodes, self.lowerings, touching)):
            lines = found.setdefault(self.nodes[place] if place >= 0 else None, [])
            names = {n: self._own(value) for n, value in given[index].items()}
            if names:
                lines.append(f"{', '.join(f'made[{order[n]}]' for n in names)} = {', '.join(names.values())}")
            later = {v for part in given[index + 1 :] for v in part.values()}
            if gone := [
                self._tensor(v) for v in dict.fromkeys(given[index].values()) if not (v in later or _is_constant(v))
            ]:
                lines.append(f"del {', '.join(gone)}")
            lines.append(f"yield  # segment {index + 1} of {len(given)}")
        return found

    def function(self, name: str, outer: Writer) -> list[str]:
        """A body as the lines of a function inside of the outer one: its inputs in, a tuple of its outputs out."""
        self.scope, self.ops, self.names = outer.scope, outer.ops, outer.names.nested()
        self.bound = self.free()
        parameters = ", ".join(self.names(v) for v in self.graph.inputs)
        self._bind(self.graph.inputs)
        self._body(keep=set(self.graph.inputs))
        self.lines.append(f"return ({''.join(f'{self._tensor(v)}, ' for v in self.results)})")
        return [f"def {name}({parameters}):", *(f"    {line}" for line in self.lines)]

    def free(self) -> set[str]:
        """The sizes that a body reads and that the shapes of its inputs do not give: those of the function around."""
        inputs = self.graph.inputs
        given = [*(shapes.dims_of(v) or () for v in inputs), *(shapes.data_of(v) for v in inputs)]
        outer = set().union(*(symbols_of(d) for d in given if d is not None), set())
        return (self.symbols & outer).difference(*map(sizes_of, inputs))

    def _results(self, needed: Sequence[str] | None) -> list[ir.Value]:
        """The graph outputs that must exist as tensors: all but saved shape tensors that nobody reads."""
        if needed is None:
            return list(self.graph.outputs)
        wanted = set(needed)
        return [v for v in self.graph.outputs if v.name in wanted or not is_known(shapes.data_of(v))]

    def _choose(self, sizes: set[str], known: Collection[str]) -> None:
        """The nodes that run, the values that they compute, and the sizes that they or others read.

        A value counts also where nothing but its size is read, before another value shows it.
        """
        roots = set(self.results)
        while True:
            self.live = self._reached(roots)
            self.nodes = [n for n in self.graph if n in self.lowerings and self._runs(n, self.live)]
            read = {n: self._sizes_read(n) for n in self.nodes}
            self.symbols = sizes.union(*read.values())
            if (more := self._shows(read, sizes, known)) is None:
                return
            roots.add(more)

    def _shows(self, read: dict[ir.Node, set[str]], sizes: set[str], known: Collection[str]) -> ir.Value | None:
        """A value that is not computed, but the first to show a size that is read."""
        bound = set(known).union(*map(sizes_of, self.graph.inputs))
        if self.symbols <= bound:
            return None
        first: dict[str, ir.Value] = {}
        for node in self.lowerings:
            if missing := first.keys() & (read.get(node, set()) - bound):
                return first[min(missing)]
            for value in node.outputs:
                shown = sizes_of(value)
                bound |= shown if node in read and value in self.live else set()
                for size in shown:
                    first.setdefault(size, value)
        missing = first.keys() & (sizes - bound)
        return first[min(missing)] if missing else None

    def _reached(self, roots: Collection[ir.Value]) -> set[ir.Value]:
        live = set(roots)
        for node in reversed(list(self.graph)):
            if node in self.lowerings and self._runs(node, live):
                live.update(v for i, v in enumerate(node.inputs) if v is not None and i not in self.as_numbers[node])
        return live

    def _runs(self, node: ir.Node, live: set[ir.Value]) -> bool:
        return node in self.staying or any(v in live for v in node.outputs)

    def _sizes_read(self, node: ir.Node) -> set[str]:
        """The sizes that a node's arguments are made of."""
        found: set[str] = set()
        for body in bodies_of(node) if is_closed(node) else ():
            found |= Writer(body, self.device).free()
        for data in (shapes.data_of(node.inputs[index]) for index in self.as_numbers[node]):
            found |= symbols_of(data) if data is not None else set()
        return found

    def _unpack(self, values: Sequence[ir.Value], source: str, more: Iterable[str] = ()) -> None:
        if names := [*(self.names(v) for v in values), *more]:
            self.lines.append(f"{', '.join(names)}, = {source}")
        self._bind(values)

    def _bind(self, values: Iterable[ir.Value]) -> None:
        """Give names to sizes that are first seen in the shape of these values."""
        for value in values:
            for axis, dim in enumerate(shapes.dims_of(value) or ()):
                text = dim_text(dim) if not isinstance(dim, int) and dim.value else ""
                if text in self.symbols and text not in self.bound:
                    self.bound.add(text)
                    self.lines.append(f"{text} = {self.names(value)}.shape[{axis}]")
            for text in itself_of(value):
                if text in self.symbols and text not in self.bound:
                    self.bound.add(text)
                    self.lines.append(f"{text} = host({self.names(value)})")

    def _body(self, keep: set[ir.Value], held: Collection[ir.Value] = ()) -> None:
        last = self._last_uses(keep)
        self.reusable = reusable(self.nodes, self.lowerings, last, keep.union(self.results, held), self.given)
        self.lines += self.after.get(None, ())
        for node in self.nodes:
            before, right_after = self.around.get(node, ((), ()))
            self.lines += [*before, self._line(node), *right_after]
            self._bind(v for v in node.outputs if v in self.live)
            if dead := [self._tensor(v) for v in last.get(node, ())]:
                self.lines.append(f"del {', '.join(dead)}")
            self.lines += self.after.get(node, ())

    def _last_uses(self, keep: set[ir.Value]) -> dict[ir.Node, list[ir.Value]]:
        final = set(self.results) | keep
        last: dict[ir.Value, ir.Node] = {}
        for node in self.nodes:
            used = [v for i, v in enumerate(node.inputs) if v is not None and i not in self.as_numbers[node]]
            for value in [*used, *node.outputs]:
                if value.name and value not in final and not _is_constant(value):
                    last[value] = node
        dying: dict[ir.Node, list[ir.Value]] = {}
        for value, node in last.items():
            dying.setdefault(node, []).append(value)
        return dying

    def _line(self, node: ir.Node) -> str:
        found = self.lowerings[node]
        name = node.op_type if node.domain in ("", "onnxtrain") else f"{node.domain}_{node.op_type}".replace(".", "_")
        arguments = [self._argument(node, i) for i in range(len(node.inputs))]
        function, place = found.function, self.reusable.get(node)
        if place is not None and found.inplace is not None:
            function, name = found.inplace, f"{name}_"  # torch's way to say: in place
            arguments.insert(0, arguments.pop(place))
        setattr(self.ops, name, function)
        stated = [a for a in node.attributes.values() if a.name != BODY or is_closed(node)]
        arguments += [f"{a.name}={self._attribute(a)}" for a in stated]
        arguments += [f"{name}={self._extra(name, node)}" for name in sorted(found.wants - set(node.attributes))]
        targets = ", ".join(self.names(v) if v.name else "_" for v in node.outputs)
        comment = f"  # {source_of(node)}" if source_of(node) else ""
        return f"{targets} = ops.{name}({', '.join(arguments)}){comment}"

    def _extra(self, name: str, node: ir.Node) -> str:
        """What a lowering wants to know beside the node's attributes, see ``registry.EXTRAS``."""
        if name == "call":
            self.calls.append(call_of(node))
            return f"calls[{len(self.calls) - 1}]"
        if name == "needed":
            return repr(tuple(v in self.live for v in node.outputs))
        if name == "final":
            return repr(tuple(v in self.live and not v.uses() for v in node.outputs))
        if name == "kept":
            return self.kept.get(node, "None")
        if name == "into":
            return self.into.get(str(node.outputs[0].name), "None")
        if name == "device":
            return repr(self._device_of(node))
        return repr({"outputs": len(node.outputs), "dtype": int(node.outputs[0].dtype or 0)}[name])

    def _device_of(self, node: ir.Node) -> str:
        return "cpu" if node in self.on_host else self.device

    def _is_known(self, node: ir.Node, index: int) -> bool:
        """Whether an input of a node is written as numbers."""
        value = node.inputs[index]
        if not self._takes_numbers(node, index):
            return node in self.on_host and is_known(shapes.data_of(value))
        return is_known(shapes.data_of(value)) or shapes.constant_of(value) is not None

    def _takes_numbers(self, node: ir.Node, index: int) -> bool:
        value, found = node.inputs[index], self.lowerings[node]
        return index in found.host or (index in found.scalars and value is not None and shapes.dims_of(value) == ())

    def _argument(self, node: ir.Node, index: int) -> str:
        value = node.inputs[index]
        if value is None:
            return "None"
        if index not in self.as_numbers[node]:
            text = self._tensor(value, self._device_of(node))
            return f"host({text})" if index in self.lowerings[node].host else text
        data, array = shapes.data_of(value), shapes.constant_of(value)
        text = data_text(data) if is_known(data) else constant_text(array)  # type: ignore[arg-type]
        dtype = int(value.dtype or ir.DataType.INT64)
        return text if self._takes_numbers(node, index) else f"tensor({text}, {dtype})"

    def _tensor(self, value: ir.Value, device: str = "") -> str:
        name = self.names(value)
        if not _is_constant(value):
            return name
        name = f"{name}_on_host" if device == "cpu" != self.device else name
        if name not in self.scope:
            self.scope[name] = as_tensor(shapes.constant_of(value), device or self.device)
        return name

    def _attribute(self, attr: ir.Attr) -> str:
        if isinstance(attr.value, str | int | float):
            return repr(attr.value)
        if attr.type == ir.AttributeType.GRAPH:
            name = self.names.unique(attr.name)
            self.lines += Writer(attr.value, self.device).function(name, self)
            return name
        if attr.type == ir.AttributeType.TENSOR:
            name = f"attribute_{len(self.scope)}"
            self.scope[name] = attr.value.numpy()
            return name
        return repr(tuple(attr.value))

    def _program(self, name: str, parameters: str) -> Program:
        text = "\n    ".join(self.lines)
        return Program(name, f"def {name}({parameters}):\n    {text}\n", self.scope, self.names.known())


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return value.const_value is not None or (node is not None and node.op_type == "Constant")
