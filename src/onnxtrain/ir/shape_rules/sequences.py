"""What is read of sequences: ONNX's own inference forgets the shapes of what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir.shape_rules.of_onnx import ask_onnx
from onnxtrain.ir.shapes import Dim, Dims, Facts, attribute, dims_of, fresh_dim, operand, shape_rule


@shape_rule("SequenceAt")
def sequence_at(node: ir.Node) -> Sequence[Facts]:
    """As the elements of the sequence; sizes in which they differ are new symbols."""
    return [_named(node, elements_of(operand(node, 0)))]


@shape_rule("ConcatFromSequence")
def concat_from_sequence(node: ir.Node) -> Sequence[Facts]:
    """As the elements, along one axis all of them, which may be a new one."""
    facts = elements_of(operand(node, 0))
    dims = None if facts.dims is None else list(facts.dims)
    if dims is not None:
        axis = attribute(node, "axis")
        if attribute(node, "new_axis", 0):
            dims.insert(axis % (len(dims) + 1), ir.SymbolicDim(None))
        elif dims:
            dims[axis % len(dims)] = ir.SymbolicDim(None)
    return [_named(node, Facts(facts.dtype, None if dims is None else tuple(dims)))]


@shape_rule("OptionalGetElement")
def optional_get_element(node: ir.Node) -> Sequence[Facts]:
    """As what the optional was made of; an operand that is no optional is what it gives."""
    source = operand(node, 0)
    maker = None if source is None else source.producer()
    inner = operand(maker, 0) if maker is not None and maker.op_type == "Optional" else source
    if inner is None or not isinstance(inner.type, ir.TensorType):
        return ask_onnx(node)
    return [_named(node, _tensor(inner))]


def _named(node: ir.Node, facts: Facts) -> Facts:
    y = node.outputs[0]
    if facts.dims is None:
        return Facts(facts.dtype, dims_of(y))
    known = (isinstance(d, int) or d.value is not None for d in facts.dims)
    return Facts(
        facts.dtype, tuple(d if k else fresh_dim(y, i) for i, (d, k) in enumerate(zip(facts.dims, known, strict=True)))
    )


def elements_of(sequence: ir.Value | None) -> Facts:
    """What is known of each tensor in a sequence; sizes that are not the same in all of them have no name."""
    node = None if sequence is None else sequence.producer()
    if sequence is None or node is None or node.domain:
        return Facts(ir.DataType.UNDEFINED if sequence is None else sequence.dtype or ir.DataType.UNDEFINED, None)
    if node.op_type == "SequenceConstruct":
        return _merged([_tensor(v) for v in node.inputs])
    if node.op_type == "SequenceInsert":
        before, new = operand(node, 0), _tensor(operand(node, 1))
        maker = None if before is None else before.producer()
        return new if maker is not None and maker.op_type == "SequenceEmpty" else _merged([elements_of(before), new])
    if node.op_type in ("SequenceErase", "Identity"):
        return elements_of(operand(node, 0))
    if node.op_type == "SplitToSequence":
        return _parts(node)
    return Facts(sequence.dtype or ir.DataType.UNDEFINED, None)


def _tensor(value: ir.Value | None) -> Facts:
    if value is None:
        return Facts(ir.DataType.UNDEFINED, None)
    return Facts(value.dtype or ir.DataType.UNDEFINED, dims_of(value))


def _parts(node: ir.Node) -> Facts:
    dtype, dims = _tensor(operand(node, 0))[:2]
    if not dims:
        return Facts(dtype, None)
    axis = attribute(node, "axis", 0) % len(dims)
    if operand(node, 1) is not None:
        size: tuple[Dim, ...] = (ir.SymbolicDim(None),)
    else:
        size = (1,) if attribute(node, "keepdims", 1) else ()
    return Facts(dtype, (*dims[:axis], *size, *dims[axis + 1 :]))


def _merged(found: Sequence[Facts]) -> Facts:
    dtype = next((f.dtype for f in found if f.dtype != ir.DataType.UNDEFINED), ir.DataType.UNDEFINED)
    shapes = [f.dims for f in found]
    known = [s for s in shapes if s is not None]
    if not known or len(known) < len(shapes) or len({len(s) for s in known}) > 1:
        return Facts(dtype, None)
    columns = zip(*known, strict=True)
    dims: Dims = tuple(c[0] if len(set(c)) == 1 else ir.SymbolicDim(None) for c in columns)
    return Facts(dtype, dims)
