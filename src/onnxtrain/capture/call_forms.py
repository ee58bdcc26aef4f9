"""The form of an operator's call: all that decides on what it returns for tensors without content.

An operator's result depends on nothing but its arguments and a few modes; calls of one form return tensors of the same
type, sizes and order in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

Form = tuple[Any, ...]
OF_FORM: set[Any] = set()  # operators of ours of which ``is_of_form`` holds
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONTENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class UnknownFormError(Exception):
    """An argument whose form says too little of what a call does with it."""


class _Differentiable(torch.autograd.Function):
    """Gives a tensor the history that a call's result has: it requires gradients, and is no leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("nobody differentiates a trace")


class Results:
    """What operators return for tensors without content where nothing is recorded: each form of a call is run once."""

    def __init__(self) -> None:
        self._known: dict[Form, Any] = {}

    def of(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """What a call returns."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        form = form_of(func, spec, leaves) if is_of_form(func) else None
        if form not in self._known:
            result = func(*args, **kwargs)
            if form is None or not _are_new(result, leaves):
                return result
            self._known[form] = result
        return pytree.tree_map(anew, self._known[form])


def _are_new(result: Any, given: Sequence[Any]) -> bool:
    """Whether a call returned tensors that have memory of their own, each its own, and sizes that were there before."""
    made = result if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(x, FakeTensor) and is_plain(x) for x in made) or unbacked_of(made) - unbacked_of(given):
        return False
    memories = [x.untyped_storage()._cdata for x in (*made, *given) if isinstance(x, torch.Tensor)]
    return len(set(memories)) == len(memories)


def is_of_form(func: Any) -> bool:
    """Whether what an operator returns depends on the form of its call alone, not on content; and it writes nothing."""
    looks = any(tag in func.tags for tag in _CONTENT)
    return (func.namespace == "aten" or func in OF_FORM) and not func._schema.is_mutable and not looks


def form_of(func: Any, spec: Any, leaves: Sequence[Any]) -> Form | None:
    """The form of a call with these leaves in that structure; None where it may depend on more."""
    try:
        form = (func, spec, *_modes(), *map(form_of_value, leaves))
        hash(form)
    except (UnknownFormError, TypeError):
        return None
    return form


def _modes() -> Form:
    """What an operator's result depends on besides its arguments."""
    device = torch.get_default_device().type
    casts = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in {"cpu", device})
    return torch.is_grad_enabled(), torch.get_default_dtype(), device, casts


def form_of_value(value: Any) -> Any:
    """What a call's result depends on of an argument; nothing is asked of sizes for it.

    Raises:
        UnknownFormError: it may depend on more.
    """
    if isinstance(value, FakeTensor):
        if not is_plain(value) or has_content(value.constant) or value.real_tensor is not None:
            raise UnknownFormError
        sizes = tuple(map(_number, (*value.shape, *value.stride(), value.storage_offset())))
        return (value.dtype, value.device, value.requires_grad, value.dim(), *sizes)
    if isinstance(value, NUMBERS):
        return _number(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    raise UnknownFormError


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether strides tell what a tensor shows of its memory; torch's lazy conjugates are marked beside them."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def has_content(constant: torch.Tensor | None) -> bool:
    """Whether a tensor's constant content is more than its form tells."""
    return constant is not None and constant.numel() != 0


def _number(value: Any) -> Any:
    return (type(value), value.node.expr) if isinstance(value, NUMBERS) else value


def unbacked_of(values: Sequence[Any]) -> set[Any]:
    """The symbols of sizes that depend on content, among values."""
    return set().union(*(free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor | torch.SymInt)))


def anew(like: FakeTensor) -> Any:
    """A tensor of the same form, with memory of its own."""
    with in_kernel_invocation_manager(like.fake_mode), torch.no_grad():
        inner = torch._lazy_clone(like)
    made = FakeTensor(like.fake_mode, inner, like.fake_device)
    return _differentiable(made) if like.requires_grad else made


def _differentiable(made: FakeTensor) -> FakeTensor:
    apply: Any = super(torch.autograd.Function, _Differentiable).apply  # the user's are recorded, this is not one
    return apply(_ANCHOR, [made])


_ANCHOR = torch.zeros((), requires_grad=True)
