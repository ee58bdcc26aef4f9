"""Which operators can be trained through and where they run: read from the tables of rules, lowerings and bodies."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx

from onnxtrain.gradient import rules as _gradient_rules  # noqa: F401  (fills RULES)
from onnxtrain.gradient.registry import RULES
from onnxtrain.ir import functions
from onnxtrain.ir.bodies import CLOSED
from onnxtrain.ir.expansions import EXPANSIONS
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.opsets import NEWEST
from onnxtrain.ir.traits import TRAITS, Trait
from onnxtrain.optimize.sequences import RESOLVED
from onnxtrain.options import OPSETS

RULE, WRITTEN, STOP, INNER, NONE = "rule", "written out", "stop", "inner", "none"  # values of Operator.gradient


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator and what is known of it.

    Args:
        name: the operator.
        domain: empty for ONNX's own, ``"onnxtrain"`` for ours.
        opsets: versions of the domain in which it was defined or changed, up to the newest that graphs use.
        gradient: ``"rule"``; ``"written out"``, where other operators take its place before it is differentiated;
            ``"stop"``, where no gradient flows through; ``"inner"``, for operators of ours that
            only backward passes or bodies contain; ``"none"``, where nothing differentiates it.
        unsupported: the cases that its gradient rule refuses.
        torch: whether the torch backend has a lowering; None where torch is not installed.
        onnxruntime: whether onnxruntime has a CPU kernel; None where onnxruntime is not installed.
        body: whether it is a function of other operators, which any ONNX runtime can run instead.
        notes: what its rule says of itself.
    """

    name: str
    domain: str
    opsets: tuple[int, ...]
    gradient: str
    unsupported: tuple[str, ...]
    torch: bool | None
    onnxruntime: bool | None
    body: bool
    notes: str

    @property
    def is_missing(self) -> bool:
        """Whether a gradient or the torch backend is missing; an inner operator needs neither."""
        return self.gradient == NONE or (self.torch is False and self.gradient not in (INNER, WRITTEN))


def operators() -> list[Operator]:
    """All operators of ONNX, of our domain and of domains that have rules registered, by domain and name.

    An operator of ONNX is as it was in the newest opset that graphs use; one that was removed by then is left out.
    """
    functions.load()
    schemas = _standard_schemas()
    ours = {(DOMAIN, name) for name in (*functions.DEFINITIONS, *functions.OPAQUE)}
    registered = {(key[0], key[1]) for key in RULES}
    keys = sorted({("", name) for name in schemas} | ours | registered)
    return [_operator(domain, name, schemas.get(name, []) if not domain else []) for domain, name in keys]


def _operator(domain: str, name: str, schemas: Sequence[onnx.defs.OpSchema]) -> Operator:
    rule = RULES.get((domain, name))
    opaque = domain == DOMAIN and name in functions.OPAQUE
    is_function = any(s.has_function or s.has_context_dependent_function for s in schemas)
    body = (not opaque and name in functions.DEFINITIONS) if domain == DOMAIN else is_function
    return Operator(
        name,
        domain,
        tuple(s.since_version for s in schemas) if not domain else (functions.VERSION,) if domain == DOMAIN else (),
        _gradient_of(domain, name),
        refusals(rule) if rule is not None else (),
        _has_lowering(domain, name),
        _has_kernel(domain, name),
        body,
        _first_sentence(rule),
    )


def _gradient_of(domain: str, name: str) -> str:
    if any(key[:2] == (domain, name) for key in RULES):
        return RULE
    if Trait.STOP in TRAITS.get(f"{domain}::{name}" if domain else name, Trait.NONE):
        return STOP
    if not domain and (name in EXPANSIONS or name in CLOSED or name in RESOLVED):
        return WRITTEN
    return INNER if domain == DOMAIN else NONE


@functools.cache
def _standard_schemas() -> dict[str, list[onnx.defs.OpSchema]]:
    found: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: (s.name, s.since_version)):
        if not schema.domain and schema.since_version <= NEWEST:
            found.setdefault(schema.name, []).append(schema)
    return {name: schemas for name, schemas in found.items() if not schemas[-1].deprecated}


@functools.cache
def _lowerings() -> set[tuple[str, str]] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    importlib.import_module("onnxtrain.execute.torch.lowerings")
    table = importlib.import_module("onnxtrain.execute.torch.registry").LOWERINGS
    return {*table, ("", "Constant")}  # a constant is no call


def _has_lowering(domain: str, name: str) -> bool | None:
    table = _lowerings()
    return None if table is None else (domain, name) in table


def _has_kernel(domain: str, name: str) -> bool | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    return importlib.import_module("onnxtrain.execute.onnxruntime").has_kernel(domain, name, min(OPSETS))


def _first_sentence(rule: Callable[..., Any] | None) -> str:
    return (inspect.getdoc(rule) or "").splitlines()[0].strip() if rule is not None and inspect.getdoc(rule) else ""


def refusals(rule: Callable[..., Any]) -> tuple[str, ...]:
    """The cases that a rule refuses, read from its ``ctx.unsupported(…)`` and those of functions of the same module."""
    seen: set[str] = set()
    return tuple(dict.fromkeys(_refusals(rule, seen)))


def _refusals(function: Callable[..., Any], seen: set[str]) -> Iterator[str]:
    seen.add(function.__qualname__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # written in a shell, or a builtin
        return
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "unsupported" and call.args:
            yield _literal(call.args[0]).removeprefix("the gradient of ")
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "first_output_only":
            yield "gradients of outputs but the first"
        elif isinstance(call.func, ast.Name) and call.func.id not in seen:
            called = getattr(inspect.getmodule(function), call.func.id, None)
            if inspect.isfunction(called) and called.__module__ == function.__module__:
                yield from _refusals(called, seen)


def _literal(text: ast.expr) -> str:
    """A string of the source; what it inserts is written as ``…``."""
    if isinstance(text, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in text.values)
    return str(text.value) if isinstance(text, ast.Constant) else "…"


HEADER = ("operator", "opsets", "gradient", "torch", "onnxruntime", "body", "notes")


def row(operator: Operator) -> tuple[str, ...]:
    """One operator as the cells under ``HEADER``."""
    marks = {True: "yes", False: "–", None: "?"}
    refused = f"not: {', '.join(operator.unsupported)}" if operator.unsupported else ""
    return (
        f"{operator.domain}::{operator.name}" if operator.domain else operator.name,
        " ".join(map(str, operator.opsets)),
        "–" if operator.gradient == NONE else operator.gradient,
        marks[operator.torch],
        marks[operator.onnxruntime],
        marks[operator.body],
        ". ".join(part.rstrip(".") for part in (operator.notes, refused) if part),
    )


def to_text(table: Sequence[Operator]) -> str:
    """The table with columns of equal width."""
    rows = [HEADER, *(row(o) for o in table)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEADER))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


_PAGE = """\
# Operators

Written by `make operators` from the tables of gradient rules, lowerings and bodies; `onnxtrain ops` prints the same,
and `onnxtrain ops --missing` what is not there yet.

* **opsets**: the versions of ONNX in which the operator was defined or changed; graphs up to opset {newest} can be
  trained.
* **gradient**: `rule`; `written out` where other operators take its place before it is differentiated (sequences: where
  their content is known); `stop` where no gradient flows through; `inner` for operators of ours that only backward
  passes and bodies contain; – where there is none: such an operator between a trained parameter and an output is an
  error.
* **torch**: a lowering of the torch backend. **onnxruntime**: a CPU kernel for opset {oldest}, for some types at least.
* **body**: a function of other operators, which any ONNX runtime can run instead.
"""


def to_markdown(table: Sequence[Operator]) -> str:
    """The page ``docs/operators.md``."""
    count = {kind: sum(o.gradient == kind and not o.domain for o in table) for kind in (RULE, WRITTEN, STOP)}
    intro = _PAGE.format(oldest=min(OPSETS), newest=NEWEST)
    total = sum(not o.domain for o in table)
    told = f"Of {total} operators of ONNX {count[RULE]} have a rule, {count[WRITTEN]} are written out in such, and "
    told += f"{count[STOP]} stop the gradient."
    domains = dict.fromkeys(o.domain for o in table)
    parts = [intro, told]
    for domain in domains:
        parts.append(f"\n## {f'Domain {domain}' if domain else 'ONNX'}\n")
        parts += _markdown_rows(row(o) for o in table if o.domain == domain)
    return "\n".join(parts) + "\n"


def _markdown_rows(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for cells in rows:
        yield "| " + " | ".join(c.replace("|", "\\|").replace("*", "\\*") for c in cells) + " |"
