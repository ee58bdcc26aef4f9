"""Optimizers of other libraries that look at gradients one by one: some kernels for all of them instead."""

from __future__ import annotations

import importlib
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

_KNOWN_DEEPSPEED = ("0.19.",)


def FP16_Optimizer(optimizer: Any, **kwargs: Any) -> Any:  # noqa: N802  (the predecessor's name)
    """Make an optimizer of another library find overflows and norms of its gradients by some kernels for all of them.

    Known are DeepSpeed's of ZeRO stages 1 and 2, and Accelerate's wrapper of one. What they compute is the same. Apex's
    and Megatron's, which the predecessor knew too, are given back as they are, with a warning.

    Args:
        optimizer: changed in place.
        kwargs: what the predecessor asked for Megatron's; not used.

    Returns:
        The optimizer.
    """
    inner = _within_accelerate(optimizer)
    module = sys.modules.get("deepspeed.runtime.zero.stage_1_and_2")
    kind = getattr(module, "DeepSpeedZeroOptimizer", None)
    if kind is None or not isinstance(inner, kind):
        _tell(f"{type(inner).__module__}.{type(inner).__qualname__} is not known: it is left as it is")
        return optimizer
    version = str(getattr(sys.modules["deepspeed"], "__version__", ""))
    missing = [name for name in _OF_DEEPSPEED if not callable(getattr(inner, name, None))]
    if missing or not version.startswith(_KNOWN_DEEPSPEED):
        lost = f", which has no {' and no '.join(missing)}" if missing else ""
        _tell(f"DeepSpeed {version}{lost} is not known here, {_KNOWN_DEEPSPEED[0]}x is: its optimizer is left as it is")
        return optimizer
    for name, function in _OF_DEEPSPEED.items():
        setattr(inner, name, types.MethodType(function, inner))
    return optimizer


def _tell(what: str) -> None:
    warnings.warn(f"FP16_Optimizer: {what}", stacklevel=3)


def _within_accelerate(optimizer: Any) -> Any:
    """What Accelerate's wrapper of DeepSpeed's optimizer holds; any other one itself."""
    wrapper = getattr(sys.modules.get("accelerate.utils.deepspeed"), "DeepSpeedOptimizerWrapper", None)
    return optimizer.optimizer if wrapper is not None and isinstance(optimizer, wrapper) else optimizer


def _has_overflow_serial(self: Any, params: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether a parameter's gradient has a number that is none, as [1] bools on the device."""
    return _any_not_finite([p.grad for p in params if p.grad is not None], self.device)


def _has_overflow_partitioned_grads_serial(self: Any) -> torch.Tensor:
    """The same of this process's part of the averaged gradients."""
    parts = [self.averaged_gradients[i] or () for i in range(len(self.bit16_groups))]
    return _any_not_finite([g for part in parts for g in part if g is not None], self.device)


def _any_not_finite(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.zeros(1, dtype=torch.bool, device=device)
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(filled, math.inf)])
    return largest.isfinite().all().logical_not().reshape(1)


def _get_grad_norm_direct(
    self: Any, gradients: Iterable[torch.Tensor], params: Iterable[torch.Tensor], norm_type: float = 2
) -> torch.Tensor:
    """The norm of all gradients of all processes; -1 where it is no finite number."""
    kind = float(norm_type)
    if math.isinf(kind):
        return type(self).get_grad_norm_direct(self, gradients, params, norm_type)
    comm: Any = importlib.import_module("deepspeed.comm")
    counted = [g.detach() for g in _counted(self, gradients, params)]
    dtype = importlib.import_module("deepspeed.runtime.zero.utils").get_norm_dtype()
    norms = [norm.pow(kind) for norm in torch._foreach_norm(counted, kind, dtype)] if counted else []
    total = torch.stack(norms).sum().float() if norms else torch.zeros((), device=self.device)
    comm.all_reduce(total, op=comm.ReduceOp.SUM, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=comm.ReduceOp.SUM)
    norm = total.pow(1.0 / kind)
    return torch.where(norm.isfinite(), norm, -1.0)


def _counted(self: Any, gradients: Iterable[torch.Tensor], params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Gradients that this process counts: no padding, and what several ranks have alike once."""
    is_parallel: Any = importlib.import_module("deepspeed.runtime.utils").is_model_parallel_parameter
    real = (g for g in gradients if not getattr(g, "_zero_padding", False))
    for gradient, parameter in zip(real, params, strict=False):
        is_copy = getattr(parameter, "ds_pipe_replicated", False)
        if not is_copy and gradient.numel() and (is_parallel(parameter) or self.model_parallel_rank == 0):
            yield gradient


_OF_DEEPSPEED: dict[str, Callable[..., Any]] = {
    "has_overflow_serial": _has_overflow_serial,
    "has_overflow_partitioned_grads_serial": _has_overflow_partitioned_grads_serial,
    "get_grad_norm_direct": _get_grad_norm_direct,
}
