"""ModuleWithLoss: a model and its loss as one module, so that the loss is part of the graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModuleWithLoss(torch.nn.Module):
    """A model that returns its training loss, computed as ``transformers.Trainer.compute_loss`` does.

    Parameters, buffers, submodules, mode, state and all other attributes are the model's own, under their own names.

    Args:
        module: the model.
        compute_loss_func: ``(outputs, labels) -> loss``, as Trainer takes it; called with ``num_items_in_batch`` too
            where a call gives it. None: the model's own loss.
        label_smoother: ``transformers.trainer_pt_utils.LabelSmoother`` or alike; used where there is no function.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        label_smoother: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        own["_wrapped"], own["_loss"], own["_smoother"] = module, compute_loss_func, label_smoother
        for name in _SHARED:
            own[name] = module.__dict__[name]

    @property
    def module(self) -> torch.nn.Module:
        """The original model: evaluate, generate and save with it."""
        return self.__dict__["_wrapped"]

    @property
    def config(self) -> Any:
        """The original model's configuration."""
        return self.module.config

    def forward(
        self,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of a batch, and the model's outputs where they are asked for.

        Args:
            inputs: the model's keyword arguments; a plain dict or a ``BatchEncoding``.
            return_outputs: return ``(loss, outputs)``.
            num_items_in_batch: what a summed loss is divided by; a tensor serves all counts from one graph.

        Raises:
            ValueError: the model returned no loss, and none is defined here.
        """
        given, labels = dict(inputs), None
        if self._loss is not None or self._smoother is not None:
            labels = given.pop("labels", None)
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = self.module(**given, **(counted if _accepts_count(self.module) else {}))
        loss = self._loss_of(outputs, labels, counted)
        return (loss, outputs) if return_outputs else loss

    def _loss_of(self, outputs: Any, labels: Any, counted: dict[str, Any]) -> torch.Tensor:
        """In the order of Trainer: the function, label smoothing, the model's own loss or first output."""
        if self._loss is not None:
            return self._loss(outputs, labels, **counted)
        if self._smoother is not None and labels is not None:
            shifted = {"shift_labels": True} if _is_causal(self.module) else {}
            return self._smoother(outputs, labels, **shifted, **counted)
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            raise ValueError(
                f"the model returned no loss, only {', '.join(outputs)}: give it labels, or ModuleWithLoss a function"
            )
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's mode."""
        wrapped = self.__dict__.get("_wrapped")
        return True if wrapped is None else wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_wrapped" in self.__dict__:
            self.module.training = mode

    def train(self, mode: bool = True) -> ModuleWithLoss:
        """Set the model's mode."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state, without any prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> ModuleWithLoss:
        self.module._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        if "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)


def _accepts_count(module: torch.nn.Module) -> bool:
    """Whether the model normalizes its own loss by a count, decided as Trainer decides it."""
    stated = getattr(module, "accepts_loss_kwargs", None)
    if stated is not None:
        return stated
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _is_causal(module: torch.nn.Module) -> bool:
    """Whether position i of the model's logits predicts label i + 1: known by its class, as in Trainer."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner: Any = getattr(module, "get_base_model", lambda: module)()  # of a PEFT model
    return inner._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
