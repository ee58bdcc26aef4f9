"""Vision layers of torch in training: outputs and gradients, those of inputs included, as eager PyTorch gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import pair, same_step
from torch import nn

Tensor = torch.Tensor


class Calls(nn.Module):
    """A function of an image after a convolution, so that something is trained, and a bend."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 4, dimensions: int = 2) -> None:
        super().__init__()
        self.function = function
        self.stem = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions](2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.softplus(self.stem(x)))


class Unpools(nn.Module):
    """Max pooling, a convolution, and back to the pooled places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)
        self.pool, self.unpool = nn.MaxPool2d(2, 2, return_indices=True), nn.MaxUnpool2d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(self.stem(x[..., :8]))
        return self.unpool(self.middle(y), indices)


class Transforms(nn.Module):
    """A spatial transformer: a learned affine map of an image."""

    def __init__(self, mode: str, padding: str, align: bool) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[[0.9, 0.1, 0.05], [-0.2, 0.8, 0.1]]]))
        self.options = {"mode": mode, "padding_mode": padding, "align_corners": align}

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta.expand(x.shape[0], 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=self.options["align_corners"])
        return F.grid_sample(x, grid, **self.options)


def _interpolates(mode: str, dimensions: int = 2, **options: object) -> nn.Module:
    return Calls(lambda y: F.interpolate(y, mode=mode, **options), dimensions=dimensions)  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "upsample_nearest": lambda: Calls(nn.Upsample(scale_factor=2)),
    "upsample_bilinear": lambda: Calls(nn.Upsample(scale_factor=2, mode="bilinear")),
    "nearest_size": lambda: _interpolates("nearest", size=(11, 5)),
    "nearest_exact": lambda: _interpolates("nearest-exact", size=(11, 5)),
    "bilinear_corners": lambda: _interpolates("bilinear", size=(11, 5), align_corners=True),
    "bilinear_scale": lambda: _interpolates("bilinear", scale_factor=1.5),
    "bilinear_antialias": lambda: _interpolates("bilinear", size=(4, 5), antialias=True),
    "bicubic": lambda: _interpolates("bicubic", scale_factor=2),
    "bicubic_corners": lambda: _interpolates("bicubic", size=(11, 5), align_corners=True),
    "area": lambda: _interpolates("area", size=(4, 5)),
    "linear_1d": lambda: _interpolates("linear", 1, scale_factor=2),
    "nearest_1d": lambda: _interpolates("nearest", 1, scale_factor=3),
    "trilinear": lambda: _interpolates("trilinear", 3, scale_factor=2),
    "nearest_3d": lambda: _interpolates("nearest", 3, scale_factor=2),
    "lp_pool": lambda: Calls(nn.LPPool2d(2, 3, 2)),
    "max_unpool": Unpools,
    "group_norm": lambda: Calls(nn.GroupNorm(2, 4)),
    "rms_norm": lambda: Calls(nn.RMSNorm(9)),
    "instance_norm": lambda: Calls(nn.InstanceNorm2d(4, affine=True)),
    "local_response_norm": lambda: Calls(nn.LocalResponseNorm(3)),
    "unfold": lambda: Calls(lambda y: F.unfold(y, 3, padding=1, stride=2)),
    "pixel_unshuffle": lambda: Calls(lambda y: F.pixel_unshuffle(y[..., :8], 2)),
    "channel_shuffle": lambda: Calls(nn.ChannelShuffle(2)),
    "adaptive_avg_pool": lambda: Calls(nn.AdaptiveAvgPool2d((3, 4))),
    "adaptive_max_pool": lambda: Calls(nn.AdaptiveMaxPool2d((3, 4))),
    "conv_transpose": lambda: Calls(nn.ConvTranspose2d(4, 3, 3, 2, 1, 1, dilation=2)),
    "conv_same": lambda: Calls(nn.Conv2d(4, 3, (3, 4), padding="same")),
    "max_pool_ceil": lambda: Calls(nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "avg_pool_ceil": lambda: Calls(nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
    "grid_sample": lambda: Transforms("bilinear", "zeros", False),
    "grid_sample_border": lambda: Transforms("bilinear", "border", True),
    "grid_sample_reflection": lambda: Transforms("bicubic", "reflection", False),
    "grid_sample_nearest": lambda: Transforms("nearest", "zeros", False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_trains_as_eager(name: str) -> None:
    wrapped, eager = pair(LAYERS[name]())
    layer = eager.stem if hasattr(eager, "stem") else None
    sizes = {nn.Conv1d: (9,), nn.Conv3d: (4, 5, 6)}.get(type(layer), (8, 9))
    for batch in (2, 3):
        same_step(wrapped, eager, torch.randn(batch, 2, *sizes, requires_grad=True), loss=_weighted)


def _weighted(y: Tensor) -> Tensor:
    """A sum with weights that differ: a sum of squares has no gradient where y is normalized."""
    return (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum()
