"""THE TABLE: one row puts an operator into every loop (inference, gradient rule, backends)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Given:
    """How to make one input: a shape and a range of real numbers, or of integers."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    integer: bool = False
    boolean: bool = False
    distinct: bool = False

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """A fresh array in double precision, int64 or bool."""
        if self.boolean:
            return rng.random(self.shape) < 0.5
        if self.integer:
            return rng.integers(int(self.low), int(self.high), self.shape)
        if self.distinct:
            count = int(np.prod(self.shape))
            return (rng.permutation(count).reshape(self.shape) / count * (self.high - self.low) + self.low) + 0.01
        return rng.uniform(self.low, self.high, self.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Args:
        op: the operator.
        inputs: how to make each input; an array is a constant of the graph, None a missing input.
        reference: the same in torch, on the inputs that are not constants; returns a tensor or a tuple.
        attributes: the node's attributes.
        domain: the operator's domain.
        outputs: how many outputs the node has.
        label: tells rows of one operator apart.
        static: inputs whose sizes are constants of the graph.
        frozen: inputs that get no gradient.
        differentiable: whether the gradient rule is checked.
    """

    op: str
    inputs: tuple[Any, ...]
    reference: Callable[..., Any]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    label: str = ""
    static: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    differentiable: bool = True

    @property
    def id(self) -> str:
        """The row's name in test output."""
        return f"{self.op}-{self.label}" if self.label else self.op


def x(*shape: int, low: float = -2.0, high: float = 2.0) -> Given:
    """Real numbers."""
    return Given(shape, low, high)


def positive(*shape: int) -> Given:
    """Real numbers above 0."""
    return Given(shape, 0.3, 2.5)


def distinct(*shape: int) -> Given:
    """Real numbers of which no two are equal or near 0: for operators with kinks."""
    return Given(shape, -2.0, 2.0, distinct=True)


def index(*shape: int, high: int, low: int = 0) -> Given:
    """Integers."""
    return Given(shape, low, high, integer=True)


def flag(*shape: int) -> Given:
    """Bools."""
    return Given(shape, boolean=True)


def ints(*content: int) -> np.ndarray:
    """A constant int64 vector."""
    return np.array(content, np.int64)


def _unary() -> list[Case]:
    plain = {
        "Neg": torch.neg, "Exp": torch.exp, "Sin": torch.sin, "Cos": torch.cos, "Erf": torch.erf, "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid, "Softplus": F.softplus, "Softsign": F.softsign, "Identity": lambda a: a,
    }  # fmt: skip
    kinked = {
        "Abs": torch.abs, "Relu": F.relu, "LeakyRelu": F.leaky_relu, "Elu": F.elu, "HardSwish": F.hardswish,
        "HardSigmoid": lambda a: (0.2 * a + 0.5).clamp(0, 1), "Gelu": F.gelu,
    }  # fmt: skip
    above = {"Log": torch.log, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal}
    rows = [Case(op, (x(3, 4),), f) for op, f in plain.items()]
    rows += [Case(op, (distinct(3, 4),), f) for op, f in kinked.items()]
    rows += [Case(op, (positive(3, 4),), f) for op, f in above.items()]
    rows += [
        Case("Gelu", (x(3, 4),), lambda a: F.gelu(a, approximate="tanh"), {"approximate": "tanh"}, label="tanh"),
        Case("LeakyRelu", (distinct(3, 4),), lambda a: F.leaky_relu(a, 0.3), {"alpha": 0.3}, label="alpha"),
        Case("Elu", (distinct(3, 4),), lambda a: F.elu(a, 0.7), {"alpha": 0.7}, label="alpha"),
        Case("Silu", (x(3, 4),), F.silu, domain=DOMAIN),
        Case("Detach", (x(3, 4),), lambda a: a.detach(), domain=DOMAIN, differentiable=False),
        Case("Softmax", (x(3, 4, 5),), lambda a: F.softmax(a, -1)),
        Case("Softmax", (x(3, 4, 5),), lambda a: F.softmax(a, 1), {"axis": 1}, label="axis1"),
        Case("LogSoftmax", (x(3, 4, 5),), lambda a: F.log_softmax(a, -1)),
        Case("LogSoftmax", (x(3, 4, 5),), lambda a: F.log_softmax(a, 1), {"axis": 1}, label="axis1"),
        Case("Clip", (distinct(3, 4), np.array(-0.5), np.array(0.7)), lambda a: a.clamp(-0.5, 0.7)),
        Case("Clip", (distinct(3, 4), None, np.array(0.7)), lambda a: a.clamp(max=0.7), label="above"),
        Case("Cast", (x(3, 4),), lambda a: a.float(), {"to": 1}, label="float", differentiable=False),
        Case("Cast", (x(3, 4),), lambda a: a.double(), {"to": 11}, label="double"),
        Case("CastLike", (x(3, 4), x(2, 2)), lambda a, b: a + 0 * b.sum()),
        Case("Dropout", (x(3, 4), np.array(0.3), np.array(False)), lambda a: a),
    ]
    stops = {
        "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
        "IsNaN": torch.isnan, "IsInf": torch.isinf,
    }  # fmt: skip
    rows += [Case(op, (distinct(3, 4),), f, differentiable=False) for op, f in stops.items()]
    rows.append(Case("Not", (flag(3, 4),), torch.logical_not, differentiable=False))
    return rows


def _binary() -> list[Case]:
    shapes = {"same": ((3, 4), (3, 4)), "broadcast": ((2, 3, 4), (3, 1)), "scalar": ((3, 4), ())}
    plain = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul}
    rows = [Case(op, (x(*a), x(*b)), f, label=n) for op, f in plain.items() for n, (a, b) in shapes.items()]
    rows += [Case("Div", (x(*a), positive(*b)), torch.div, label=n) for n, (a, b) in shapes.items()]
    rows += [
        Case("Pow", (x(3, 4), np.array(2.0)), lambda a: a**2, label="square"),
        Case("Pow", (x(3, 4), np.array(3.0)), lambda a: a**3, label="cube"),
        Case("Pow", (positive(3, 4), np.array(-0.5)), lambda a: a**-0.5, label="root"),
        Case("Pow", (positive(3, 4), x(4)), torch.pow, label="tensor"),
        Case("Mod", (distinct(3, 4), np.array(0.7)), lambda a: torch.fmod(a, 0.7), {"fmod": 1}),
        Case("Max", (distinct(3, 4), x(4)), torch.maximum),
        Case("Min", (distinct(3, 4), x(4)), torch.minimum),
        Case("Max", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: torch.maximum(torch.maximum(a, b), c), label="three"),
        Case("Sum", (x(3, 4), x(4), x(3, 1)), lambda a, b, c: a + b + c),
        Case("Where", (flag(3, 4), x(3, 4), x(4)), torch.where),
        Case("Where", (flag(3, 1), x(1, 4), x(3, 4)), torch.where, label="broadcast"),
        Case("PRelu", (distinct(3, 4), x(4)), lambda a, s: torch.where(a < 0, a * s, a)),
    ]
    comparisons = {
        "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    }  # fmt: skip
    rows += [Case(op, (x(3, 4), x(4)), f, differentiable=False) for op, f in comparisons.items()]
    logic = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
    rows += [Case(op, (flag(3, 4), flag(4)), f, differentiable=False) for op, f in logic.items()]
    return rows


def _reductions() -> list[Case]:
    functions = {
        "ReduceSum": lambda a, d, k: a.sum(d, k),
        "ReduceMean": lambda a, d, k: a.mean(d, k),
        "ReduceMax": lambda a, d, k: a.amax(d, k),
        "ReduceMin": lambda a, d, k: a.amin(d, k),
        "ReduceL1": lambda a, d, k: a.abs().sum(d, k),
        "ReduceL2": lambda a, d, k: a.square().sum(d, k).sqrt(),
        "ReduceSumSquare": lambda a, d, k: a.square().sum(d, k),
        "ReduceLogSumExp": lambda a, d, k: a.logsumexp(d, k),
    }
    rows = []
    for op, f in functions.items():
        rows += [
            Case(op, (distinct(2, 3, 4), ints(1)), lambda a, f=f: f(a, (1,), True), label="keep"),
            Case(
                op, (distinct(2, 3, 4), ints(0, -1)), lambda a, f=f: f(a, (0, 2), False), {"keepdims": 0}, label="drop"
            ),
            Case(op, (distinct(2, 3, 4),), lambda a, f=f: f(a, (0, 1, 2), False), {"keepdims": 0}, label="all"),
        ]
    rows += [
        Case("CumSum", (x(3, 4), np.array(1)), lambda a: a.cumsum(1)),
        Case("CumSum", (x(3, 4), np.array(0)), lambda a: a.flip(0).cumsum(0).flip(0), {"reverse": 1}, label="reverse"),
        Case("ArgMax", (distinct(3, 4),), lambda a: a.argmax(1, True), {"axis": 1}, differentiable=False),
        Case("ArgMin", (distinct(3, 4),), lambda a: a.argmin(1), {"axis": 1, "keepdims": 0}, differentiable=False),
        Case("TopK", (distinct(3, 6), ints(2)), lambda a: tuple(a.topk(2, -1)), outputs=2),
    ]
    return rows


def _linear() -> list[Case]:
    sizes = {
        "matrix": ((3, 4), (4, 5)), "batch": ((2, 3, 4), (2, 4, 5)), "weight": ((2, 3, 4), (4, 5)),
        "broadcast": ((6, 2, 3, 4), (2, 4, 5)), "row": ((4,), (4, 5)), "column": ((2, 3, 4), (4,)), "dot": ((4,), (4,)),
    }  # fmt: skip
    rows = [Case("MatMul", (x(*a), x(*b)), torch.matmul, label=n) for n, (a, b) in sizes.items()]
    rows += [
        Case("Gemm", (x(3, 4), x(4, 5), x(5)), lambda a, b, c: a @ b + c),
        Case("Gemm", (x(3, 4), x(4, 5)), torch.matmul, label="no-bias"),
        Case(
            "Gemm", (x(4, 3), x(5, 4), x(3, 1)), lambda a, b, c: 0.5 * a.T @ b.T + 2 * c,
            {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}, label="transposed",
        ),
        Case("Gemm", (x(3, 4), x(5, 4), x(3, 5)), lambda a, b, c: a @ b.T + c, {"transB": 1}, label="b-transposed"),
        Case("Linear", (x(2, 3, 4), x(5, 4), x(5)), F.linear, domain=DOMAIN),
        Case("Linear", (x(4), x(5, 4), x(5)), F.linear, domain=DOMAIN, label="vector"),
        Case("LinearWithoutBias", (x(2, 3, 4), x(5, 4)), F.linear, domain=DOMAIN),
        Case("LinearWithoutBias", (x(4), x(5, 4)), F.linear, domain=DOMAIN, label="vector"),
    ]  # fmt: skip
    return rows


def _shape() -> list[Case]:
    return [
        Case("Reshape", (x(2, 3, 4), ints(0, -1)), lambda a: a.reshape(2, 12)),
        Case("Reshape", (x(2, 12), ints(2, 3, -1)), lambda a: a.reshape(2, 3, 4), label="split"),
        Case("Flatten", (x(2, 3, 4),), lambda a: a.flatten(1)),
        Case("Transpose", (x(2, 3, 4),), lambda a: a.permute(1, 2, 0), {"perm": [1, 2, 0]}),
        Case("Transpose", (x(2, 3),), lambda a: a.T, label="default"),
        Case("Squeeze", (x(2, 1, 4, 1), ints(1, -1)), lambda a: a.reshape(2, 4)),
        Case("Unsqueeze", (x(2, 4), ints(0, -1)), lambda a: a.reshape(1, 2, 4, 1)),
        Case("Expand", (x(3, 1), ints(2, 3, 4)), lambda a: a.expand(2, 3, 4)),
        Case("Tile", (x(2, 3), ints(2, 3)), lambda a: a.repeat(2, 3)),
        Case("Concat", (x(2, 3), x(2, 5)), lambda a, b: torch.cat((a, b), 1), {"axis": 1}),
        Case("Concat", (x(2, 3), x(4, 3), x(5, 3)), lambda *a: torch.cat(a, 0), {"axis": -2}, label="three"),
        Case("Split", (x(2, 6), ints(2, 4)), lambda a: a.split((2, 4), 1), {"axis": 1}, outputs=2),
        Case("Split", (x(7, 2),), lambda a: a.split((3, 3, 1), 0), {"num_outputs": 3}, outputs=3, label="uneven", static=(0,)),
        Case("Slice", (x(5, 6), ints(1), ints(4), ints(1)), lambda a: a[:, 1:4]),
        Case("Slice", (x(5, 6), ints(0, 2), ints(9, 5), ints(0, 1)), lambda a: a[:, 2:5], label="two"),
        Case("Slice", (x(5, 6), ints(-4), ints(-1), ints(0)), lambda a: a[-4:-1], label="negative"),
        Case("Slice", (x(5, 6), ints(1), ints(6), ints(1), ints(2)), lambda a: a[:, 1:6:2], label="steps"),
        Case("Slice", (x(5, 6), ints(4), ints(-9), ints(0), ints(-1)), lambda a: a.flip(0), label="reverse"),
        Case("Pad", (x(2, 3), ints(1, 0, 2, 1), np.array(0.5)), lambda a: F.pad(a, (0, 1, 1, 2), value=0.5)),
        Case("Pad", (x(4, 5), ints(-1, 0, 0, 2)), lambda a: F.pad(a, (0, 2, -1, 0)), label="cut"),
        Case("Trilu", (x(4, 5),), torch.triu),
        Case("Trilu", (x(4, 5), np.array(1)), lambda a: a.tril(1), {"upper": 0}, label="lower"),
        Case("Shape", (x(3, 4),), lambda a: torch.tensor(a.shape), differentiable=False),
        Case("Size", (x(3, 4),), lambda a: torch.tensor(a.numel()), differentiable=False),
    ]  # fmt: skip


def _indexing() -> list[Case]:
    def scatter(a: Tensor, i: Tensor, u: Tensor) -> Tensor:
        return a.scatter(1, i, u)

    column = np.array([[0, 1], [2, 3], [1, 0]], np.int64)
    pairs = np.array([[0, 1], [2, 3]], np.int64)
    return [
        Case("Gather", (x(5, 3), index(2, 4, high=5)), lambda a, i: a[i]),
        Case("Gather", (x(3, 5, 2), index(4, high=5, low=-5)), lambda a, i: a[:, i], {"axis": 1}, label="negative"),
        Case("Gather", (x(3, 5), np.array(2)), lambda a: a[:, 2], {"axis": 1}, label="one"),
        Case("Embedding", (x(6, 3), index(2, 4, high=6)), lambda w, i: F.embedding(i, w), domain=DOMAIN),
        Case(
            "Embedding", (x(6, 3), index(2, 9, high=6)), lambda w, i: F.embedding(i, w, padding_idx=1),
            {"padding_idx": 1}, DOMAIN, label="padding",
        ),
        Case("GatherElements", (x(3, 5), index(3, 4, high=5)), lambda a, i: a.gather(1, i), {"axis": 1}),
        Case("GatherND", (x(3, 5), index(4, 2, high=3)), lambda a, i: a[i[:, 0], i[:, 1]], static=(1,)),
        Case("ScatterElements", (x(3, 4), column, x(3, 2)), lambda a, u: scatter(a, torch.tensor(column), u), {"axis": 1}),
        Case(
            "ScatterElements", (x(3, 4), index(3, 2, high=4), x(3, 2)), lambda a, i, u: a.scatter_add(1, i, u),
            {"axis": 1, "reduction": "add"}, label="add",
        ),
        Case(
            "ScatterND", (x(3, 4), pairs, x(2)),
            lambda a, u: a.index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), u),
        ),
        Case(
            "ScatterND", (x(3, 4), index(5, 1, high=3), x(5, 4)),
            lambda a, i, u: a.index_put((i[:, 0],), u, accumulate=True), {"reduction": "add"}, label="add", static=(1,),
        ),
        Case("NonZero", (flag(3, 4),), lambda a: a.nonzero().T, differentiable=False),
        Case(
            "OneHot", (index(3, high=4), np.array(4), np.array([0.0, 1.0])), lambda i: F.one_hot(i, 4),
            differentiable=False,
        ),
    ]  # fmt: skip


def _normalization() -> list[Case]:
    def layer_norm(a: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.layer_norm(a, w.shape, w, b)

    def losses(reduction: str, ignore: int = -100) -> Callable[..., Tensor]:
        return lambda s, i, w=None: F.cross_entropy(s, i, w, reduction=reduction, ignore_index=ignore)

    rows = [
        Case("LayerNormalization", (x(2, 3, 4), x(4), x(4)), layer_norm),
        Case("LayerNormalization", (x(2, 3, 4), x(4)), layer_norm, label="no-bias"),
        Case("LayerNormalization", (x(2, 3, 4), x(3, 4), x(3, 4)), layer_norm, {"axis": 1}, label="axis1"),
        Case(
            "SoftmaxCrossEntropyLoss", (x(6, 5), index(6, high=5), positive(5)), losses("mean"), label="weights", frozen=(2,),
        ),
        Case(
            "SoftmaxCrossEntropyLoss", (x(3, 5, 4), index(3, 4, high=5)), losses("mean", 2),
            {"ignore_index": 2}, label="ignore",
        ),
        Case(
            "NegativeLogLikelihoodLoss", (x(6, 5), index(6, high=5)), lambda s, i: F.nll_loss(s, i, ignore_index=1),
            {"ignore_index": 1},
        ),
    ]  # fmt: skip
    rows += [
        Case("SoftmaxCrossEntropyLoss", (x(6, 5), index(6, high=5)), losses(r), {"reduction": r}, label=r)
        for r in ("mean", "sum", "none")
    ]
    return rows


def _attention() -> list[Case]:
    def attend(scale: float, causal: bool = False) -> Callable[..., Tensor]:
        return lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, is_causal=causal, scale=scale)

    q, k = x(2, 3, 5, 4), x(2, 3, 6, 4)
    return [
        Case("ScaledDotProductAttention", (q, k, k), attend(0.5), {"scale": 0.5}, DOMAIN),
        Case("CausalScaledDotProductAttention", (q, q, q), attend(0.7, True), {"scale": 0.7}, DOMAIN),
        Case(
            "MaskedScaledDotProductAttention", (q, k, k, np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9)),
            lambda q, k, v: attend(0.5)(q, k, v, torch.tensor(np.where(np.tri(5, 6, 1) > 0, 0.0, -1e9), dtype=q.dtype)),
            {"scale": 0.5}, DOMAIN,
        ),
    ]  # fmt: skip


def _convolution() -> list[Case]:
    def norm(training: bool) -> Callable[..., Any]:
        def run(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Any:
            m, v = m.detach().clone(), v.detach().clone()
            y = F.batch_norm(a, m, v, w, b, training, 0.1, 1e-5)
            return (y, m, v) if training else y

        return run

    def pads(n: int, p: int) -> dict[str, Any]:
        return {"pads": [p] * 2 * n}

    return [
        Case("Conv", (x(2, 3, 8, 9), x(4, 3, 3, 3), x(4)), lambda a, w, b: F.conv2d(a, w, b, 2, 1),
             {**pads(2, 1), "strides": [2, 2]}, static=(1, 2), label="strided"),
        Case("Conv", (x(2, 4, 7, 6), x(6, 2, 3, 2)), lambda a, w: F.conv2d(a, w, groups=2), {"group": 2},
             static=(1,), label="grouped"),
        Case("Conv", (x(2, 4, 9, 9), x(4, 1, 3, 3), x(4)), lambda a, w, b: F.conv2d(a, w, b, 1, 2, 2, 4),
             {**pads(2, 2), "dilations": [2, 2], "group": 4}, static=(1, 2), label="depthwise"),
        Case("Conv", (x(2, 3, 10), x(4, 3, 4)), lambda a, w: F.conv1d(a, w, stride=3), {"strides": [3]},
             static=(1,), label="1d"),
        Case("Conv", (x(1, 2, 4, 5, 6), x(3, 2, 2, 2, 2)), F.conv3d, static=(1,), label="3d"),
        Case("Conv", (x(2, 3, 6, 6), x(4, 3, 2, 2)), lambda a, w: F.conv2d(F.pad(a, (0, 1, 0, 1)), w),
             {"pads": [0, 0, 1, 1]}, static=(1,), label="uneven"),
        Case("ConvTranspose", (x(2, 3, 4, 5), x(3, 2, 3, 3)),
             lambda a, w: F.conv_transpose2d(a, w, stride=2, padding=1, output_padding=1),
             {**pads(2, 1), "strides": [2, 2], "output_padding": [1, 1]}, static=(0, 1)),
        Case("MaxPool", (distinct(2, 3, 8, 7),), lambda a: F.max_pool2d(a, 3, 2, 1),
             {**pads(2, 1), "kernel_shape": [3, 3], "strides": [2, 2]}),
        Case("MaxPool", (distinct(2, 3, 9),), lambda a: F.max_pool1d(a, 2), {"kernel_shape": [2], "strides": [2]},
             label="1d"),
        Case("AveragePool", (x(2, 3, 8, 7),), lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False),
             {**pads(2, 1), "kernel_shape": [3, 3], "strides": [2, 2]}),
        Case("AveragePool", (x(2, 3, 8, 7),), lambda a: F.avg_pool2d(a, 2, 1, 1),
             {**pads(2, 1), "kernel_shape": [2, 2], "count_include_pad": 1}, label="padded"),
        Case("GlobalAveragePool", (x(2, 3, 4, 5),), lambda a: a.mean((2, 3), True)),
        Case("GlobalMaxPool", (distinct(2, 3, 4, 5),), lambda a: a.amax((2, 3), True)),
        Case("Conv", (x(2, 4, 11, 12), x(6, 4, 2, 3), x(6)), lambda a, w, b: F.conv2d(a, w, b, 3), {"strides": [3, 3]},
             static=(1, 2), label="remainder"),
        Case("Conv", (x(3, 4, 12, 13), x(6, 2, 3, 2), x(6)), lambda a, w, b: F.conv2d(a, w, b, 2, (2, 1), (2, 3), 2),
             {"pads": [2, 1, 2, 1], "strides": [2, 2], "dilations": [2, 3], "group": 2}, static=(1, 2), label="all"),
        Case("ConvTranspose", (x(2, 4, 5, 6), x(4, 3, 3, 3), x(6)),
             lambda a, w, b: F.conv_transpose2d(a, w, b, (2, 1), 0, 0, 2, (1, 2)),
             {"strides": [2, 1], "dilations": [1, 2], "group": 2}, static=(0, 1, 2), label="grouped"),
        Case("ConvTranspose", (x(2, 3, 9), x(3, 4, 3), x(4)), lambda a, w, b: F.conv_transpose1d(a, w, b, 2, 1, 1),
             {"pads": [1, 1], "strides": [2], "output_padding": [1]}, static=(0, 1, 2), label="1d"),
        Case("MaxPool", (distinct(2, 3, 7, 8),), lambda a: F.max_pool2d(a, 2, 3, 1, ceil_mode=True),
             {**pads(2, 1), "kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1}, label="ceil"),
        Case("AveragePool", (x(2, 3, 9),), lambda a: F.avg_pool1d(a, 3, 2, 1, True, False),
             {**pads(1, 1), "kernel_shape": [3], "strides": [2], "ceil_mode": 1}, label="ceil"),
        Case("InstanceNormalization", (x(2, 3, 5, 4), positive(3), x(3)),
             lambda a, w, b: F.instance_norm(a, weight=w, bias=b, eps=1e-3), {"epsilon": 1e-3}),
        Case("BatchNormTraining", (x(4, 3, 5), positive(3), x(3), x(3), positive(3)), norm(True), domain=DOMAIN, outputs=3,
             frozen=(3, 4)),
        Case("BatchNormalization", (x(4, 3, 5), positive(3), x(3), x(3), positive(3)), norm(False), frozen=(3, 4)),
    ]  # fmt: skip


CASES = [
    *_unary(), *_binary(), *_reductions(), *_linear(), *_shape(), *_indexing(), *_normalization(), *_attention(),
    *_convolution(),
]  # fmt: skip
