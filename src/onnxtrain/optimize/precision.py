"""Casts move so that more of the graph runs in half precision: down to where float32 is needed, up to where it was not.

The rules and names are those of onnxruntime-training's cast propagation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.options import Options

FLOAT = ir.DataType.FLOAT
HALF = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_MOVING = """
    Reshape Squeeze Unsqueeze Flatten Transpose Identity Slice Split Concat Gather DepthToSpace SpaceToDepth"""
_COMPUTING = """
    Add Sub Neg Abs Min Max Where Relu Tanh Sigmoid Gelu Dropout LayerNormalization Expand Tile GatherElements"""
MOVING = frozenset(_MOVING.split())  # level 1: they do no arithmetic, and neither do their gradients
COMPUTING = frozenset(_COMPUTING.split())  # level 2: they keep to the range of half, and kernels sum in float32
_SELECTING = frozenset(("Slice", "Split", "Gather", "GatherElements"))  # give fewer elements than they get
_STAY_WIDE = {"Dropout": (1,)}  # operands with a type of their own


class CastPropagationPass(ir.passes.InPlacePass):
    """Operators between casts from and to half precision run in half precision.

    ``FLOOD_FILL`` goes node by node: a cast from half above a node moves below it, one to half below it above.
    ``INSERT_AND_REDUCE`` takes all nodes that hang together at once: casts are put around them, those that cancel go,
    and the result stays where it has not more casts than before, those of weights aside.

    Level 1 keeps every bit, in gradients as well. So nothing moves over a value in float32 that is read twice: its
    gradients would be added in half. Two casts in a row are one where the type between them holds every number of
    both others: half to float32 to half, and not float32 to half to float32, which rounds. Losses, Softmax, sums and
    products stay as they are at every level: only an entry of ``propagate_cast_ops_allow`` moves those.

    Args:
        options: strategy, level and the operators that are allowed beside those of the level.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.on = options.propagate_cast_ops_strategy != "NONE" and options.propagate_cast_ops_level >= 0
        self.level, self.at_once = options.propagate_cast_ops_level, options.propagate_cast_ops_strategy != "FLOOD_FILL"
        self.rounding = frozenset(options.propagate_cast_ops_allow) | (COMPUTING if self.level >= 2 else frozenset())
        self.allowed = self.rounding | (MOVING if self.level >= 1 else frozenset())

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        graph, modified = model.graph, False
        if not self.on or not any(_half_of(n) for n in graph):
            return ir.passes.PassResult(model, False)
        modified |= self._join_all(graph)
        for nodes in self._together(graph) if self.at_once else self._one_by_one(graph):
            region = _Region.of(nodes)
            if region is not None and self._is_right(region) and self._is_worth_it(region):
                _narrow(graph, region)
                modified = True
        return ir.passes.PassResult(model, self._join_all(graph) or modified)

    def _join_all(self, graph: ir.Graph) -> bool:
        done = [_join(n, shared=self.level >= 2) for n in list(graph) if _is_cast(n)]
        return any(done)

    def _may(self, node: ir.Node) -> bool:
        """Whether a node's operator is allowed, and all it gives is float32 that is read in the graph alone."""
        if node.op_type not in self.allowed or node.domain not in ("", DOMAIN) or not _wide(node):
            return False
        read = [v for v in node.outputs if v.uses() or v.is_graph_output()]
        if any(v.is_graph_output() or v.dtype != FLOAT for v in read):
            return False
        return node.op_type != "Gather" or "Gather" in self.rounding or _are_distinct(node.inputs[1])

    def _one_by_one(self, graph: ir.Graph) -> Iterator[list[ir.Node]]:
        """Forwards, so that casts from half go down all the way, then backwards for those to half."""
        nodes = [n for n in graph if self._may(n)]
        for order in (nodes, nodes[::-1]):
            yield from ([n] for n in order if n.graph is graph)

    def _together(self, graph: ir.Graph) -> list[list[ir.Node]]:
        """The nodes that are joined by values that nothing else reads, in order."""
        root: dict[ir.Node, ir.Node] = {}

        def find(node: ir.Node) -> ir.Node:
            while root[node] is not node:
                node = root[node]
            return node

        for node in graph:
            if self._may(node):
                root[node] = node
                for value in _wide(node):
                    before = value.producer()
                    if before in root and len(value.uses()) == 1:
                        root[find(before)] = node  # type: ignore[arg-type]
        groups: dict[ir.Node, list[ir.Node]] = {}
        for node in root:
            groups.setdefault(find(node), []).append(node)
        return list(groups.values())

    def _is_right(self, region: _Region) -> bool:
        """Whether values keep every bit, or operators are among the nodes that are allowed to round."""
        if any(n.op_type in self.rounding for n in region.nodes):
            return True
        once = all(len(v.uses()) == 1 for v in (*region.from_half, *region.inside))
        return once and not (region.rounded and region.open)

    def _is_worth_it(self, region: _Region) -> bool:
        """Whether there are not more casts than before, nor casts of more elements; those of inputs do not count."""
        before = sum(len(v.uses()) == 1 for v in region.from_half) + len(region.closing)
        inserted = [v for v in region.rounded if not v.is_graph_input()]
        after = len(inserted) + len(region.open)
        if region.rounded and after == before and any(n.op_type in _SELECTING for n in region.nodes):
            return False
        return before > 0 and after <= before


@dataclasses.dataclass(frozen=True)
class _Region:
    """Nodes that could run in half precision, and what crosses their border.

    Args:
        nodes: the nodes in order.
        half: the type.
        inside: all they give.
        from_half: what they read that is a cast from that type.
        rounded: what they read that the type does not hold.
        open: what they give that is read in float32.
        closing: the casts to the type that read what they give.
    """

    nodes: list[ir.Node]
    half: ir.DataType
    inside: list[ir.Value]
    from_half: list[ir.Value]
    rounded: list[ir.Value]
    open: list[ir.Value]
    closing: list[ir.Node]

    @classmethod
    def of(cls, nodes: list[ir.Node]) -> _Region | None:
        """The border of some nodes; None where no half precision is near, or a constant is beyond its range."""
        within, inside = set(nodes), [v for n in nodes for v in n.outputs if v.uses()]
        entries = [v for v in dict.fromkeys(v for n in nodes for v in _wide(n)) if v.producer() not in within]
        readers = {v: [u.node for u in v.uses() if u.node not in within] for v in inside}
        near = [_half_of(v.producer()) for v in entries] + [_half_of(n) for r in readers.values() for n in r]
        half = next((t for t in near if t is not None), None)
        if half is None or any(not _in_range(v, half) for v in entries):
            return None
        from_half = [v for v in entries if _is_from(v, half)]
        rounded = [v for v in entries if v not in from_half and not _is_held(v, half)]
        open_ = [v for v, r in readers.items() if r and not all(_is_to(n, half) for n in r)]
        closing = [n for v, r in readers.items() if v not in open_ for n in r]
        return cls(nodes, half, inside, from_half, rounded, open_, closing)


def _narrow(graph: ir.Graph, region: _Region) -> None:
    """Put nodes that run in half in the place of a region's."""
    half, narrow, named = region.half, dict[ir.Value, ir.Value](), dict[ir.Value, ir.Value]()
    for node in region.nodes:
        op = Builder(graph, before=node)
        op.metadata = dict(node.metadata_props)
        wide = set(_wide(node))
        for value in wide - set(narrow):
            narrow[value] = _in_half(op, value, half)
        inputs = [narrow[v] if v in wide and v is not None else v for v in node.inputs]
        settings = {a.name: a for a in node.attributes.values()}
        made = op.node(node.op_type, inputs, settings, domain=node.domain, outputs=len(node.outputs))
        for old, new in zip(node.outputs, made.outputs, strict=True):
            new.shape, narrow[old], named[old] = old.shape, new, new
            if old in region.open:
                named[old] = op.Cast(new, to=int(FLOAT))
                old.replace_all_uses_with(named[old])
    for cast in region.closing:
        _replace_cast(cast, narrow[cast.inputs[0]])  # type: ignore[index]
    _remove_unread([n for v in region.from_half if (n := v.producer()) is not None], region.nodes)
    for old, new in named.items():
        new.name = old.name


def _in_half(op: Builder, value: ir.Value, half: ir.DataType) -> ir.Value:
    content, before = shapes.constant_of(value), value.producer()
    if content is not None:
        return op.constant(content, half)
    if before is not None and _is_from(value, half) and before.inputs[0] is not None:
        return before.inputs[0]
    return op.cast(value, half)


def _remove_unread(casts: Sequence[ir.Node], nodes: Sequence[ir.Node]) -> None:
    for node in [*nodes[::-1], *dict.fromkeys(casts)]:
        if node.graph is not None and not any(v.uses() or v.is_graph_output() for v in node.outputs):
            node.graph.remove(node, safe=True)


def _join(node: ir.Node, *, shared: bool) -> bool:
    """Make two casts in a row one, where the type between them holds every number of both others.

    What is not floating has no gradient: there it is enough that the first cast loses nothing. ``shared`` joins them
    where something else reads the value between the two as well.
    """
    first = None if node.inputs[0] is None else node.inputs[0].producer()
    if first is None or not _is_cast(first) or first.inputs[0] is None:
        return False
    x, middle, y = first.inputs[0], first.outputs[0], node.outputs[0]
    if x.dtype is None or middle.dtype is None or y.dtype is None or not _holds(middle.dtype, x.dtype):
        return False
    alone = len(middle.uses()) == 1 and not middle.is_graph_output()
    if x.dtype.is_floating_point() and not (_holds(middle.dtype, y.dtype) and (alone or shared)):
        return False
    if x.dtype == y.dtype:
        _replace_cast(node, x)
    else:
        node.replace_input_with(0, x)
    _remove_unread([first], [])
    return True


def _replace_cast(node: ir.Node, value: ir.Value) -> None:
    """Let all that read a cast read a value of its type; a graph output stays a node of its own."""
    if node.outputs[0].is_graph_output():
        node.replace_input_with(0, value)
        return
    node.outputs[0].replace_all_uses_with(value)
    _remove_unread([node], [])


_DIGITS = {ir.DataType.BFLOAT16: 8, ir.DataType.FLOAT16: 11, FLOAT: 24, ir.DataType.DOUBLE: 53}  # binary, of floats
_BITS = {getattr(ir.DataType, f"{sign}INT{bits}"): bits for sign in ("", "U") for bits in (8, 16, 32, 64)}


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether a type has every number of another."""
    if wide == narrow or narrow == ir.DataType.BOOL:
        return wide in _DIGITS or wide in _BITS or wide == narrow
    if wide in _DIGITS and narrow in _DIGITS:
        return _DIGITS[wide] > _DIGITS[narrow] and wide not in HALF
    if wide in _DIGITS and narrow in _BITS:
        return _BITS[narrow] - narrow.is_signed() <= _DIGITS[wide]
    if wide in _BITS and narrow in _BITS:
        return bool(np.can_cast(narrow.numpy(), wide.numpy(), "safe"))
    return False


def _wide(node: ir.Node) -> list[ir.Value]:
    """The operands in float32 that would be in half."""
    own = _STAY_WIDE.get(node.op_type, ())
    return [v for i, v in enumerate(node.inputs) if v is not None and v.dtype == FLOAT and i not in own]


def _is_cast(node: ir.Node | None) -> bool:
    return node is not None and node.domain == "" and node.op_type == "Cast"


def _half_of(node: ir.Node | None) -> ir.DataType | None:
    """The half precision that a cast makes float32 of or float32; None for other nodes."""
    if node is None or not _is_cast(node) or node.inputs[0] is None:
        return None
    types = (node.inputs[0].dtype, node.outputs[0].dtype)
    return next((t for t in types if t in HALF), None) if FLOAT in types else None


def _is_from(value: ir.Value, half: ir.DataType) -> bool:
    node = value.producer()
    return node is not None and _half_of(node) == half and value.dtype == FLOAT


def _is_to(node: ir.Node, half: ir.DataType) -> bool:
    return _half_of(node) == half and node.outputs[0].dtype == half


def _is_held(value: ir.Value, half: ir.DataType) -> bool:
    """Whether a value is a constant that a type holds."""
    content = shapes.constant_of(value)
    return content is not None and bool((content.astype(half.numpy()).astype(content.dtype) == content).all())


def _in_range(value: ir.Value, half: ir.DataType) -> bool:
    """Whether a constant stays finite; what is not constant is taken to."""
    content = shapes.constant_of(value)
    if content is None:
        return True
    with np.errstate(over="ignore"):
        return bool((np.isfinite(content.astype(half.numpy()).astype(content.dtype)) | ~np.isfinite(content)).all())


def _are_distinct(indices: ir.Value | None) -> bool:
    """Whether constant indices take no element twice, so that the gradient adds nothing."""
    content = shapes.constant_of(indices)
    return content is not None and bool((content >= 0).all()) and len(np.unique(content)) == content.size
