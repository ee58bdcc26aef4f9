"""Everything that keeps a module from being captured, not only the first: for a report, never for a step."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture import Traced, trace
from onnxtrain.capture.export import Autocast, FlatModule, data_dependent, recording
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.schema import flatten, input_names
from onnxtrain.capture.source_lines import is_users
from onnxtrain.errors import CaptureError

_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses")


def survey(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, static_shapes: bool = False
) -> tuple[Traced | None, list[CaptureError]]:
    """Record a call of a module; where that fails, record it along the branches that this call takes.

    Returns:
        What was recorded, to look at its operators, or None; and one error for each line that could not be captured.

    Raises:
        UnsupportedDataError: an input or output has a type that a graph cannot take.
    """
    try:
        return trace(module, args, kwargs, static_shapes=static_shapes), []
    except CaptureError as error:
        first = error
    try:
        traced = _draft(copy.deepcopy(module), args, kwargs)
    except Exception as error:  # what stops the draft too has no second error behind it
        return None, [first, *([error] if isinstance(error, CaptureError) and str(error) != str(first) else [])]
    found = [data_dependent(line) for line in dict.fromkeys(_lines(traced.program))]
    if first.source in {error.source for error in found}:
        return traced, found
    return (traced if found else None), [first, *found]


def _draft(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    tensors, inputs = flatten((tuple(args), dict(kwargs)))
    device = next((t.device.type for t in [*tensors, *module.parameters(), *module.buffers()]), "cpu")
    flat = FlatModule(module, inputs, Autocast.current(device))
    with recording(), calm():
        program = torch.export.draft_export(flat, tuple(tensors), strict=False)
    names = input_names(module.forward, args, kwargs, inputs.numbers)
    return Traced(program, flat, inputs, tuple(names), tuple(name for name, _ in module.named_buffers()))


def _lines(program: torch.export.ExportedProgram) -> Iterator[str]:
    """The user's lines whose branches depend on data, as the report of a draft names them."""
    from torch._logging.structured import INTERN_TABLE  # torch numbers each file once in a process

    files = {number: name for name, number in INTERN_TABLE.items()}
    report: Any = program._report
    for failure in report.failures if report is not None else ():
        if "DATA_DEPENDENT" in failure.failure_type.name:
            stack = failure.data.get("user_stack") or failure.data.get("stack") or []
            frames = [(files.get(f["filename"], ""), f["line"]) for f in stack]
            yield next((f"{name}:{line}" for name, line in reversed(frames) if name and is_users(name)), "")


def calm() -> contextlib.AbstractContextManager[None]:
    """Without the draft's warnings: what it finds is returned."""
    return loggers_at(logging.CRITICAL, *_LOGGERS)
