"""Classes of ``torch.autograd.Function`` met during capture.

torch.export records what their forward does and drops their backward without a word, so that gradients would be wrong.
This is the one module that changes something of torch's, ``Function.apply`` and what makes gradient checkpoints, and
only while a module is captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from onnxtrain.capture.layer_values import version_of
from onnxtrain.capture.python_op import record
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.running_statistics import UNCOUNTED
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

    def __init__(
        self, root: torch.nn.Module, kept: list[Any], functions: Functions, has_gradients: Callable[[], bool]
    ) -> None:
        self._root, self._kept, self._functions, self._has_gradients = root, kept, functions, has_gradients
        self._hinted = False

    def apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call; those made within its own forward pass are part of it."""
        if cls is CheckpointFunction and not self._functions.keep_checkpoints:
            run, _, *rest = args
            with self.checkpoint():
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

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """In the block the region of a gradient checkpoint runs, which becomes part of the graph; this is said once.

        Eager PyTorch runs it again in the backward pass, which updates the statistics of a batch normalization twice.
        """
        if not self._hinted:
            self._hinted = True
            _LOG.warning(
                "gradient checkpointing is captured through: the graph keeps what the backward pass reads, and what is "
                "computed again to save memory is the memory optimizer's choice, not the module's"
            )
        with _Updates(self._root) as updates:
            yield
        if updates.found and self._has_gradients():
            updates.repeat()


class _Updates(TorchFunctionMode):
    """Notes the calls in its block that change buffers.

    Args:
        root: the module that has the buffers.

    Attributes:
        found: the calls, in their order.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        super().__init__()
        self._buffers = {id(b): b for b in root.buffers()}
        self.found: list[Callable[[], Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [b for a in (*args, *(kwargs or {}).values()) if (b := self._buffers.get(id(a))) is not None]
        before = list(map(version_of, held))
        result = function(*args, **(kwargs or {}))
        if before != list(map(version_of, held)) or function in UNCOUNTED:  # whose changes torch does not count
            self.found.append(functools.partial(function, *args, **(kwargs or {})))
        return result

    def repeat(self) -> None:
        """Change the buffers in the same way again."""
        with torch.no_grad():
            for call in self.found:
                call()


_RECORDER: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("onnxtrain_recorder", default=None)


@contextlib.contextmanager
def recording(
    root: torch.nn.Module, kept: list[Any], functions: Functions, has_gradients: Callable[[], bool]
) -> Iterator[None]:
    """Within it, applying a class of ``torch.autograd.Function`` records one operator; other threads are unaffected.

    Args:
        root: the module that is captured.
        kept: receives what the recorded operators need as long as they are translated.
        functions: what becomes of them.
        has_gradients: says whether gradients are enabled, and notes that this was asked.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        recorder, own = _RECORDER.get(), original.__get__(None, cls)
        if recorder is None or cls.__module__ in _OPERATORS:
            return own(*args, **kwargs)
        return recorder.apply(cls, own, args, kwargs)

    token = _RECORDER.set(_Recorder(root, kept, functions, has_gradients))
    try:
        with replaced((torch.autograd.Function, "apply", classmethod(apply))), _through_checkpoints():
            yield
    finally:
        _RECORDER.reset(token)


def _through_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Within it, checkpoints that are not reentrant only run their function: the graph decides what it keeps."""
    torch_checkpoint = sys.modules[CheckpointFunction.__module__]
    outer = "_checkpoint_without_reentrant_generator"
    name = next(n for n in (f"{outer}_impl", outer) if hasattr(torch_checkpoint, n))  # the first from torch 2.15 on
    original = getattr(torch_checkpoint, name)

    def through(*args: Any, **kwargs: Any) -> Iterator[None]:
        recorder = _RECORDER.get()
        if recorder is None:
            yield from original(*args, **kwargs)
        else:
            with recorder.checkpoint():
                yield

    return replaced((torch_checkpoint, name, through))


def _lost(cls: type, cure: str) -> CaptureError:
    return CaptureError(
        f"the backward of {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, would be lost in the graph",
        cure=cure,
    )
