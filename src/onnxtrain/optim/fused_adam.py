"""Adam for many parameters in a few kernels: its formula with L2 regularization, Transformers' AdamW and PyTorch's."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from onnxtrain.errors import OptimizerError

FUSED = ("cpu", "cuda", "mps", "xpu")  # devices for which torch has one kernel for all parameters


class AdamWMode(enum.IntEnum):
    """What weight decay and ``eps`` mean in ``FusedAdam``.

    With ``m`` and ``v`` the running means of the gradient and of its square, ``c1 = 1 - beta1 ** t``,
    ``c2 = 1 - beta2 ** t`` and the weight decay ``d``:

    ``ADAM_L2REG``: ``p -= lr * (m / c1) / (sqrt(v / c2) + eps)``, with ``d * p`` added to the gradient first (Kingma
    and Ba, 2015).

    ``ADAMW_TRANSFORMERS``: ``p -= lr * sqrt(c2) / c1 * m / (sqrt(v) + eps)``, and then ``p -= lr * d * p`` (the AdamW
    that Transformers had).

    ``ADAMW_TORCH``: ``p -= lr * d * p``, and then as in the first without a decay (Loshchilov and Hutter, 2019; what
    ``torch.optim.AdamW`` does).
    """

    ADAM_L2REG = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


class FusedAdam(torch.optim.Optimizer):
    """Adam by torch's kernels for many parameters at once: fused where the device has them, else ``foreach``.

    Its formula is chosen by ``adam_w_mode``. The state of a parameter is ``step`` (int), ``exp_avg`` and
    ``exp_avg_sq``, of the shape and type of the parameter. A state of ``torch.optim.Adam`` or ``AdamW`` can be loaded,
    and one that counts steps by group.

    Args:
        params: parameters, or groups of them, as any optimizer of ``torch.optim`` takes them; real floating-point.
        lr: the learning rate.
        bias_correction: False leaves ``c1`` and ``c2`` out (they are 1).
        betas: decay rates of the running means, each in [0, 1).
        eps: what is added to the denominator.
        adam_w_mode: an ``AdamWMode``, or its number.
        weight_decay: ``d`` above.
        set_grad_none: whether ``zero_grad()`` lets gradients go; False fills them with zeros.

    Raises:
        OptimizerError: an argument is out of range; a parameter is complex, or a gradient sparse.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        if adam_w_mode not in list(AdamWMode):
            raise OptimizerError(f"adam_w_mode={adam_w_mode!r} is not known", cure="choose 0, 1 or 2 (AdamWMode)")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise OptimizerError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: one of them is out of range",
                cure="betas are in [0, 1), the others at least 0",
            )
        self.mode, self.set_grad_none = AdamWMode(adam_w_mode), set_grad_none
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let gradients go, or fill them with zeros where this or the optimizer's ``set_grad_none`` is False."""
        super().zero_grad(set_to_none and self.set_grad_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; where a group counts the steps, each of its parameters has done as many."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update({name: value for name, value in self.defaults.items() if name not in group})
            steps = group.pop("step", 0)
            for state in (self.state[p] for p in group["params"] if p in self.state):
                state["step"] = int(state.get("step", steps))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update each parameter that has a gradient; what the closure returns, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for group in self.param_groups:
            alike: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault((self._next_step(parameter), parameter.device), []).append(parameter)
            for (step, device), parameters in alike.items():
                self._update(group, step, device, parameters)
        return loss

    def _check(self) -> None:
        """Raise OptimizerError where there is what cannot be updated, before anything is."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.is_complex() or p.grad.layout is not torch.strided for p in parameters):
            raise OptimizerError(
                "FusedAdam updates real parameters whose gradients are dense",
                cure="use torch.optim.Adam for complex ones, torch.optim.SparseAdam or Embedding(sparse=False)",
            )

    def _next_step(self, parameter: torch.Tensor) -> int:
        state = self.state[parameter]
        if not state:
            state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] = int(state.get("step", 0)) + 1
        return state["step"]

    def _update(self, group: dict[str, Any], step: int, device: torch.device, parameters: list[torch.Tensor]) -> None:
        """Update parameters of one device for which it is the same step."""
        (beta1, beta2), eps, decay, lr = group["betas"], group["eps"], group["weight_decay"], group["lr"]
        is_transformers, is_fused = self.mode == AdamWMode.ADAMW_TRANSFORMERS, device.type in FUSED
        done = step - 1.0
        if not group["bias_correction"]:
            done = math.inf  # after infinitely many steps there is nothing to correct
        elif is_transformers:
            eps = eps / math.sqrt(1 - beta2**step)  # torch's kernels add it after the correction
        counts = torch.full((len(parameters),), done, dtype=torch.float32, device=device if is_fused else "cpu")
        adam(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            list(counts.unbind()),
            foreach=not is_fused,
            fused=is_fused,
            decoupled_weight_decay=self.mode == AdamWMode.ADAMW_TORCH,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=0.0 if is_transformers else decay,
            eps=eps,
            maximize=False,
        )
        if is_transformers and decay:
            torch._foreach_mul_(parameters, 1 - float(lr) * decay)


__all__ = ["AdamWMode", "FusedAdam"]
