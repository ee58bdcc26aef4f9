"""What the commonest calls return, told from the sizes of their arguments: torch takes them apart to find it.

Told are results with memory of their own, of calls on tensors of one floating type whose sizes agree; where their order
in memory decides on the result's, on contiguous ones. All others are left to torch.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max

from onnxtrain.capture.call_forms import unbacked_of
from onnxtrain.capture.replaced import replaced

Tensor = torch.Tensor
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten
Like = Callable[[], Tensor]  # makes a tensor as the call returns it


def told(func: Any, args: Sequence[Any], kwargs: Any) -> FakeTensor | None:
    """A tensor like the one that a call returns, without content and recorded by nobody; None where torch is to say."""
    tell = _TOLD.get(func)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)] if tell is not None else []
    if tell is None or not all(isinstance(x, FakeTensor) for x in tensors) or _is_autocast(tensors):
        return None
    if unbacked_of(tensors):  # of sizes that content decides torch asks other questions
        return None
    with disable_proxy_modes_tracing():
        like = tell(*args, **kwargs)
        if like is None:
            return None
        with torch.no_grad():
            made: Any = like()
    return made.requires_grad_(any(x.requires_grad for x in tensors) and torch.is_grad_enabled())


def told_in_place() -> contextlib.AbstractContextManager[None]:
    """Within it what changes each element of a tensor costs what Relu does: torch takes apart the others."""
    ways = {func: decomposition_table[func] for func in _IN_PLACE if func in decomposition_table}
    return replaced(*((decomposition_table, func, functools.partial(_changed, way)) for func, way in ways.items()))


def _changed(apart: Callable[..., Tensor], input: Tensor, *numbers: Any, **options: Any) -> Tensor:
    return _ATEN.relu_.default(input) if input.dtype in _FLOATING else apart(input, *numbers, **options)


def _is_autocast(tensors: Sequence[Tensor]) -> bool:
    return any(torch.is_autocast_enabled(x.device.type) for x in tensors)


def _are_alike(*given: Any) -> bool:
    """Whether tensors, those that are given, have one floating type and device."""
    tensors = [x for x in given if x is not None]
    forms = {(x.dtype, x.device) for x in tensors if isinstance(x, Tensor)}
    return len(forms) == 1 and tensors[0].dtype in _FLOATING and all(isinstance(x, Tensor) for x in tensors)


def _agree(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are the same, which torch asks too, and none is 0, which many an operator treats in its own way."""
    if len(some) != len(others) or any(isinstance(size, int) and size == 0 for size in (*some, *others)):
        return False
    return all(_formula(a) == _formula(b) or guard_or_false(a == b) for a, b in zip(some, others, strict=True))


def _formula(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is so now: that a size is the 1 which makes it so need not hold from then on."""
    steps: Any = (1,)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        width, step = _formula(size), _formula(stride)
        if step not in steps:
            break
        steps = (step * width, step * Max(1, width))  # the second is what torch writes
    else:
        return True  # as its formulas say, which are asked in a fraction of the time
    environment = next((size.node.shape_env for size in tensor.shape if isinstance(size, torch.SymInt)), None)
    with contextlib.nullcontext() if environment is None else environment.suppress_guards():
        return tensor.is_contiguous()


def _of_shape(like: Tensor, *shape: Any) -> Like:
    return lambda: torch.empty(shape, dtype=like.dtype, device=like.device)


def _elementwise(input: Any, *numbers: Any, **options: Any) -> Like | None:
    """As the input, where nothing but numbers comes with it."""
    if any(isinstance(x, Tensor) for x in (*numbers, *options.values())) or not _are_alike(input):
        return None
    return (lambda: fast_detach(input.fake_mode, input)) if _is_contiguous(input) else None


def _combined(input: Any, other: Any, **options: Any) -> Like | None:
    """As both operands, or as the tensor where the other is a number."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor | int | float) or not _are_alike(input):
        return None
    if isinstance(other, Tensor):
        is_same = _are_alike(input, other) and _agree(input.shape, other.shape) and _is_contiguous(other)
        return _elementwise(input) if is_same else None
    return _elementwise(input)


def _dropout(input: Tensor, p: float, train: bool) -> Like | None:
    return _elementwise(input) if train and p > 0 and _agree(input.shape, input.shape) else None


def _layer_norm(input: Tensor, normalized: Sequence[Any], weight: Any = None, bias: Any = None, *_: Any) -> Like | None:
    sizes = input.shape[input.dim() - len(normalized) :]
    if not _are_alike(input, weight, bias) or not _agree(sizes, normalized):
        return None
    return _elementwise(input) if all(x is None or _agree(x.shape, sizes) for x in (weight, bias)) else None


def _batch_norm(input: Tensor, *given: Any) -> Like | None:
    """Of images in training, in their order in memory."""
    *vectors, is_training, _momentum, _epsilon, _cudnn = given
    channels: Any = input.shape[1] if input.dim() > 2 else None
    if not is_training or not isinstance(channels, int) or not _are_alike(input, *vectors):
        return None
    if not all(x is None or tuple(x.shape) == (channels,) for x in vectors):
        return None
    return lambda: torch.empty_like(input, memory_format=suggest_memory_format(input))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Like | None:
    if weight.dim() != 2 or input.dim() < 2 or not _are_alike(input, weight, bias):
        return None
    fits = _agree(input.shape[-1:], weight.shape[1:]) and (bias is None or _agree(bias.shape, weight.shape[:1]))
    return _of_shape(input, *input.shape[:-1], weight.shape[0]) if fits and _is_contiguous(input) else None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Like | None:
    """Of images with margins so wide that there is a place for the weights at every size."""
    pairs = _pairs(stride, padding, dilation)
    if pairs is None or weight.dim() != 4:
        return None
    if not _is_of_images(input, weight, bias, groups, weight.shape[1] * groups, weight.shape[0]):
        return None
    sizes = [_places(n, *window) for n, *window in zip(input.shape[2:], weight.shape[2:], *pairs, strict=True)]
    return None if None in sizes else _of_shape(input, input.shape[0], weight.shape[0], *sizes)


def _places(size: Any, window: int, step: int, margin: int, spread: int, smallest: int = 1) -> Any:
    """How many places a window has on an axis; None where it may be none.

    Args:
        size: of the axis.
        window: how many elements it takes.
        step: from place to place.
        margin: of the axis, on either side.
        spread: from one of its elements to the next.
        smallest: what the size is known to be at least.
    """
    beyond = 2 * margin - spread * (window - 1) - 1
    if margin < 0 or smallest + beyond < 0:
        return None
    return size if step == 1 and beyond == -1 else (size + beyond) // step + 1


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Like | None:
    """Of images, each of whose pixels becomes a block of its own."""
    pairs = _pairs(stride, padding, output_padding, dilation)
    if pairs is None or weight.dim() != 4:
        return None
    steps, *others = pairs
    is_by_blocks = others == [(0, 0), (0, 0), (1, 1)] and steps == tuple(weight.shape[2:])
    made = weight.shape[1] * groups
    if not is_by_blocks or not _is_of_images(input, weight, bias, groups, weight.shape[0], made):
        return None
    sizes = ((size - 1) * step + step for size, step in zip(input.shape[2:], steps, strict=True))
    return _of_shape(input, input.shape[0], made, *sizes)


def _is_of_images(input: Tensor, weight: Tensor, bias: Any, groups: int, read: int, made: int) -> bool:
    """Whether images are taken by weights that fit, all in their usual order in memory.

    Args:
        input: the images.
        weight: the weights, of four axes.
        bias: of the channels that are made.
        groups: of channels.
        read: how many channels the weights take.
        made: how many they make.
    """
    if input.dim() != 4 or not _are_alike(input, weight, bias):
        return False
    sizes = (input.shape[1], *weight.shape)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or weight.shape[0] % groups:
        return False
    fits = input.shape[1] == read and (bias is None or tuple(bias.shape) == (made,))
    return fits and _agree(input.shape, input.shape) and _is_contiguous(input) and _is_contiguous(weight)


def _pairs(*given: Any) -> list[tuple[int, int]] | None:
    """What is given for two axes, where one number is for both; None where a size is among it."""
    lists = [[value] * 2 if isinstance(value, int | torch.SymInt) else list(value) for value in given]
    pairs = [tuple(values * 2 if len(values) == 1 else values) for values in lists]
    return pairs if all(len(pair) == 2 and type(n) is int for pair in pairs for n in pair) else None  # type: ignore[return-value]


def _max_pool(
    input: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Like | None:
    """Of images in their usual order in memory."""
    pairs = _pairs(kernel_size, stride or kernel_size, padding, dilation)
    if pairs is None or ceil_mode or input.dim() != 4 or not _are_alike(input):
        return None
    if any(2 * margin > window for window, margin in zip(pairs[0], pairs[2], strict=True)):
        return None
    if not _agree(input.shape, input.shape) or not _is_contiguous(input):
        return None
    smallest = [size if isinstance(size, int) else 2 for size in input.shape[2:]]  # a symbol is 2 at least
    sizes = [_places(*axis) for axis in zip(input.shape[2:], *pairs, smallest, strict=True)]
    return None if None in sizes else _of_shape(input, *input.shape[:2], *sizes)


def _resized(input: Tensor, output_size: Any, *options: Any) -> Like | None:
    """Images in their usual order in memory, to sizes that are given."""
    by_scales = options[-1] is not None
    if by_scales or output_size is None or len(output_size) != 2 or input.dim() != 4 or not _are_alike(input):
        return None
    sizes = (*input.shape, *output_size)
    if not _agree(sizes, sizes) or any(isinstance(size, int) and size < 0 for size in sizes):
        return None
    return _of_shape(input, *input.shape[:2], *output_size) if _is_contiguous(input) else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Like | None:
    if len(tensors) < 2 or not _are_alike(*tensors):
        return None
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        return None
    dim %= first.dim()
    rest = [[n for axis, n in enumerate(x.shape) if axis != dim] for x in tensors]
    if not all(_agree(rest[0], other) and _agree(x.shape, x.shape) for x, other in zip(tensors, rest, strict=True)):
        return None
    if not all(map(_is_contiguous, tensors)):
        return None
    shape = [*first.shape]
    shape[dim] = functools.reduce(operator.add, (x.shape[dim] for x in tensors))
    return _of_shape(first, *shape)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Like | None:
    """Of classes by their numbers: one number for all."""
    if weight is not None or reduction == 0 or label_smoothing or not _are_alike(input) or target.dtype != torch.int64:
        return None
    fits = input.dim() == target.dim() + 1 > 1 and _agree((input.shape[0], *input.shape[2:]), target.shape)
    return _of_shape(input) if fits and _agree(input.shape[1:2], input.shape[1:2]) else None


def _matmul(input: Tensor, other: Tensor) -> Like | None:
    """Of stacks of matrices, one for one."""
    if not _are_alike(input, other) or input.dim() != other.dim() or input.dim() < 2:
        return None
    fits = _agree((*input.shape[:-2], input.shape[-1]), other.shape[:-1])
    return _of_shape(input, *input.shape[:-1], other.shape[-1]) if fits else None


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Like | None:
    is_plain = weight.dim() == 2 and _are_alike(weight) and indices.dtype in (torch.int64, torch.int32)
    return _of_shape(weight, *indices.shape, weight.shape[1]) if is_plain else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Like | None:
    """With dropout on the CPU, where torch has no kernel for the whole; each size of a mask is the scores' or 1."""
    if not dropout_p > 0 or query.device.type != "cpu":
        return None
    if not _are_alike(query, key, value) or not query.dim() == key.dim() == value.dim() == 4 or enable_gqa:
        return None
    fits = _agree(query.shape[:2], key.shape[:2]) and _agree(key.shape[:3], value.shape[:3])
    fits = fits and _agree(query.shape[3:], key.shape[3:]) and _agree(query.shape, query.shape)
    if attn_mask is not None:
        pairs = zip(attn_mask.shape, (*query.shape[:3], key.shape[2]), strict=False)
        is_each = attn_mask.dim() == 4 and all((isinstance(a, int) and a == 1) or _agree((a,), (b,)) for a, b in pairs)
        fits = fits and is_each and not is_causal and attn_mask.dtype in (torch.bool, query.dtype)
    return _of_shape(query, *query.shape[:3], value.shape[3]) if fits else None


_TOLD: dict[Any, Callable[..., Like | None]] = {
    **dict.fromkeys(
        (
            _ATEN.cos.default,
            _ATEN.exp.default,
            _ATEN.gelu.default,
            _ATEN.hardsigmoid.default,
            _ATEN.hardswish.default,
            _ATEN.hardtanh.default,
            _ATEN.leaky_relu.default,
            _ATEN.log.default,
            _ATEN.neg.default,
            _ATEN.pow.Tensor_Scalar,
            _ATEN.relu.default,
            _ATEN.rsqrt.default,
            _ATEN.sigmoid.default,
            _ATEN.silu.default,
            _ATEN.sin.default,
            _ATEN.sqrt.default,
            _ATEN.tanh.default,
        ),
        _elementwise,
    ),
    **dict.fromkeys((_ATEN.add.Tensor, _ATEN.div.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor), _combined),
    _ATEN.batch_norm.default: _batch_norm,
    _ATEN.cat.default: _cat,
    _ATEN.conv2d.default: _convolution,
    _ATEN.conv_transpose2d.input: _transposed_convolution,
    _ATEN.cross_entropy_loss.default: _cross_entropy,
    _ATEN.dropout.default: _dropout,
    _ATEN.embedding.default: _embedding,
    _ATEN.layer_norm.default: _layer_norm,
    _ATEN.linear.default: _linear,
    _ATEN.matmul.default: _matmul,
    _ATEN.max_pool2d.default: _max_pool,
    _ATEN.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((_ATEN.upsample_bilinear2d.vec, _ATEN.upsample_nearest2d.vec), _resized),
}

_IN_PLACE = (_ATEN.hardsigmoid_.default, _ATEN.hardswish_.default, _ATEN.hardtanh_.default)

__all__ = ["told", "told_in_place"]
