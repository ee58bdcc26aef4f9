"""Libraries that a walk may lack, or has in a build for another torch."""

from __future__ import annotations

import importlib
import importlib.util

import torch


def load_torchvision() -> None:
    """Import torchvision where it is there, also a wheel for another build of torch.

    Such a wheel does not load its operators; no model that is walked calls them, but it wants to know what two of them
    take.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def versions(*names: str) -> str:
    """The installed ones of these packages with their versions."""
    found = [n for n in names if importlib.util.find_spec(n) is not None]
    return ", ".join(f"{n} {importlib.import_module(n).__version__}" for n in found)
