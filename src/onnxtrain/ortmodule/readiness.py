"""check: what would keep a module from being trained through the graph, all at once and before any step."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onnxtrain.blockers import Check, graph_errors, make_check
from onnxtrain.capture import Captured, arguments_of, device_of, flatten, translate
from onnxtrain.capture.source_lines import user_place
from onnxtrain.capture.survey import calm, survey
from onnxtrain.engine import randomness
from onnxtrain.errors import ModuleError, OnnxTrainError, first_line
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize import optimize
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import check_module, device_errors, hook_errors, sharding_errors
from onnxtrain.ortmodule.module import ORTModule

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check(module: torch.nn.Module, batch: Any, *, options: Options | None = None) -> Check:
    """Look for everything that would keep a module from being trained; nothing is trained and nothing is changed.

    Looked at are hooks, devices, shards and types of parameters; what cannot be captured on the path that this batch
    takes; each operator between a trained parameter and an output without gradient rule,
    or without a form on the backend. What cannot be looked at is told like all else; nothing is raised.

    Args:
        module: a module, or an ORTModule.
        batch: a mapping is passed as keyword arguments, a tuple or list as positional ones, else one argument.
        options: says which backend; an ORTModule has its own.

    Returns:
        The result: print it, or ask whether it is true.
    """
    if isinstance(module, ORTModule):
        module, options = module.module, options or module.options
    options = options or Options()
    errors: list[OnnxTrainError] = []
    notes: list[str] = []
    if _add(errors, check_module, module) and _add(errors, _check_inputs, batch):
        _look(module, batch, options, errors, notes)
    return make_check(type(module).__name__, options, errors, notes)


def _look(
    module: torch.nn.Module, batch: Any, options: Options, errors: list[OnnxTrainError], notes: list[str]
) -> None:
    """Add what is found of a module that can be wrapped: first what needs no graph, then the rest."""
    args, kwargs = arguments_of(batch)
    tensors, _ = flatten((args, kwargs))
    _add(errors, sharding_errors, module)
    _add(errors, hook_errors, module, options.hooks)
    _add(errors, _parameter_errors, module)
    if any(map(is_lazy, module.parameters())):
        return
    before = len(errors)
    if _add(errors, device_errors, module, tensors) and len(errors) == before:
        _add(errors, _capture_errors, module, args, kwargs, options, notes)


def _add(errors: list[OnnxTrainError], look: Callable[..., Iterable[OnnxTrainError] | None], *args: Any) -> bool:
    """Add the errors that a look yields, and the one that stops it; whether nothing stopped it."""
    try:
        errors.extend(look(*args) or ())
    except OnnxTrainError as error:
        errors.append(error)
    except Exception as error:
        errors.append(_stopped_by(error))
    else:
        return True
    return False


def _stopped_by(error: Exception) -> ModuleError:
    """What is told of a module that raises where it is looked at."""
    place = user_place("".join(traceback.format_exception(error)))
    return ModuleError(
        f"the module cannot be looked at: {type(error).__name__}: {first_line(error)}",
        source=f"{place[0]}:{place[1]}" if place else "",
        cure="mend the line that raises it, or wrap the parts of the module that do not",
    )


def _check_inputs(batch: Any) -> None:
    flatten(arguments_of(batch))


def _parameter_errors(module: torch.nn.Module) -> Iterator[ModuleError]:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield ModuleError(
                f"parameter {name} has no size yet: it is one of a lazy module",
                cure="run the module on one batch first",
            )
        elif parameter.requires_grad and parameter.dtype not in _FLOATING:
            kind = str(parameter.dtype).removeprefix("torch.")
            yield ModuleError(
                f"parameter {name} is {kind}: a graph has gradients of floating tensors only",
                cure="requires_grad_(False) if it is not trained; a complex one as two real ones",
            )


def _capture_errors(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, notes: list[str]
) -> list[OnnxTrainError]:
    errors: list[OnnxTrainError] = []
    if list(hook_errors(module, "trace")):
        try:
            module = _without_backward_hooks(module)
        except Exception as error:
            notes.append(f"operators were not looked at: the module cannot be copied ({first_line(error)})")
            return errors
    try:
        with randomness.replayed(randomness.state()):
            traced, found = survey(module, args, kwargs, static_shapes=options.static_shapes)
        errors += found
        if traced is None:
            notes.append("operators were not looked at: there is no graph")
            return errors
        with calm():
            captured = translate(traced, opset=options.opset)
    except OnnxTrainError as error:
        return [*errors, error]
    if captured.path:
        lines = dict.fromkeys(str(look) for look in captured.path.looks)
        told = "; ".join([*lines, *captured.path.conditions.told()])
        notes.append(f"each thing that is seen in a tensor is a path, with a graph of its own; here {told}")
    return [*errors, *_graph_errors(module, captured, options, notes)]


def _without_backward_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """A copy without the hooks that are refused: capture would stop at them, and not see what is behind."""
    copied = copy.deepcopy(module)
    for inner in copied.modules():
        inner._backward_hooks.clear()
        inner._backward_pre_hooks.clear()
        inner._is_full_backward_hook = None
    return copied


def _graph_errors(
    module: torch.nn.Module, captured: Captured, options: Options, notes: list[str]
) -> list[OnnxTrainError]:
    optimize(captured.graph, options, check=False)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    read = tuple(name for name in captured.graph.signature.parameters if name in trained)
    graph = ForwardGraph(captured.graph.model, dataclasses.replace(captured.graph.signature, differentiable=read))
    unread = sorted(trained - set(read))
    if unread:
        notes.append(f"{len(unread)} trained parameters are not read, and get no gradient: {', '.join(unread[:5])}")
    return graph_errors(graph, options, str(device_of(module)))
