"""Parameters in the element type that autocast wants, kept between the steps of a gradient accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from onnxtrain.execute.torch.dtypes import torch_dtype
from onnxtrain.ir.graphs import Cast


class CastCache:
    """Casts of parameters, valid until any optimizer steps or the parameter is modified in place.

    Fused optimizers do not count their modifications in the tensors' versions, so both are watched.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        weak = weakref.ref(self)

        def forget(*_: object) -> None:
            cache = weak()
            if cache is not None:
                cache._kept.clear()

        weakref.finalize(self, register_optimizer_step_post_hook(forget).remove)

    def casts(self, wanted: Mapping[str, Cast], inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The wanted casts in order.

        Args:
            wanted: name of a graph input to the parameter and element type that it is.
            inputs: the parameters by name.
        """
        found: list[torch.Tensor] = []
        for name, cast in wanted.items():
            parameter = inputs[cast.parameter]
            kept = self._kept.get(name)
            if kept is None or kept[0] is not parameter or kept[1] != parameter._version:
                made = parameter.detach().to(torch_dtype(cast.dtype))
                kept = self._kept[name] = (parameter, parameter._version, made)
            found.append(kept[2])
        return found
