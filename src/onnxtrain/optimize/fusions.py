"""Fusions: formulas that models write out become the operator that has a fused kernel in both directions.

A fused kernel rounds differently in the last digits; nothing else changes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import SOURCE, source_of


def _is(value: ir.Value | None, number: float) -> bool:
    """Whether a value is a constant scalar, up to the rounding of its type."""
    content = shapes.constant_of(value)
    return (
        content is not None and content.size == 1 and bool(np.isclose(float(content.reshape(-1)[0]), number, rtol=1e-3))
    )


class TanhGelu(RewriteRuleClassBase):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` is Gelu's tanh approximation (``gelu_new`` of GPT-2)."""

    def pattern(self, op: Any, x: Any, three: Any, cubic: Any, root: Any, one: Any, half: Any) -> Any:
        """The formula, products and sums in any order."""
        inner = op.Add(x, op.Mul(op.Pow(x, three), cubic))
        return op.Mul(op.Mul(x, half), op.Add(op.Tanh(op.Mul(inner, root)), one))

    def check(self, context: Any, x: ir.Value, **constants: ir.Value) -> MatchResult:
        """The constants must be the formula's."""
        wanted = {"three": 3.0, "cubic": 0.044715, "root": math.sqrt(2 / math.pi), "one": 1.0, "half": 0.5}
        result = MatchResult()
        for name, number in wanted.items():
            if not _is(constants[name], number):
                return result.fail(f"{name} is not {number}", constants[name])
        return result

    def rewrite(self, op: Any, x: ir.Value, **_: ir.Value) -> Any:
        """One Gelu node."""
        return op.Gelu(x, approximate="tanh")


class FusionsPass(ir.passes.InPlacePass):
    """Apply all fusions; a fused node keeps the source line of what it replaces."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        rules = RewriteRuleSet([TanhGelu.rule()], commute=True)  # made anew: a matcher holds the last graph it saw
        lines = {v.name: source_of(node) for node in model.graph for v in node.outputs}
        count = rules.apply_to_model(model)
        if count:
            for node in model.graph:
                if SOURCE not in node.metadata_props and lines.get(node.outputs[0].name):
                    node.metadata_props[SOURCE] = lines[node.outputs[0].name]
                shapes.infer(node)
        return ir.passes.PassResult(model, bool(count))
