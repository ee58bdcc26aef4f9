"""One table of facts per operator: what passes and planners may assume about it."""

from __future__ import annotations

import enum

import onnx_ir as ir

from onnxtrain.ir.graphs import DOMAIN, DRAWN


class Trait(enum.Flag):
    """A fact about an operator.

    ELEMENTWISE: each output element depends on the input elements at its (broadcast) place.
    VIEW: the output holds the first input's elements, in memory it may share.
    RANDOM: two runs on the same inputs differ; never merged, folded or run twice.
    EXPENSIVE: costs far more than reading its inputs; not computed again to save memory.
    ROW_WISE: each row (all axes but the last) is computed from the same row of the first input alone.
    IDENTITY: the output equals the first input.
    STOP: no gradient flows through: the result is integer, bool or a shape, constant by pieces, or random.
    EFFECT: does something beside its outputs (a probe reports, a user's class does anything); never removed, merged
        or moved.
    DRAWN: nothing reads its random numbers; never removed, so that those after it are eager's.
    """

    NONE = 0
    ELEMENTWISE = enum.auto()
    VIEW = enum.auto()
    RANDOM = enum.auto()
    EXPENSIVE = enum.auto()
    ROW_WISE = enum.auto()
    IDENTITY = enum.auto()
    STOP = enum.auto()
    EFFECT = enum.auto()
    DRAWN = enum.auto()
    STAYS = EFFECT | DRAWN


_GROUPS = {
    Trait.ELEMENTWISE | Trait.ROW_WISE: """
        Abs Acos Acosh Add And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil
        Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN
        LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu
        Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum SwiGLU Swish Tan Tanh ThresholdedRelu Where Xor
        onnxtrain::Silu onnxtrain::Log1p onnxtrain::Expm1 onnxtrain::Erfc onnxtrain::GeluGrad
        onnxtrain::DropoutGrad onnxtrain::ScaleGradient""",
    Trait.VIEW: "Reshape Squeeze Unsqueeze Flatten Transpose Expand Slice Split",
    Trait.VIEW | Trait.IDENTITY | Trait.ELEMENTWISE | Trait.ROW_WISE: "Identity onnxtrain::Detach onnxtrain::Fetched",
    Trait.ELEMENTWISE | Trait.RANDOM | Trait.ROW_WISE: "Dropout onnxtrain::PackedDropout",
    Trait.RANDOM: """
        Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike onnxtrain::ATen
        onnxtrain::RandomState""",
    Trait.RANDOM | Trait.EFFECT: "onnxtrain::PythonOp onnxtrain::PythonOpGrad",
    Trait.EXPENSIVE: """
        Conv ConvTranspose Det Einsum Gemm MatMul LSTM GRU RNN onnxtrain::If onnxtrain::Loop onnxtrain::Scan
        onnxtrain::ScaledDotProductAttention onnxtrain::ConvGrad onnxtrain::Cofactors
        onnxtrain::CausalScaledDotProductAttention onnxtrain::CausalScaledDotProductAttentionGrad
        onnxtrain::MaskedScaledDotProductAttention onnxtrain::ScaledDotProductAttentionGrad
        onnxtrain::MaskedScaledDotProductAttentionGrad
        onnxtrain::PackedAttention onnxtrain::PackedAttentionGrad onnxtrain::LinearCrossEntropy""",
    Trait.EXPENSIVE | Trait.ROW_WISE: """
        onnxtrain::Linear onnxtrain::LinearWithoutBias onnxtrain::MatMulBnb4 onnxtrain::MatMulBnb4Grad
        onnxtrain::MatMulInt8Weight onnxtrain::MatMulInt8WeightGrad""",
    Trait.ROW_WISE: "onnxtrain::SoftmaxGrad onnxtrain::LogSoftmaxGrad",
}
_STOPS = """
    ArgMax ArgMin And Or Not Xor BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Equal Greater GreaterOrEqual
    Less LessOrEqual IsInf IsNaN NonZero Shape Size Range Constant ConstantOfShape EyeLike Floor Ceil Round Sign
    Hardmax Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike
    QuantizeLinear DynamicQuantizeLinear StringNormalizer TfIdfVectorizer onnxtrain::Detach
    HannWindow HammingWindow BlackmanWindow MelWeightMatrix BitCast NonMaxSuppression ConvInteger MatMulInteger
    QLinearConv QLinearMatMul RegexFullMatch StringConcat StringSplit ImageDecoder onnxtrain::ReachableRows
    onnxtrain::Gradients onnxtrain::RandomState onnxtrain::DropoutMask onnxtrain::Offload"""
TRAITS: dict[str, Trait] = {name: traits for traits, names in _GROUPS.items() for name in names.split()}
TRAITS |= {name: TRAITS.get(name, Trait.NONE) | Trait.STOP for name in _STOPS.split()}
PROBES = ("onnxtrain::probe", "onnxtrain::probe_backward")  # operators of torch, recorded as ATen nodes


def traits_of(node: ir.Node) -> Trait:
    """The facts known of a node's operator; those that depend on attributes are decided here."""
    name = f"{DOMAIN}::{node.op_type}" if node.domain == DOMAIN else node.op_type
    found = TRAITS.get(name, Trait.NONE)
    if node.op_type in ("Softmax", "LogSoftmax", "LayerNormalization") and _axis(node) == -1:
        found |= Trait.ROW_WISE
    if node.op_type == "PackedAttention" and "ratio" in node.attributes and node.attributes["ratio"].value > 0:
        found |= Trait.RANDOM
    if node.op_type == "Dropout" and not node.domain and _drops_nothing(node):
        found &= ~Trait.RANDOM
    if node.op_type == "ATen" and node.domain == DOMAIN and node.attributes["operator"].value in PROBES:
        found |= Trait.EFFECT
    if Trait.RANDOM in found and DRAWN in node.metadata_props:
        found |= Trait.DRAWN
    for body in (a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH):
        for inner in body:
            found |= traits_of(inner) & (Trait.RANDOM | Trait.EFFECT)
    return found


def _drops_nothing(node: ir.Node) -> bool:
    """Whether a Dropout is known not to be in training mode."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    content = None if mode is None else ir.convenience.get_const_tensor(mode)
    return mode is None or (content is not None and not content.numpy().any())


def _axis(node: ir.Node) -> int:
    found = node.attributes.get("axis")
    return -1 if found is None else int(found.value)
