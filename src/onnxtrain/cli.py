"""The command line: ``onnxtrain ops`` and ``onnxtrain check``; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

from onnxtrain import __version__
from onnxtrain.errors import OnnxTrainError
from onnxtrain.options import BACKENDS, Options

_FAILED = 2  # exit status of a command that could not do its work; 1 is its finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 is well, 1 means that something was found, 2 that it failed."""
    given = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except OnnxTrainError as error:
        print(f"onnxtrain: {error}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("onnxtrain", description="Train PyTorch modules and ONNX models as one graph.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    ops = commands.add_parser("ops", help="which operators can be trained through, and where they run")
    ops.add_argument("name", nargs="*", help="operators to show; all where none is given")
    ops.add_argument("--missing", action="store_true", help="only operators without a gradient or a lowering")
    form = ops.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/operators.md")
    ops.set_defaults(run=_ops)
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
    return parser


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


def _check(given: argparse.Namespace) -> int:
    from onnxtrain.blockers import check_model

    found = check_model(given.model, options=Options(backend=given.backend), parameters=given.train)
    print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if given.json else found)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
