"""The table of gradient rules: ``@gradient("Softmax")`` puts a function into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, describe, source_of

Rule: TypeAlias = Callable[..., Any]
RULES: dict[tuple[str, str], Rule] = {}


class Context:
    """What a rule may use beside its arguments.

    Attributes:
        op: the Builder that emits backward nodes.
        node: the forward node being differentiated.
        dys: gradient of each forward output, None for one that receives none.
        wanted: for each forward input whether its gradient is wanted; only a node that runs the user's own backward
            pass, which may ask for it, needs this.
    """

    def __init__(self, op: Builder, node: ir.Node, dys: Sequence[ir.Value | None], wanted: Sequence[bool] = ()) -> None:
        self.op, self.node, self.dys, self.wanted = op, node, tuple(dys), tuple(wanted)

    @property
    def y(self) -> ir.Value:
        """The forward node's first output."""
        return self.node.outputs[0]

    def output(self, index: int) -> ir.Value:
        """The index-th output of the forward node; an optional one is switched on when first asked for."""
        from onnxtrain.ir import shapes

        if len(self.node.outputs) <= index:
            self.node.resize_outputs(index + 1)
        value = self.node.outputs[index]
        if not value.name:
            value.name = f"{self.y.name}__{index}"
        if value.type is None:
            shapes.infer(self.node)
        return value

    def first_output_only(self) -> None:
        """Refuse a gradient of any output but the first.

        Raises:
            GradientError: another output has received one.
        """
        for index, dy in enumerate(self.dys):
            if index and dy is not None:
                raise self.unsupported(f"the gradient of output {index} of {self.node.op_type}")

    def unsupported(self, what: str) -> GradientError:
        """The error for a case of the operator that its rule does not cover."""
        return GradientError(
            f"{what} is not available",
            node=describe(self.node),
            source=source_of(self.node),
            cure="rewrite that line with other operators, or detach() the value if it is not trained",
        )


def gradient(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the gradient rule of one or more operators.

    The rule is called ``rule(ctx, dy, *inputs, **attributes)`` with ``dy`` the gradient of the first output
    (None where only later outputs receive one), the inputs as values (None where missing) and the attributes the node
    states as Python values. It returns one gradient for each input, in order: a value, or None where the derivative is
    zero or not defined; a single value stands for a tuple of one. An input that needs a gradient and has no entry is
    an error. A rule does not undo broadcasting, does not ask which gradients are needed and does not say what to save.

    Raises:
        ValueError: the operator has a rule already.
    """

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            if (domain, op_type) in RULES:
                raise ValueError(f"the gradient rule of {op_type} is registered twice")
            RULES[domain, op_type] = rule
        return rule

    return register


def rule_of(node: ir.Node) -> Rule | None:
    """The rule of a node's operator, or None."""
    from onnxtrain.gradient import rules  # noqa: F401  (fills RULES)

    return RULES.get((node.domain, node.op_type))


__all__ = ["DOMAIN", "RULES", "Context", "Rule", "gradient", "rule_of"]
