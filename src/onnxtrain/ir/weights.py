"""Which constants of a model are weights: decided by what reads them and by their form, each with a reason.

Exporters fold whatever does not depend on the input into constants of floating type, so tables of positions, masks,
slopes and initial states stand beside weights. What is trained by default is what is read as a weight and does not
look like a table; what may be either is doubtful.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Collection, Container, Iterator

import onnx_ir as ir

from onnxtrain.ir import forms
from onnxtrain.ir.forms import Form

FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Kind(enum.StrEnum):
    """What a constant is."""

    WEIGHT = "weight"
    STATISTIC = "statistic"
    CONSTANT = "constant"
    DOUBTFUL = "doubtful"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a constant is, and why.

    Args:
        name: of the initializer.
        dtype: its element type.
        shape: its shape.
        kind: whether it is a weight; doubtful ones are not trained where nobody names them.
        reason: what reads it, or what it looks like.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    reason: str


_WEIGHT, _STATISTIC, _CONSTANT, _DOUBTFUL = Kind.WEIGHT, Kind.STATISTIC, Kind.CONSTANT, Kind.DOUBTFUL
_NORM = (_WEIGHT, "scale or bias of a normalization")
_STATE = (_CONSTANT, "an initial state")
_BOUND = (_CONSTANT, "a bound")
_COMPARED = (_CONSTANT, "compared with")

# What an input of an operator is whatever its content: (operator, index) -> decision. The rest is decided by form.
_BY_USE: dict[tuple[str, int], tuple[Kind, str]] = {
    **{(op, i): (_WEIGHT, "kernel or bias of a convolution") for op in ("ConvTranspose", "FusedConv") for i in (1, 2)},
    **{("CausalConvWithState", i): (_WEIGHT, "kernel or bias of a convolution") for i in (1, 2)},
    **{(op, 3): _STATE for op in ("CausalConvWithState", "LinearAttention")},
    ("Conv", 2): (_WEIGHT, "kernel or bias of a convolution"),
    ("DeformConv", 1): (_WEIGHT, "kernel or bias of a convolution"),
    ("DeformConv", 3): (_WEIGHT, "kernel or bias of a convolution"),
    **{(op, i): (_WEIGHT, "of a recurrent layer") for op in ("LSTM", "GRU", "RNN") for i in (1, 2, 3, 7)},
    **{(op, i): _STATE for op in ("LSTM", "GRU", "RNN") for i in (5, 6)},
    **{(op, i): _NORM for op in ("LayerNormalization", "GroupNormalization", "BatchNormalization") for i in (1, 2)},
    **{("InstanceNormalization", i): _NORM for i in (1, 2)},
    **{(op, i): _NORM for op in ("RMSNormalization", "RMSNorm", "SimplifiedLayerNormalization") for i in (1, 2)},
    **{(op, i): _NORM for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization") for i in (2, 3, 4)},
    **{("BatchNormalization", i): (_STATISTIC, "running statistic of BatchNormalization") for i in (3, 4)},
    ("Gemm", 2): (_WEIGHT, "bias of a linear layer"),
    ("PRelu", 1): (_WEIGHT, "slopes of PRelu"),
    **{(op, i): (_WEIGHT, "of a linear model") for op in ("LinearClassifier", "LinearRegressor") for i in (1, 2)},
    **{("Scaler", i): (_CONSTANT, "statistics of data") for i in (1, 2)},
    **{("Resize", i): (_CONSTANT, "region or scales of Resize") for i in (1, 2)},
    **{(op, 1): (_CONSTANT, "scale of a quantization") for op in ("QuantizeLinear", "DequantizeLinear")},
    **{("Clip", i): _BOUND for i in (1, 2)},
    **{(op, i): _BOUND for op in ("Max", "Min") for i in (0, 1)},
    **{(op, i): _COMPARED for op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual") for i in (0, 1)},
    **{("Where", i): (_CONSTANT, "what Where puts in") for i in (1, 2)},
    **{("RotaryEmbedding", i): (_CONSTANT, "cosines or sines of positions") for i in (1, 2)},
    **{("Attention", i): (_CONSTANT, "mask or past of attention") for i in (3, 4, 5)},
    **{(op, i): _STATE for op in ("Loop", "Scan") for i in range(16)},
    **{(op, 2): (_CONSTANT, "weights of classes") for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")},
    ("Pow", 1): (_CONSTANT, "an exponent"),
    ("Pad", 2): (_CONSTANT, "what Pad fills in"),
    ("OneHot", 2): (_CONSTANT, "values of OneHot"),
    ("Dropout", 1): (_CONSTANT, "a ratio"),
    **{(op, 1): (_DOUBTFUL, f"{op} by a constant") for op in ("Sub", "Div")},
    ("GridSample", 1): (_CONSTANT, "a grid of places"),
    ("RoiAlign", 1): (_CONSTANT, "regions"),
}
# What exporters fill in where a layer has no weights.
_MAYBE_NONE = {(op, i) for op in ("InstanceNormalization", "GroupNormalization", "LayerNormalization") for i in (1, 2)}
_MAYBE_NONE |= {(op, 3) for op in ("LSTM", "GRU", "RNN")}
_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum", "FusedMatMul", "Conv"))
_TABLES = frozenset(("Gather", "GatherElements", "GatherND"))
# What hands its first input on, rearranged or under a function: what reads the result decides.
_REARRANGING = (
    "Identity",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Expand",
    "Tile",
    "Slice",
    "Split",
)
_CASTING = ("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "Dropout")
_FUNCTIONS = ("Exp", "Neg", "Sqrt", "Reciprocal", "Log", "Sigmoid", "Softplus", "Softmax", "Tanh", "Abs")
_REDUCING = ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare")
_CARRIERS = frozenset(("Split", *_REARRANGING, *_CASTING, *_FUNCTIONS, *_REDUCING))
_GENERATED = re.compile(  # names that exporters give to what they fold, not those of modules
    r"val_\d+|.*__\d+|onnx::.*|.*/Constant(_\d+)?_output_\d+|const_.*|.*const_fold.*|"
    r"_?(tensor_constant|lifted_tensor).*|scalar_tensor_default.*|"
    r"(ones|zeros|full|expand|unsqueeze|view|clone|slice|cat|select|arange|linspace|mul|add|sub|cos|sin|embedding|"
    r"lift_fresh_copy|masked_fill|where|repeat|permute|transpose|reshape|_to_copy)(_like)?(_\d+)?"
)
_WRITTEN = re.compile(r"(.*/)?Constant(_\d+)?_output_\d+")  # by TorchScript's exporter, whose weights have other names
_DEEPEST = 12  # carriers in a row


def decide(value: ir.Value) -> Decision | None:
    """What a constant is that is an initializer; None where it is of no floating type or has no content."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in FLOATING:
        return None
    found = [_read(value, node, index) for node, index in _reads(value)]
    order = (_WEIGHT, _STATISTIC, _DOUBTFUL, _CONSTANT)
    kind, reason = min(found, key=lambda f: order.index(f[0]), default=(_DOUBTFUL, "nothing reads it but outputs"))
    if kind is _WEIGHT and _WRITTEN.fullmatch(str(value.name)):
        kind, reason = _DOUBTFUL, f"{reason}, but written in the module's code"
    return Decision(str(value.name), str(tensor.dtype), tuple(tensor.shape.numpy()), kind, reason)


def is_generated(name: str) -> bool:
    """Whether an exporter made the name up for what it folded."""
    return _GENERATED.fullmatch(name) is not None


def _reads(value: ir.Value, depth: int = 0) -> Iterator[tuple[ir.Node, int]]:
    """What reads a value in the end, and as which of its inputs."""
    for node, index in ((use.node, use.idx) for use in value.uses()):
        carries = (index == 0 and node.op_type in _CARRIERS) or node.op_type == "Concat"
        if carries and (node.op_type, index) not in _BY_USE and depth < _DEEPEST:
            yield from (read for y in node.outputs for read in _reads(y, depth + 1))
        else:
            yield node, index


def _read(value: ir.Value, node: ir.Node, index: int) -> tuple[Kind, str]:
    """What a value is that a node reads as one of its inputs."""
    tensor = value.const_value
    assert tensor is not None
    by_use = _BY_USE.get((node.op_type, index))
    if (node.op_type, index) in _MAYBE_NONE and is_generated(str(value.name)) and forms.of(tensor.numpy()) is Form.SAME:
        return _DOUBTFUL, f"ones or zeros read by {node.op_type}, which may have no weights there"
    if by_use is not None:
        return by_use
    if tensor.size == 1 and not (tensor.shape.numpy() and _follows(node, _PRODUCTS)):  # the bias of one output is one
        return _CONSTANT if is_generated(str(value.name)) else _DOUBTFUL, "a single number"
    form = forms.of(tensor.numpy())
    if form is Form.IRREGULAR:
        return _WEIGHT, _ROLES.get(node.op_type, f"values that follow no rule, read by {node.op_type}")
    if form is Form.SAME:
        return _same(value, node)
    if form is Form.REPEATED and node.op_type != "Conv":
        return _WEIGHT, _ROLES.get(node.op_type, f"read by {node.op_type}")
    return (_DOUBTFUL if form is Form.SPARSE else _CONSTANT), form.value


def _same(value: ir.Value, node: ir.Node) -> tuple[Kind, str]:
    """What a constant is that holds one number again and again: a weight before its first step, or none."""
    tensor = value.const_value
    assert tensor is not None
    if node.op_type in _PRODUCTS or node.op_type in _TABLES:
        return (_CONSTANT if is_generated(str(value.name)) else _WEIGHT), "one number everywhere"
    shape = tensor.shape.numpy()
    if len(shape) == 2 and shape[0] == 1 < shape[1] and node.op_type == "Add":
        return _DOUBTFUL, "one number everywhere, in a row: biases of layers are vectors"
    channels = sum(size != 1 for size in shape) <= 1
    if channels and (not is_generated(str(value.name)) or _follows(node, ("InstanceNormalization",))):
        return _WEIGHT, "a number for each channel"
    return _DOUBTFUL if channels else _CONSTANT, "one number everywhere"


def _follows(node: ir.Node, operators: Collection[str]) -> bool:
    """Whether a node scales or shifts what one of these operators made, as where an exporter wrote GroupNorm out."""
    for value in node.inputs:
        producer = None if value is None else value.producer()
        while producer is not None and producer.op_type in ("Reshape", "Mul") and producer.inputs[0] is not None:
            producer = producer.inputs[0].producer()
        if producer is not None and producer.op_type in operators:
            return True
    return False


_ROLES = {
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "Einsum"), "factor of a product"),
    **dict.fromkeys(_TABLES, "a table that rows are taken of"),
    "Conv": "kernel or bias of a convolution",
}


def as_text(decisions: list[Decision]) -> str:
    """A line for each decision."""
    if not decisions:
        return "no floating initializer"
    width = max(len(d.name) for d in decisions)
    rows = [(d, f"{d.dtype.lower()} [{', '.join(map(str, d.shape))}]") for d in decisions]
    form = max(len(text) for _, text in rows)
    return "\n".join(f"{d.name:{width}}  {text:{form}}  {d.kind:9}  {d.reason}" for d, text in rows)


def is_meant(name: str, pattern: str, known: Container[str]) -> bool:
    """Whether a name or pattern stands for this name; one that is known itself, such as a weight ``*``, is a name."""
    return name == pattern if pattern in known else fnmatch.fnmatchcase(name, pattern)
