"""Classes of ``torch.autograd.Function`` met during capture.

torch.export records what their forward does and drops their backward without a word, so that gradients would be wrong.
This is the one module that changes something of torch's, ``Function.apply`` and what makes gradient checkpoints, and
only while a module is captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from onnxtrain.capture.python_op import record
from onnxtrain.errors import CaptureError

_LOG = logging.getLogger(__name__)
# Classes whose operator is recorded as a whole: those that register_autograd makes, and torch's own control flow.
_OPERATORS = (
    "torch._library.autograd",
    *(f"torch._higher_order_ops.{n}" for n in ("cond", "scan", "while_loop", "map")),
)


@dataclasses.dataclass(frozen=True)
class Functions:
    """What becomes of the classes of ``torch.autograd.Function`` that a captured module applies.

    Args:
        as_nodes: each call is one node; else an error.
        keep_checkpoints: reentrant gradient checkpoints are nodes too, which run in eager PyTorch; else their content
            becomes part of the graph.
    """

    as_nodes: bool = True
    keep_checkpoints: bool = False


class _Recorder:
    """What happens to calls within one capture."""

    def __init__(self, root: torch.nn.Module, kept: list[Any], functions: Functions) -> None:
        self._root, self._kept, self._functions = root, kept, functions
        self._hinted = False

    def apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call; those made within its own forward pass are part of it."""
        if cls is CheckpointFunction and not self._functions.keep_checkpoints:
            run, _, *rest = args
            self.pass_checkpoint()
            return run(*rest)
        if not self._functions.as_nodes:
            raise _lost(cls, "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD=0 refuses them; remove it")
        if torch._C._are_functorch_transforms_active():
            raise _lost(cls, "apply it outside torch.func.vmap and torch.func.grad")
        if kwargs:
            raise _lost(cls, "pass its arguments by position")
        token = _RECORDER.set(None)
        try:
            return record(cls, original, args, self._kept, self._root)
        finally:
            _RECORDER.reset(token)

    def pass_checkpoint(self) -> None:
        """Say once what becomes of gradient checkpoints."""
        if not self._hinted:
            self._hinted = True
            _LOG.warning(
                "gradient checkpointing is captured through: the graph keeps what the backward pass reads, and what is "
                "computed again to save memory is the memory optimizer's choice, not the module's"
            )


_RECORDER: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("onnxtrain_recorder", default=None)


@contextlib.contextmanager
def recording(root: torch.nn.Module, kept: list[Any], functions: Functions) -> Iterator[None]:
    """Within it, applying a class of ``torch.autograd.Function`` records one operator; other threads are unaffected.

    Args:
        root: the module that is captured.
        kept: receives what the recorded operators need as long as they are translated.
        functions: what becomes of them.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        recorder, own = _RECORDER.get(), original.__get__(None, cls)
        if recorder is None or cls.__module__ in _OPERATORS:
            return own(*args, **kwargs)
        return recorder.apply(cls, own, args, kwargs)

    token = _RECORDER.set(_Recorder(root, kept, functions))
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign]
    try:
        with _through_checkpoints():
            yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        _RECORDER.reset(token)


@contextlib.contextmanager
def _through_checkpoints() -> Iterator[None]:
    """Within it, checkpoints that are not reentrant only run their function: the graph decides what it keeps."""
    torch_checkpoint = sys.modules[CheckpointFunction.__module__]
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(torch_checkpoint, name)

    def through(*args: Any, **kwargs: Any) -> Iterator[None]:
        recorder = _RECORDER.get()
        if recorder is None:
            yield from original(*args, **kwargs)
        else:
            recorder.pass_checkpoint()
            yield

    setattr(torch_checkpoint, name, through)
    try:
        yield
    finally:
        setattr(torch_checkpoint, name, original)


def _lost(cls: type, cure: str) -> CaptureError:
    return CaptureError(
        f"the backward of {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, would be lost in the graph",
        cure=cure,
    )
