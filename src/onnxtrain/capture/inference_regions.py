"""``torch.inference_mode`` within a forward pass: the record says where gradients are switched, as of ``no_grad``.

torch records no switch of its own for it, and tensors without content cannot be made in it.
"""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.capture.substitutes import instead_of


@instead_of(torch.inference_mode, "__enter__")
def enter(self: torch.inference_mode) -> None:
    """Switch gradients off, or, where the mode is False, on: under ``no_grad`` too, as torch does."""
    self._gradients_before = torch._C.is_grad_enabled()  # type: ignore[attr-defined]
    torch.set_grad_enabled(not self.mode)


@instead_of(torch.inference_mode, "__exit__")
def leave(self: torch.inference_mode, *raised: Any) -> None:
    """Switch them as they were."""
    torch.set_grad_enabled(self._gradients_before)  # type: ignore[attr-defined]


__all__ = ["enter", "leave"]
