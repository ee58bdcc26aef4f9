"""Words of ONNX's attributes as the numbers that bodies of our functions compare: a body cannot compare text."""

from __future__ import annotations

RESIZE_MODES = {"nearest": 0, "linear": 1, "cubic": 2}
COORDINATES = {
    "half_pixel": 0,
    "pytorch_half_pixel": 1,
    "asymmetric": 2,
    "align_corners": 3,
    "tf_crop_and_resize": 4,
    "half_pixel_symmetric": 5,
}
NEAREST = {"round_prefer_floor": 0, "round_prefer_ceil": 1, "floor": 2, "ceil": 3}
GRID_MODES = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
