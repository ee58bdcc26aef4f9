"""``onnxtrain ops``, ``weights``, ``check`` and ``errors``: what can be trained, and what keeps something from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from onnxtrain.errors import OnnxTrainError, close_to, kinds
from onnxtrain.options import BACKENDS, Options


def add_to(commands: Any) -> None:
    """Add the commands."""
    ops = commands.add_parser("ops", help="which operators can be trained through, and where they run")
    ops.add_argument("name", nargs="*", help="operators to show; all where none is given")
    ops.add_argument("--missing", action="store_true", help="only operators without a gradient or a lowering")
    form = ops.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/operators.md")
    ops.set_defaults(run=_ops)
    weights = commands.add_parser("weights", help="what each constant of an .onnx model is taken for, and why")
    weights.add_argument("model", help="the .onnx file")
    weights.add_argument("--json", action="store_true", help="print JSON")
    weights.set_defaults(run=_weights)
    check = commands.add_parser(
        "check", help="what would keep an .onnx model from being trained; status 1 if something"
    )
    check.add_argument("model", help="the .onnx file")
    check.add_argument("--backend", choices=BACKENDS, default="auto", help="where it would run")
    check.add_argument(
        "--train", nargs="+", default=(), metavar="NAME", help="initializers, patterns too; default: all"
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_check)
    told = commands.add_parser("errors", help="what an error means, and what mostly leads to it")
    told.add_argument("name", nargs="*", help="classes of errors; all where none is given")
    told.set_defaults(run=_errors)


def _ops(given: argparse.Namespace) -> int:
    from onnxtrain import operators

    table = operators.operators()
    if unknown := set(given.name) - {o.name for o in table}:
        raise OnnxTrainError(f"there is no operator {sorted(unknown)[0]}", cure="onnxtrain ops lists all of them")
    chosen = [o for o in table if (not given.name or o.name in given.name) and (o.is_missing or not given.missing)]
    if given.json:
        print(json.dumps([dataclasses.asdict(o) for o in chosen], indent=1, ensure_ascii=False))
    else:
        print(operators.to_markdown(chosen) if given.markdown else operators.to_text(chosen), end="")
        print(end="" if given.markdown else "\n")
    return 0


def _weights(given: argparse.Namespace) -> int:
    from onnxtrain import artifacts

    found = artifacts.weights(given.model)
    print(json.dumps([dataclasses.asdict(d) for d in found], indent=1, ensure_ascii=False) if given.json else found)
    return 0


def _check(given: argparse.Namespace) -> int:
    from onnxtrain.blockers import check_model

    found = check_model(given.model, options=Options(backend=given.backend), parameters=given.train)
    print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if given.json else found)
    return 0 if found else 1


def _errors(given: argparse.Namespace) -> int:
    known = {kind.__name__: kind for kind in kinds() if kind is not OnnxTrainError}
    if unknown := [name for name in given.name if name not in known]:
        raise OnnxTrainError(
            f"there is no error {unknown[0]}{close_to(unknown[0], known)}", cure="onnxtrain errors lists all"
        )
    if not given.name:
        print("\n".join(f"{name:<22}{kind.meaning().splitlines()[0]}" for name, kind in known.items()))
        return 0
    for name in given.name:
        other = [base.__name__ for base in known[name].__mro__[1:] if base.__module__ == "builtins"]
        print(f"{name} (a {', '.join(b for b in other if b not in ('Exception', 'BaseException', 'object'))})")
        print(f"\n{known[name].meaning()}\n")
    return 0
