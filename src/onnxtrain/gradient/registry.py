"""The table of gradient rules: ``@gradient("Softmax")`` puts a function into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.graphs import DOMAIN, describe, source_of

Rule: TypeAlias = Callable[..., Any]
Key: TypeAlias = tuple[str, ...]  # domain, operator; and which of them, for one that stands for many: ATen
RULES: dict[Key, Rule] = {}
STOP_EDGES: dict[Key, frozenset[int]] = {}  # inputs through which no gradient flows, where a user says so


class Context:
    """What a rule may use beside its arguments.

    Attributes:
        op: the Builder that emits backward nodes.
        node: the forward node being differentiated.
        dys: gradient of each forward output, None for one that receives none.
        wanted: for each input, whether its gradient is asked for: only for rules that build a body, where what nobody
            reads is not removed afterwards, and for a node that runs the user's own backward pass, which may ask.
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


def gradient(*op_types: str, domain: str = "", of: Sequence[str] = (), replace: bool = False) -> Callable[[Rule], Rule]:
    """Register the gradient rule of one or more operators.

    Args:
        op_types: the operators.
        domain: their domain.
        of: for ``ATen``, which stands for many, the operator of torch and its overload: ``("aten::cummax", "")``.
        replace: take the place of a rule that is there already.

    The rule is called ``rule(ctx, dy, *inputs, **attributes)`` with ``dy`` the gradient of the first output
    (None where only later outputs receive one), the inputs as values (None where missing) and the attributes the node
    states as Python values. It returns one gradient for each input, in order: a value, or None where the derivative is
    zero or not defined; a single value stands for a tuple of one. An input that needs a gradient and has no entry is
    an error. A rule does not undo broadcasting, does not ask which gradients are needed and does not say what to save.

    Raises:
        ValueError: the operator has a rule already.
    """

    def register(rule: Rule) -> Rule:
        if not _is_own(rule):
            _fill()  # a rule that takes the place of one comes after it
        for op_type in op_types:
            key = (domain, op_type, *of)
            if key in RULES and not replace:
                raise ValueError(f"the gradient rule of {'::'.join(filter(None, key))} is registered twice")
            RULES[key] = rule
        return rule

    return register


def rule_of(node: ir.Node) -> Rule | None:
    """The rule of a node's operator, or None; one for just this operator of torch comes before that of all."""
    _fill()
    return next((RULES[key] for key in _keys(node) if key in RULES), None)


def stopped_inputs(node: ir.Node) -> frozenset[int]:
    """Positions of the inputs through which, as a user has registered, no gradient flows."""
    return (
        next((STOP_EDGES[key] for key in _keys(node) if key in STOP_EDGES), frozenset()) if STOP_EDGES else frozenset()
    )


def registered_by_users() -> tuple[tuple[Key, ...], tuple[tuple[Key, tuple[int, ...]], ...]]:
    """Which operators have a gradient rule that is not of this package, and the inputs through which none flows."""
    rules = tuple(sorted(key for key, rule in RULES.items() if not _is_own(rule)))
    return rules, tuple(sorted((key, tuple(sorted(edges))) for key, edges in STOP_EDGES.items()))


def _is_own(rule: Rule) -> bool:
    """Whether a rule is of this package."""
    return getattr(rule, "__module__", "").startswith(f"{__package__}.rules.")


def _fill() -> None:
    """Put the rules of this package into the table."""
    from onnxtrain.gradient import rules  # noqa: F401


def _keys(node: ir.Node) -> Iterator[Key]:
    """Under what a node may be registered, the most specific first."""
    operator = node.attributes.get("operator")
    if operator is not None and node.domain == DOMAIN:
        name, overload = operator.as_string().split(".")[0], node.attributes["overload"].as_string()
        yield (node.domain, node.op_type, name, "" if overload == "default" else overload)
        yield (node.domain, node.op_type, name)
    yield (node.domain, node.op_type)


__all__ = [
    "DOMAIN",
    "RULES",
    "STOP_EDGES",
    "Context",
    "Rule",
    "gradient",
    "registered_by_users",
    "rule_of",
    "stopped_inputs",
]
