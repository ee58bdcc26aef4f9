"""Are wrong signs noticed? Every gradient rule is changed in one place at a time, and the table's rows are run.

Two kinds of change: a gradient that the rule returns is negated; a ``+`` in the rule's source becomes ``-`` or the
other way round (``op.Add`` and ``op.Sub`` too), a minus before a value goes. ``python tests/coverage/mutations.py``
prints how many are caught by the rows of the rule's own operators, and which are not.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from op_cases import CASES, Case
from op_runs import prepare, reference, run

from onnxtrain.gradient import rules  # noqa: F401
from onnxtrain.gradient.registry import RULES, Rule

_CALLS = {"Add": "Sub", "Sub": "Add", "Neg": "Identity"}


def negations(rule: Rule, most: int = 8) -> Iterator[tuple[str, Rule]]:
    """The rule with one of the gradients it returns negated."""
    for place in range(most):

        def negated(ctx: Any, *args: Any, place: int = place, **kwargs: Any) -> Any:
            made = rule(ctx, *args, **kwargs)
            parts = list(made) if isinstance(made, tuple) else [made]
            if place < len(parts) and parts[place] is not None:
                parts[place] = ctx.op.Neg(parts[place])
                _USED.append(place)
            return tuple(parts)

        yield f"gradient of input {place} negated", negated


_USED: list[int] = []  # a negation that never applied says nothing


class _Flip(ast.NodeTransformer):
    """Changes the sign at the index-th place that has one."""

    def __init__(self, index: int) -> None:
        self.left, self.line = index, 0

    def _is_it(self, node: ast.expr) -> bool:
        self.left -= 1
        if self.left == -1:
            self.line = node.lineno
        return self.left == -1

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add | ast.Sub) and self._is_it(node):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        is_number = isinstance(node.operand, ast.Constant)
        return node.operand if isinstance(node.op, ast.USub) and not is_number and self._is_it(node) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS and self._is_it(node):
            node.func.attr = _CALLS[node.func.attr]
        return node


def flips(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """The rule with one sign in its source changed; none of a rule that was made by another function."""
    if rule.__closure__:
        return
    source = textwrap.dedent(inspect.getsource(rule))
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    for index in range(1000):
        flip = _Flip(index)
        changed = flip.visit(copy.deepcopy(tree))
        if flip.left >= 0:
            return
        scope: dict[str, Any] = {}
        code = compile(ast.fix_missing_locations(changed), inspect.getfile(rule), "exec")
        exec(code, dict(rule.__globals__), scope)
        line = source.splitlines()[flip.line - 1].strip()
        yield f"another sign in: {line}", scope[definition.name]


def survives(rows: list[Case], changed: Rule, keys: list[tuple[str, str]]) -> bool:
    """Whether all rows still pass with the changed rule in place."""
    original = RULES[keys[0]]
    RULES.update(dict.fromkeys(keys, changed))
    try:
        return all(map(_passes, rows))
    except Exception:  # a malformed graph is noticed as well
        return False
    finally:
        RULES.update(dict.fromkeys(keys, original))


def _passes(case: Case) -> bool:
    row = prepare(case, np.float64, gradients=True)
    _, found = run(row, "torch")
    _, expected = reference(row, torch.float64)
    pairs = zip(found, expected, strict=True)
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in pairs)


def mutants(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """All changes of a rule, each with what it is."""
    yield from negations(rule)
    yield from flips(rule)


def main() -> int:
    """Print how many changes the rows notice; the exit status says whether that is all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operators", nargs="*", help="operators whose rules are changed; all where none is named")
    chosen = set(parser.parse_args().operators)
    keys: dict[Rule, list[tuple[str, str]]] = {}
    for key, rule in RULES.items():
        keys.setdefault(rule, []).append(key)
    caught, missed = 0, []
    for rule, names in keys.items():
        rows = [c for c in CASES if (c.domain, c.op) in names and c.differentiable]
        if not rows or (chosen and not chosen & {n for _, n in names}):
            continue
        for what, changed in mutants(rule):
            _USED.clear()
            if not survives(rows, changed, names):
                caught += 1
            elif _USED or what.startswith("another"):
                missed.append(f"{'/'.join(n for _, n in names)}: {what}")
    print(f"{caught} of {caught + len(missed)} wrong signs are caught", *missed, sep="\n    ")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
