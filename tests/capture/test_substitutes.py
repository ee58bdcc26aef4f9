"""Calls that torch.export cannot record train all the same, as eager does, with sizes that change."""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.capture.substitutes import SUBSTITUTES, substitute


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def check(module: torch.nn.Module, *batches: tuple[torch.Tensor, ...]) -> ORTModule:
    """Outputs, gradients and buffers as eager has them, for each batch in turn."""
    wrapped, eager = ORTModule(copy.deepcopy(module)), module
    for batch in batches:
        results = []
        for run in (wrapped, eager):
            leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in batch]
            y = run(*leaves)
            torch.manual_seed(3)
            y.backward(torch.randn(y.shape))
            results.append([y.detach(), *(x.grad for x in leaves if x.requires_grad), *run.buffers()])
        torch.testing.assert_close(*results, equal_nan=True)
    return wrapped


def _diagonals(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.fill_diagonal_(2.0)
    tall = x.repeat(3, 1)
    tall.fill_diagonal_(3.0, wrap=True)
    cube = x[:2, :2].expand(2, 2, 2).clone()
    cube.fill_diagonal_(4.0)
    return y.sum(0) @ tall.T * cube.sum()


def _at_places_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    rows = x.index_select(0, index) * 3
    y = x.index_add(0, index, rows) + (x * 1).index_copy_(0, index, rows).index_add_(0, index, rows)
    return y + x.index_reduce(0, index, rows, "prod") + x.index_fill(0, index, 2.0)


def _at_one_place(x: torch.Tensor) -> torch.Tensor:
    """At what one number of a tensor says, beside places, axes and slices."""
    place, places = x.detach().sum(1).argmax() % 2, torch.tensor([0, 1])
    y = x.reshape(-1, 2, 3) * 1
    y[:, place] = x[0, :3]
    y[place, 1] *= 2
    y[..., place] += 1
    y[place, :, places] = 3
    y[None, y.shape[0] - 1, place - 1] = x[1, 0]
    read = y[place, :, places] * y[places, :, place] + y[place, ..., places] + y[places, None, -1 - place].sum()
    return y.flatten(1) * read.sum() * y[y.shape[0] - 1, 1, places].sum()


def scores(steps: int, batch: int) -> torch.Tensor:
    return torch.randn(steps, batch, 6).log_softmax(-1)


def _written(y: torch.Tensor, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    y[:, condition] = 3.0
    y[..., condition, 1] += x.mean()
    y[condition] = x[None] * 2
    total = y.sum() * 1
    total[total > 5] += 0.5
    share = y.mean() * 1
    share[share.isfinite()] = 0.1
    return y * total + (share - 0.1) * 1e9


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[torch.Tensor, ...]]]] = {
    "gaussian_nll_loss": (
        lambda x, t, v: F.gaussian_nll_loss(x, t, v - 0.3, full=True, eps=0.1),  # part of it is below eps
        [(torch.rand(n, 3), torch.rand(n, 3), torch.rand(n, 3) + 0.31) for n in (2, 5)],
    ),
    "cov": (lambda x: x.cov(correction=0), [(torch.rand(n, 5),) for n in (2, 4)]),
    "cov, weights": (
        lambda x, w: torch.cov(x, aweights=w, fweights=torch.arange(5) + 1),
        [(torch.rand(3, 5), torch.rand(5))],
    ),
    "corrcoef": (lambda x: torch.corrcoef(x), [(torch.rand(n, 5),) for n in (2, 4)]),
    "combinations": (lambda x: torch.combinations(x, 3).prod(1), [(torch.rand(n),) for n in (4, 6)]),
    "narrow": (lambda x, start: x.narrow(1, start, 2), [(torch.rand(2, 5), torch.tensor(s)) for s in (1, -2)]),
    "ctc_loss": (
        lambda x, t, n, m: F.ctc_loss(x, t, n, m, zero_infinity=True),
        [
            (scores(k, b), torch.randint(1, 6, (b, 3)), torch.full((b,), k), torch.full((b,), 2))
            for k, b in ((8, 2), (9, 3))
        ],
    ),
    "ctc_loss, lengths as numbers": (
        lambda x, t: F.ctc_loss(x, t, (8, 7), (3, 1), blank=5, reduction="none"),
        [(scores(8, 2), torch.randint(0, 5, (2, 3)))],
    ),
    "one label": (
        lambda x, t: F.cross_entropy(x, t),
        [(torch.rand(4), torch.tensor(2)), (torch.rand(7), torch.tensor(5))],
    ),
    "one label, ignored": (
        lambda x, t: F.nll_loss(x, t, ignore_index=2, reduction="sum"),
        [(torch.rand(4), torch.tensor(2))],
    ),
    "one label, weighted": (
        lambda x, t: F.nll_loss(x, t, torch.arange(4.0)),
        [(torch.rand(4), torch.tensor(label)) for label in (1, 2)],
    ),
    "labels that are bytes": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=1) + F.nll_loss(x, t, torch.arange(4.0) + 1),
        [(torch.rand(n, 4), torch.tensor([3, 1, 0, 2, 2][:n], dtype=torch.uint8)) for n in (3, 5)],
    ),
    "one label that is a byte": (
        lambda x, t: F.cross_entropy(x, t) + F.nll_loss(x, t),
        [(torch.rand(4), torch.tensor(2, dtype=torch.uint8))],
    ),
    "angles of real numbers": (
        lambda x: x.angle(),
        [(torch.tensor([1.0, -1.0, 0.0, -0.0, math.nan, math.inf, -math.inf][:n]),) for n in (4, 7)],
    ),
    "mapped over another axis": (
        lambda x, y: torch.vmap(torch.sin, 1)(x) + torch.vmap(torch.mul, (-1, 0), 1)(x.T, y),
        [(torch.rand(n, 3), torch.rand(n, 3)) for n in (2, 4)],
    ),
    "one place": (lambda x, i: x.take(i), [(torch.rand(3, 4), torch.tensor(i)) for i in (7, -1)]),
    "chunk": (
        lambda x: torch.cat([(p - q).exp() for p, q in (x.chunk(2), x.flip(0).chunk(2))], 1).sum(1),
        [(torch.rand(n, 3),) for n in (4, 6, 2)],
    ),
    "chunks of different sizes": (
        lambda x: torch.stack([part.prod(0) for part in x.T.chunk(3, dim=-2)]),
        [(torch.rand(2, n),) for n in (5, 8, 10)],
    ),
    "fewer chunks than asked for": (lambda x: x.chunk(3)[-1] * len(x.chunk(3)), [(torch.rand(n, 2),) for n in (4, 7)]),
    "split by a size": (
        lambda x: torch.stack([part.sum(0) for part in x.split(x.shape[0] // 2)]),
        [(torch.rand(n, 2),) for n in (4, 6, 5)],
    ),
    "distribution": (
        lambda x, y: torch.distributions.Categorical(logits=x).log_prob(y),
        [(torch.rand(n, 4), torch.randint(0, 4, (n,))) for n in (3, 5)],
    ),
    "a condition among indices": (
        lambda x, c: (x[:, c].sum((0, 1)) + x[..., c, 1:].sum()) * x[None, c, 1:].sum(),
        [(torch.rand(n, 3), torch.tensor(c)) for n in (3, 4) for c in (True, False)],
    ),
    "written under a condition among indices": (
        lambda x, c: _written(x * 1, x, c),
        [(torch.rand(n, 3, dtype=torch.double), torch.tensor(c)) for n in (3, 4) for c in (True, False)],
    ),
    "attention to no value": (
        lambda x: F.scaled_dot_product_attention(x, x[:0], x[:0], is_causal=True) + x,
        [(torch.rand(n, 5, 4),) for n in (2, 3)],
    ),
    "attention of no query": (
        lambda x: F.scaled_dot_product_attention(x[:, :0], x, x, attn_mask=x[:, :0]).sum() + x,
        [(torch.rand(n, 5, 4),) for n in (2, 3)],
    ),
    "attention to no value, of other widths": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :0, :3], x[:, :0, :2], torch.ones(7, 9)) + x[..., :2],
        [(torch.rand(n, 5, 4),) for n in (2, 3)],
    ),
    "diagonals": (_diagonals, [(torch.rand(n, 4),) for n in (2, 5)]),
    "indices of one place": (_at_places_of, [(torch.rand(n, 3), torch.tensor(1)) for n in (2, 4)]),
    "one place among others": (_at_one_place, [(torch.rand(n, 6),) for n in (2, 4)]),
    "indices into nothing": (_at_places_of, [(torch.rand(0, 0, 3), torch.zeros(0, dtype=torch.long))]),
    "places beyond nothing": (
        lambda x, i: x.index_fill(-1, i, 2.0) + (x * 1).index_fill_(1, i, 3.0) + x.index_add(1, i, x.new_ones(0, 2)),
        [(torch.rand(0, 3 - n), torch.zeros(2, dtype=torch.long)) for n in (0, 3)],
    ),
    "what is repeated is another tensor": (
        lambda x: (y := x * 2).repeat_interleave(3, 0).add_(1.0) + y.repeat_interleave(1, 1).mul_(3.0) + y,
        [(torch.rand(1, n),) for n in (2, 1)],
    ),
    "polygamma_": (lambda x: (x * 2).polygamma_(1), [(torch.rand(n) + 1,) for n in (2, 5)]),
    "masked_scatter_ with a mask for a batch of one": (
        lambda x, y: x.clone().masked_scatter_(y.mean(1) > 0.5, x * 2),
        [(torch.rand(n, 2, 6, 4), torch.rand(1, 6, 4)) for n in (3, 2)],
    ),
    "masked_scatter of a number": (
        lambda x: (y := x.detach().mean()).clone().masked_scatter_(y > 0, y * 2) * x,
        [(torch.rand(n),) for n in (2, 5)],
    ),
    "a tensor of nothing": (
        lambda x: torch.cat([torch.tensor([]), x.sum(0), torch.tensor([], dtype=torch.int64)]) + torch.tensor([]).sum(),
        [(torch.rand(n, 3),) for n in (2, 5)],
    ),
    "one label, not reduced": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        [(torch.rand(4), torch.tensor(2))],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_eager(name: str) -> None:
    function, batches = CALLS[name]
    try:
        function(*batches[0])
    except RuntimeError as error:
        pytest.skip(f"this version of torch refuses: {error}")
    check(Call(function), *batches)


def test_shares_that_are_drawn() -> None:
    def drawn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shares = torch.distributions.Dirichlet(x * y).rsample()
        return shares * torch.distributions.Beta(x * y, y).rsample()

    results = []
    for run in (ORTModule(Call(drawn)), drawn):
        for count in (2, 5):
            x, y = torch.rand(count, 3) * 0 + torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])
            leaves = [x.requires_grad_(), y.requires_grad_()]
            torch.manual_seed(0)
            made = run(*leaves)
            made.square().sum().backward()
            results.append([made.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[:2], results[2:])


def test_running_statistics_of_instance_norm() -> None:
    layer = torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True, momentum=0.3)
    wrapped = check(layer, *((torch.randn(b, 3, 4, 5),) for b in (2, 3)))
    assert not torch.equal(wrapped.running_mean, torch.zeros(3))
    check(layer.eval(), (torch.randn(2, 3, 4, 5),))


class Causal(torch.nn.Module):
    """Torch's own layers, which look whether the mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Transformer(8, 2, 1, 2, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        late = torch.triu(torch.full((y.shape[1], y.shape[1]), float("-inf")), 1)
        return self.layers(x, y, tgt_mask=late)


def test_masks_of_torch_layers() -> None:
    check(Causal(), *((torch.randn(b, 5, 8), torch.randn(b, t, 8)) for b, t in ((2, 4), (3, 5))))


def test_a_loss_in_chunks() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    labels = torch.tensor([0, 3, 1, 2])
    check(
        Call(lambda x, w: F.linear_cross_entropy(x, w, labels, options=options)), (torch.rand(4, 5), torch.rand(6, 5))
    )


def test_outside_of_capture_torch_is_itself_and_a_function_is_replaced_once() -> None:
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(torch.ones(2), torch.ones(2), -torch.ones(2))
    with pytest.raises(ValueError, match="rate"):
        torch.distributions.Poisson(torch.tensor(-1.0), validate_args=True)
    with pytest.raises(ValueError, match="registered twice"):
        substitute(next(iter(SUBSTITUTES)))(lambda: None)


NAMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cat": lambda x: torch.cat(tensors=[x, x * x], axis=1),
    "concat": lambda x: torch.concat([x, x * x], axis=-1),
    "chunk": lambda x: torch.chunk(input=x, chunks=2, dim=1)[1] * 2,
    "narrow": lambda x: torch.narrow(x=x, axis=1, start=1, length=2) * 2,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, axis=1),
    "cumsum": lambda x: torch.cumsum(x, axis=1),
    "sum": lambda x: x.sum(axis=1, keepdims=True) + torch.sum(a=x, axis=0),
    "argmax": lambda x: x * torch.argmax(x, axis=1, keepdims=True),
    "cosine_similarity": lambda x: F.cosine_similarity(x1=x, x2=x * x, dim=1),
    "add": lambda x: torch.add(x1=x, x2=x * x),
    "split": lambda x: torch.split(x, split_size_or_sections=[1, 3], dim=1)[1] * 2,
    "result_type": lambda x: (x * 2).to(torch.result_type(tensor=x, other=x)),
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_by_the_names_that_numpy_has_for_them(name: str) -> None:
    check(Call(NAMED[name]), (torch.randn(3, 4),), (torch.randn(5, 4),))


def test_substitutes_take_the_names_that_torch_has() -> None:
    """Of functions that are torch's own code, whose names its operators tell."""
    wrong, looked = [], 0
    for function, made in SUBSTITUTES.items():
        parameters = inspect.signature(made).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        operator = getattr(torch.ops.aten, function.__name__, None)
        is_torchs = isinstance(function, types.BuiltinFunctionType) and hasattr(operator, "default")
        if takes_all or not is_torchs:
            continue
        looked += 1
        named = {a.name for a in operator.default._schema.arguments} - {"self", "out"}
        wrong += [(function.__name__, name) for name in named - {*parameters}]
    assert looked > 10 and not wrong
