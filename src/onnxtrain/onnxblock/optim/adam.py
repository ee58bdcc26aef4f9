"""Optimizers with running means of gradients and of their squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.ir import shapes
from onnxtrain.number_ranges import check_number
from onnxtrain.onnxblock.optim.optimizer import ClipGradNorm, Optimizer, Slot, check_betas

Value = ir.Value


class _Moments(Optimizer):
    """Optimizers with running means of gradients and of their squares."""

    def __init__(
        self, bias_correction: bool, betas: tuple[float, float], eps: float, weight_decay: float, **given: Any
    ) -> None:
        super().__init__(weight_decay=weight_decay, **given)
        self.bias_correction, self.betas = bias_correction, check_betas(betas)
        self.eps = check_number("eps", eps, least=0)

    def prepare(self, step: Value) -> None:
        """Bias corrections ``1 - βᵗ``, and the rate that takes account of both.

        They are computed in double: in single precision ``1 - 0.999`` is wrong in its fifth digit.
        """
        op = self.op
        self.root: Value | None = None
        self.corrected = self.rate
        if self.bias_correction:
            exact = op.Cast(step, to=int(ir.DataType.DOUBLE))
            powers = (op.Pow(op.like(b, exact), exact) for b in self.betas)
            first, second = (op.cast(op.like(1.0, exact) - p, shapes.dtype_of(step)) for p in powers)
            self.root = op.Sqrt(second)
            self.corrected = self.rate * self.root / first

    def moments(self, slot: Slot, gradient: Value) -> tuple[Value, Value]:
        """The new running means of the gradient and of its square."""
        average, square = slot.state("exp_avg"), slot.state("exp_avg_sq")
        first, second = self.betas
        new = average * first + gradient * (1.0 - first)
        new_square = square * second + gradient * gradient * (1.0 - second)
        slot.update(average, new)
        slot.update(square, new_square)
        return new, new_square


class Adam(_Moments):
    """The formula of torch.optim.Adam: weight decay is part of the gradient."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(bias_correction, betas, eps, weight_decay, clip_grad=clip_grad, no_decay=no_decay)

    def update(self, slot: Slot) -> None:
        """``p - rate·√c₂/c₁ · m / (√v + ε·√c₂)`` with bias corrections c: torch's formula times √c₂ / √c₂."""
        p, g = slot.parameter, slot.gradient
        if self.decays(slot):
            g = g + p * self.weight_decay
        slot.update(p, p - self.direction(slot, g))

    def direction(self, slot: Slot, gradient: Value) -> Value:
        """What is subtracted from the parameter."""
        op = self.op
        average, square = self.moments(slot, gradient)
        eps = op.like(self.eps, average) if self.root is None else self.scalar(self.root, slot) * self.eps
        return average / (op.Sqrt(square) + eps) * self.scalar(self.corrected, slot)


class AdamW(Adam):
    """Adam with decoupled weight decay, in one of two formulas.

    Args:
        bias_correction: divide the running means by ``1 - βᵗ``.
        betas: β of both running means.
        eps: added to the root.
        weight_decay: factor of ``rate · p``.
        clip_grad: how gradients are clipped.
        formula: ``"huggingface"`` adds eps before the bias correction and decays after the update, as
            onnxruntime-training did; ``"torch"`` is torch.optim.AdamW, whose eps is 1e-8 and weight_decay 1e-2.
        no_decay: patterns of names of parameters that do not decay.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        formula: str = "huggingface",
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(bias_correction, betas, eps, weight_decay, clip_grad, no_decay=no_decay)
        if formula not in ("huggingface", "torch"):
            raise ArtifactError(f"formula={formula!r} is not known", cure="choose 'huggingface' or 'torch'")
        self.formula = formula

    def update(self, slot: Slot) -> None:
        """The step and the decay, in the order of the formula."""
        p, op = slot.parameter, self.op
        if self.formula == "torch":
            step = self.direction(slot, slot.gradient)
            slot.update(p, (p * self._kept(slot) if self.decays(slot) else p) - step)
            return
        average, square = self.moments(slot, slot.gradient)
        new = p - average / (op.Sqrt(square) + self.eps) * self.scalar(self.corrected, slot)
        slot.update(p, new * self._kept(slot) if self.decays(slot) else new)

    def _kept(self, slot: Slot) -> Value:
        """``1 - rate · weight_decay``."""
        return self.op.like(1.0, slot.parameter) - self.rate_of(slot) * self.weight_decay
