"""Results that are told from the sizes of arguments are those that torch finds by taking the call apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, captures, pair, same_step
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from onnxtrain.capture import known_calls, told_results
from onnxtrain.capture.recorder import recorder

Tensor = torch.Tensor
AUTO, STATIC = torch.export.Dim.AUTO, torch.export.Dim.STATIC
MARGINS = (  # how far apart the weights are, and how far from place to place
    *(((1, 1), 1, 1), ((0, 0), 1, 1), ((1, 0), 1, 1), ((2, 2), 2, 1), ((4, 2), 2, 1)),
    *(((1, 1), 1, 2), ((0, 0), 1, (2, 1)), ((2, 3), 1, 1), ((2, 2), 2, 3)),
)
ORDERS = (torch.contiguous_format, torch.channels_last)
NAMES = {str(func).split(".")[1] for func in told_results._TOLD}
OPERATORS = [op for op in op_db if op.name.removeprefix("nn.functional.") in NAMES]


class Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _forms(op: OpInfo) -> Iterator[tuple[list[Any], Any, Any]]:
    """Arguments of torch's own samples, and the kind of their sizes."""
    for dtype, count in ((torch.float32, 3), (torch.bfloat16, 1)):
        found = list(op.sample_inputs("cpu", dtype, requires_grad=dtype is torch.float32))
        for sample in found[:: max(1, len(found) // count)] + found[-1:]:
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            yield leaves, spec, AUTO
            yield [_transposed(x) for x in leaves], spec, AUTO
        yield leaves, spec, STATIC


def _transposed(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    return value.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_(value.requires_grad)


def _of_torch() -> Iterator[tuple[Callable[..., Any], list[Tensor], Any]]:
    for op in OPERATORS:
        for leaves, spec, kind in _forms(op):

            def called(*tensors: Tensor, op: Any = op, leaves: Any = leaves, spec: Any = spec) -> Any:
                given = iter(tensors)
                filled = [next(given) if isinstance(x, Tensor) else x for x in leaves]
                first, args, kwargs = pytree.tree_unflatten(filled, spec)
                return op(first, *args, **kwargs)

            yield called, [x for x in leaves if isinstance(x, Tensor)], kind


def _of_layers() -> Iterator[tuple[Callable[..., Any], list[Tensor], Any]]:
    """Forms of which torch has no sample, or few."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    whole, heads = made(2, 3, 5, 4), made(2, 5, 3, 4)
    weights = (made(6, 3, 3, 3), made(6, 3, 1, 1), made(3, 1, 3, 1), made(6, 1, 3, 3), made(6, 3, 5, 3))
    for kind in (AUTO, STATIC):
        yield lambda x: x**2, [whole], kind
        yield lambda x: x @ x.transpose(-1, -2), [whole], kind
        yield lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), [whole], kind
        yield lambda x, y: F.scaled_dot_product_attention(x, y, x, dropout_p=0.1, is_causal=True), [whole, whole], kind
        yield lambda x: F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, dropout_p=0.1), [heads], kind
        for weight, image in itertools.product(weights, (whole, made(1, 3, 4, 4), made(2, 1, 5, 4))):
            for order, (padding, spread, step) in itertools.product(ORDERS, MARGINS):
                options = {"padding": padding, "dilation": spread, "stride": step}
                options["groups"] = image.shape[1] // weight.shape[1] or 1
                ordered = [image.contiguous(memory_format=order), weight]
                yield lambda x, w, options=options: F.conv2d(x, w, **options), ordered, kind
        for image, order in itertools.product((whole, made(2, 1, 1, 4)), ORDERS):
            for sizes in (
                (2,),
                ((1, 2), (1, 2)),
                ((3, 2), (3, 2)),
                (2, 1, 1),
                (2, 2, 0, 1, True),
                (3, 2, 1),
                (3, 1, 1, 2),
            ):
                ordered = [image.contiguous(memory_format=order)]
                yield lambda x, sizes=sizes: F.max_pool2d(x, *sizes), ordered, kind
        for image, order in itertools.product((whole, made(2, 1, 1, 4)), ORDERS):
            ordered = [image.contiguous(memory_format=order)]
            for options in ({"size": (7, 3)}, {"scale_factor": 2}, {"size": (1, 2), "mode": "bilinear"}):
                yield lambda x, options=options: F.interpolate(x, **options), ordered, kind
            for mode in ("nearest", "bilinear"):
                yield lambda x, mode=mode: F.interpolate(x, (x.shape[2] * 2, x.shape[3]), mode=mode), ordered, kind
        yield lambda x, w, b: F.conv2d(x, w, b, padding=1), [whole, weights[0], made(6)], kind
        for weight, stride in itertools.product((made(3, 2, 2, 2), made(3, 2, 2, 1)), (1, 2, (2, 1))):
            yield lambda x, w, stride=stride: F.conv_transpose2d(x, w, stride=stride), [whole, weight], kind
        yield lambda x, w, b: F.conv_transpose2d(x, w, b, 2, groups=3), [whole, made(3, 2, 2, 2), made(6)], kind
        for dim in (0, 1, -1):
            yield lambda x, y, dim=dim: torch.cat([x, y * 2, x], dim), [whole, whole], kind
            yield lambda x, y, dim=dim: torch.cat([x, y], dim), [whole, whole.mT.contiguous().mT], kind
        yield lambda x, y: torch.cat([x, y, x], 1), [whole, made(2, 1, 5, 4)], kind
        yield lambda x, y: torch.cat([x, y[:, 1:]], 1), [whole, made(2, 2, 5, 4)], kind
        yield lambda x: torch.cat([x, x[:0]]), [made(3)], kind
        yield lambda x, y: torch.cat([x, y]), [whole, torch.randn(0)], kind
        yield lambda x: F.max_pool2d(x, x.shape[2:]), [whole], kind
        yield lambda x, w: F.conv2d(x, w, padding=x.shape[1] - 2), [whole, weights[0]], kind
        for shape, mean in itertools.product(
            ((7, 3), (2, 3, 5), (2, 3, 5, 4), (2, 3, 1, 5, 4)), ("mean", "sum", "none")
        ):
            labels = torch.ones((shape[0], *shape[2:]), dtype=torch.long)
            yield lambda x, y, mean=mean: F.cross_entropy(x, y, reduction=mean), [made(*shape), labels], kind
            yield lambda x, mean=mean: F.cross_entropy(x, x.softmax(1), reduction=mean), [made(*shape)], kind
        yield lambda x, y: F.cross_entropy(x, y), [made(3), torch.tensor(1)], kind
        for mask in ((2, 3, 5, 5), (1, 1, 5, 5), (2, 1, 1, 5)):
            yield lambda x, m: F.scaled_dot_product_attention(x, x, x, m, 0.1), [whole, torch.randn(mask)], kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some", [_of_torch, _of_layers])
def test_results_are_torchs(some: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At symbolic sizes and constant ones, contiguous and transposed."""
    told, wrong = set(), []

    def checked(func: Any, args: Any, kwargs: Any) -> Any:
        made = told_results.told(func, args, kwargs)
        if made is not None:
            told.add(func)
            with disable_proxy_modes_tracing():
                expected = func(*args, **kwargs)
            if _form(made) != _form(expected):
                wrong.append((func, _form(made), _form(expected)))
        return made

    monkeypatch.setattr(known_calls, "told", checked)
    for function, tensors, kind in some():
        sizes = (tuple(dict.fromkeys(range(t.dim()), kind) for t in tensors),)
        try:
            with recorder():
                torch.export.export(Called(function), tuple(tensors), dynamic_shapes=sizes, strict=False)
        except Exception:  # a sample that torch.export refuses
            continue
    assert not wrong, wrong[:4]
    names = (
        "cat",
        "conv2d",
        "conv_transpose2d",
        "max_pool2d",
        "cross_entropy_loss",
        "matmul",
        "pow",
        "scaled_dot_product_attention",
        "upsample_bilinear2d",
        "upsample_nearest2d",
    )
    ours = {f for f in told_results._TOLD if str(f).split(".")[1] in names}
    assert told >= (ours if some is _of_layers else set(told_results._TOLD) - ours)


def _form(value: Tensor) -> tuple[Any, ...]:
    sizes = (str(s) for s in (*value.shape, *value.stride(), value.storage_offset()))
    return (*sizes, value.dtype, value.device, value.requires_grad)


@pytest.mark.parametrize("name", ["hardsigmoid", "hardswish", "hardtanh", "relu6"])
def test_in_place(name: str) -> None:
    """Activations that change each element, of a view and of a whole."""

    def activated(x: Tensor) -> Tensor:
        made = x * 4
        getattr(F, name)(made[1:], inplace=True)
        return getattr(F, name)(made + 1, inplace=True)

    wrapped, eager = pair(Applied(activated).double())
    for batch in (4, 3, 2):
        same_step(wrapped, eager, torch.randn(batch, 8, dtype=torch.float64))
    assert captures(wrapped) == 1


@pytest.mark.parametrize("mask", [None, (1, 1), (4, 1), (1, 2), (4, 2)])
def test_attention(mask: tuple[int, int] | None) -> None:
    """With masks for the whole batch or each of it, for all heads or each."""

    def attended(x: Tensor) -> Tensor:
        q, hidden = x.unflatten(-1, (2, -1)).transpose(1, 2), None
        if mask is not None:
            batch = 1 if mask[0] == 1 else x.shape[0]
            hidden = torch.ones(batch, mask[1], x.shape[1], x.shape[1]).tril().bool()
        made = F.scaled_dot_product_attention(q, q, q, attn_mask=hidden)
        return made.transpose(1, 2).reshape(x.shape)

    wrapped, eager = pair(Applied(attended).double())
    for batch, length in ((4, 5), (3, 7), (1, 1)):
        same_step(wrapped, eager, torch.randn(batch, length, 8, dtype=torch.float64))
    assert captures(wrapped) == 1
