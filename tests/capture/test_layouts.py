"""Tensors without content lie in memory as real ones do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, pair, same_step
from torch._decomp import global_decomposition_table
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


def overloads() -> Iterator[Any]:
    """Those of torch's decompositions that take tensors and numbers alone, by position, and write nothing."""
    tables = global_decomposition_table.values()
    known = {op.name() for table in tables for op in table if isinstance(op, torch._ops.OpOverload)}
    for name in sorted({n.removeprefix("aten::").partition(".")[0] for n in known if n.startswith("aten::")}):
        packet = getattr(torch.ops.aten, name)
        if name not in STOP_THE_PROCESS and isinstance(packet, torch._ops.OpOverloadPacket):
            yield from filter(_is_of_tensors, (getattr(packet, overload) for overload in packet.overloads()))


STOP_THE_PROCESS = {"_batch_norm_no_update", "smooth_l1_loss_backward"}  # of arguments that do not fit
NOT_PLAIN = {"uniform", "resize_as"}  # without content, these take an input's own strides where it has gaps


def _is_of_tensors(overload: Any) -> bool:
    kinds, name = [str(a.type) for a in _positional(overload)], overload._schema.name.split("::")[1]
    is_plain = name not in NOT_PLAIN and not overload._schema.is_mutable
    if BEFORE_2_12 and (name.startswith("fft_") or name == "zero"):
        return False
    return is_plain and "Tensor" in kinds and set(kinds) <= {"Tensor", "number", "int", "float", "bool"}


def _positional(overload: Any) -> list[Any]:
    return [a for a in overload._schema.arguments if not a.kwarg_only and not a.has_default_value()]


def _argument(kind: str, tensor: torch.Tensor) -> Any:
    return {"Tensor": tensor, "number": 2, "int": 1, "float": 0.5, "bool": True}[kind]


LAID_OUT: dict[str, Callable[[], torch.Tensor]] = {
    "backwards": lambda: torch.rand(4, 5).mT,
    "in another order": lambda: torch.rand(3, 4, 5).permute(1, 2, 0),
    "channels last": lambda: channels_last(torch.rand(2, 3, 4, 5)),
    "with gaps": lambda: torch.rand(4, 10)[:, ::2],
    "counted, backwards": lambda: torch.randint(2, (4, 4)).mT,
}


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.filterwarnings("ignore")
def test_overloads_of_torch(name: str) -> None:
    """The same of what takes tensors and numbers, calls that torch's samples do not make among them."""
    given, compared, wrong = LAID_OUT[name](), 0, []
    for overload in overloads():
        kinds = [str(a.type) for a in _positional(overload)]
        try:
            real = overload(*(_argument(kind, given) for kind in kinds))
            with layouts(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = overload(*(_argument(kind, mode.from_tensor(given)) for kind in kinds))
        except Exception:
            continue
        compared += 1
        if strides(fake)[:1] != strides(real)[:1]:
            wrong.append(str(overload))
    assert compared > 200
    assert not wrong


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "first": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "two beside": lambda x, i: x[:, i, i],
    "two apart": lambda x, i: x[i, :, i],
    "one of each kind": lambda x, i: x[i, i.contiguous()],
    "two of other ranks": lambda x, i: x[i, i[:, 0][:, None]],
}


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_indices_in_another_order(name: str, order: tuple[int, ...]) -> None:
    x, index = torch.rand(4, 5, 6).permute(order), torch.randint(4, (3, 5)).mT
    with layouts(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = INDEXED[name](mode.from_tensor(x), mode.from_tensor(index))
    assert strides(fake) == strides(INDEXED[name](x, index))


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copysign": lambda x: torch.copysign(x, x.flip(0)),
    "floor": lambda x: torch.div(x, 0.3, rounding_mode="floor") * 0.3,
    "xlogy": lambda x: torch.xlogy(x, x.square() + 1),
    "logaddexp": lambda x: torch.logaddexp(x, x[:1]),
    "channel shuffle": lambda x: F.channel_shuffle(x.permute(0, 2, 3, 1), 2),
    "padding": lambda x: F.pad(x.permute(0, 2, 3, 1), (1, 1, 1, 1), mode="reflect"),
    "power": lambda x: 2.0 ** x.detach().clamp(-3.0, 3.0) * x.mean(),
    "rolled": lambda x: x.roll(1, 2),
    "indexed": lambda x: x[:, torch.tensor([[0, 1], [2, 3], [1, 5]]).mT],
    "max pooling": lambda x: F.max_pool1d(x.detach()[0].transpose(1, 2), 2) * x.mean(),
    "resizing": lambda x: F.interpolate(x[0].transpose(1, 2), size=5, mode="nearest-exact"),
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
