"""Our code that PyTorch calls back within a compiled program: Dynamo traces neither it nor what it calls."""

from __future__ import annotations

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import trace_rules
from torch._dynamo.types import FrameAction, FrameExecStrategy

from onnxtrain.engine.deferred import content_of
from onnxtrain.engine.late import LateStep
from onnxtrain.engine.node import LaterPart, Step

_ENTRIES = (content_of, Step.backward, LaterPart.backward, LateStep.forward, LateStep.backward)


def keep_untraced() -> None:
    """Let Dynamo pass over the files of what runs graphs, and run what they call as it is.

    Else the backward pass within a compiled step, and what computes a late output, would be compiled bit by bit. It may
    look into what captures, where ``torch.cond`` has Dynamo record its branches, and into ``ORTModule``, which hands
    compilers the module that it wraps.
    """
    for folder in ("engine", "execute", "torchdynamo"):
        trace_rules.add(f"onnxtrain.{folder}")
    for entry in _ENTRIES:
        set_code_exec_strategy(entry.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
