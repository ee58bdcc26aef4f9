"""``torch.func`` as Dynamo has it in a graph: levels that are begun and ended, and calls that wrap tensors for them.

While a graph is recorded, derivatives are gradients of what was recorded, as those of ``torch.func`` in a module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onnxtrain.capture.function_transforms import own_copy
from onnxtrain.capture.inner_gradients import grad

Tensor = torch.Tensor
_LEVEL_AT = {"_add_batch_dim": 2, "_remove_batch_dim": 1, "_wrap_for_grad": 1, "_unwrap_for_grad": 1}
_MAPS = "_vmap_increment_nesting"
_SILENT = frozenset(
    (
        *("set_inplace_requires_grad_allowed", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
        *("_set_fwd_grad_enabled", "_enter_dual_level", "_exit_dual_level", "_maybe_load_decompositions"),
    )
)


@dataclasses.dataclass
class _Level:
    """A transform that has begun.

    Args:
        number: torch's; None where torch does not know of it.
        gradients: whether they were on before.
        duals: the arguments of a ``jvp``, with their tangents.
    """

    number: int | None
    gradients: bool
    duals: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)


class Transforms:
    """The transforms of a run of a graph that have begun and not ended."""

    def __init__(self) -> None:
        self._open: list[_Level] = []
        self._instead: dict[str, Callable[..., Any]] = {
            "_wrap_for_grad": lambda tensor, level: own_copy(tensor),
            "_set_tensor_requires_grad": lambda tensor: tensor,
            "_unwrap_for_grad": lambda tensor, level: tensor if self._open[-1].gradients else tensor.detach(),
            "_autograd_grad": _gradients,
            "_make_dual": self._dual,
            "_unpack_dual": self._parts,
            **dict.fromkeys(_SILENT, lambda *args, **kwargs: None),
        }

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a graph; NotImplemented where it is none of a transform's, or torch's own will do."""
        name = getattr(target, "__name__", "")
        is_recorded = get_proxy_mode() is not None
        if name.endswith("_increment_nesting"):
            return self._begin(target, args, is_recorded and name != _MAPS)
        if name.endswith("_decrement_nesting"):
            return self._end(target)
        if is_recorded and name in self._instead:
            return self._instead[name](*args, **kwargs)
        if name not in _LEVEL_AT:
            return NotImplemented
        at = _LEVEL_AT[name]
        args = (*args[:at], self._open[args[at] - 1].number, *args[at + 1 :])
        if name == "_remove_batch_dim":  # the axis comes first, and is moved then: a record would lose where it is
            return target(*args[:-1], 0).movedim(0, args[-1])
        return target(*args, **kwargs)

    def _begin(self, target: Callable[..., Any], args: tuple[Any, ...], is_ours: bool) -> Any:
        level = _Level(None if is_ours else target(*args), torch.is_grad_enabled())
        self._open.append(level)
        if is_ours:
            torch._C._set_grad_enabled(True)
        return level.number

    def _end(self, target: Callable[..., Any]) -> Any:
        level = self._open.pop()
        return torch._C._set_grad_enabled(level.gradients) if level.number is None else target()

    def _dual(self, tensor: Tensor, tangent: Tensor, *, level: int) -> Tensor:
        """An argument of a ``jvp``."""
        made = own_copy(tensor)
        self._open[-1].duals.append((made, tangent))
        return made

    def _parts(self, tensor: Tensor, *, level: int) -> tuple[Tensor, Tensor]:
        """A value and its derivative along the tangents: the gradient is linear in what it is computed from."""
        inputs, tangents = zip(*self._open[-1].duals, strict=True)
        seed = own_copy(torch.zeros_like(tensor))
        return tensor, _gradients(_gradients([tensor], inputs, [seed]), [seed], tangents)[0]


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor] | None = None, **named: Any
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        made = grad(outputs, inputs, seeds, create_graph=True, materialize_grads=True)
    return made if torch.is_grad_enabled() else tuple(x.detach() for x in made)
