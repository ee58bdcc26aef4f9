"""Classes of ``torch.autograd.Function`` met during capture.

torch.export records what their forward does and drops their backward without a word, so that gradients would be wrong.
This is the one module that changes something of torch's, and only while a module is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain.errors import CaptureError

# Classes whose operator is recorded as a whole: those that register_autograd makes, and torch's own control flow.
_RECORDED = (
    "torch._library.autograd",
    *(f"torch._higher_order_ops.{n}" for n in ("cond", "scan", "while_loop", "map")),
)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Within it, applying a class of ``torch.autograd.Function`` to tensors raises CaptureError."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ not in _RECORDED:
            _refuse(cls)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _refuse(cls: type) -> None:
    raise CaptureError(
        f"the backward of {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, would be lost in the graph",
        cure="write it with torch.library.custom_op and register_autograd, which are kept; or leave out the class, "
        "where it only saves memory (gradient checkpointing among them)",
    )
