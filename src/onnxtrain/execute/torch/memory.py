"""Which values may be overwritten: nothing alive, and nothing the caller holds, shares their memory."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.execute.torch.kernels import is_kernel
from onnxtrain.execute.torch.registry import Lowering, lowering_of
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import Plan
from onnxtrain.ir.python_calls import is_call
from onnxtrain.ir.traits import Trait, traits_of


def reusable(
    nodes: Sequence[ir.Node],
    lowerings: Mapping[ir.Node, Lowering],
    last: Mapping[ir.Node, Sequence[ir.Value]],
    held: set[ir.Value],
    given: Collection[ir.Value] = (),
) -> dict[ir.Node, int]:
    """For each node that can write its result into one of its operands, the operand's position.

    Args:
        nodes: the program in order.
        lowerings: how each node runs.
        last: the values that die after each node.
        held: values whose memory outlives the program: inputs, outputs, saved values.
        given: inputs whose memory is the program's alone.
    """
    groups = Groups(nodes, lowerings)
    alive = {groups.root(value): 1 for value in given}
    for node in nodes:
        for value in node.outputs:
            alive[groups.root(value)] = alive.get(groups.root(value), 0) + 1
    made = {v: n for n in nodes for v in n.outputs}
    outside = {groups.root(v) for v in held} | {
        groups.root(v) for n in nodes for v in n.inputs if v is not None and v not in made and v not in given
    }
    found: dict[ir.Node, int] = {}
    for node in nodes:
        dying = set(last.get(node, ()))
        if lowerings[node].inplace is not None:
            for index, value in enumerate(node.inputs if node.op_type in _COMMUTATIVE else node.inputs[:1]):
                if value is None or value not in dying or (value not in made and value not in given):
                    continue
                if value in made and lowerings[made[value]].view:
                    continue
                root, once = groups.root(value), node.inputs.count(value) == 1
                if once and root not in outside and alive[root] == 1 and _same(value, node.outputs[0]):
                    found[node] = index
                    break
        for value in dying:
            if value in made or value in given:
                alive[groups.root(value)] -= 1
    return found


def unshared(
    nodes: Sequence[ir.Node], lowerings: Mapping[ir.Node, Lowering], values: Sequence[ir.Value], held: set[ir.Value]
) -> set[ir.Value]:
    """Those of the values a program gives away whose memory no other of them has, nor anything held, nor they twice."""
    groups = Groups(nodes, lowerings)
    made = {v: n for n in nodes for v in n.outputs}
    roots = [groups.root(v) for v in values]
    outside = {groups.root(v) for v in held} | {
        groups.root(v) for n in nodes for v in n.inputs if v is not None and v not in made
    }
    alone = {v for v in values if v in made and groups.root(v) is v and roots.count(v) == 1 and v not in outside}
    return {v for v in alone if not _may_overlap(v, made, lowerings)}


def mistakable(
    nodes: Sequence[ir.Node],
    lowerings: Mapping[ir.Node, Lowering],
    outputs: Sequence[ir.Value],
    held: Sequence[ir.Value],
    views: Mapping[str, str],
) -> dict[ir.Value, list[ir.Value]]:
    """The outputs that are to have memory of their own and may not, with the values whose memory theirs may be.

    Args:
        nodes: the program in order.
        lowerings: how each node runs.
        outputs: what the program gives away.
        held: the values that outlive it otherwise: its inputs, and constants that it reads.
        views: of each output that lies in the memory of an input or of another output, the name of that; of one that
            is expanded its own.
    """
    groups = Groups(nodes, lowerings)
    made = {v: n for n in nodes for v in n.outputs}
    memories = {v: views.get(str(v.name), str(v.name)) for v in outputs}
    own, found = {str(v.name) for v in outputs}, dict[ir.Value, list[ir.Value]]()
    for index, value in enumerate(outputs):
        rest = [*outputs[:index], *(v for v in outputs[index:] if memories[v] not in own)]  # others come in their turn
        beside = [*held, *(v for v in rest if memories[v] != memories[value])]
        others = [v for v in beside if v is not value and groups.root(v) is groups.root(value)]
        is_expanded = str(value.name) not in views and _may_overlap(value, made, lowerings)
        if memories[value] in own and (others or is_expanded):
            found[value] = others
    return found


def forks(
    lowerings: Mapping[ir.Node, Lowering], outputs: Sequence[ir.Value], views: Mapping[str, str]
) -> dict[ir.Value, list[ir.Value]]:
    """Of outputs that lie in one memory, the last value that all of them are views of, with them.

    Those in the memory of an input are left out, and those that the program makes of nothing in common.

    Args:
        lowerings: how each node runs.
        outputs: what the program gives away.
        views: as of ``mistakable``.
    """
    own, groups = {str(v.name) for v in outputs}, dict[str, list[ir.Value]]()
    for value in outputs:
        if (memory := views.get(str(value.name), str(value.name))) in own:
            groups.setdefault(memory, []).append(value)
    found = dict[ir.Value, list[ir.Value]]()
    for group in (list(dict.fromkeys(values)) for values in groups.values()):
        first, *others = [_seen_through(v, lowerings) for v in group]
        common = next((v for v in first if others and all(v in path for path in others)), None)
        if common is not None and _maker(common, lowerings) is not None:
            found[common] = group
    return found


def turned(lowerings: Mapping[ir.Node, Lowering], value: ir.Value, seen: ir.Value) -> list[int] | None:
    """The axes of what a value is a view of, in the order that they have in the value; None where that moves more."""
    order = [*range(len(value.shape or ()))]
    for through in _seen_through(value, lowerings):
        if through is seen:
            return order
        node = _maker(through, lowerings)
        if node is None or node.op_type != "Transpose":
            return None
        moved = shapes.attribute(node, "perm", None) or [*reversed(range(len(order)))]
        order = [moved[axis] for axis in order]
    return None


def is_in_input(lowerings: Mapping[ir.Node, Lowering], value: ir.Value) -> bool:
    """Whether a value is an input or a constant, or a view of one."""
    return _maker(_seen_through(value, lowerings)[-1], lowerings) is None


def _seen_through(value: ir.Value, lowerings: Mapping[ir.Node, Lowering]) -> list[ir.Value]:
    """A value, what it is a view of, what that is a view of, and so on."""
    path = [value]
    while (node := _maker(path[-1], lowerings)) is not None and lowerings[node].view and node.inputs:
        if node.inputs[0] is None:
            break
        path.append(node.inputs[0])
    return path


def _maker(value: ir.Value, lowerings: Mapping[ir.Node, Lowering]) -> ir.Node | None:
    """The node of the program that makes a value; an input and a constant have none."""
    node = value.producer()
    return node if node in lowerings else None


def disordered(
    nodes: Sequence[ir.Node],
    lowerings: Mapping[ir.Node, Lowering],
    values: Sequence[ir.Value],
    given: Collection[ir.Value],
) -> list[ir.Value]:
    """Those of the values whose elements may not lie in memory in the order of their axes, where eager PyTorch's do.

    What is computed element by element of what the caller gives is in the order of that, as in eager PyTorch.

    Args:
        nodes: the program in order.
        lowerings: how each node runs.
        values: the values, whose axes the traced call had in order.
        given: inputs that a caller may give in any order, which the traced call had in order.
    """
    shown, follows, moved = set(given), set[ir.Value](), set[ir.Value]()
    for node in nodes:
        is_view, operands = lowerings[node].view, {v for v in node.inputs if v is not None}
        is_elementwise = Trait.ELEMENTWISE in traits_of(node) or is_kernel(node)
        if node.op_type in _MOVING or ((is_view or is_elementwise) and moved & operands):
            moved.update(node.outputs)
        elif (is_elementwise and operands & (shown | follows)) or (is_view and node.inputs[0] in follows):
            follows.update(node.outputs)
        elif is_view and node.inputs[0] in shown:
            shown.update(node.outputs)
    return [v for v in values if v not in follows and (v.shape is None or len(v.shape) > 1)]


def settled(
    nodes: Sequence[ir.Node], lowerings: Mapping[ir.Node, Lowering], sets: Sequence[Collection[ir.Value]]
) -> list[int]:
    """After which node nothing touches a set of values, nor one of the sets before it; -1 where no node does."""
    groups = Groups(nodes, lowerings)
    touched = {groups.root(v): i for i, n in enumerate(nodes) for v in (*n.inputs, *n.outputs) if v is not None}
    found = (max((touched.get(groups.root(v), -1) for v in values), default=-1) for values in sets)
    return list(itertools.accumulate(found, max))


def _may_overlap(value: ir.Value, made: Mapping[ir.Value, ir.Node], lowerings: Mapping[ir.Node, Lowering]) -> bool:
    """Whether elements of a value may have one memory: it is a view of something expanded."""
    node = made.get(value)
    while node is not None and lowerings[node].view:
        if node.op_type == "Expand" or node.op_type in SHARE_ANY:
            return True
        node = made.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    return False


def added_of(plan: Plan) -> dict[str, int]:
    """The inputs whose gradients a lowering can add to what there is of them already, and their places among all."""
    if plan.backward is None:
        return {}
    results = {str(v.name): v for v in plan.backward.graph.outputs}
    count, found = collections.Counter(plan.gradients.values()), dict[str, int]()
    for place, (name, gradient) in enumerate(plan.gradients.items()):
        node = results[gradient].producer() if count[gradient] == 1 and not results[gradient].uses() else None
        lowering = None if node is None else lowering_of(node)
        if lowering is not None and "into" in lowering.wants:
            found[name] = place
    return found


_COMMUTATIVE = ("Add", "Mul")
SHARE_ANY = (
    "ATen",
    "ATenGrad",
    "PythonOp",
    "PythonOpGrad",
    "Sum",
    "Max",
    "Min",
    "If",
    "Loop",
    "Scan",
)  # a result may share memory with any operand


_MOVING = ("Transpose", "ATen", "ATenGrad", "PythonOp", "PythonOpGrad", "If", "Loop", "Scan")


def _same(a: ir.Value, b: ir.Value) -> bool:
    dims = shapes.dims_of(a)
    known = dims is not None and all(isinstance(d, int) or d.value is not None for d in dims)
    return known and dims == shapes.dims_of(b) and a.dtype == b.dtype


def _sharers(node: ir.Node) -> list[list[ir.Value]]:
    """Groups of a node's values that may share memory.

    The autograd context of a PythonOp may hold all of its tensors; without one, what the class declares counts.
    """
    inputs = [v for v in node.inputs if v is not None]
    declared = node.attributes.get("tensor_reuse_map")
    if declared is not None and not (is_call(node) and "needs_input_grad" in node.attributes):
        pairs = zip(node.outputs, declared.as_ints(), strict=False)
        first = int(is_call(node))  # of a PythonOp the first input is the sizes
        found = ((y, node.inputs[index + first] if index >= 0 else None) for y, index in pairs)
        return [[y, x] for y, x in found if x is not None]
    every = node.op_type in SHARE_ANY
    return [[*node.outputs, *(inputs if every else inputs[:1])]]


class Groups:
    """Values that may share memory, as a union of sets."""

    def __init__(self, nodes: Sequence[ir.Node], lowerings: Mapping[ir.Node, Lowering]) -> None:
        self._parent: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            if lowerings[node].view and node.inputs:
                for group in _sharers(node):
                    for value in group:
                        self._parent[self.root(value)] = self.root(group[0])

    def root(self, value: ir.Value) -> ir.Value:
        """One value that stands for all that may share memory with this one."""
        while self._parent.get(value, value) is not value:
            value = self._parent[value]
        return value
