"""Marks for NVIDIA's profilers, and memory in use at a phase of a step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from onnxtrain.engine.memory_stats import in_use, in_words
from onnxtrain.processes import rank

P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger(__name__)
_MIB = 2**20


def torch_nvtx_range_push(message: str) -> None:
    """Begin a named range in NVIDIA's profilers; nothing where there is no CUDA."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(message)


def torch_nvtx_range_pop() -> None:
    """End the range that began last."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_function_decorator(function: Callable[P, R]) -> Callable[P, R]:
    """Make every call of a function a range of its qualified name."""

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        torch_nvtx_range_push(function.__qualname__)
        try:
            return function(*args, **kwargs)
        finally:
            torch_nvtx_range_pop()

    return marked


def log_memory_usage(
    cur_phase: str,
    rank_0_only: bool = True,
    step_info: str = "",
    logger: logging.Logger | None = None,
    module: torch.nn.Module | None = None,
) -> None:
    """Log the memory in use, in MiB, with its peak: of the CUDA allocator, or resident where there is no CUDA.

    Args:
        cur_phase: where in the step this is, as ``"pre_forward"``.
        rank_0_only: other processes of a distributed training say nothing.
        step_info: said with it, as ``"step 3"``.
        logger: where to; onnxtrain's own logger where it is None.
        module: its parameters, their gradients and its buffers are counted too.
    """
    if rank_0_only and rank() != 0:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [*in_words(in_use(device)), *([] if module is None else _of_module(module))]
    (logger or _LOG).info(
        "%s", " | ".join([f"rank-{rank()} {step_info} memory ({cur_phase})".replace("  ", " "), *parts])
    )


def _of_module(module: torch.nn.Module) -> list[str]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    groups = {"parameters": parameters, "gradients": gradients, "buffers": list(module.buffers())}
    return [f"{name} {sum(t.nbytes for t in tensors) // _MIB} MiB" for name, tensors in groups.items()]
