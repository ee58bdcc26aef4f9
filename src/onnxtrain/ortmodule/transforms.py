"""Whether torch records or transforms the computation that a call is part of: there the module itself runs."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_transformed() -> bool:
    """Whether an exporter, a compiler or a tracer records the call, or ``torch.func`` or forward-mode AD transforms it.

    They see through a module's operators, not through a graph's one node.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.jit.is_tracing()
        or get_proxy_mode() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
