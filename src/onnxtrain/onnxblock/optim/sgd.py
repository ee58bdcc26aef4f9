"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.number_ranges import check_number
from onnxtrain.onnxblock.optim.optimizer import ClipGradNorm, Optimizer, Slot

Value = ir.Value


class SGD(Optimizer):
    """Stochastic gradient descent, the formula of torch.optim.SGD.

    Args:
        momentum, dampening, nesterov: as there.
        weight_decay: added to the gradient, times the parameter.
    """

    def __init__(
        self,
        clip_grad: ClipGradNorm | None = None,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        self.momentum = check_number("momentum", momentum, least=0)
        self.dampening, self.nesterov = check_number("dampening", dampening), nesterov
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArtifactError("Nesterov's momentum needs a momentum and no dampening", cure="set momentum=0.9")

    def prepare(self, step: Value) -> None:
        """The gradient counts whole in the first step, whatever the dampening."""
        op = self.op
        first = op.Equal(step, op.like(1.0, step))
        self.share = op.Where(first, op.like(1.0, step), op.like(1.0 - self.dampening, step))

    def update(self, slot: Slot) -> None:
        """``p - rate · direction``."""
        p, g = slot.parameter, slot.gradient
        if self.decays(slot):
            g = g + p * self.weight_decay
        if self.momentum:
            buffer = slot.state("momentum_buffer")
            new = buffer * self.momentum + (g * self.scalar(self.share, slot) if self.dampening else g)
            slot.update(buffer, new)
            g = g + new * self.momentum if self.nesterov else new
        slot.update(p, p - g * self.rate_of(slot))
