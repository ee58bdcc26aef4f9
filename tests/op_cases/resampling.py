"""Resizing, and sampling at given places."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from op_cases.case import Case, Tensor, x


def _place(at: int, size: int, count: int, scale: float, mode: str, crop: tuple[float, float]) -> float:
    """The coordinate on the original of one element of the result, as ONNX's text says it."""
    if mode == "align_corners":
        return at * (size - 1) / (count - 1) if count > 1 else 0.0
    if mode == "asymmetric":
        return at / scale
    if mode == "tf_crop_and_resize":
        if count == 1:
            return 0.5 * sum(crop) * (size - 1)
        return crop[0] * (size - 1) + at * (crop[1] - crop[0]) * (size - 1) / (count - 1)
    if mode == "pytorch_half_pixel" and count == 1:
        return 0.0
    shift = size / 2 * (1 - count / (scale * size)) if mode == "half_pixel_symmetric" else 0.0
    return shift + (at + 0.5) / scale - 0.5


def _taps(at: float, kind: str, nearest: str, a: float, wide: float = 1.0) -> dict[int, float]:
    """The elements that one element of the result is made of, with their weights."""
    low = math.floor(at)
    if kind == "nearest":
        up, down = math.floor(at + 0.5), math.ceil(at - 0.5)
        rounded = {"round_prefer_floor": down, "round_prefer_ceil": up, "floor": low, "ceil": math.ceil(at)}
        return {rounded[nearest]: 1.0}
    reach = math.ceil(2 * wide) + 1
    distances = {i: abs(at - i) / wide for i in range(low - reach, low + reach + 1)}
    if kind == "linear":
        weights = {i: max(1 - d, 0.0) for i, d in distances.items()}
    else:
        weights = {i: _cubic(d, a) for i, d in distances.items()}
    return {i: w / sum(weights.values()) for i, w in weights.items()}


def _cubic(d: float, a: float) -> float:
    near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return near if d <= 1 else far if d < 2 else 0.0


def _resized(
    axes: dict[int, tuple[int, float]],
    kind: str,
    mode: str = "half_pixel",
    nearest: str = "round_prefer_floor",
    a: float = -0.75,
    exclude: bool = False,
    crops: dict[int, tuple[float, float]] | None = None,
    outside: float = 0.0,
    antialias: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Resize by loops over the elements of each axis: ``axes`` says their new sizes and factors."""

    def run(image: Tensor) -> Tensor:
        for axis, (count, scale) in axes.items():
            rows, size = [], image.shape[axis]
            for at in range(count):
                place = _place(at, size, count, scale, mode, (crops or {}).get(axis, (0.0, 1.0)))
                taps = _taps(place, kind, nearest, a, max(1 / scale, 1.0) if antialias else 1.0)
                inside = {i: w for i, w in taps.items() if 0 <= i < size} if exclude else taps
                total = sum(inside.values()) if exclude else 1.0
                parts = [image.select(axis, min(max(i, 0), size - 1)) * (w / total) for i, w in inside.items()]
                row = torch.stack(parts).sum(0)
                crop = mode == "tf_crop_and_resize"
                rows.append(torch.full_like(row, outside) if crop and not 0 <= place <= size - 1 else row)
            image = torch.stack(rows, axis)
        return image

    return run


def _resize() -> list[Case]:
    def scales(*content: float) -> np.ndarray:
        return np.array(content, np.float32)

    def way(coordinates: str, mode: str = "linear", **more: Any) -> dict[str, Any]:
        return {"coordinate_transformation_mode": coordinates, "mode": mode, **more}

    def interpolate(**options: Any) -> Callable[[Tensor], Tensor]:
        return lambda a: F.interpolate(a, **options)

    def to(*sizes: int) -> tuple[Any, ...]:
        return (image, None, None, np.array((2, 3, *sizes), np.int64))

    def by(*factors: float) -> tuple[Any, ...]:
        return (image, None, scales(1, 1, *factors))

    image = x(2, 3, 6, 5)
    old = way("asymmetric", "nearest", nearest_mode="floor")
    rows = [
        Case("Resize", by(2, 3), interpolate(scale_factor=(2, 3), mode="nearest"), old, label="nearest"),
        Case("Resize", to(9, 7), interpolate(size=(9, 7), mode="nearest"), old, label="nearest-sizes", static=(0,)),
        Case("Resize", to(6, 5), interpolate(size=(6, 5), mode="nearest"), old, label="as-it-is"),
        Case("Resize", by(2, 2), interpolate(scale_factor=2, mode="bilinear"), way("half_pixel"), label="linear"),
        Case("Resize", by(1.5, 2), interpolate(scale_factor=(1.5, 2), mode="bilinear", recompute_scale_factor=False),
             way("pytorch_half_pixel"), label="pytorch"),
        Case("Resize", to(4, 7), interpolate(size=(4, 7), mode="bilinear", align_corners=True), way("align_corners"),
             label="corners"),
        Case("Resize", (x(2, 3, 5), None, None, np.array([2, 3, 8])), interpolate(size=8, mode="linear"),
             way("half_pixel"), label="linear-1d", static=(0,)),
        Case("Resize", (x(1, 2, 3, 4, 5), None, scales(1, 1, 2, 2, 2)), interpolate(scale_factor=2, mode="trilinear"),
             way("half_pixel"), label="linear-3d"),
        Case("Resize", (x(1, 2, 3, 4, 5), None, scales(1, 1, 2, 2, 2)), interpolate(scale_factor=2), old, label="nearest-3d"),
        Case("Resize", by(2, 2), interpolate(scale_factor=2, mode="bicubic"), way("half_pixel", "cubic"), label="cubic"),
        Case("Resize", to(9, 7), interpolate(size=(9, 7), mode="bicubic", align_corners=True), way("align_corners", "cubic"),
             label="cubic-corners", static=(0,)),
        Case("Resize", to(4, 3), interpolate(size=(4, 3), mode="bilinear", antialias=True), way("half_pixel", antialias=1, exclude_outside=1),
             label="antialias", static=(0,)),
        Case("Resize", to(4, 3), interpolate(size=(4, 3), mode="bicubic", antialias=True),
             way("half_pixel", "cubic", antialias=1, cubic_coeff_a=-0.5, exclude_outside=1), label="cubic-antialias", static=(0,)),
        Case("Resize", to(4, 3), _resized({2: (4, 4 / 6), 3: (3, 0.6)}, "linear", antialias=True),
             way("half_pixel", antialias=1), label="antialias-clamped", static=(0,)),
        Case("Resize", by(2, 2), _resized({2: (12, 2.0), 3: (10, 2.0)}, "cubic", a=-0.5, exclude=True),
             way("half_pixel", "cubic", cubic_coeff_a=-0.5, exclude_outside=1), label="cubic-exclude"),
        Case("Resize", by(2, 2), _resized({2: (12, 2.0), 3: (10, 2.0)}, "linear", "asymmetric"), way("asymmetric"),
             label="asymmetric"),
        Case("Resize", by(0.75, 1.5), _resized({2: (4, 0.75), 3: (7, 1.5)}, "linear", "half_pixel_symmetric"),
             way("half_pixel_symmetric"), label="symmetric"),
        Case("Resize", to(1, 7), _resized({2: (1, 1 / 6), 3: (7, 1.4)}, "linear", "pytorch_half_pixel"),
             way("pytorch_half_pixel"), label="pytorch-one"),
        Case("Resize", (image, np.array([0, 0, 0.25, -0.25, 1, 1, 0.75, 0.5], np.float32), None, np.array([2, 3, 4, 6])),
             _resized({2: (4, 0.0), 3: (6, 0.0)}, "linear", "tf_crop_and_resize", crops={2: (0.25, 0.75), 3: (-0.25, 0.5)},
                      outside=7.0),
             way("tf_crop_and_resize", extrapolation_value=7.0), label="crop"),
        Case("Resize", (image, None, None, np.array([7, 9])), _resized({2: (7, 7 / 6), 3: (6, 7 / 6)}, "linear"),
             way("half_pixel", axes=[2, 3], keep_aspect_ratio_policy="not_larger"), label="not-larger"),
        Case("Resize", (image, None, None, np.array([7, 9])), _resized({2: (11, 1.8), 3: (9, 1.8)}, "linear"),
             way("half_pixel", axes=[2, 3], keep_aspect_ratio_policy="not_smaller"), label="not-smaller"),
        Case("Resize", (x(2, 6, 5, 3), None, scales(2, 2)), _resized({1: (12, 2.0), 2: (10, 2.0)}, "linear"),
             way("half_pixel", axes=[1, 2]), label="channels-last"),
    ]  # fmt: skip
    for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        for mode in ("half_pixel", "align_corners", "asymmetric"):
            to_sizes = _resized({2: (4, 4 / 6), 3: (8, 1.6)}, "nearest", mode, nearest)
            attributes = way(mode, "nearest", nearest_mode=nearest)
            rows.append(Case("Resize", to(4, 8), to_sizes, attributes, label=f"{nearest}-{mode}", static=(0,)))
    return rows


def _sampling() -> list[Case]:
    def sample(mode: str, padding: str, corners: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, g: F.grid_sample(a, g, mode, padding, corners)

    def ways(mode: str, padding: str = "zeros", corners: int = 0) -> dict[str, Any]:
        return {"mode": mode, "padding_mode": padding, "align_corners": corners}

    image, grid = x(2, 3, 6, 5), x(2, 4, 7, 2, low=-1.4, high=1.4)
    volume, places = x(2, 3, 4, 3, 5), x(2, 3, 2, 4, 3, low=-1.4, high=1.4)
    names = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
    rows = [
        Case("GridSample", (image, grid), sample(names[mode], padding, bool(corners)), ways(mode, padding, corners),
             label=f"{mode}-{padding}-{corners}")
        for mode in names for padding in ("zeros", "border", "reflection") for corners in (0, 1)
    ]  # fmt: skip
    rows += [
        Case("GridSample", (volume, places), sample(names[mode], padding, bool(corners)), ways(mode, padding, corners),
             label=f"3d-{mode}-{padding}-{corners}")
        for mode in ("linear", "nearest") for padding, corners in (("zeros", 0), ("border", 1), ("reflection", 0))
    ]  # fmt: skip
    for corners in (0, 1):
        flat, deep = np.array([2, 3, 4, 5]), np.array([2, 3, 2, 4, 3])
        rows += [
            Case("AffineGrid", (x(2, size.size - 2, size.size - 1), size),
                 lambda t, size=size, corners=corners: F.affine_grid(t, size.tolist(), align_corners=bool(corners)),
                 {"align_corners": corners}, label=f"{size.size - 2}d-{corners}")
            for size in (flat, deep)
        ]  # fmt: skip
    return rows


def _aligned(height: int, width: int, ratio: int, scale: float, half: bool) -> Callable[..., Tensor]:
    """RoiAlign by loops over regions, bins and samples."""

    def sample(image: Tensor, y: float, x: float) -> Tensor:
        if not (-1 <= y <= image.shape[1] and -1 <= x <= image.shape[2]):
            return image[:, 0, 0] * 0.0
        y, x = (min(max(v, 0.0), n - 1) for v, n in zip((y, x), image.shape[1:], strict=True))
        corners = [(i, j) for i in (int(y), int(y) + 1) for j in (int(x), int(x) + 1)]
        inside = [(i, j) for i, j in corners if i < image.shape[1] and j < image.shape[2]]
        return torch.stack([image[:, i, j] * (1 - abs(y - i)) * (1 - abs(x - j)) for i, j in inside]).sum(0)

    def run(a: Tensor) -> Tensor:
        made = []
        for (x0, y0, x1, y1), image in zip((REGIONS * scale - 0.5 * half).tolist(), OWNERS.tolist(), strict=True):
            tall, wide = ((v if half else max(v, 1.0)) for v in (y1 - y0, x1 - x0))
            tall, wide = tall / height, wide / width
            n, m = (ratio or math.ceil(v) for v in (tall, wide))
            for i in range(height):
                for j in range(width):
                    parts = [
                        sample(a[image], y0 + (i + (p + 0.5) / n) * tall, x0 + (j + (q + 0.5) / m) * wide)
                        for p in range(n) for q in range(m)
                    ]  # fmt: skip
                    made.append(torch.stack(parts).mean(0))
        return torch.stack(made).reshape(len(OWNERS), height, width, -1).movedim(-1, 1)

    return run


REGIONS = np.array([[0.5, 1.0, 9.0, 6.5], [-5.0, -3.0, 4.0, 30.0], [2.0, 2.5, 3.0, 3.0]])
OWNERS = np.array([1, 0, 1])


def _regions() -> list[Case]:
    given = (x(2, 3, 6, 7), REGIONS, OWNERS)
    return [
        Case("RoiAlign", given, _aligned(2, 3, 0, 0.5, True), {"output_height": 2, "output_width": 3, "spatial_scale": 0.5}),
        Case("RoiAlign", given, _aligned(3, 2, 2, 1.0, False),
             {"output_height": 3, "output_width": 2, "sampling_ratio": 2,
              "coordinate_transformation_mode": "output_half_pixel"}, label="sampled"),
    ]  # fmt: skip


CASES = [*_resize(), *_sampling(), *_regions()]
