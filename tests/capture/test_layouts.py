"""Tensors without content lie in memory as real ones do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, pair, same_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from onnxtrain.capture.layouts import layouts

PART = 20
BEFORE_2_12 = TorchVersion(torch.__version__) < (2, 12)


def backwards(t: torch.Tensor) -> torch.Tensor:
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes)


def last_two(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else backwards(t)


ORDERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], slice]] = {
    "the first backwards": (backwards, slice(1)),
    "the others": (last_two, slice(1, None)),
    "all channels last": (channels_last, slice(None)),
}


def ordered(leaves: Sequence[Any], order: str) -> list[Any]:
    """A call's arguments with another order in memory."""
    change, places = ORDERS[order]
    chosen = range(len(leaves))[places]
    return [change(x) if i in chosen and _is_matrix(x) else x for i, x in enumerate(leaves)]


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dim() > 1


def strides(result: Any) -> list[list[int] | None]:
    """Of all tensors, where an axis has more than one place."""
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [
        [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1] if t.numel() > 1 else None
        for t in tensors
        if t.layout == torch.strided
    ]


def _called(op: Any, leaves: Sequence[Any], spec: Any) -> Any:
    given, args, kwargs = pytree.tree_unflatten(leaves, spec)
    return op(given, *args, **kwargs)


def _calls(op: Any) -> Iterator[tuple[list[Any], Any]]:
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 2):
        yield pytree.tree_flatten((sample.input, sample.args, sample.kwargs))


@pytest.mark.parametrize("part", range(PART))
@pytest.mark.filterwarnings("ignore")
def test_operators_of_torch(part: int) -> None:
    """Over torch's own samples: what it returns without content has the strides of what it returns."""
    compared, wrong = 0, []
    for op in op_db[part::PART]:
        if not {torch.float32, torch.int64} & op.dtypes or (op.name.startswith("fft.") and BEFORE_2_12):
            continue  # the oldest torch says another order of Fourier transforms than it has
        for (leaves, spec), order in itertools.product(_calls(op), ORDERS):
            given = ordered(leaves, order)
            try:
                real = _called(op, given, spec)
                with layouts(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
                    fake = _called(op, fakes, spec)
            except Exception:  # an operator that looks at contents, or takes no such argument
                continue
            compared += 1
            if strides(fake) != strides(real):
                wrong.append((op.full_name, order))
    assert compared > 50
    assert not wrong


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copysign": lambda x: torch.copysign(x, x.flip(0)),
    "floor": lambda x: torch.div(x, 0.3, rounding_mode="floor") * 0.3,
    "xlogy": lambda x: torch.xlogy(x, x.square() + 1),
    "logaddexp": lambda x: torch.logaddexp(x, x[:1]),
    "channel shuffle": lambda x: F.channel_shuffle(x.permute(0, 2, 3, 1), 2),
    "padding": lambda x: F.pad(x.permute(0, 2, 3, 1), (1, 1, 1, 1), mode="reflect"),
    "max pooling": lambda x: F.max_pool1d(x.detach()[0].transpose(1, 2), 2) * x.mean(),
    "one hot": lambda x: F.one_hot(x.detach()[0, 0].abs().long().T, 9) * x.mean(),
    "cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).to(x), reduction="none"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_copies_of_results(name: str) -> None:
    """What is a copy in eager is one in the graph, and what is a view is a view."""

    def written(x: torch.Tensor) -> torch.Tensor:
        y = WRITTEN[name](x.permute(0, 2, 3, 1))
        y.flatten().add_(1.0)
        return y * x.mean()

    wrapped, eager = pair(Applied(written).double())
    for batch in (2, 3):
        same_step(wrapped, eager, torch.randn(batch, 4, 6, 6, dtype=torch.float64))


def test_nothing_is_left_replaced() -> None:
    before = FakeTensorMode._dispatch_impl
    with layouts():
        assert FakeTensorMode._dispatch_impl is not before
    assert FakeTensorMode._dispatch_impl is before
