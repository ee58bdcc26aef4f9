"""Resizing, and sampling at given places."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.errors import BackendError
from onnxtrain.execute.torch.registry import lowering
from onnxtrain.ir.functions.codes import COORDINATES, GRID_MODES, NEAREST, PADDINGS, RESIZE_MODES
from onnxtrain.ir.graphs import DOMAIN
from onnxtrain.ir.shape_rules.resampling import resized_counts

Tensor = torch.Tensor
aten = torch.ops.aten
_LINEAR = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}
_ANTIALIAS = {(1, -0.75): "_upsample_bilinear2d_aa", (2, -0.5): "_upsample_bicubic2d_aa"}


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a Resize: its size, that of the result, the factor, and start and end of a crop."""

    size: int
    count: int
    scale: float
    start: float = 0.0
    end: float = 1.0


@dataclasses.dataclass(frozen=True)
class Filter:
    """How a Resize weighs elements, in the numbers of ``ir.functions.codes``; attributes as in ``ResizeMatrix``."""

    mode: int
    coordinates: int
    nearest: int = 0
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    antialias: int = 0

    def places(self, axis: Axis, device: torch.device) -> Tensor:
        """Where the elements of the result lie on the original axis."""
        size, count = axis.size, axis.count
        steps = torch.arange(count, dtype=torch.float64, device=device)
        centred = (steps + 0.5) / axis.scale - 0.5
        if self.coordinates == COORDINATES["asymmetric"]:
            return steps / axis.scale
        if self.coordinates == COORDINATES["align_corners"]:
            return steps * ((size - 1) / max(count - 1, 1))
        if self.coordinates == COORDINATES["tf_crop_and_resize"]:
            if count == 1:
                return steps + 0.5 * (axis.start + axis.end) * (size - 1)
            return axis.start * (size - 1) + (axis.end - axis.start) * (size - 1) / (count - 1) * steps
        if self.coordinates == COORDINATES["half_pixel_symmetric"]:
            return centred + size / 2 * (1 - count / (size * axis.scale))
        return steps if self.coordinates == COORDINATES["pytorch_half_pixel"] and count == 1 else centred

    def outside(self, axis: Axis, device: torch.device) -> Tensor:
        """Which elements of the result lie outside the original: only a crop tells."""
        at = self.places(axis, device)
        crop = self.coordinates == COORDINATES["tf_crop_and_resize"]
        return (at < 0) | (at > axis.size - 1) if crop else torch.zeros_like(at, dtype=torch.bool)

    def matrix(self, axis: Axis, like: Tensor) -> Tensor:
        """The matrix (count, size) by which one axis is multiplied."""
        at = self.places(axis, like.device).clamp(-2, axis.size + 1).unsqueeze(1)
        inner = torch.arange(axis.size, dtype=torch.float64, device=like.device)
        if self.mode == RESIZE_MODES["nearest"]:
            made = (self._rounded(at).clamp(0, axis.size - 1) == inner).double()
        else:
            squeezed = min(axis.scale, 1.0) if self.antialias else 1.0
            margin = math.ceil(2 / squeezed) + 2
            framed = torch.arange(-margin, axis.size + margin, dtype=torch.float64, device=like.device)
            weights = self._kernel((framed - at) * squeezed)
            made = weights[:, margin:-margin].clone()
            if not self.exclude_outside:
                made[:, 0] += weights[:, :margin].sum(1)
                made[:, -1] += weights[:, -margin:].sum(1)
            total = made.sum(1, keepdim=True)
            made = made / torch.where(total == 0, 1.0, total)
        return made.masked_fill(self.outside(axis, like.device).unsqueeze(1), 0.0).to(like.dtype)

    def _rounded(self, at: Tensor) -> Tensor:
        ways = {
            NEAREST["round_prefer_floor"]: lambda: torch.ceil(at - 0.5),
            NEAREST["round_prefer_ceil"]: lambda: torch.floor(at + 0.5),
            NEAREST["floor"]: lambda: torch.floor(at),
            NEAREST["ceil"]: lambda: torch.ceil(at),
        }
        return ways[self.nearest]()

    def _kernel(self, distance: Tensor) -> Tensor:
        d, a = distance.abs(), self.cubic_coeff_a
        if self.mode == RESIZE_MODES["linear"]:
            return (1 - d).clamp(min=0)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))

    def kernel(self, axes: Sequence[Axis]) -> tuple[str, tuple[bool, ...]] | None:
        """The name and first options of ATen's operator that computes the same, None where none does."""
        corners = self.coordinates == COORDINATES["align_corners"]
        plain = self.coordinates == COORDINATES["pytorch_half_pixel"] and all(a.count > 1 for a in axes)
        centred = self.coordinates == COORDINATES["half_pixel"] or plain
        count = len(axes)
        if self.mode == RESIZE_MODES["nearest"]:
            same = self.coordinates == COORDINATES["asymmetric"] and self.nearest == NEAREST["floor"]
            return (f"upsample_nearest{count}d", ()) if same else None
        if not (corners or centred):
            return None
        if self.antialias:
            known = count == 2 and centred and self.exclude_outside
            found = _ANTIALIAS.get((self.mode, self.cubic_coeff_a)) if known else None
            return None if found is None else (found, (False,))
        if self.mode == RESIZE_MODES["linear"]:
            return _LINEAR[count], (corners,)
        keys = self.cubic_coeff_a == -0.75 and not self.exclude_outside and count == 2
        return ("upsample_bicubic2d", (corners,)) if keys else None


def _proper(axes: Sequence[Axis]) -> list[Axis]:
    """The axes from the first on that has more than one element."""
    first = next((i for i, a in enumerate(axes) if a.size > 1 or a.count > 1), len(axes) - 1)
    return list(axes[first:])


def _factors(axes: Sequence[Axis]) -> list[float | None]:
    """Factors as ATen takes them: None where the sizes say them."""
    return [None if a.scale == a.count / a.size else a.scale for a in axes]


@lowering("Resize", host=(1, 2, 3), view=True)
def resize(
    x: Tensor,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    axes: Sequence[int] | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
    extrapolation_value: float = 0.0,
) -> Tensor:
    """ATen's kernel where one computes the same; else, and for no planes, each axis is multiplied by its matrix."""
    given = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    ways = (RESIZE_MODES[mode], COORDINATES[coordinate_transformation_mode], NEAREST[nearest_mode])
    found = Filter(*ways, cubic_coeff_a, exclude_outside, antialias)
    crop = found.coordinates == COORDINATES["tf_crop_and_resize"]
    region = roi if crop and roi else (0.0,) * len(given) + (1.0,) * len(given)
    lengths = [x.shape[a] for a in given]
    counts, factors = resized_counts(lengths, scales, sizes, keep_aspect_ratio_policy, region if crop else None)
    ends = zip(region[: len(given)], region[len(given) :], strict=True)
    made = [Axis(n, c, f, *e) for n, c, f, e in zip(lengths, counts, factors, ends, strict=True)]
    changed = {
        a: axis for a, axis in zip(given, made, strict=True) if crop or axis.size != axis.count or axis.scale != 1
    }
    return _resized(x, dict(sorted(changed.items())), found, extrapolation_value)


def _resized(x: Tensor, changed: dict[int, Axis], found: Filter, outside: float) -> Tensor:
    last = tuple(range(x.dim() - len(changed), x.dim()))
    axes = list(changed.values())
    kernel = found.kernel(axes) if 0 < len(changed) <= 3 and tuple(changed) == last else None
    if kernel is not None and x.numel():
        name, options = kernel
        planes = x.reshape(1, -1, *(a.size for a in axes))
        y = getattr(aten, name)(planes, [a.count for a in axes], *options, *_factors(axes))
        return y.reshape(*x.shape[: -len(axes)], *y.shape[2:])
    for at, axis in changed.items():
        x = torch.matmul(x.movedim(at, -1), found.matrix(axis, x).t()).movedim(-1, at)
        shape = [-1 if i == at else 1 for i in range(x.dim())]
        x = torch.where(found.outside(axis, x.device).view(shape), outside, x)
    return x.contiguous()


@lowering("ResizeGrad", domain=DOMAIN, host=(1, 2, 3), view=True)
def resize_grad(
    dy: Tensor,
    sizes: Any,
    scales: Any,
    roi: Any,
    *,
    mode: int,
    coordinates: int,
    nearest: int = 0,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
) -> Tensor:
    """ATen's kernel where one computes the same; else each axis is multiplied by its matrix, transposed."""
    found = Filter(mode, coordinates, nearest, cubic_coeff_a, exclude_outside, antialias)
    axes = [Axis(*a) for a in zip(sizes, dy.shape[1:], scales, roi[:3], roi[3:], strict=True)]
    proper = _proper(axes)
    kernel = found.kernel(proper)
    if kernel is not None and dy.numel():
        name, options = kernel
        backward: Callable[..., Tensor] = getattr(aten, f"{name}_backward")
        counts, lengths = [a.count for a in proper], [a.size for a in proper]
        planes = dy.reshape(1, dy.shape[0], *counts)
        made = backward(planes, counts, [1, dy.shape[0], *lengths], *options, *_factors(proper))
        return made.reshape(dy.shape[0], *sizes)
    for at, axis in enumerate(axes, 1):
        dy = torch.matmul(dy.movedim(at, -1), found.matrix(axis, dy)).movedim(-1, at)
    return dy.contiguous()


@lowering("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    """ATen's kernel."""
    return torch.grid_sampler(x, grid, GRID_MODES[mode], PADDINGS[padding_mode], bool(align_corners))


def _grid_gradients(
    dy: Tensor, x: Tensor, grid: Tensor, mode: str, padding: int, align: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """ATen's kernel; with a grid of a plane, (n, height, width, 3), the volume is an image."""
    ways = (GRID_MODES[mode], padding, bool(align), [*wanted, False][:2])
    if grid.dim() == 5:
        return aten.grid_sampler_3d_backward(dy, x, grid, *ways)
    dx, dgrid = aten.grid_sampler_2d_backward(dy.squeeze(2), x.squeeze(2), grid[..., :2], *ways)
    dgrid = None if dgrid is None else F.pad(dgrid, (0, 1))
    return None if dx is None else dx.unsqueeze(2), dgrid


def _grid_lowering(op_type: str, mode: str) -> None:
    @lowering(op_type, domain=DOMAIN)
    def grid_grad(
        dy: Tensor, x: Tensor, grid: Tensor, *, needed: Sequence[bool], padding: int = 0, align_corners: int = 0
    ) -> Any:
        """ATen's kernel, for the gradients that are read."""
        made = _grid_gradients(dy, x, grid, mode, padding, align_corners, needed)
        return made[0] if len(needed) == 1 else made


_grid_lowering("GridSampleGrad", "linear")
_grid_lowering("NearestGridSampleGrad", "nearest")
_grid_lowering("CubicGridSampleGrad", "cubic")


@lowering("AffineGrid", host=(1,))
def affine_grid(theta: Tensor, size: Any, *, align_corners: int = 0) -> Tensor:
    """ATen's kernel."""
    return torch.affine_grid_generator(theta, list(size), bool(align_corners))


def _roi_matrix(starts: Tensor, ends: Tensor, size: int, count: int, ratio: int, half: bool) -> Tensor:
    """The matrices (rois, count, size) by which RoiAlign averages one axis."""
    span = ends - starts if half else (ends - starts).clamp(min=1.0)
    wide = (span / count).view(-1, 1, 1)
    samples = torch.full_like(wide, ratio) if ratio > 0 else wide.ceil()
    share = samples.clamp(min=1.0)
    most = int(share.max()) if share.numel() else 1
    steps = torch.arange(most, dtype=starts.dtype, device=starts.device)
    bins = torch.arange(count, dtype=starts.dtype, device=starts.device).view(-1, 1)
    at = starts.view(-1, 1, 1) + (bins + (steps + 0.5) / share) * wide
    counted = (at >= -1.0) & (at <= size) & (steps < samples)
    places = torch.arange(size, dtype=starts.dtype, device=starts.device)
    weights = (1.0 - (places - at.clamp(0, size - 1).unsqueeze(3)).abs()).clamp(min=0.0) / share.unsqueeze(3)
    return torch.where(counted.unsqueeze(3), weights, 0.0).sum(2)


def _roi_matrices(
    rois: Tensor, shape: Sequence[int], counts: tuple[int, int], ratio: int, scale: float, half: bool
) -> tuple[Tensor, Tensor]:
    """The matrices of rows and of columns, each with an axis for the channels."""
    x0, y0, x1, y1 = (rois * scale - (0.5 if half else 0.0)).unbind(1)
    rows = _roi_matrix(y0, y1, shape[2], counts[0], ratio, half)
    return rows.unsqueeze(1), _roi_matrix(x0, x1, shape[3], counts[1], ratio, half).unsqueeze(1)


@lowering("RoiAlign")
def roi_align(
    x: Tensor,
    rois: Tensor,
    images: Tensor,
    *,
    mode: str = "avg",
    coordinate_transformation_mode: str = "half_pixel",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """Each roi's image between the matrices of rows and columns.

    Raises:
        BackendError: the mode is not ``avg``.
    """
    if mode != "avg":
        raise BackendError(f"the torch backend has no RoiAlign in mode {mode!r}", cure="use mode 'avg'")
    half = coordinate_transformation_mode == "half_pixel"
    counts = (output_height, output_width)
    rows, columns = _roi_matrices(rois, x.shape, counts, sampling_ratio, spatial_scale, half)
    return torch.matmul(torch.matmul(rows, x[images.long()]), columns.transpose(-1, -2))


@lowering("RoiAlignGrad", domain=DOMAIN, host=(3,))
def roi_align_grad(
    dy: Tensor,
    rois: Tensor,
    images: Tensor,
    shape: Any,
    *,
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    half_pixel: int = 1,
) -> Tensor:
    """The same matrices, transposed; summed into each roi's image."""
    counts = (output_height, output_width)
    rows, columns = _roi_matrices(rois, shape, counts, sampling_ratio, spatial_scale, bool(half_pixel))
    planes = torch.matmul(torch.matmul(rows.transpose(-1, -2), dy), columns)
    return torch.zeros(shape, dtype=dy.dtype, device=dy.device).index_add_(0, images.long(), planes)
