"""Gradients of matrix products."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.gradient.registry import DOMAIN, Context, gradient
from onnxtrain.ir import shapes
from onnxtrain.ir.builder import Builder

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
    width = op.Shape(x, start=-1)
    return op.Reshape(x, op.Concat(op.ints(-1), width, axis=0))


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
