"""What one node costs: the table of formulas; units and conventions are those of ``onnxtrain.plan.cost``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
import sympy

from onnxtrain.errors import GraphError, ShapeError
from onnxtrain.ir import functions, shapes
from onnxtrain.ir.bodies import bodies_of
from onnxtrain.ir.einsum import parse
from onnxtrain.ir.graphs import DOMAIN, describe, source_of
from onnxtrain.ir.recurrent import RECURRENT
from onnxtrain.ir.traits import Trait, traits_of

Count: TypeAlias = Any  # a sympy expression: sympy has no types
Formula: TypeAlias = Callable[[ir.Node], Count]

FORMULAS: dict[tuple[str, str], Formula] = {}
PRODUCTS: set[str] = set()  # operators whose cost is that of their multiply-adds
PER_ELEMENT = {
    "Dropout": 2,  # compare, scale
    "PackedDropout": 2,
    "DropoutGrad": 2,
    "Softmax": 5,  # maximum, subtraction, exponential, sum, division
    "LogSoftmax": 5,
    "SoftmaxCrossEntropyLoss": 5,
    "SoftmaxGrad": 4,  # product, sum, subtraction, product
    "LogSoftmaxGrad": 4,
    "LayerNormalization": 7,  # mean (1), variance (3), normalize (1), scale and bias (2)
    "BatchNormalization": 7,
    "GroupNormalization": 7,
    "InstanceNormalization": 7,
    "RMSNormalization": 4,
    "RMSNorm": 4,
    "LayerNormalizationGrad": 13,  # dx 10 (onnxtrain::LayerNormalizationGrad, term by term), dscale 2, dbias 1
    "BatchNormalizationGrad": 13,
    "GroupNormalizationGrad": 17,  # the statistics are computed again (4)
    "InstanceNormalizationGrad": 17,
    "RMSNormalizationGrad": 13,
}
_MOVES = """
    Compress Concat Constant ConstantOfShape DepthToSpace EyeLike Gather GatherElements GatherND NonZero OneHot Pad
    Range ReverseSequence ScatterElements ScatterND Shape Size SpaceToDepth SplitToSequence SequenceAt SequenceEmpty
    SequenceInsert SequenceConstruct SequenceErase SequenceLength ConcatFromSequence Optional OptionalGetElement
    OptionalHasElement Tile Trilu Embedding FlattenAndUnpad PadAndUnflatten ShrunkenGather ShrunkenGatherGrad PlaceAt
    SliceGrad"""
MOVES = frozenset(_MOVES.split())


def as_dim(count: Count) -> shapes.Dim:
    """An expression as a dimension: an ``int`` where it is a number."""
    return int(count) if count.is_Integer else ir.SymbolicDim(count)


def node_flops(node: ir.Node) -> shapes.Dim:
    """The operations of one node, an expression over the names of dynamic dimensions.

    Raises:
        GraphError: they cannot be told from sizes: the node calls Python or ATen, or iterates an unknown number of
            times.
        ShapeError: a shape that is needed is not known.
    """
    return as_dim(count_of(node))


def _key(node: ir.Node) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def count_of(node: ir.Node) -> Count:
    """``node_flops`` as a sympy expression."""
    formula = FORMULAS.get(_key(node))
    return formula(node) if formula else _element_count(node)


def _element_count(node: ir.Node) -> Count:
    traits = traits_of(node)
    if Trait.VIEW in traits or node.op_type in MOVES:
        return sympy.S.Zero
    if _key(node)[0] == DOMAIN and node.op_type in functions.OPAQUE:
        raise _untold(node)
    value = node.outputs[0] if Trait.ELEMENTWISE in traits or not node.inputs else node.inputs[0]
    if value is None or isinstance(value.type, ir.SequenceType | ir.OptionalType):
        return sympy.S.Zero
    return PER_ELEMENT.get(node.op_type, 1) * _elements(value)


def _untold(node: ir.Node) -> GraphError:
    return GraphError(f"sizes do not tell what {node.op_type} costs", node=describe(node), source=source_of(node))


def _sizes(value: ir.Value | None) -> list[Count]:
    """The dimensions of a value as expressions (ShapeError where one is not known)."""
    if value is None:
        raise ShapeError("an input is missing")
    dims = shapes.known_dims(value)
    if any(not isinstance(d, int) and d.value is None for d in dims):
        raise ShapeError(f"the shape of {value.name} is not known")
    return [shapes.as_expression(d) for d in dims]


def _elements(value: ir.Value | None) -> Count:
    return sympy.Mul(*_sizes(value))


def _formula(*op_types: str, domain: str = "") -> Callable[[Formula], Formula]:
    """Register the multiply-adds of operators."""

    def register(formula: Formula) -> Formula:
        FORMULAS.update({(domain, op_type): formula for op_type in op_types})
        PRODUCTS.update(op_types)
        return formula

    return register


@_formula("MatMul")
@_formula("MatMulBnb4", "MatMulBnb4Grad", "MatMulInt8Weight", "MatMulInt8WeightGrad", domain=DOMAIN)
def _matmul(node: ir.Node) -> Count:
    return 2 * _elements(node.outputs[0]) * _sizes(node.inputs[0])[-1]


@_formula("Gemm")
def _gemm(node: ir.Node) -> Count:
    return 2 * _elements(node.outputs[0]) * _sizes(node.inputs[0])[0 if shapes.attribute(node, "transA", 0) else 1]


@_formula("Linear", "LinearWithoutBias", domain=DOMAIN)
def _linear(node: ir.Node) -> Count:
    return 2 * _elements(node.inputs[0]) * _sizes(node.inputs[1])[0]


@_formula("Conv")
def _conv(node: ir.Node) -> Count:
    return 2 * _elements(node.outputs[0]) * _window(node.inputs[1])


@_formula("ConvTranspose")
def _conv_transpose(node: ir.Node) -> Count:
    return 2 * _elements(node.inputs[0]) * _window(node.inputs[1])


def _window(weight: ir.Value | None) -> Count:
    """Multiply-adds for each element on the side of the weight's first axis: channels of a group times the kernel."""
    return sympy.Mul(*_sizes(weight)[1:])


@_formula("ConvGrad", domain=DOMAIN)
def _conv_grad(node: ir.Node) -> Count:
    """A product for each of dx and dw that is read; inputs are dy, x, w."""
    count = sum(bool(v.uses()) or v.is_graph_output() for v in node.outputs[:2])
    return count * 2 * _elements(node.inputs[0]) * _window(node.inputs[2])


@_formula("Einsum")
def _einsum(node: ir.Node) -> Count:
    """Operands joined from the left, two at a time, as torch does without a path; a letter is summed once it is done.

    A join that sums nothing is an elementwise product.
    """
    operands = [_sizes(v) for v in node.inputs]
    equation = parse(shapes.attribute(node, "equation"), [len(d) for d in operands])
    size: dict[str, Count] = {}
    for letters, dims in zip(equation.operands, operands, strict=True):
        for letter, dim in zip(letters, dims, strict=True):
            size[letter] = dim if size.get(letter, 1) == 1 else size[letter]
    count, have = sympy.S.Zero, set(equation.operands[0])
    for index, letters in enumerate(equation.operands[1:], 2):
        joined = have | set(letters)
        have = joined & set("".join(equation.operands[index:]) + equation.result)
        count += (1 if have == joined else 2) * sympy.Mul(*(size[x] for x in sorted(joined)))
    return count if len(operands) > 1 else sympy.Mul(*(size[x] for x in sorted(have)))


def _named(node: ir.Node, name: str) -> ir.Value | None:
    """The input of one of our operators that its definition gives that name."""
    functions.load()
    if node.op_type not in functions.DEFINITIONS:
        raise _untold(node)
    return shapes.operand(
        node, list(inspect.signature(functions.DEFINITIONS[node.op_type].body).parameters).index(name)
    )


def _attention_products(node: ir.Node) -> tuple[Count, Count]:
    """Operations of one product of scores (over the width of q), and of one of weights (over the width of v)."""
    q, k, v = (_sizes(_named(node, name)) for name in "qkv")
    if node.op_type.startswith("PackedAttention"):  # (tokens, heads, width): each sample sees its own share of keys
        samples = shapes.data_of(_named(node, "q_shape"))
        if not isinstance(samples, tuple):
            raise _untold(node)
        pairs = q[0] * k[0] * q[1] / shapes.as_expression(samples[0])
    else:
        pairs = sympy.Mul(*q[:-1]) * k[-2]
    return 2 * pairs * q[-1], 2 * pairs * v[-1]


_ATTENTION = (
    "ScaledDotProductAttention",
    "CausalScaledDotProductAttention",
    "MaskedScaledDotProductAttention",
    "PackedAttention",
)


@_formula(*_ATTENTION, domain=DOMAIN)
def _attention(node: ir.Node) -> Count:
    """Scores and output; a causal mask skips nothing here, as in torch's counter.

    How many keys a token of packed attention sees is not known from sizes: samples are taken to be of equal length.
    """
    return sympy.Add(*_attention_products(node))


@_formula(*(f"{name}Grad" for name in _ATTENTION), domain=DOMAIN)
def _attention_grad(node: ir.Node) -> Count:
    """The scores again, then dq and dk; the gradient of the weights, and dv."""
    scores, weights = _attention_products(node)
    return 3 * scores + 2 * weights


@_formula("LinearCrossEntropy", domain=DOMAIN)
def _linear_cross_entropy(node: ir.Node) -> Count:
    """The scores of x (tokens, hidden) by weight (classes, hidden), and both gradients' products, taken at once."""
    return 6 * _elements(node.inputs[0]) * _sizes(node.inputs[1])[0]


def _recurrent_products(node: ir.Node) -> tuple[Count, Count]:
    """Operations of the products of X by W and of the states by R, for all steps and directions."""
    steps = sympy.Mul(*_sizes(node.inputs[0])[:2])
    return 2 * steps * _elements(node.inputs[1]), 2 * steps * _elements(node.inputs[2])


@_formula(*RECURRENT)
def _recurrent(node: ir.Node) -> Count:
    return sympy.Add(*_recurrent_products(node))


@_formula(*(f"{name}Grad" for name in RECURRENT), domain=DOMAIN)
def _recurrent_grad(node: ir.Node) -> Count:
    """The forward again, then what the gradients asked for take."""
    return _recurrent(node) + _recurrent_gradients(node, shapes.attribute(node, "wanted"))


def _recurrent_gradients(node: ir.Node, wanted: Sequence[object]) -> Count:
    """Products of the gates' gradients for X, W and R; those for the states pass through every step."""
    given, states = _recurrent_products(node)
    return given * (bool(wanted[0]) + bool(wanted[1])) + states * (1 + bool(wanted[2]))


def _control_flow(node: ir.Node) -> Count:
    """The dearest branch of an If; a loop's body for each of its iterations, where their number is known."""
    parts = [sympy.Add(*(count_of(inner) for inner in body)) for body in bodies_of(node)]
    return sympy.Max(*parts) if node.op_type == "If" else _iterations(node) * parts[0]


def _iterations(node: ir.Node) -> Count:
    if node.op_type == "Loop":
        count = shapes.data_of(node.inputs[0])
        if count is None:
            raise _untold(node)
        return shapes.as_expression(count[0] if isinstance(count, tuple) else count)
    scanned = shapes.operand(node, shapes.attribute(node, "states"))
    axes = shapes.attribute(node, "scan_input_axes") or (0,)
    return _sizes(scanned)[axes[0]]


FORMULAS.update({(DOMAIN, name): _control_flow for name in ("If", "Loop", "Scan")})


def backward_count(node: ir.Node, active: set[ir.Value]) -> Count:
    """Operations of the gradients of a node's inputs in eager PyTorch."""
    needed = [v in active for v in node.inputs]
    if not any(needed) or (node.op_type == "LinearCrossEntropy" and node.domain == DOMAIN):
        return sympy.S.Zero
    if node.domain == DOMAIN and node.op_type in _ATTENTION:
        return _attention_grad(node)
    if node.op_type in RECURRENT:
        return _recurrent_gradients(node, needed)
    if node.op_type not in PRODUCTS:
        return count_of(node)
    operands = needed if node.op_type == "Einsum" else needed[:2]
    return sum(operands) * count_of(node)
