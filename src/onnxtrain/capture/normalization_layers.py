"""Normalization whose running statistics torch updates out of sight, with the update beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.capture.substitutes import UNSEEN, of_nothing, substitute

Tensor = torch.Tensor


@substitute(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Running statistics are updated in sight: torch does so inside, without saying that it does.

    They move towards the mean over the batch of each sample's mean and unbiased variance.
    """
    if running_mean is None or running_var is None or not use_input_stats:
        return NotImplemented
    with torch.no_grad():
        variance, mean = torch.var_mean(input, dim=tuple(range(2, input.dim())), correction=1)
        _move(running_mean, mean.mean(0), momentum, input)
        _move(running_var, variance.mean(0), momentum, input)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


@substitute(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Of a layer that is called a second time: in a trace the running statistics carry the first call's gradient.

    Of nothing, as torch has it: whatever the number of channels, and without a look at statistics.
    """
    if of_nothing(input.shape):
        scaled = input.clone() if weight is None else input * weight[0]
        return scaled if bias is None else scaled + bias[0]
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    if getattr(running_mean, "_was_updated", False):
        return _batch_norm_in_sight(input, running_mean, running_var, weight, bias, momentum, eps)
    running_mean._was_updated = True  # type: ignore[attr-defined]  # of the tensor that stands for it in this trace
    return NotImplemented


def _weights_first(normalize: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the function that torch's own calls, which takes weight and bias before the statistics."""

    def call(
        input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *others: Any, **named: Any
    ) -> Any:
        named.pop("cudnn_enabled", None)
        return normalize(input, running_mean, running_var, weight, bias, *others[:3], **named)

    return call


substitute(torch.batch_norm)(_weights_first(batch_norm))
substitute(torch.instance_norm)(_weights_first(instance_norm))


@substitute(torch.native_batch_norm)
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """With the statistics of the batch, which have no gradient: its operator does not say what it writes."""
    given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    made = batch_norm(*given)
    made = F.batch_norm(*given) if made is NotImplemented else made
    if not training:
        return made, input.new_empty(0), input.new_empty(0)
    with torch.no_grad():
        variance, mean = torch.var_mean(input, dim=(0, *range(2, input.dim())), correction=0)
    return made, mean, torch.rsqrt(variance + eps)


def _batch_norm_in_sight(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: Tensor | float,
    eps: float,
) -> Tensor:
    """Batch normalization in training mode whose running statistics are updated beside it."""
    if of_nothing(input.shape):
        return batch_norm(input, running_mean, running_var, weight, bias)  # type: ignore[no-any-return]
    with torch.no_grad():
        variance, mean = torch.var_mean(input, dim=(0, *range(2, input.dim())), correction=1)
        _move(running_mean, mean, momentum, input)
        _move(running_var, variance, momentum, input)
    return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def _forward_of_batch_norm(self: Any, input: Tensor) -> Tensor:
    """With ``momentum=None`` the mean over all batches: torch reads how many there were."""
    if not (self.training and self.track_running_stats and self.momentum is None and self.running_mean is not None):
        return _FORWARD_OF_BATCH_NORM(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    momentum = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
    return _batch_norm_in_sight(input, self.running_mean, self.running_var, self.weight, self.bias, momentum, self.eps)


_FORWARD_OF_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm.forward
UNSEEN.append((torch.nn.modules.batchnorm._BatchNorm, "forward", _forward_of_batch_norm))


def _move(running: Tensor, now: Tensor, momentum: Tensor | float, batch: Tensor) -> None:
    """Running statistics towards those of a batch; an empty one has none."""
    moved = (1.0 - momentum) * running.detach() + momentum * now
    running.copy_(torch.where(torch.scalar_tensor(batch.numel(), dtype=torch.int64) > 0, moved, running.detach()))
