"""Parameters in the element type that autocast wants, kept between the steps of a gradient accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir.graphs import Cast

_Mark = tuple[int, int] | None  # where a tensor lies, and how often it was written to


class _Kept(NamedTuple):
    """A cast, and what tells whether its parameter is still the same."""

    parameter: torch.Tensor
    content: _Mark
    gradient: _Mark
    cast: torch.Tensor


class CastCache:
    """Casts of parameters that a torch optimizer steps, valid while their gradients are accumulated.

    What is written through ``p.data`` is not counted in the parameter's version, nor is what fused optimizers write. A
    cast is therefore kept only where nothing but a backward pass came between two forward passes, as far as gradients
    tell; parameters that no ``torch.optim.Optimizer`` has stepped, such as those of a target network, are cast each
    time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._stepped: dict[str, torch.Tensor] = {}
        weak = weakref.ref(self)

        def forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            cache = weak()
            if cache is not None:
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                cache._stepped |= {n: k.parameter for n, k in cache._kept.items() if id(k.parameter) in own}
                cache._kept.clear()

        weakref.finalize(self, register_optimizer_step_post_hook(forget).remove)

    def casts(self, wanted: Mapping[str, Cast], inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The wanted casts in order.

        Args:
            wanted: name of a graph input to the parameter and element type that it is.
            inputs: the parameters by name.
        """
        return [self._cast(name, inputs[cast.parameter], torch_dtype(cast.dtype)) for name, cast in wanted.items()]

    def _cast(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept, content = self._kept.get(name), _mark(parameter)
        gradient = _mark(parameter.grad) if parameter.is_leaf else None
        is_same = kept is not None and kept.parameter is parameter and kept.content == content
        if kept is None or not is_same or not self._accumulates(name, kept, gradient):
            kept = _Kept(parameter, content, gradient, parameter.detach().to(dtype))
        self._kept[name] = kept._replace(gradient=gradient)
        return kept.cast

    def _accumulates(self, name: str, kept: _Kept, gradient: _Mark) -> bool:
        """Whether a backward pass added to the gradient since the parameter was cast, and nothing else changed it."""
        if gradient is None or self._stepped.get(name) is not kept.parameter:
            return False
        return kept.gradient is None or gradient == (kept.gradient[0], kept.gradient[1] + 1)


def _mark(tensor: torch.Tensor | None) -> _Mark:
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor._version
