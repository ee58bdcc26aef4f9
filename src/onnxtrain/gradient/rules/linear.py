"""Gradients of matrix products."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.einsum import Equation, parse

Value = ir.Value


@gradient("MatMul")
def matmul(ctx: Context, dy: Value, a: Value, b: Value) -> Any:
    """da = dy · bᵀ, db = aᵀ · dy; one-dimensional operands are taken as a row and a column."""
    op = ctx.op
    ranks = shapes.rank(a), shapes.rank(b)
    if 1 in ranks:
        return _vector_matmul(op, dy, a, b, ranks)
    if ranks[1] == 2 and ranks[0] > 2:
        db = op.Gemm(rows(op, a), rows(op, dy), transA=1)
    else:
        db = op.MatMul(op.transpose(a), dy)
    return op.MatMul(dy, op.transpose(b)), db


def _vector_matmul(op: Builder, dy: Value, a: Value, b: Value, ranks: tuple[int, int]) -> Any:
    row = op.Unsqueeze(a, op.ints(0)) if ranks[0] == 1 else a
    column = op.Unsqueeze(b, op.ints(1)) if ranks[1] == 1 else b
    dz = op.Unsqueeze(dy, op.ints(-1)) if ranks[1] == 1 else dy
    dz = op.Unsqueeze(dz, op.ints(-2)) if ranks[0] == 1 else dz
    da = op.MatMul(dz, op.transpose(column))
    db = op.MatMul(op.transpose(row), dz)
    if ranks[0] == 1:
        da = _drop_batch(op, da, 0)
    if ranks[1] == 1:
        db = _drop_batch(op, db, 1)
    return da, db


def _drop_batch(op: Builder, matrix: Value, axis: int) -> Value:
    """Sum leading batch axes, then drop the axis that was added."""
    extra = shapes.rank(matrix) - 2
    if extra:
        matrix = op.ReduceSum(matrix, op.ints(*range(extra)), keepdims=0)
    return op.Squeeze(matrix, op.ints(axis))


def rows(op: Builder, x: Value) -> Value:
    """X as a matrix: all axes but the last in one."""
    if shapes.rank(x) == 2:
        return x
    if shapes.known_dims(x)[-1] == 0:
        return op.Flatten(x, axis=-1)  # where nothing is reshaped, -1 may be anything
    width = op.Shape(x, start=-1)
    return op.Reshape(x, op.Concat(op.ints(-1), width, axis=0), allowzero=1)


@gradient("Linear", domain=DOMAIN)
def linear(ctx: Context, dy: Value, x: Value, weight: Value, bias: Value) -> Any:
    """dx = dy · W, dW = dyᵀ · x, dbias = Σ dy over all rows. dW comes first: x is free before dx needs memory."""
    op = ctx.op
    if shapes.rank(x) == 1:
        return op.MatMul(dy, weight), op.MatMul(op.Unsqueeze(dy, op.ints(1)), op.Unsqueeze(x, op.ints(0))), dy
    flat = rows(op, dy)
    dw = op.Gemm(flat, rows(op, x), transA=1)
    db = op.ReduceSum(flat, op.ints(0), keepdims=0)
    return op.MatMul(dy, weight), dw, db


@gradient("LinearWithoutBias", domain=DOMAIN)
def linear_without_bias(ctx: Context, dy: Value, x: Value, weight: Value) -> Any:
    """dx = dy · W, dW = dyᵀ · x, in the weight's own layout."""
    op = ctx.op
    if shapes.rank(x) == 1:
        return op.MatMul(dy, weight), op.MatMul(op.Unsqueeze(dy, op.ints(1)), op.Unsqueeze(x, op.ints(0)))
    dw = op.Gemm(rows(op, dy), rows(op, x), transA=1)
    return op.MatMul(dy, weight), dw


@gradient("Gemm")
def gemm(
    ctx: Context,
    dy: Value,
    a: Value,
    b: Value,
    c: Value | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Any:
    """Gradients of alpha · A' B' + beta · C, each again one Gemm."""
    op = ctx.op
    if transA:
        da = op.Gemm(b, dy, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - transA)
    if c is None or beta == 0.0:
        return da, db, None
    return da, db, dy if beta == 1.0 else dy * beta


@gradient("Einsum")
def einsum(ctx: Context, dy: Value, *operands: Value, equation: str) -> Any:
    """For each operand, dy and the other operands contracted to its letters: one Einsum each."""
    parsed = parse(equation, [shapes.rank(v) for v in operands])
    return tuple(_of_operand(ctx.op, dy, operands, parsed, index) for index in range(len(operands)))


def _of_operand(op: Builder, dy: Value, operands: tuple[Value, ...], equation: Equation, index: int) -> Value:
    letters, x = equation.operands[index], operands[index]
    others = [(v, t) for i, (v, t) in enumerate(zip(operands, equation.operands, strict=True)) if i != index]
    unique = "".join(dict.fromkeys(letters))
    factors = [(dy, equation.result), *others]
    present = "".join(letter for letter in unique if any(letter in t for _, t in factors))
    inner = [(v, t) for v, t in factors if t]
    g = (
        op.Einsum(*(v for v, _ in inner), equation=str(Equation(tuple(t for _, t in inner), present)))
        if inner
        else None
    )
    for scalar in (v for v, t in factors if not t):  # runtimes take no operand without axes
        g = scalar if g is None else g * scalar
    assert g is not None
    if missing := [axis for axis, letter in enumerate(unique) if letter not in present]:
        g = op.Unsqueeze(g, op.ints(*missing))
    return _on_diagonal(op, g, x, letters) if unique != letters else op.Expand(g, op.shape(x))


def _on_diagonal(op: Builder, g: Value, x: Value, letters: str) -> Value:
    """The gradient of a diagonal in zeros of x's shape: axes of one letter are equal where it is placed."""
    firsts = [letters.index(letter) for letter in dict.fromkeys(letters)]
    repeats = [axis for axis in range(len(letters)) if axis not in firsts]
    g = op.Unsqueeze(g, op.ints(*repeats))
    for axis in repeats:
        here, first = (_numbers(op, x, a, len(letters)) for a in (axis, letters.index(letters[axis])))
        g = op.Where(op.Equal(here, first), g, op.like(0.0, g))
    return op.Expand(g, op.shape(x))


def _numbers(op: Builder, x: Value, axis: int, rank: int) -> Value:
    """0, 1, … along one axis of x, 1 wide along the others."""
    count = op.Range(op.constant(0), op.Squeeze(op.size(x, axis), op.ints(0)), op.constant(1))
    others = [a for a in range(rank) if a != axis]
    return op.Unsqueeze(count, op.ints(*others)) if others else count


@gradient("Det")
def det(ctx: Context, dy: Value, x: Value) -> Any:
    """dx = dy · the cofactors of x: they exist where x has no inverse, too."""
    op = ctx.op
    g = op.Unsqueeze(dy, op.ints(-2, -1))
    if shapes.known_dims(x)[-1] == 1:
        return g
    return g * op.Cofactors(x)
