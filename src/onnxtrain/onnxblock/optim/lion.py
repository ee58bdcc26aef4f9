"""Steps of one size, in the direction of a running mean."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.onnxblock.optim.optimizer import ClipGradNorm, Optimizer, Slot, check_betas

Value = ir.Value


class Lion(Optimizer):
    """Sign of a mean of gradients and their running mean, decoupled weight decay (arXiv 2302.06675, algorithm 2)."""

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        self.betas = check_betas(betas)

    def update(self, slot: Slot) -> None:
        """Both means from one difference, so that the old running mean is read once."""
        op, p, g = self.op, slot.parameter, slot.gradient
        average, rate = slot.state("exp_avg"), self.rate_of(slot)
        difference = average - g
        step = op.Sign(g + difference * self.betas[0]) * rate
        slot.update(average, g + difference * self.betas[1])
        kept = p * (op.like(1.0, p) - rate * self.weight_decay) if self.decays(slot) else p
        slot.update(p, kept - step)
