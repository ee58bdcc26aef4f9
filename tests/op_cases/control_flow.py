"""Branches and loops with closed bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN
from op_cases.case import Case, flag, x


def body(inputs: str, write: Callable[..., Any]) -> ir.Graph:
    """A closed body: inputs by name, outputs what ``write(op, *inputs)`` returns."""
    graph = ir.Graph([ir.Value(name=n) for n in inputs.split()], [], nodes=[], opset_imports={"": 20, DOMAIN: 1})
    made = write(_Untyped(graph), *graph.inputs)
    graph.outputs.extend(made if isinstance(made, tuple) else (made,))
    return graph


class _Untyped(Builder):
    """Types of a body come from the node that holds it."""

    def node(self, op_type: str, operands: Any, attributes: Any = None, **kwargs: Any) -> ir.Node:
        return super().node(op_type, operands, attributes, **{**kwargs, "like": [ir.Value(name="unknown")]})


def _branches() -> list[Case]:
    def different(then: Any, other: Any) -> dict[str, ir.Graph]:
        return {"then_branch": body("a w", then), "else_branch": body("a w", other)}

    product = different(lambda op, a, w: op.Tanh(op.MatMul(a, w)), lambda op, a, w: op.Sin(a))
    sizes = different(
        lambda op, a, w: op.Reshape(op.Mul(a, a), op.constant(np.array([-1]))),
        lambda op, a, w: op.ReduceSum(op.MatMul(a, w), op.constant(np.array([1])), keepdims=0),
    )
    several = different(lambda op, a, w: (op.Exp(a), w), lambda op, a, w: (a, op.Mul(w, op.Sigmoid(w))))
    return [
        Case("If", (np.array(True), x(3, 4), x(4, 4)), lambda a, w: torch.tanh(a @ w), product, DOMAIN, label="then"),
        Case("If", (np.array(False), x(3, 4), x(4, 4)), lambda a, w: a.sin(), product, DOMAIN, label="else"),
        Case("If", (np.array(True), x(3, 4), x(4, 4)), lambda a, w: (a * a).flatten(), sizes, DOMAIN, label="sizes-then"),
        Case("If", (np.array(False), x(3, 4), x(4, 4)), lambda a, w: (a @ w).sum(1), sizes, DOMAIN, label="sizes-else"),
        Case("If", (flag(), x(3, 4), x(4, 2)), _either, several, DOMAIN, outputs=2, label="several"),
    ]  # fmt: skip


def _either(flag: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (a.exp(), w * 1) if flag else (a * 1, w * w.sigmoid())


def _scans() -> list[Case]:
    def recurrence(op: Any, h: Any, row: Any, w: Any) -> Any:
        new = op.Tanh(op.Add(op.MatMul(h, w), row))
        return new, op.Mul(new, row)

    def recurred(h: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = []
        for row in rows:
            h = torch.tanh(h @ w + row)
            made.append(h * row)
        return h, torch.stack(made)

    simple = {"body": body("h row w", recurrence), "states": 1, "num_scan_inputs": 1}
    columns = simple | {"body": body("h row w", recurrence), "scan_input_axes": [1], "scan_output_axes": [1]}
    reverse = simple | {
        "body": body("h row w", recurrence),
        "scan_input_directions": [1],
        "scan_output_directions": [1],
    }
    mapped = {"body": body("row w", lambda op, row, w: op.Exp(op.MatMul(row, w))), "states": 0, "num_scan_inputs": 1}

    def backwards(h: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, made = recurred(h, rows.flip(0), w)
        return h, made.flip(0)

    def across(h: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, made = recurred(h, rows.transpose(0, 1), w)
        return h, made.transpose(0, 1)

    return [
        Case("Scan", (x(2, 3), x(5, 2, 3), x(3, 3)), recurred, simple, DOMAIN, outputs=2),
        Case("Scan", (x(2, 3), x(2, 5, 3), x(3, 3)), across, columns, DOMAIN, outputs=2, label="axes"),
        Case("Scan", (x(2, 3), x(5, 2, 3), x(3, 3)), backwards, reverse, DOMAIN, outputs=2, label="reverse"),
        Case("Scan", (x(5, 2, 3), x(3, 4)), lambda a, w: (a @ w).exp(), mapped, DOMAIN, label="map"),
    ]  # fmt: skip


def _loops() -> list[Case]:
    def step(op: Any, i: Any, going: Any, a: Any, w: Any) -> Any:
        new = op.Add(op.Sin(op.Mul(a, w)), op.CastLike(i, a))
        small = op.Less(op.ReduceMax(op.CastLike(i, a), keepdims=0), op.CastLike(op.constant(np.array(2.0)), a))
        return small, new, op.Mul(new, w)

    def looped(count: int) -> Callable[..., Any]:
        def run(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = []
            for i in range(count):
                a = torch.sin(a * w) + i
                rows.append(a * w)
            return a, torch.stack(rows)

        return run

    def attributes() -> dict[str, Any]:
        return {"body": body("i going a w", step), "states": 1}

    return [
        Case("Loop", (np.array(2), None, x(2, 3), x(2, 3)), looped(2), attributes(), DOMAIN, outputs=2, label="count"),
        Case("Loop", (None, np.array(True), x(2, 3), x(2, 3)), looped(3), attributes(), DOMAIN, outputs=2, label="while"),
        Case("Loop", (np.array(9), np.array(True), x(2, 3), x(2, 3)), looped(3), attributes(), DOMAIN, outputs=2, label="both"),
    ]  # fmt: skip


CASES = [*_branches(), *_scans(), *_loops()]
