"""``onnxtrain plan``, ``profile`` and ``report``: what memory a step needs, where its time goes, all that is told."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.cli.artifacts import budget, shape
from onnxtrain.cluster import OPTIMIZERS, STRATEGIES, Cluster
from onnxtrain.errors import GraphError, OptionError, first_line
from onnxtrain.options import Options

_EXAMPLES = """examples:
  onnxtrain plan model.onnx --sizes ids=16,128 labels=16 --budget 512MiB --html memory.html
  onnxtrain plan package.module:function --budget 0.5
  onnxtrain plan package.module:function --ranks 8 64 1024 --memory 80GB --link 50GB --speed 400T --bandwidth 3TB

The function takes nothing and returns a module and a batch: a tuple of arguments, a dict of keyword arguments, or one
argument.
"""
_MEASURED = """example:
  onnxtrain {name} package.module:function --html {page}

The function takes nothing and returns a module and a batch, as for onnxtrain plan, and may return an optimizer, too.
"""


_OF_RANKS = {
    "strategies": ("NAME", f"how they share: {', '.join(STRATEGIES)}"),
    "optimizer": ("NAME", f"whose state there is: {', '.join(OPTIMIZERS)}"),
    "memory": ("BYTES", "of each: 80GB"),
    "link": ("BYTES", "a second that each sends while it receives as many: 50GB"),
    "speed": ("FLOPS", "operations a second in products: 400T; default: this machine's"),
    "bandwidth": ("BYTES", "a second of the memory of each: 3TB; default: this machine's"),
}


def add_to(commands: Any) -> None:
    """Add the commands."""
    _add_plan(commands)
    _add_measured(
        commands,
        "profile",
        "where the time of a training step goes, operator by operator",
        "Measure a training step of a module: forward, backward and optimizer, each operator, what this "
        "machine could do, and what is spent around the operators. The module is not changed.",
        "time.html",
        _profile,
    )
    _add_measured(
        commands,
        "report",
        "what is done with a module: captured, rewritten, skipped; time and memory of a step",
        "Capture a module and tell all of it: the graph, what each pass did, which rows are computed, and "
        "of a step its time and its memory, predicted and real. The module is not changed.",
        "run.html",
        _report,
    )


def _add_plan(commands: Any) -> None:
    """Add the command that plans a file or a module."""
    parser = _parser(
        commands,
        "plan",
        "what memory a training step needs, and what it would compute again to need less",
        "Tell the peak of a training step, when it is, what holds it up, and how a budget would be kept. "
        "Nothing is computed.",
        _EXAMPLES,
    )
    parser.add_argument("what", help="the .onnx file, or package.module:function")
    parser.add_argument("--budget", type=budget, metavar="BYTES", help="of a step beside weights: 64MiB, 0.5, or min")
    parser.add_argument("--offload", metavar="WHERE", help="a folder, or host: where saved values may wait within it")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=shape,
        default=(),
        metavar="INPUT=SIZES",
        help="shapes of a file's inputs: ids=16,128",
    )
    parser.add_argument(
        "--worst-case", nargs="+", type=shape, metavar="INPUT=SIZES", help="shapes of a module's largest batch"
    )
    parser.add_argument(
        "--train", nargs="+", default=(), metavar="NAME", help="initializers of a file, patterns too; default: all"
    )
    _add_cluster(parser)
    _add_outputs(parser, _plan)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add what is said of many ranks, under the names that ``Cluster`` has."""
    group = parser.add_argument_group("many ranks, of which none is needed")
    group.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="how many there may be, one or several numbers"
    )
    for name, (metavar, told) in _OF_RANKS.items():
        group.add_argument(f"--{name}", nargs="+" if name == "strategies" else None, metavar=metavar, help=told)
    group.add_argument("--bucket", type=int, metavar="ELEMENTS", help="reduce_bucket_size of DeepSpeed")


def _add_measured(
    commands: Any, name: str, summary: str, description: str, page: str, run: Callable[[argparse.Namespace], int]
) -> None:
    """Add a command that measures the module which a function returns."""
    parser = _parser(commands, name, summary, description, _MEASURED.format(name=name, page=page))
    parser.add_argument("what", help="package.module:function")
    _add_outputs(parser, run)


def _parser(commands: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command, whose examples stand as they are."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_outputs(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Add what every report can be given as, and the function that makes it."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with a picture")
    parser.set_defaults(run=run)


def _plan(given: argparse.Namespace) -> int:
    return _told(_of_file(given) if _named(given.what) is None else _of_module(given), given)


def _profile(given: argparse.Namespace) -> int:
    model, args, kwargs = _measured(given.what)
    return _told(model.profile(*args, **kwargs), given)


def _report(given: argparse.Namespace) -> int:
    model, args, kwargs = _measured(given.what)
    return _told(model.report(None, *args, **kwargs), given)


def _measured(what: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module that a function returns, and what it is to be measured with."""
    if _named(what) is None:
        raise OptionError(f"{what} names no function", cure="give package.module:function")
    made, batch, *optimizers = _returned(what, most=3)
    from onnxtrain.ortmodule import ORTModule

    args, kwargs = _arguments(batch)
    return ORTModule(made), args, {**kwargs, "optimizer": next(iter(optimizers), None)}


def _told(report: Any, given: argparse.Namespace) -> int:
    """Print a report, and write its page."""
    print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) if given.json else report)
    if given.html is not None:
        report.save(given.html)
    return 0


def _named(what: str) -> tuple[str, str] | None:
    """The module and the function that are named; None where it is a file."""
    module, _, function = what.rpartition(":")
    return (module, function) if module and not what.endswith(".onnx") and function.isidentifier() else None


def _of_file(given: argparse.Namespace) -> Any:
    """The report of an ``.onnx`` file."""
    from onnxtrain.execute import backend

    backend("torch")  # an error that says what to install where it is not there
    from onnxtrain.engine.model_memory import model_memory
    from onnxtrain.files import check_file
    from onnxtrain.ir.reading import read_forward
    from onnxtrain.optimize import optimize

    _refuse(given, "worst_case", "a file is planned for --sizes")
    _refuse(given, "ranks", "many ranks train a module")
    check_file(given.what, GraphError, "give the path of an .onnx file, or package.module:function")
    options = Options(memory_budget=given.budget, memory_offload=given.offload, backend="torch")
    graph = read_forward(given.what, given.train)
    optimize(graph, options, check=False)
    return model_memory(graph, dict(given.sizes), options)


def _of_module(given: argparse.Namespace) -> Any:
    """The report of the module and the batch that a function returns."""
    _refuse(given, "sizes", "a module is planned for the batch beside it, or for --worst-case")
    _refuse(given, "train", "a module trains what requires a gradient")
    made, batch = _returned(given.what)
    from onnxtrain.ortmodule import ORTModule

    worst = dict(given.worst_case) if given.worst_case else None
    options = Options(memory_budget=given.budget, memory_offload=given.offload, worst_case=worst)
    args, kwargs = _arguments(batch)
    model, stated = ORTModule(made, options=options), _stated(given)
    if not given.ranks:
        for name in stated:
            _refuse(given, name, "it is said of many ranks")
        return model.memory_report(*args, **kwargs)
    return model.plan(Cluster(tuple(given.ranks), **stated), *args, **kwargs)


def _stated(given: argparse.Namespace) -> dict[str, Any]:
    """What is said of many ranks, beside how many."""
    found = {name: getattr(given, name) for name in (*_OF_RANKS, "bucket")}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if v is not None}


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def _refuse(given: argparse.Namespace, option: str, why: str) -> None:
    if getattr(given, option):
        name = option.replace("_", "-")
        raise OptionError(f"--{name} says nothing about {given.what}: {why}", cure=f"leave --{name} out")


def _function(module: str, name: str) -> Callable[[], Any]:
    """A function of a module of Python, which may lie in this folder.

    Raises:
        OptionError: there is no such module or function.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise OptionError(
            f"{module} cannot be imported: {first_line(error)}", cure="give package.module:function"
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise OptionError(f"{module} has no function {name}", cure="give package.module:function")
    return found


def _returned(what: str, most: int = 2) -> tuple[Any, ...]:
    """What a function that is named returns: a module, a batch, and where more is allowed an optimizer.

    Raises:
        OptionError: it is not there, or returns something else.
    """
    named = _named(what)
    assert named is not None
    found = _function(*named)()
    if not isinstance(found, tuple) or not 2 <= len(found) <= most:
        more = ", and an optimizer where it has one" if most > 2 else ""
        raise OptionError(f"{what} returns a {type(found).__name__}", cure=f"return a module and a batch{more}")
    return found
