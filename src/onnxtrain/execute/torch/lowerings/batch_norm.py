"""Batch and instance normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.graphs import DOMAIN

Tensor = torch.Tensor
aten = torch.ops.aten


@lowering("BatchNormTraining", domain=DOMAIN)
def batch_norm_training(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    outputs: int = 1,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
) -> Tensor | tuple[Tensor, ...]:
    """ATen's kernel; the running statistics come back as new tensors, an empty batch's as they were."""
    if not x.numel():
        nothing = torch.zeros_like(running_mean)
        made = (x * 1.0, running_mean.clone(), running_var.clone(), nothing, nothing.clone())
        return made[0] if outputs == 1 else made[:outputs]
    y, mean, inv_std, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, scale, bias, running_mean, running_var, True, momentum, epsilon
    )
    return y if outputs == 1 else (y, new_mean, new_var, mean, inv_std)[:outputs]


@lowering("BatchNormTrainingGrad", domain=DOMAIN)
def batch_norm_training_grad(
    dy: Tensor, x: Tensor, scale: Tensor, save_mean: Tensor, save_inv_std: Tensor, *, needed: Sequence[bool]
) -> Tensor | tuple[Tensor | None, ...]:
    """ATen's kernel, for the gradients that are read."""
    return _backward(dy, x, scale, None, None, save_mean, save_inv_std, True, 0.0, needed)


@lowering("BatchNormalization")
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    outputs: int = 1,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """By given statistics; in training mode by the batch's, where ONNX's momentum is the weight of the old ones."""
    if not training_mode:
        return torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, epsilon, torch.backends.cudnn.enabled)
    if not x.numel():
        return x * 1.0 if outputs == 1 else (x * 1.0, mean.clone(), variance.clone())[:outputs]
    y, batch_mean, inv_std = torch.native_batch_norm(x, scale, bias, None, None, True, 0.0, epsilon)
    if outputs == 1:
        return y
    batch_variance = inv_std.square().reciprocal() - epsilon
    pairs = ((mean, batch_mean), (variance, batch_variance))
    return (y, *(old * momentum + new * (1.0 - momentum) for old, new in pairs))[:outputs]


@lowering("BatchNormalizationGrad", domain=DOMAIN)
def batch_normalization_grad(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    needed: Sequence[bool],
    epsilon: float = 1e-5,
) -> Tensor | tuple[Tensor | None, ...]:
    """ATen's kernel, for the gradients that are read."""
    return _backward(dy, x, scale, mean, variance, None, None, False, epsilon, needed)


def _backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    save_mean: Tensor | None,
    save_inv_std: Tensor | None,
    training: bool,
    epsilon: float,
    needed: Sequence[bool],
) -> Tensor | tuple[Tensor | None, ...]:
    if not x.numel():
        return _zeros(x, scale, needed)
    mask = [*needed, False, False][:3]
    scale = scale.contiguous()  # the kernel reads an expanded one beyond its end
    made = aten.native_batch_norm_backward(
        _of_one_sample(dy), _of_one_sample(x), scale, mean, variance, save_mean, save_inv_std, training, epsilon, mask
    )
    return made[0] if len(needed) == 1 else made[: len(needed)]


def _of_one_sample(batch: Tensor) -> Tensor:
    """A batch of 1 with the stride of its first axis as torch makes it: by it the kernel tells how the batch lies."""
    return batch.as_strided(batch.shape, (batch.numel(), *batch.stride()[1:])) if len(batch) == 1 else batch


def _zeros(x: Tensor, scale: Tensor, needed: Sequence[bool]) -> Tensor | tuple[Tensor | None, ...]:
    """The gradients of an empty batch, of which torch has no statistics."""
    made = (torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale))[: len(needed)]
    return made[0] if len(needed) == 1 else made


@lowering("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each sample by its own statistics, of which torch has none for an empty batch."""
    if not x.numel():
        return x * 1.0
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, torch.backends.cudnn.enabled)


@lowering("InstanceNormalizationGrad", domain=DOMAIN)
def instance_normalization_grad(
    dy: Tensor, x: Tensor, scale: Tensor, *, needed: Sequence[bool], epsilon: float = 1e-5
) -> Tensor | tuple[Tensor | None, ...] | None:
    """As one batch whose channels are all channels of all samples."""
    if not x.numel():
        return _zeros(x, scale, needed)
    batch, channels = x.shape[:2]
    planes, g = (t.reshape(1, batch * channels, *x.shape[2:]) for t in (x, dy))
    variance, mean = torch.var_mean(planes, (0, *range(2, x.dim())), correction=0)
    inv_std = torch.rsqrt(variance + epsilon)
    made = _backward(g, planes, scale.repeat(batch), None, None, mean, inv_std, True, epsilon, (*needed, False)[:3])
    dx, dscale, dbias = (*made, None, None)[:3]
    sums = [None if s is None else s.view(batch, channels).sum(0) for s in (dscale, dbias)]
    dx = None if dx is None else dx.reshape(x.shape)
    return dx if len(needed) == 1 else (dx, *sums)[: len(needed)]
