"""check: what would keep a module from being trained through the graph, all at once and before any step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain.blockers import Check, graph_errors, make_check
from onnxtrain.capture import Captured, arguments_of, flatten, translate
from onnxtrain.capture.survey import calm, survey
from onnxtrain.errors import CaptureError, ModuleError, OnnxTrainError
from onnxtrain.ir.graphs import ForwardGraph
from onnxtrain.optimize import optimize
from onnxtrain.options import Options
from onnxtrain.ortmodule.checks import check_module, device_errors, hook_errors, sharding_errors
from onnxtrain.ortmodule.module import ORTModule

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check(module: torch.nn.Module, batch: Any, *, options: Options | None = None) -> Check:
    """Look for everything that would keep a module from being trained; nothing is trained and nothing is changed.

    Looked at are hooks, devices, shards and types of parameters; each line whose control flow depends on data, along
    the branches that this batch takes; each operator between a trained parameter and an output without gradient rule,
    or without a form on the backend.

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
    subject = type(module).__name__
    try:
        check_module(module)
        args, kwargs = arguments_of(batch)
        tensors, _ = flatten((args, kwargs))
    except OnnxTrainError as error:
        return make_check(subject, options, [error])
    errors: list[OnnxTrainError] = [
        *sharding_errors(module),
        *hook_errors(module, options.hooks),
        *device_errors(module, tensors),
        *_parameter_errors(module),
    ]
    notes: list[str] = []
    if not list(device_errors(module, tensors)):
        errors += _capture_errors(module, args, kwargs, options, notes)
    return make_check(subject, options, errors, notes)


def _parameter_errors(module: torch.nn.Module) -> Iterator[ModuleError]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _FLOATING:
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
        module = _without_backward_hooks(module)
    try:
        traced, found = survey(module, args, kwargs, static_shapes=options.static_shapes)
        errors += found
        if traced is None:
            notes.append("operators were not looked at: there is no graph")
            return errors
        with calm():
            captured = translate(traced, opset=options.opset)
    except OnnxTrainError as error:
        if errors and isinstance(error, CaptureError):
            notes.append("operators were not looked at: the branches that this batch takes make no graph")
            return errors
        return [*errors, error]
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
    device = next((str(p.device) for p in module.parameters()), "cpu")
    return graph_errors(graph, options, device)
