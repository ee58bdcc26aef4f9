"""A step of the graph beside the same step of something else, tensor by tensor."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping

import torch

from onnxtrain.errors import VerificationError

_RELATIVE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_NOISE = 1e-2  # of the relative tolerance: what counts as rounding noise beside the largest tensor of the same kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor of a step, graph against eager.

    Args:
        kind: ``"loss"``, ``"output"``, ``"gradient"`` or ``"buffer"``.
        name: the tensor's name.
        error: largest absolute difference.
        scale: largest absolute value in eager.
        tolerance: largest difference that passes.
    """

    kind: str
    name: str
    error: float
    scale: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance (NaN is not)."""
        return self.error <= self.tolerance

    @property
    def badness(self) -> float:
        """The difference in units of the tolerance."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0.0 and self.error == self.error else float("inf")

    def __str__(self) -> str:
        limits = f"tolerance {self.tolerance:.2e}, largest value {self.scale:.2e}"
        return f"{self.kind} {self.name}: error {self.error:.2e} ({limits})"


@dataclasses.dataclass
class Report:
    """All comparisons of one step.

    Args:
        comparisons: one for each tensor.
    """

    comparisons: list[Comparison]

    @property
    def worst(self) -> Comparison:
        """The comparison farthest from, or nearest to, its tolerance."""
        return max(self.comparisons, key=lambda c: c.badness)

    def raise_if_failed(self) -> None:
        """Raise VerificationError where a tensor is out of tolerance; the message names the worst ones."""
        failed = sorted((c for c in self.comparisons if not c.passed), key=lambda c: -c.badness)
        if failed:
            rows = "\n".join(f"    {c}" for c in failed[:10])
            raise VerificationError(
                f"{len(failed)} of {len(self.comparisons)} tensors differ from eager PyTorch\n{rows}",
                cure="report it with the module; train with eager PyTorch until it is resolved",
            )

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(c.kind for c in self.comparisons))
        rows = [f"{kind}: {sum(c.kind == kind for c in self.comparisons)} compared" for kind in kinds]
        return "\n".join([*rows, f"worst: {self.worst}"])


def compare(kind: str, pairs: Mapping[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> list[Comparison]:
    """Compare tensors of one kind; None stands for zeros, as eager leaves out gradients that are zero."""
    scales = {name: _largest(eager) for name, (_, eager) in pairs.items()}
    largest = max((s for s in scales.values() if s == s), default=0.0)
    made = []
    for name, (ours, eager) in pairs.items():
        model = eager if eager is not None else ours
        if model is None:
            continue
        relative = _RELATIVE.get(model.dtype, 0.0)
        noise = relative * _NOISE * largest if kind == "gradient" else relative * _NOISE
        made.append(Comparison(kind, name, _difference(ours, eager), scales[name], relative * scales[name] + noise))
    return made


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.detach().double().abs().max().item()


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return _largest(a if b is None else b)
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    x, y = a.detach().double(), b.detach().double()
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (x - y).abs()).max().item()


class Reference(abc.ABC):
    """The other side of one step.

    Attributes:
        report: what was compared so far.
    """

    report: Report

    @abc.abstractmethod
    def check_forward(self, outputs: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
        """Compare outputs and buffer updates.

        Args:
            outputs: the outputs that were computed, by name.
            zeros: for those that are zeros beside some rows, these rows, counted over the first two axes.

        Raises:
            VerificationError: one is out of tolerance.
        """

    @abc.abstractmethod
    def check_backward(
        self, dys: Mapping[str, torch.Tensor | None], gradients: Mapping[str, torch.Tensor | None]
    ) -> None:
        """Compare gradients for the same gradients of the outputs.

        Raises:
            VerificationError: one is out of tolerance.
        """
