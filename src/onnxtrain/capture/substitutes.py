"""Calls that torch.export cannot record, or would make depend on sizes, replaced by equal ones while it traces.

The table maps functions of torch to functions that take the same arguments and return NotImplemented for calls that
are to be left alone. What torch writes in Python and asks nobody about is in a list of its own (``UNSEEN``).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from onnxtrain.capture import packed_sequences
from onnxtrain.capture.argument_names import own_names
from onnxtrain.capture.assertions import expected, tell
from onnxtrain.capture.embeddings import shortened
from onnxtrain.capture.found_elsewhere import FoundElsewhere
from onnxtrain.capture.hidden_changes import (
    SET_DATA,
    HiddenChanges,
    history,
    is_made_in_call,
    is_uncounted,
    is_view_in_place,
    refuse_freezing,
    refuse_unnoticed,
    tensors_written_by,
    uncounted,
    write,
)
from onnxtrain.capture.host_random import of_everybody
from onnxtrain.capture.library_layers import forwards
from onnxtrain.capture.lowering.records import memory_of
from onnxtrain.capture.parts_at import PART_AT
from onnxtrain.capture.replaced import replaced
from onnxtrain.capture.source_lines import is_users
from onnxtrain.errors import CaptureError

Tensor = torch.Tensor
_DETACH = frozenset((torch.detach, Tensor.detach, Tensor.data.__get__))  # type: ignore[attr-defined]
_FREEZING = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]
SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {}


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """What the caller says of a mask of ``nn.Transformer``; torch compares it with a causal one, for a fast kernel."""
    return is_causal is True


_ONE_HOT = F.one_hot


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """With as many classes as there are, which torch looks for in the tensor."""
    return _ONE_HOT(tensor, int(tensor.max()) + 1 if num_classes == -1 else num_classes)


_UNSEEN: tuple[tuple[Any, str, Any], ...] = (
    (torch._VF, "_pack_padded_sequence", packed_sequences.pack),
    (torch._VF, "_pad_packed_sequence", packed_sequences.pad),
    (torch.nn.RNNBase, "get_expected_hidden_size", packed_sequences.hidden_size),
    (torch.nn.LSTM, "get_expected_cell_size", packed_sequences.cell_size),
    (torch.nn.modules.transformer, "_detect_is_causal_mask", _is_causal),
    (F, "one_hot", _one_hot),
    (torch.distributions.Distribution, "_validate_args", False),  # whether parameters and samples are looked at
)
UNSEEN: list[tuple[Any, str, Any]] = [
    entry for entry in _UNSEEN if hasattr(*entry[:2])
]  # neither name is promised by torch

_INSTEAD: list[tuple[Any, str, Any]] = []


def unseen() -> contextlib.AbstractContextManager[None]:
    """Within it torch does not look at tensors where it asks nobody (``UNSEEN``)."""
    return replaced(*UNSEEN)


class Substitutes(TorchFunctionMode):
    """Within it the functions of the table are replaced; changes that autograd does not see are seen.

    Args:
        elsewhere: the module's tensors, for code that keeps them elsewhere than on the module.
        hidden: what is changed behind autograd's back.
    """

    def __init__(self, elsewhere: FoundElsewhere, hidden: HiddenChanges) -> None:
        super().__init__()
        self._elsewhere, self._hidden = elsewhere, hidden

    def __enter__(self) -> Substitutes:
        self._unseen = replaced(*UNSEEN, *_INSTEAD, *forwards())
        self._unseen.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._unseen.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(self._elsewhere.now(func, args))
        kwargs = dict(zip(kwargs, self._elsewhere.now(func, kwargs.values()), strict=True)) if kwargs else {}
        kwargs = of_everybody(kwargs) if kwargs else kwargs
        if func in _FREEZING:
            refuse_freezing(args[0], *args[1:], **kwargs)
        if (cut := shortened(func, args, kwargs)) is not None:
            weight, content, kwargs = cut
            args = ()
            with torch.no_grad():
                self.__torch_function__(Tensor.copy_, (), (weight, content))
        self._elsewhere.refuse_written(written := tensors_written_by(func, args, kwargs))
        if func == SET_DATA:
            return self._hidden.replace_data(args[0], args[1])
        if behind := [t for w in written for t in self._hidden.behind(w, func.__name__)]:
            return write(behind, lambda: _call(func, written, args, kwargs))
        before = [(w, history(w)) for w in written if not (_is_unwatched(func, w) or self._hidden.is_known(w))]
        made = _call(func, written, args, kwargs)
        self._elsewhere.made(made, args, is_detached := _detaches(func, args, kwargs))
        refuse_unnoticed(before, func.__name__)
        if is_detached:
            self._hidden.detach(args[0])
        return made


def _detaches(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function gives the memory of its argument without gradient: as another type too."""
    return func in _DETACH or (func is Tensor.view and _is_type(*args[1:], **kwargs))


def _is_type(size: Any = None, *others: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor is to be looked at as another type."""
    return dtype is not None or isinstance(size, torch.dtype)


def _call(func: Callable[..., Any], written: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch gives, or what takes its place; what it writes to has another version then."""
    substitute = SUBSTITUTES.get(func)
    made = NotImplemented if substitute is None else substitute(*args, **own_names(func, substitute, kwargs))
    made = func(*args, **kwargs) if made is NotImplemented else made
    if is_uncounted(func):
        torch.autograd.graph.increment_version(written)
    return made


def _is_unwatched(func: Callable[..., Any], changed: Tensor) -> bool:
    """Whether autograd has nothing to notice of a change."""
    return is_view_in_place(func) or is_made_in_call(changed)


def substitute(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what takes the place of functions of torch.

    Raises:
        ValueError: one of them has a substitute already.
    """

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            if function in SUBSTITUTES:
                raise ValueError(f"the substitute of {function} is registered twice")
            SUBSTITUTES[function] = made
        return made

    return register


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what takes the place of a function of torch that asks no mode; nothing where torch has none."""

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(owner, name):
            _INSTEAD.append((owner, name, made))
        return made

    return register


def of_nothing(sizes: Sequence[Any]) -> bool:
    """Whether tensors of these sizes are known to have no elements; a symbol is not known to be 0."""
    return any(isinstance(size, int) and size == 0 for size in sizes)


@substitute(F.dropout)
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The input itself where nothing is dropped, so that what is written to one is written to the other."""
    return NotImplemented if training and p != 0 else input


@substitute(torch.dropout)
def _dropout(input: Tensor, p: float, train: bool) -> Any:
    """The same, whose mode has another name."""
    return dropout(input, p, train)


@substitute(Tensor.masked_scatter_)
def masked_scatter_(self: Tensor, mask: Tensor, source: Tensor) -> Any:
    """With a mask for each element: without content torch takes one that does not fit."""
    return NotImplemented if mask.dim() == self.dim() == 0 else self.masked_scatter_(mask.expand(self.shape), source)


@substitute(torch.angle, Tensor.angle)
def angle(self: Tensor) -> Any:
    """Of real numbers: 0 or π, with a gradient, which is 0; torch's own formula has none."""
    if not self.is_floating_point():
        return NotImplemented
    turned = torch.where(self < 0, math.pi, torch.zeros_like(self))
    made = torch.where(self.isnan(), self.detach(), turned)
    return torch.where(torch.zeros_like(self, dtype=torch.bool), self, made)


@substitute(Tensor.polygamma_)
def polygamma_(self: Tensor, n: int) -> Any:
    """It has no form that writes nothing by its name: the order comes first there."""
    return self.copy_(torch.polygamma(n, self))


@substitute(torch.cov, Tensor.cov)
def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Any:
    """Covariance of rows as ``torch.cov`` documents it, without its look at the content of the weights."""
    if input.dim() > 2 or input.numel() == 0:
        return NotImplemented
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        centred = weighted = rows - rows.mean(1, keepdim=True)
        count = torch.scalar_tensor(rows.shape[1], device=rows.device) - correction
    else:
        total = weights.sum()
        centred = rows - (rows * weights).sum(1, keepdim=True) / total
        weighted, unbiased = centred * weights, total
        if aweights is not None and correction:
            unbiased = (weights * aweights).sum() / total
        count = total - correction * (unbiased if aweights is not None else 1)
    return (weighted @ centred.mH / count.clamp(min=0)).squeeze()


@substitute(torch.corrcoef, Tensor.corrcoef)
def corrcoef(input: Tensor) -> Any:
    """The covariance over the deviations of both rows, cut to [-1, 1]."""
    made = NotImplemented if input.is_complex() else cov(input)
    if made is NotImplemented:
        return made
    if made.dim() == 0:
        return made / made
    deviation = made.diagonal().sqrt()
    return (made / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clamp(-1, 1)


@substitute(torch.combinations)
def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """Rows of increasing places, selected once: torch selects each column for itself, as if their lengths differed."""
    if r < 2:
        return NotImplemented
    places = torch.arange(input.shape[0], device=input.device)
    rows = torch.cartesian_prod(*[places] * r)
    before, after = rows[:, :-1], rows[:, 1:]
    kept = (before <= after if with_replacement else before < after).all(1)
    return input[rows[kept]]


@substitute(torch.narrow, Tensor.narrow)
def narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Any:
    """A start that a tensor holds, as places: torch.export loses track of a slice that starts there."""
    if not isinstance(start, Tensor):
        return NotImplemented
    first = torch.where(start < 0, start + input.shape[dim], start)
    places = first + torch.arange(length, device=input.device)
    is_mapped = bool(torch._C._functorch.get_interpreter_stack())
    return input.index_select(dim, places) if is_mapped else PART_AT(input, dim, places)


@substitute(Tensor.__bool__, Tensor.item)
def truth(condition: Tensor) -> Any:
    """What lets a check pass that would raise; a branch that does more is refused by torch, which has no content."""
    frame = sys._getframe(1) if condition.dtype == torch.bool else None
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or getattr(condition, "constant", None) is not None or (answer := expected(frame)) is None:
        return NotImplemented
    tell(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return answer


@substitute(torch.chunk, Tensor.chunk)
def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Parts of known number along an axis whose size varies; torch records them as a list of any length."""
    total = input.shape[dim]
    if isinstance(total, int):
        return NotImplemented
    if total == 0:
        return torch.split_with_sizes(input, [total] * chunks, dim)
    size = (total + chunks - 1) // chunks
    count = 2 - int(total == 1) if chunks == 2 else int((total + size - 1) // size)
    return _parts(input, size, dim, count)


@substitute(torch.split, Tensor.split)
def split(tensor: Tensor, split_size: Any, dim: int = 0) -> Any:
    """The same where the size of a part varies too; of nothing there is one part, which torch 2.11 cannot record."""
    total = tensor.shape[dim]
    if isinstance(split_size, int) and split_size > 0 and isinstance(total, int) and total == 0:
        return _parts(tensor, split_size, dim, 1)
    if isinstance(split_size, int | list | tuple):
        return NotImplemented
    return _parts(tensor, split_size, dim, int((total + split_size - 1) // split_size))


def _parts(x: Tensor, size: Any, dim: int, count: int) -> Sequence[Tensor]:
    """Parts of a size, and what is left as the last."""
    return torch.split_with_sizes(x, [*[size] * (count - 1), x.shape[dim] - size * (count - 1)], dim)


@substitute(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """The same number of times for all, as a new axis: torch.onnx repeats along another one where it varies."""
    if isinstance(repeats, Tensor) or repeats is None or input.dim() == 0:
        return NotImplemented
    if dim is None:
        input, dim = input.flatten(), 0
    axis = dim % input.dim() + 1
    sizes = input.shape
    made = input.unsqueeze(axis).expand(*sizes[:axis], repeats, *sizes[axis:]).flatten(axis - 1, axis)
    return made.clone(memory_format=torch.contiguous_format) if memory_of(made) == memory_of(input) else made


@substitute(Tensor.data.__get__)  # type: ignore[attr-defined]
def data(self: Tensor) -> Tensor:
    """The tensor detached: what torch gives here would belong to no graph."""
    return uncounted(self.detach())


@substitute(Tensor.view)
def view(self: Tensor, *size: Any, dtype: torch.dtype | None = None) -> Any:
    """As another type without gradient: a node of the graph would say that floats of floats have one."""
    if not _is_type(*size, dtype=dtype) or not self.requires_grad:
        return NotImplemented
    return self.detach().view(*size) if dtype is None else self.detach().view(dtype=dtype)


@substitute(Tensor.detach_, torch.detach_)
def detach_(self: Tensor) -> Any:
    """Of an input or a parameter an error: the caller's own tensor would need no gradient from then on.

    Raises:
        CaptureError: it is one of these.
    """
    if not self.is_leaf or not self.requires_grad:
        return NotImplemented
    raise CaptureError(
        "detach_ takes the gradient from an input or a parameter itself, which a graph does not change",
        cure="write y = x.detach()",
    )


@substitute(torch.as_tensor)
def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """Of sizes, which it would read."""
    return torch.tensor(data, dtype=dtype, device=device) if _holds_sizes(data) else NotImplemented


@substitute(Tensor.new_tensor)
def new_tensor(
    self: Tensor,
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Of sizes, which it would read."""
    if not _holds_sizes(data) or requires_grad:
        return NotImplemented
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)


def _holds_sizes(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(map(_holds_sizes, data))
    return isinstance(data, torch.SymInt | torch.SymFloat)


@substitute(F.scaled_dot_product_attention)
def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of no query, or of no value, as torch has it: zeros, whatever the key, the mask and what they would be beside."""
    if min(query.dim(), key.dim(), value.dim()) < 2 or not of_nothing((*query.shape[-2:-1], *value.shape)):
        return NotImplemented
    widths = ((key, query.shape[-1]), (value, value.shape[-1]))
    key, value = (x[..., :0, :].reshape(*query.shape[:-2], 0, width) for x, width in widths)
    return F.scaled_dot_product_attention(query, key, value)
