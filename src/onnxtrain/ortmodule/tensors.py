"""What backends return, as tensors of torch."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.errors import UnsupportedDataError


def as_torch(value: Any) -> torch.Tensor:
    """A backend's tensor as torch's, without copying."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "__dlpack__"):
        made = torch.from_dlpack(value)
        is_bool = hasattr(value, "data_type") and value.data_type() == "tensor(bool)"
        return made.view(torch.bool) if is_bool else made
    raise UnsupportedDataError(f"the backend returned a {type(value).__name__}")
