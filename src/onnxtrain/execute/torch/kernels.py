"""Kernels: operators of one shape in a row as one node, whose body a compiler may make one loop of.

What is looked for is what moves memory and computes little: arithmetic, activations and their gradients,
normalizations, sums over rows. Products, moves and random numbers stay as they are; so do operators for which ATen has
the faster loop. A node ``Kernel_…`` carries its body; those that compute the same have the same name, in all layers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.registry import lowering_of
from onnxtrain.ir import shapes
from onnxtrain.ir.bodies import BODY
from onnxtrain.ir.graphs import DOMAIN, copy_notes, origin_of
from onnxtrain.ir.traits import Trait, traits_of

NAME = "Kernel_"
_ROWS = frozenset(
    ("LayerNormalization", "LayerNormalizationGrad", "RMSNormalization", "RMSNormalizationGrad", "RMSNorm", "Softmax")
) | {"SoftmaxGrad"}
_SUMS = frozenset(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"))
_FASTER_ALONE = frozenset(("Gelu", "GeluGrad", "Erf"))  # on the CPU, whose ATen has a vectorized error function
_EXTRAS = frozenset(("outputs", "needed", "dtype"))  # of a lowering, that a body tells as well
_FLOATING = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE))
_CONTENT = _FLOATING | {ir.DataType.BOOL}
_Shape = tuple[int | str, ...]


def with_kernels(model: ir.Model, parts: Sequence[int], device: str) -> ir.Model:
    """A copy of a model in which kernels stand for their nodes; the model itself where there are none.

    Args:
        model: the model.
        parts: how many nodes each part has, over whose ends no kernel reaches; the last part has the rest.
        device: where it runs.
    """
    found = [nodes for nodes in _groups(model.graph, parts, device) if len(nodes) > 1]
    if not found:
        return model
    own = list(model.graph)
    model = ir.Model(model.graph.clone(), ir_version=model.ir_version)
    copies = dict(zip(own, model.graph, strict=True))
    groups = [[copies[node] for node in nodes] for nodes in found]
    _move_together(model.graph, groups)
    for nodes in groups:
        _replace(model.graph, nodes)
    return model


def is_kernel(node: ir.Node) -> bool:
    """Whether a node is a kernel."""
    return node.domain == DOMAIN and node.op_type.startswith(NAME)


def body_of(node: ir.Node) -> ir.Graph:
    """The body of a kernel: its inputs are the node's, its outputs, too."""
    return node.attributes[BODY].as_graph()


def _groups(graph: ir.Graph, parts: Sequence[int], device: str) -> list[list[ir.Node]]:
    """The nodes of each kernel there could be, in order."""
    found = _Groups()
    ends = [*itertools.accumulate(parts)]
    part = 0
    for index, node in enumerate(graph):
        while ends and part < len(ends) - 1 and index >= ends[part]:
            part += 1
        shape = _shape_of(node, device)
        found.take(node, None if shape is None else (part, *shape[:-1]), shape[-1] if shape else 1)
    return found.nodes


class _Groups:
    """Puts nodes together as they come: into the group of an operand where no other operand needs this group.

    Those of a group go through rows of one length, or have one number for each row.

    Attributes:
        nodes: those of each group.
    """

    def __init__(self) -> None:
        self.nodes: list[list[ir.Node]] = []
        self._keys: list[_Shape] = []
        self._lengths: list[int | str] = []  # of rows
        self._needs: list[set[int]] = []  # of each group the groups of which it needs values
        self._from: dict[ir.Value, frozenset[int]] = {}  # groups that a value needs, its own among them
        self._own: dict[ir.Value, int] = {}

    def take(self, node: ir.Node, key: _Shape | None, length: int | str) -> None:
        """The next node.

        Args:
            node: it.
            key: what those of its group have in common, None where it stays alone.
            length: of the rows that it goes through.
        """
        inputs = [v for v in node.inputs if v is not None]
        needed = frozenset().union(*(self._from.get(v, frozenset()) for v in inputs))
        if key is None:
            self._from.update(dict.fromkeys(node.outputs, needed))
            return
        own = next((g for g in self._candidates(inputs, key, length) if self._may_join(g, inputs)), None)
        if own is None:
            own = len(self.nodes)
            self.nodes.append([])
            self._keys.append(key)
            self._lengths.append(length)
            self._needs.append(set())
        self.nodes[own].append(node)
        self._lengths[own] = length if self._lengths[own] == 1 else self._lengths[own]
        self._needs[own] |= needed - {own}
        for value in node.outputs:
            self._from[value], self._own[value] = frozenset((own,)), own

    def _candidates(self, inputs: Sequence[ir.Value], key: _Shape, length: int | str) -> list[int]:
        """The groups of operands, the latest first."""
        found = {self._own[v] for v in inputs if v in self._own}
        fitting = (g for g in found if self._keys[g] == key and (length == 1 or self._lengths[g] in (1, length)))
        return sorted(fitting, reverse=True)

    def _may_join(self, group: int, inputs: Sequence[ir.Value]) -> bool:
        others = [v for v in inputs if self._own.get(v) != group]
        return all(group not in self._reached(self._from.get(v, frozenset())) for v in others)

    def _reached(self, groups: frozenset[int]) -> set[int]:
        seen: set[int] = set()
        waiting = [*groups]
        while waiting:
            group = waiting.pop()
            if group not in seen:
                seen.add(group)
                waiting += self._needs[group]
        return seen


def _shape_of(node: ir.Node, device: str) -> _Shape | None:
    """The shape of the elements that a node goes through, and what else its kernel has; None where it is of none."""
    found, traits = lowering_of(node), traits_of(node)
    if found is None or node.attributes.get(BODY) is not None or not found.wants <= _EXTRAS:
        return None
    if node.op_type in _FASTER_ALONE and device == "cpu":
        return None
    moved = Trait.RANDOM | Trait.EFFECT | Trait.IDENTITY | Trait.EXPENSIVE
    is_elementwise = bool(traits & Trait.ELEMENTWISE) and not traits & moved
    if not (is_elementwise or node.op_type in _ROWS or _is_sum(node)) or not _are_content(node):
        return None
    if is_elementwise and _may_be_its_operand(node):
        return None
    if any(i in found.host and shapes.constant_of(v) is None for i, v in enumerate(node.inputs) if v is not None):
        return None
    through = node.outputs[0] if is_elementwise else node.inputs[0]
    dims = _dims(through)
    return dims if dims is not None and len(dims) > 1 and 0 not in dims else None


def _is_sum(node: ir.Node) -> bool:
    """Whether a node adds up rows, or all rows: one axis at the end, or all others."""
    rank = node.inputs[0] and shapes.dims_of(node.inputs[0])
    axes = shapes.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type not in _SUMS or node.domain or not rank or axes is None or not axes.size:
        return False
    over = sorted(int(a) % len(rank) for a in axes.reshape(-1))
    return over == [len(rank) - 1] or over == [*range(len(rank) - 1)]


def _are_content(node: ir.Node) -> bool:
    """Whether all that a node reads and gives are tensors of numbers and of truth values, of known rank."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and (v.name or v.uses())]
    tensors = [v for v in values if shapes.constant_of(v) is None]
    return all(v.dtype in _CONTENT and _dims(v) is not None and shapes.data_of(v) is None for v in tensors) and any(
        v.dtype in _FLOATING for v in node.outputs
    )


def _may_be_its_operand(node: ir.Node) -> bool:
    """Whether what a node gives may be what it is given: a kernel's results have memory of their own."""
    given = [v for v in node.inputs if v is not None]
    if node.op_type in ("Cast", "CastLike"):
        return given[0].dtype == node.outputs[0].dtype
    return node.op_type in ("Clip", "Sum", "Max", "Min", "Mean") and len(given) < 2


def _dims(value: ir.Value | None) -> _Shape | None:
    dims = None if value is None else shapes.dims_of(value)
    if dims is None or not all(isinstance(d, int) or d.value is not None for d in dims):
        return None
    return tuple(d if isinstance(d, int) else str(d.value) for d in dims)


def _move_together(graph: ir.Graph, groups: Sequence[Sequence[ir.Node]]) -> None:
    """Bring the nodes of each group to one place, where all that they need is there and nothing waits for them."""
    own = {n: nodes for nodes in groups for n in nodes}
    done: dict[ir.Node, None] = {}

    def bring(node: ir.Node) -> None:
        waiting = [node]
        while waiting:
            unit = own.get(waiting[-1], (waiting[-1],))
            missing = [n for n in _made_by(unit) if n not in done and n not in unit]
            if missing:
                waiting += missing
            else:
                done.update(dict.fromkeys(unit))
                waiting.pop()

    for node in graph:
        if node not in own or node is own[node][-1]:
            bring(node)
    order = list(done)
    for node in order:
        graph.remove(node)
    graph.extend(order)


def _made_by(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that make what others read."""
    made = (v.producer() for n in nodes for v in n.inputs if v is not None)
    return (n for n in made if n is not None)


def _replace(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Put a kernel in the place of nodes that stand together."""
    made = {v for n in nodes for v in n.outputs}
    members = set(nodes)
    read = [v for n in nodes for v in n.inputs if v is not None and v not in made]
    given = [v for v in dict.fromkeys(read) if shapes.constant_of(v) is None]
    results = [v for n in nodes for v in n.outputs if v.is_graph_output() or {u.node for u in v.uses()} - members]
    body = _body(nodes, given, [v for v in dict.fromkeys(read) if v not in given], results)
    name = NAME + hashlib.sha256(_text(body).encode()).hexdigest()[:8]
    node = ir.Node(DOMAIN, name, given, [ir.AttrGraph(BODY, body)], num_outputs=len(results))
    node.metadata_props.update(origin_of(nodes[0]))
    graph.insert_before(nodes[0], node)
    for old, new in zip(results, node.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        copy_notes(old, new)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, old.name
    for inner in reversed(nodes):
        graph.remove(inner, safe=True)


def _body(
    nodes: Sequence[ir.Node], given: Sequence[ir.Value], constants: Sequence[ir.Value], results: Sequence[ir.Value]
) -> ir.Graph:
    """The nodes as a graph of their own, its values numbered."""
    names, known = (f"v{i}" for i in itertools.count()), dict[ir.Value, ir.Value]()
    for value in (*given, *constants):
        known[value] = ir.Value(name=next(names), type=value.type, shape=value.shape)
    for value in constants:
        known[value].const_value = ir.convenience.get_const_tensor(value)
    copies = []
    for node in nodes:
        inputs = [None if v is None else known[v] for v in node.inputs]
        copy = ir.Node(node.domain, node.op_type, inputs, [*node.attributes.values()], num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = next(names) if old.name else "", old.type, old.shape
            known[old] = new
        copies.append(copy)
    return ir.Graph(
        [known[v] for v in given],
        [known[v] for v in results],
        nodes=copies,
        initializers=[known[v] for v in constants],
        opset_imports={"": 20, DOMAIN: 1},
        name="body",
    )


def _text(body: ir.Graph) -> str:
    """What tells one body from others: sizes that are symbols are numbered as they come."""
    symbols: dict[str, str] = {}

    def form(value: ir.Value) -> str:
        dims = [d if isinstance(d, int) else symbols.setdefault(d, f"s{len(symbols)}") for d in _dims(value) or ()]
        return f"{value.name}:{value.dtype}{dims}"

    def content(value: ir.Value) -> str:
        array = shapes.constant_of(value)
        return f"{form(value)}={array.tobytes().hex()}" if array is not None else form(value)

    lines = [" ".join(map(form, body.inputs)), *map(content, body.initializers.values())]
    for node in body:
        attributes = sorted(f"{a.name}={a.value!r}" for a in node.attributes.values())
        inputs = [v.name if v is not None else "" for v in node.inputs]
        lines.append(f"{[form(v) for v in node.outputs]} {node.domain} {node.op_type} {inputs} {attributes}")
    return "\n".join([*lines, str([v.name for v in body.outputs])])


__all__ = ["NAME", "body_of", "is_kernel", "with_kernels"]
