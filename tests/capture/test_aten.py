"""Operators that stay whole as ATen nodes: which, and that they run and are differentiated as torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, pair, same_step

from onnxtrain import ORTModule


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


def compare(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> ORTModule:
    """Outputs and gradients as eager has them, from the same random state; gives the wrapped module."""
    wrapped, results = ORTModule(Calls(function)), []
    for module in (wrapped, Calls(function)):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        torch.manual_seed(3)
        y = module(*leaves)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(x.grad for x in leaves if x.requires_grad)])
    torch.testing.assert_close(results[0], results[1])
    return wrapped


FUNCTIONS = {
    "complex numbers": lambda x: torch.fft.fft(x).abs().sum(),
    "a list of results": lambda x: sum(p.prod() for p in torch.hsplit(x, 2)),
    "integer results": lambda x: torch.kthvalue(x, 2)[0].sum(),
    "a computed number": lambda x: torch.cumprod(x, 0).narrow(0, 0, x.shape[0] - 1).sum(),
    "written in place": lambda x: x.clone().cumprod_(0).sum(),
    "no dimensions": lambda x: torch.special.i1e(x.sum()),
    "one gradient for two operands": lambda x: (
        torch.view_as_real(torch.view_as_complex((x * 2).exp()[:, :2]) + torch.view_as_complex((x * 3).tanh()[:, :2]))
        .square()
        .sum()
    ),
    "a keyword of Python": lambda x: (
        (x * torch.empty_like(x).random_(0, 5)).sum() + x.detach().clone().random_(2, 9).sum()
    ),
    "an optional tensor": lambda x: torch.trapezoid(x.logcumsumexp(1), x.cummax(1)[0]).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_eager(name: str) -> None:
    compare(FUNCTIONS[name], torch.rand(4, 6) + 0.5)


def test_random_numbers_are_drawn_once() -> None:
    wrapped = compare(lambda x: F.rrelu(x, 0.0, 1.0, True), torch.randn(64))
    assert "aten::rrelu" in wrapped.graph("captured")


def test_no_rule_keeps_the_operator_whole() -> None:
    wrapped = compare(lambda x: torch.cumprod(x, 0), torch.rand(3, 4))
    assert "aten::cumprod" in wrapped.graph("captured")


def test_squeeze_of_one_and_of_more() -> None:
    wrapped, eager = ORTModule(Calls(torch.squeeze)), Calls(torch.squeeze)
    for rows in (1, 3, 1):
        x = torch.randn(rows, 4, requires_grad=True)
        assert wrapped(x).shape == eager(x).shape


def test_a_size_of_one_that_must_stay_one() -> None:
    compare(lambda a, b: torch.block_diag(a, b).square().sum(), torch.rand(1, 2), torch.rand(3, 1))


def test_sizes_that_depend_on_content_survive_a_second_translation() -> None:
    wrapped = compare(lambda x: torch.cumprod(x[x > 0.8], 0).sum(), torch.rand(4, 6) + 0.5)
    assert "aten::cumprod" in wrapped.graph("captured")


def test_sizes_that_depend_on_content_keep_a_name_where_others_are_made_of_them() -> None:
    def selected(x: torch.Tensor) -> torch.Tensor:
        found = x[(x > 0.8).nonzero()[:, 0]]
        return (found.reshape(-1, 2) / found.shape[0]).expand(3, -1, -1).sum()

    compare(selected, torch.rand(4, 6) + 0.5)


def test_sizes_that_become_numbers_are_numbers_from_the_first() -> None:
    def by_row(x: torch.Tensor) -> torch.Tensor:
        counts = (x > 1).sum(1)  # their number is that of the batch, until they are looped over
        return torch.stack([row * (x.shape[1] - count) for row, count in zip(x, counts, strict=True)]).sum()

    wrapped = compare(by_row, torch.rand(4, 6) + 0.5)
    assert "ATen" not in wrapped.graph("captured") and "Sequence" not in wrapped.graph("captured")


WHOLE = {
    "a masked row of a softmax": lambda x: torch.ops.aten._safe_softmax(x.masked_fill(x > 0, float("-inf")), 0),
    "the tail of a distribution": lambda x: torch.special.log_ndtr(x * 20),
    "a value filled in twice": lambda x: torch.index_fill(x, 0, torch.tensor([1, 1, 0]), x.sum()),
    "corners aligned": lambda x: F.interpolate(
        x[None, None], (3, 4), mode="bilinear", align_corners=True, antialias=True
    ),
    "a scale of its own": lambda x: F.interpolate(
        x[None, None], scale_factor=(0.7, 0.8), mode="bilinear", antialias=True
    ),
    "gradients by counts": lambda x: F.embedding(torch.tensor([0, 1, 1, 3]), x, scale_grad_by_freq=True),
    "distances of 0": lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"),
    "a norm at zero": lambda x: torch.linalg.vector_norm(x * 0, 0.5, 1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_torch_onnx_would_translate_otherwise(name: str) -> None:
    wrapped = compare(WHOLE[name], torch.randn(4, 6))
    assert "ATen(" in wrapped.graph("captured")


def test_what_has_no_gradient_in_eager_has_none() -> None:
    """Not one that is not implemented, and the result requires none."""
    for draw in (lambda x: torch.randint_like(x, 0, 5), lambda x: torch.randint_like(x, 7)):
        compare(lambda x, draw=draw: (x * draw(x)).sum(), torch.randn(4, 6))
    wrapped, eager = pair(Applied(lambda x: torch.histc(x, 3)))
    same_step(wrapped, eager, torch.rand(2, 3))
    assert not wrapped(torch.rand(2, 3)).requires_grad


@pytest.mark.parametrize(
    "shapes", [((4, 3), (4, 5)), ((6, 4, 3), (4, 5)), ((4, 3), (1, 5)), ((4, 3), ()), ((3,), (1,))]
)
def test_a_bias_of_several_rows(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, bias = map(torch.randn, shapes)
    compare(F.linear, x, torch.randn(5, 3), bias)


@pytest.mark.parametrize("counts", [(10, 40), (40, 10)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_distances_of_few_and_of_many_rows(counts: tuple[int, int], shape: tuple[int, ...]) -> None:
    """Of more than 25 they are by a product of matrices; that of a row to itself has gradient 0 either way."""
    ours, eager = pair(Applied(lambda x: torch.cdist(x, x)))
    for count in counts:
        same_step(ours, eager, torch.randn(*shape, count, 3))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "trilinear"])
def test_scales_of_images_in_double_precision(mode: str) -> None:
    """ONNX's are in float32."""
    axes = (None,) * (3 if mode == "trilinear" else 2)
    images = torch.randn(4, 6, dtype=torch.float64)
    exact = compare(lambda x: F.interpolate(x[axes], scale_factor=1.5, mode=mode), images)
    wrapped = compare(lambda x: F.interpolate(x[axes], scale_factor=1.7, mode=mode), images)
    assert "ATen(" in wrapped.graph("captured") and "ATen(" not in exact.graph("captured")


@pytest.mark.parametrize("scale", [1.7, 2.2, 0.7, 0.3, 1.1, 0.29])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_scales_that_float32_does_not_hold(axes: int, scale: float) -> None:
    """Sizes and the places that are nearest come of the scale as it is; an axis of the same size is copied."""
    for mode in ("nearest", "nearest-exact", {1: "linear", 2: "bilinear", 3: "trilinear"}[axes]):
        resize = partial(F.interpolate, scale_factor=scale, mode=mode)
        wrapped, eager = pair(Applied(resize))
        for length in (100, 17, 6):
            same_step(wrapped, eager, torch.randn(1, 2, *(5,) * (axes - 1), length))
        assert "ATen(" in wrapped.graph("captured")


@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5, 1.25])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_scales_that_float32_holds(mode: str, scale: float) -> None:
    wrapped, eager = pair(Applied(partial(F.interpolate, scale_factor=scale, mode=mode)))
    for length in (3, 17, 6):
        same_step(wrapped, eager, torch.randn(1, 2, length))
    assert ("ATen(" in wrapped.graph("captured")) == (mode == "linear" and scale == 1.25)


@pytest.mark.parametrize("order", [1, 2, float("inf"), -float("inf")])
@pytest.mark.parametrize("dims", [{}, {"keepdim": True}, {"dim": 1}, {"dim": (0, 1), "keepdim": True}])
def test_norms(order: float, dims: dict[str, object]) -> None:
    wrapped = compare(lambda x: torch.linalg.vector_norm(x, order, **dims), torch.randn(4, 6))
    assert "ATen(" not in wrapped.graph("captured")


EMPTY = {
    "group_norm": (lambda x: F.group_norm(x, 2), (0, 4, 3)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 1), (1, 1, 0, 1)),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), (0, 4)),
    "unfold": (lambda x: F.unfold(x, 2), (0, 2, 5, 5)),
    "matmul": (lambda x: torch.ones(5, 5, 0).requires_grad_() @ x, (0, 5)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_tensors_without_elements(name: str) -> None:
    function, shape = EMPTY[name]
    compare(function, torch.randn(shape))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_batch_axis(causal: bool) -> None:
    wrapped = compare(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=causal), *torch.rand(2, 3, 5, 8))
    assert "ATen(" not in wrapped.graph("captured")


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_dropout_draws_what_eager_draws(rate: float) -> None:
    compare(lambda x: F.dropout(F.dropout(x, rate, True), 0.5, True), torch.randn(4, 6))


@torch.library.custom_op("onnxtrain_tests::scale_in_place", mutates_args=("x",))
def _scaled(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("onnxtrain_tests::add_in_place", mutates_args=("x",))
def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


@torch.library.custom_op("onnxtrain_tests::move_apart", mutates_args=("x", "y"))
def _moved(x: torch.Tensor, y: torch.Tensor, *, by: int = 2) -> None:
    x.add_(by)
    y.sub_(by)


_added.register_fake(lambda x, y: torch.empty_like(x))


def _with_one_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    _scaled(y[1:], 3.0)
    return y * w


def _with_a_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = _added(y, w)
    return y * w + z.detach()


def _with_two_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, w * 3
    _moved(y, z, by=4)
    return y * z


def _with_an_argument_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    _scaled(x, 3.0)
    return x * w


@pytest.mark.parametrize("way", ["wrapped", "compiled"])
@pytest.mark.parametrize(
    "function",
    [_with_one_written, _with_a_result, _with_two_written, _with_an_argument_written],
    ids=lambda f: f.__name__,
)
def test_operators_of_others_that_write_to_their_arguments(function: Callable[..., torch.Tensor], way: str) -> None:
    """Autograd does not see what they write: the gradient goes on as if they had written nothing."""
    wrapped, eager = pair(Calls(function))
    trained = wrapped if way == "wrapped" else torch.compile(function, backend="onnxtrain")
    steps = []
    for run in (trained, eager):
        x, w = torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 3, 5], requires_grad=True)
        x.requires_grad_(function is not _with_an_argument_written)
        result = run(x, w)
        result.sum().backward()
        steps.append((result, x, x.grad, w.grad))
    torch.testing.assert_close(*steps)
