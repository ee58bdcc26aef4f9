"""A callback of Transformers' Trainer."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers

from onnxtrain.ortmodule import ORTModule

_PREFIX = "onnxtrain/"


class TrainerCallback(transformers.TrainerCallback):
    """Adds to what Trainer logs how much work is skipped, how fast steps are, and the memory in use.

    What is logged goes wherever Trainer's logs go. Callbacks run in order, also those that send logs on, as that of
    TensorBoard: ``install(trainer)`` puts this one before them. After them, as of ``Trainer(callbacks=[...])``, its
    numbers are in ``trainer.state.log_history`` alone.

    The names are those of ``ORTModule.metrics`` with ``onnxtrain/`` before them; ``onnxtrain/steps_per_second`` since
    the log before; and ``onnxtrain/memory_bytes``: most bytes that were allocated on an accelerator so far, without one
    most bytes of the process, where the system tells.
    """

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None  # step and time of the latest log

    def install(self, trainer: transformers.Trainer) -> TrainerCallback:
        """Add it to a trainer, before the callbacks that send logs on."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count."""
        self._since = state.global_step, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add to the logs of training; those of evaluation stay as they are."""
        logs, model = kwargs.get("logs"), kwargs.get("model")
        if logs is None or "loss" not in logs or model is None:
            return
        found = {f"{_PREFIX}{name}": value for name, value in _metrics(model).items()}
        found |= {f"{_PREFIX}steps_per_second": speed for speed in self._speed(state.global_step)}
        found |= {f"{_PREFIX}memory_bytes": size for size in _memory(args.device)}
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)  # a copy of the logs, made before

    def _speed(self, step: int) -> list[float]:
        now, since = time.perf_counter(), self._since
        self._since = step, now
        return [] if since is None or step <= since[0] else [(step - since[0]) / (now - since[1])]


def _metrics(model: torch.nn.Module) -> dict[str, float]:
    """Of the outermost ORTModule in a model; none where there is none."""
    return next((part.metrics() for part in model.modules() if isinstance(part, ORTModule)), {})


def _memory(device: torch.device) -> list[float]:
    if device.type != "cpu":
        return [float(torch.accelerator.max_memory_allocated(device))]
    try:
        import resource
    except ImportError:  # Windows
        return []
    unit = 1 if sys.platform == "darwin" else 1024
    return [float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)]
