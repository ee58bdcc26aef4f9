"""What a loss is multiplied by before the backward pass, and how that changes when gradients overflow.

In a loop of one's own::

    scaler = DynamicLossScaler()
    (model(batch) * scaler.loss_scale).backward()
    all_finite = all(p.grad.isfinite().all() for p in model.parameters())
    if all_finite:
        ...  # divide the gradients by scaler.loss_scale, and update
    scaler.update(all_finite)

``torch.amp.GradScaler`` does all of it, and is what a new script uses; these are for one that was written with them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from onnxtrain.errors import OptimizerError


@runtime_checkable
class StepInfo(Protocol):
    """What a trainer knows of a step."""

    all_finite: bool


class LossScaler:
    """A scale that stays what it is.

    Args:
        loss_scale: the factor, above 0.

    Raises:
        OptimizerError: the factor is not above 0.
    """

    def __init__(self, loss_scale: float = 1.0) -> None:
        if not loss_scale > 0:
            raise OptimizerError(f"loss_scale={loss_scale} is no factor", cure="choose a positive number")
        self._initial = self.loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Begin anew."""
        self.loss_scale = self._initial

    def update(self, step: bool | StepInfo) -> float:
        """The factor for the next step, when it is known whether all gradients of this one are finite.

        Args:
            step: whether they are, or what has it as ``all_finite``.
        """
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """The numbers that a checkpoint needs."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict()`` was called."""
        vars(self).update({name: state[name] for name in vars(self)})


class DynamicLossScaler(LossScaler):
    """A scale that is halved when a gradient overflows, and doubled after enough steps without that.

    Args:
        automatic_update: False keeps the factor as it is.
        loss_scale: the first factor.
        up_scale_window: after how many finite steps in a row it is doubled.
        min_loss_scale: the least it may be.
        max_loss_scale: the most it may be.

    Raises:
        OptimizerError: not ``0 < min_loss_scale <= loss_scale <= max_loss_scale``, or a window below 1.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = 2.0**16,
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        super().__init__(loss_scale)
        if not 0 < min_loss_scale <= loss_scale <= max_loss_scale or up_scale_window < 1:
            raise OptimizerError(
                f"loss_scale={loss_scale} of {min_loss_scale} to {max_loss_scale}, up_scale_window={up_scale_window}: "
                "one of them is out of range",
                cure="0 < min_loss_scale <= loss_scale <= max_loss_scale, and a window of at least one step",
            )
        self.automatic_update, self.up_scale_window = automatic_update, up_scale_window
        self.min_loss_scale, self.max_loss_scale = float(min_loss_scale), float(max_loss_scale)
        self._stable_steps = 0

    def reset(self) -> None:
        """Begin anew: the first factor, and no finite steps yet."""
        super().reset()
        self._stable_steps = 0

    def update(self, step: bool | StepInfo) -> float:
        """The factor for the next step: half if a gradient is infinite or NaN, twice after enough that were not."""
        if not self.automatic_update:
            return self.loss_scale
        if step.all_finite if isinstance(step, StepInfo) else bool(step):
            self._stable_steps += 1
            if self._stable_steps >= self.up_scale_window:
                self.loss_scale, self._stable_steps = min(self.max_loss_scale, self.loss_scale * 2), 0
        else:
            self.loss_scale, self._stable_steps = max(self.min_loss_scale, self.loss_scale / 2), 0
        return self.loss_scale


__all__ = ["DynamicLossScaler", "LossScaler", "StepInfo"]
