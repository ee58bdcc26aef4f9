"""A module recorded to be looked at, and what keeps it from being captured: for a report, never for a step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxtrain.capture import Traced, trace
from onnxtrain.capture.quiet import loggers_at
from onnxtrain.capture.rehearsal import Answers, rehearse
from onnxtrain.errors import CaptureError, ContentError, OnnxTrainError

_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses")


def survey(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, static_shapes: bool = False
) -> tuple[Traced | None, list[CaptureError]]:
    """Record a call of a module; where it looks into tensors, on the path that this call takes.

    Returns:
        What was recorded, to look at its operators, or None; and the error that stopped it.

    Raises:
        UnsupportedDataError: an input or output has a type that a graph cannot take.
    """
    try:
        return trace(module, args, kwargs, static_shapes=static_shapes, answers=Answers()), []
    except ContentError as error:
        first = error
    except CaptureError as error:
        return None, [error]
    try:
        answers = rehearse(module, args, kwargs)
    except OnnxTrainError:
        raise
    except Exception:  # the module's own: it cannot run in eager PyTorch
        return None, [first]
    if not answers.looks and not answers.sizes:
        return None, [first]
    try:
        return trace(module, args, kwargs, static_shapes=static_shapes, answers=answers), []
    except CaptureError as error:
        return None, [error]


def calm() -> contextlib.AbstractContextManager[None]:
    """Without the warnings of torch while it translates: what is found is returned."""
    return loggers_at(logging.CRITICAL, *_LOGGERS)
