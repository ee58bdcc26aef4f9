"""Small groups of nodes that fit values of any shape: what a random program is written in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from fuzz.calls import Call, calls
from fuzz.program import Program
from fuzz.units import Rejected

_UNARY = {
    "Tanh": 13, "Sigmoid": 13, "Sin": 13, "Cos": 13, "Neg": 13, "Erf": 13, "Softplus": 13, "Softsign": 13,
    "Identity": 13, "Atan": 13, "Relu": 13, "Elu": 13, "Celu": 13, "Selu": 13, "LeakyRelu": 13, "Abs": 13,
    "HardSwish": 14, "Mish": 18, "Gelu": 20, "Swish": 24, "HardSigmoid": 13, "Asinh": 13, "ThresholdedRelu": 13,
}  # fmt: skip
_REDUCTIONS = ("Mean", "Sum", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare", "Prod")
_INDICES = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "ScatterND": 1, "OneHot": 0}
_CONDITIONS = {"Where": 0, "Compress": 1}


def unary(p: Program) -> None:
    """One operand."""
    p.emit(p.choose([op for op, since in _UNARY.items() if since <= p.opset]), [p.pick()])


def softmax(p: Program) -> None:
    """Along an axis."""
    v = p.pick(lambda a: a.ndim > 0)
    p.emit(p.choose(["Softmax", "LogSoftmax"]), [v], axis=p.number(-p.array(v).ndim, p.array(v).ndim - 1))


def _partner(p: Program, v: str) -> str:
    """A value that is broadcast with another, or a new weight that is."""
    shape = p.shape(v)
    others = [n for n in p.floats() if _broadcasts(p.shape(n), shape)]
    if others and p.chance(0.5):
        return p.choose(others)
    kept = shape[p.number(0, len(shape)) :] if p.chance(0.5) else shape
    sizes = [1 if p.chance(0.2) else d for d in kept]
    return p.weight(p.random(*sizes))


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x in (1, y) or y == 1 for x, y in zip(reversed(a), reversed(b), strict=False))


def binary(p: Program) -> None:
    """Two operands or more, broadcast."""
    v = p.pick()
    operands = [v, _partner(p, v)]
    if p.chance(0.3):
        operands.reverse()
    op = p.choose(["Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum", "Div", "Pow", "PRelu", "Mod"])
    if op == "PRelu" and np.broadcast_shapes(*map(p.shape, operands)) != p.shape(operands[0]):
        operands[1] = p.weight(p.random(*[1] * (len(p.shape(operands[0])) > 0)))
    if op in ("Div", "Pow", "Mod"):
        place = 0 if op == "Pow" else 1
        away = p.emit("Softplus", [operands[place]])[0]
        operands[place] = p.emit("Add", [away, p.constant(np.float32(0.5))])[0]
    if op in ("Max", "Min", "Mean", "Sum") and p.chance(0.4):
        operands.append(_partner(p, v))
    p.emit(op, operands, **({"fmod": 1} if op == "Mod" else {}))


def product(p: Program) -> None:
    """A matrix product by a weight."""
    v = p.pick(lambda a: a.ndim > 0)
    inner, outer = p.shape(v)[-1], p.number(1, 5)
    kind = p.choose(["MatMul", "Gemm", "Einsum"])
    if kind == "Gemm" and p.array(v).ndim == 2:
        flip = p.chance(0.5)
        w = p.weight(p.random(outer, inner) if flip else p.random(inner, outer))
        bias = [p.weight(p.random(*p.choose([(outer,), (1, outer), (1,), ()])))] if p.chance(0.7) else []
        p.emit("Gemm", [v, w, *bias], transB=int(flip), alpha=p.choose([1.0, 0.5]), beta=p.choose([1.0, 2.0]))
    elif kind == "Einsum":
        p.emit(
            "Einsum", [v, p.weight(p.random(outer, inner))], equation=p.choose(["...i,ji->...j", " ...i, ji -> j... "])
        )
    else:
        p.emit("MatMul", [v, p.weight(p.random(inner, outer))])


def reduction(p: Program) -> None:
    """Over some axes or all."""
    v = p.pick()
    rank, op = p.array(v).ndim, "Reduce" + p.choose(_REDUCTIONS)
    axes = sorted({p.number(-rank, rank - 1) % rank for _ in range(p.number(1, 2))}) if rank and p.chance(0.8) else None
    axes = [a - rank if p.chance(0.3) else a for a in axes] if axes else None
    keep = {"keepdims": p.number(0, 1)} if p.chance(0.7) else {}
    if axes is not None and (p.opset >= 18 or op == "ReduceSum"):
        p.emit(op, [v, p.constant(np.array(axes, np.int64))], **keep)
    else:
        p.emit(op, [v], **keep, **({"axes": axes} if axes is not None else {}))


def reshaped(p: Program) -> None:
    """Another shape, as a constant or computed."""
    v = p.pick()
    shape = list(p.shape(v))
    kind = p.number(0, 4)
    if kind == 0:
        p.emit("Reshape", [v, p.constant(np.array([-1, 1] if p.chance(0.5) else [-1], np.int64))])
    elif kind == 1 and shape:
        p.emit("Reshape", [v, p.constant(np.array([0, -1] if len(shape) > 1 else [0, 1], np.int64))])
    elif kind == 2 and shape:
        sizes = p.emit("Shape", [v])[0]
        first = p.emit("Gather", [sizes, p.constant(np.array([0], np.int64))])[0]
        target = p.emit("Concat", [first, p.constant(np.array([-1], np.int64))], axis=0)[0]
        p.emit("Reshape", [v, target])
    elif kind == 3:
        p.emit("Flatten", [v], axis=p.number(0, len(shape)))
    else:
        fit(p, v, tuple(p.choose([(p.array(v).size,), (1, p.array(v).size), (p.array(v).size, 1)])))


def axes_moved(p: Program) -> None:
    """Transposed, or axes of size 1 added or removed."""
    v = p.pick()
    rank = p.array(v).ndim
    ones = [i for i, d in enumerate(p.shape(v)) if d == 1]
    kind = p.number(0, 2)
    if kind == 0:
        given = {"perm": [int(i) for i in p.rng.permutation(rank)]} if p.chance(0.7) and rank else {}
        p.emit("Transpose", [v], **given)
    elif kind == 1 and ones:
        p.emit("Squeeze", [v, p.constant(np.array([p.choose(ones)], np.int64))] if p.chance(0.7) else [v])
    elif rank < 4:
        p.emit("Unsqueeze", [v, p.constant(np.array([p.number(-rank - 1, rank)], np.int64))])


def pieces(p: Program) -> None:
    """Cut along an axis, or joined."""
    v = p.pick(lambda a: a.ndim > 0)
    rank = p.array(v).ndim
    axis = p.number(-rank, rank - 1)
    size = p.shape(v)[axis]
    kind = p.number(0, 3)
    if kind == 0:
        like = [n for n in p.floats() if _joins(p.shape(n), p.shape(v), axis)]
        p.emit("Concat", [v, *(p.choose(like) for _ in range(p.number(0, 2)))], axis=axis)
    elif kind == 1 and size > 1:
        first = p.number(1, size - 1)
        p.emit("Split", [v, p.constant(np.array([first, size - first], np.int64))], 2, axis=axis)
    elif kind == 2:
        start, stop, step = p.choose([(0, 2**31 - 1, 2), (-1, -(2**31), -1), (1, 9, 1), (0, -1, 1), (-9, 3, 1)])
        p.emit("Slice", [v, *(p.constant(np.array([n], np.int64)) for n in (start, stop, axis, step))])
    else:
        places = p.rng.integers(-size, size, p.choose([(), (2,), (3,), (2, 2)]))
        p.emit("Gather", [v, p.input(places) if p.chance(0.4) else p.constant(np.asarray(places))], axis=axis)


def _joins(a: tuple[int, ...], b: tuple[int, ...], axis: int) -> bool:
    return len(a) == len(b) and all(i == axis % len(b) or x == y for i, (x, y) in enumerate(zip(a, b, strict=True)))


def widened(p: Program) -> None:
    """Repeated or padded."""
    v = p.pick(lambda a: 0 < a.ndim < 5)
    rank = p.array(v).ndim
    kind = p.number(0, 2)
    if kind == 0:
        p.emit("Tile", [v, p.constant(p.rng.integers(1, 3, rank))])
    elif kind == 1:
        target = [d if d > 1 else p.number(1, 3) for d in p.shape(v)]
        p.emit("Expand", [v, p.constant(np.array([2, *target] if p.chance(0.3) else target, np.int64))])
    else:
        mode = p.choose(["constant", "edge", "reflect"])
        pads = [p.number(-1 if mode == "constant" and d > 2 else 0, min(2, d - 1)) for d in (*p.shape(v), *p.shape(v))]
        fill = [p.constant(np.float32(0.3))] if mode == "constant" and p.chance(0.5) else []
        p.emit("Pad", [v, p.constant(np.array(pads, np.int64)), *fill], mode=mode)


def ordered(p: Program) -> None:
    """What goes along an axis."""
    v = p.pick(lambda a: a.ndim > 0)
    rank = p.array(v).ndim
    axis = p.number(-rank, rank - 1)
    if p.chance(0.5):
        p.emit("CumSum", [v, p.constant(np.int64(axis))], reverse=p.number(0, 1), exclusive=p.number(0, 1))
    else:
        count = p.constant(np.array([p.number(1, p.shape(v)[axis])], np.int64))
        p.emit("TopK", [v, count], 2, axis=axis, largest=p.number(0, 1))


def chosen(p: Program) -> None:
    """One of two by a comparison."""
    v = p.pick()
    other = _partner(p, v)
    flags = p.emit(p.choose(["Greater", "Less"]), [v, other])[0]
    p.emit("Where", [flags, v, other])


def counted(p: Program) -> None:
    """Integers made of a value, and back: no gradient."""
    v = p.pick(lambda a: a.ndim > 0)
    found = p.emit(p.choose(["ArgMax", "ArgMin"]), [v], axis=-1, keepdims=1)[0]
    back = p.emit("Cast", [found], to=1)[0]
    p.emit("Add", [v, p.emit("Mul", [back, p.constant(np.float32(0.1))])[0]])


def cast(p: Program) -> None:
    """To doubles and back."""
    wide = p.emit("Cast", [p.pick()], to=11)[0]
    wide = p.emit("Tanh", [wide])[0] if p.chance(0.5) else wide
    p.emit("Cast", [wide], to=1)


def random_numbers(p: Program) -> None:
    """Random numbers, which count nothing."""
    v = p.pick()
    op = p.choose(["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
    if op == "Bernoulli" and p.opset >= 15:
        made = p.emit(op, [p.emit("Sigmoid", [v])[0]], seed=1.0)[0]
    else:
        made = p.emit("RandomNormalLike", [v], seed=1.0)[0]
    p.drawn.add(made)
    p.emit("Add", [v, p.emit("Mul", [made, p.constant(np.float32(0))])[0]])


def dropout(p: Program) -> None:
    """Dropout that drops nothing."""
    v, kind = p.pick(), p.number(0, 2)
    more = [[], [p.constant(np.float32(0.3))], [p.constant(np.float32(0)), p.constant(np.array(True))]][kind]
    p.emit("Dropout", [v, *more], p.number(1, 2))


def sequence(p: Program) -> None:
    """Values kept in a sequence."""
    v = p.pick(lambda a: a.ndim > 0)
    twin = p.emit("Sin", [v])[0]
    kind = p.number(0, 3)
    if kind == 0:
        made = p.emit("SequenceConstruct", [v, twin])[0]
        p.emit("ConcatFromSequence", [made], axis=0, new_axis=p.number(0, 1))
    elif kind == 1:
        made = p.emit("SequenceConstruct", [twin, v])[0]
        made = p.emit("SequenceInsert", [made, twin])[0] if p.chance(0.5) else made
        p.emit("SequenceAt", [made, p.constant(np.int64(p.choose([0, 1, -1])))])
    elif kind == 2:
        made = p.emit("SplitToSequence", [v], axis=-1, keepdims=p.number(0, 1))[0]
        p.emit("SequenceAt", [made, p.constant(np.int64(0))])
    else:
        p.emit("OptionalGetElement", [p.emit("Optional", [v])[0]])


def fit(p: Program, v: str, shape: tuple[int, ...]) -> str:
    """A value in another shape: its numbers repeated or cut off."""
    size, needed = p.array(v).size, int(np.prod(shape))
    if size != needed:
        v = p.emit("Reshape", [v, p.constant(np.array([-1], np.int64))])[0]
        if size < needed:
            v = p.emit("Tile", [v, p.constant(np.array([-(-needed // size)], np.int64))])[0]
        v = p.emit("Slice", [v, p.constant(np.array([0], np.int64)), p.constant(np.array([needed], np.int64))])[0]
    return p.emit("Reshape", [v, p.constant(np.array(shape, np.int64))])[0]


def called(p: Program) -> None:
    """Any operator, as a row of the table or a node test of ONNX calls it."""
    known = calls()
    call: Call = p.choose(known[p.choose(list(known))])
    operands = [_operand(p, call, place, array) for place, array in enumerate(call.inputs)]
    outputs = call.outputs if p.chance(0.7) else p.number(1, call.outputs)
    p.emit(call.op, _older(p, call, operands), outputs, _attributes(p, call))


def _operand(p: Program, call: Call, place: int, array: np.ndarray | None) -> str | None:
    if array is None:
        return None
    if place in call.fixed:
        may_vary = _INDICES.get(call.op) == place or (_CONDITIONS.get(call.op) == place)
        return p.input(array) if may_vary and p.chance(0.4) else p.constant(array)
    like = [n for n in p.made() if p.shape(n) == array.shape and _within(p.array(n), array)]
    kind = p.rng.random()
    if like and kind < 0.5:
        return p.choose(like)
    moved = (array * (1 + p.rng.uniform(0.001, 0.02, array.shape))).astype(np.float32)
    if kind < 0.75 or not p.made():
        return p.weight(moved)
    if kind < 0.8:
        return p.input(moved)
    small = p.emit("Mul", [p.emit("Tanh", [p.pick()])[0], p.constant(np.float32(0.02))])[0]
    return p.emit("Add", [p.constant(moved), fit(p, small, array.shape)])[0]


def _within(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(a.min() >= b.min() and a.max() <= b.max())


def _attributes(p: Program, call: Call) -> list[onnx.AttributeProto]:
    """The call's attributes in the form of the program's opset."""
    kept = [a for a in call.attributes if not (p.opset < 18 and call.op == "Split" and a.name == "num_outputs")]
    axes = _axes(p, call)
    return [*kept, onnx.helper.make_attribute("axes", axes)] if axes else kept


def _axes(p: Program, call: Call) -> list[int] | None:
    """Axes that are an attribute in the program's opset, and an input of the call."""
    moved = call.op.startswith("Reduce") and call.op != "ReduceSum" and p.opset < 18 and len(call.inputs) > 1
    return None if not moved or call.inputs[1] is None else [int(a) for a in call.inputs[1]]


def _older(p: Program, call: Call, operands: list[str | None]) -> list[str | None]:
    if p.opset < 18 and call.op.startswith("Reduce") and call.op != "ReduceSum" and len(operands) > 1:
        return operands[:1]
    return operands


PHRASES: list[tuple[Callable[[Program], None], int]] = [
    (called, 40), (unary, 12), (binary, 14), (product, 10), (reduction, 5), (softmax, 3), (reshaped, 6),
    (axes_moved, 5), (pieces, 8), (widened, 4), (ordered, 3), (chosen, 3), (counted, 2), (cast, 2), (random_numbers, 1),
    (dropout, 2), (sequence, 3),
]  # fmt: skip


def write(p: Program) -> bool:
    """Add a phrase; says whether it computed."""
    weights = np.array([w for _, w in PHRASES], float)
    phrase = PHRASES[int(p.rng.choice(len(PHRASES), p=weights / weights.sum()))][0]
    return p.attempt(lambda: phrase(p))


__all__ = ["Rejected", "fit", "write"]
