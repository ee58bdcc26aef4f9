"""Running means of squares, kept for rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.ir import shapes
from onnxtrain.number_ranges import check_number, check_pair
from onnxtrain.onnxblock.optim.optimizer import ClipGradNorm, Optimizer, Slot

Value = ir.Value


class Adafactor(Optimizer):
    """The formula of torch.optim.Adafactor: squares of gradients are kept as means of rows and of columns.

    Args:
        beta2_decay: exponent of the step that the mean forgets with.
        eps: least root of a mean (None: that of float32), and least size of a parameter.
        d: largest size of an update.
        weight_decay: decoupled.
        clip_grad: how gradients are clipped.
        no_decay: patterns of names of parameters that do not decay.
    """

    def __init__(
        self,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(clip_grad=clip_grad, weight_decay=weight_decay, no_decay=no_decay)
        root, size = check_pair("eps", eps)
        self.beta2_decay = check_number("beta2_decay", beta2_decay, most=0)
        self.d, self.least_size = check_number("d", d, least=1), check_number("eps", size, least=0)
        self.least_root = 2.0**-23 if root is None else check_number("eps", root, least=0)

    def prepare(self, step: Value) -> None:
        """How much of a new square counts, and the rate that falls with the step."""
        op = self.op
        self.share = op.Pow(step, op.like(self.beta2_decay, step))
        self.relative = op.Min(self.rate, op.Reciprocal(op.Sqrt(step)))

    def update(self, slot: Slot) -> None:
        """Divide the gradient by the root of its mean square, bound that, and scale it by the parameter's size."""
        op, p, g = self.op, slot.parameter, slot.gradient
        size = float(_count(p))
        norm = op.ReduceL2(p, keepdims=0) * size**-0.5
        rate = op.Max(norm, op.like(self.least_size, p)) * self.scalar(self.relative, slot)
        estimate = self._factored(slot) if shapes.rank(p) > 1 else self._mean(slot, slot.state("variance"), g * g)
        update = g / op.Sqrt(op.Max(estimate, op.like(self.least_root**2, p)))
        bound = op.Max(op.ReduceL2(update, keepdims=0) * (size**-0.5 / self.d), op.like(1.0, p))
        # the decay takes part of the old value, which its size is read from as well: it waits for the update
        kept = p * (op.like(1.0, p) - self.rate_of(slot) * self.weight_decay) if self.decays(slot) else p
        slot.update(p, kept - update * (rate / bound))

    def _mean(self, slot: Slot, old: Value, new: Value) -> Value:
        """The running mean of squares."""
        share = self.scalar(self.share, slot)
        made = old + (new - old) * share
        slot.update(old, made)
        return made

    def _factored(self, slot: Slot) -> Value:
        """The mean square of each element from those of its row and its column."""
        op, g = self.op, slot.gradient
        *lead, rows, columns = (int(d) for d in shapes.known_dims(slot.parameter))  # type: ignore[arg-type]
        row = slot.state("row_var", [*lead, rows, 1])
        column = slot.state("col_var", [*lead, 1, columns])
        square = g * g
        row = self._mean(slot, row, op.ReduceMean(square, op.ints(-1), keepdims=1))
        column = self._mean(slot, column, op.ReduceMean(square, op.ints(-2), keepdims=1))
        mean = op.ReduceMean(row, op.ints(-2), keepdims=1)
        return row * column / op.Max(mean, op.like(self.least_root, g))


def _count(value: Value) -> int:
    found = shapes.product(shapes.known_dims(value))
    assert isinstance(found, int), "parameters have sizes that are numbers"
    return max(found, 1)
