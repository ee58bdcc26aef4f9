"""Products that autocast leaves alone, of tensors that it gave two types: eager PyTorch multiplies them as they are.

They are written in functions that bring their operands to one type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.capture.substitutes import substitute

Tensor = torch.Tensor


def _of_two_types(written: Callable[..., Tensor], *functions: Callable[..., Any], device: str = "") -> None:
    """Let calls under autocast be calls of another function.

    Args:
        written: the function in others.
        functions: those it takes the place of.
        device: the only type of device where they are left alone; empty for all.
    """

    @substitute(*functions)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        kind = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        applies = torch.is_autocast_enabled(kind) and device in ("", kind)
        return written(*args, **kwargs) if applies else NotImplemented


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = (input1[..., None, :, None] * weight * input2[..., None, None, :]).sum((-2, -1))
    return made if bias is None else made + bias


_of_two_types(lambda input, tensor: (input * tensor).sum(), torch.dot, Tensor.dot)
_of_two_types(lambda input, other: (input.conj() * other).sum(), torch.vdot, Tensor.vdot)
_of_two_types(lambda input, vec: (input * vec).sum(-1), torch.mv, Tensor.mv, device="cpu")
_of_two_types(_bilinear, F.bilinear)
