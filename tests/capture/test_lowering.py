"""Recorded programs with writes, views, regions and mixed types: the graph gives what eager gives, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain.capture import capture
from onnxtrain.errors import CaptureError
from onnxtrain.options import Options
from onnxtrain.ortmodule import ORTModule

Tensor = torch.Tensor


class Piece(nn.Module):
    """A piece of code between a parameter and a loss."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x * self.weight)


def _assigned_column(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    return y * x


def _assigned_slice_of_a_slice(x: Tensor) -> Tensor:
    y = x * 2
    y[1:][:, 1:3] *= 3
    return y


def _view_read_after_its_base_was_written(x: Tensor) -> Tensor:
    y = x * 1
    first, flat = y[0], y.view(-1)
    y.mul_(2)
    return first.sum() + flat.square().sum()


def _base_read_after_its_view_was_written(x: Tensor) -> Tensor:
    y = x + 1
    y.t().flatten(0)
    y.view(-1, 2, 2).transpose(1, 2)[:, 0].add_(5)
    return y * x


def _parts_of_the_last_axis_written(x: Tensor) -> Tensor:
    y = x.detach().t() * 0.5
    with torch.no_grad():
        for i, part in enumerate(y.chunk(2, -1)):
            part.mul_(i + 2)
        y.unbind(-1)[-1].neg_()
    return y.t() * x


def _parts_written_one_after_the_other(x: Tensor) -> Tensor:
    y = x.detach() * 0.5
    for i, part in enumerate(y.unbind(1)):
        part += i
    return y.square() * x


def _chunks_written(x: Tensor) -> Tensor:
    y = x.detach() * 0.5
    first, second = y.chunk(2, dim=0)
    first[:1].copy_(second[:1].exp())
    second.add_(1)
    return y * x


def _detached_before_it_was_written(x: Tensor) -> Tensor:
    y = x * 2
    before = y.detach()
    y.relu_()
    return y * before.exp()


def _columns_written(x: Tensor) -> Tensor:
    y = (x.detach() * 0.5)[:3].unsafe_chunk(1)[0] + 0
    with torch.no_grad():
        y.hsplit(2)[1].mul_(3)
        y.view(3, 2, 2).dsplit(2)[0].add_(1)
        y[0].hsplit(4)[2].zero_()
        y.tensor_split((1, 2), 1)[1].neg_()
    return y * x[:3]


def _diagonal_filled(x: Tensor) -> Tensor:
    y = x[:3, :3] + 0
    y.diagonal().fill_(2.0)
    return y @ x[:3]


def _masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0.2] *= 2
    y.masked_fill_(y < -0.5, 0.1)
    return y


def _in_place_activations(x: Tensor) -> Tensor:
    y = torch.relu_(x - 0.1)
    return nn.functional.hardtanh_(y * 3).add_(x)


def _written_to_out(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty_like(x)
        torch.mul(x, 2, out=y)
    return y * x


def _made_in_out(x: Tensor) -> Tensor:
    """In the type of what is there, not in the one that is the default."""
    y, steps = torch.empty(x.shape[0], x.shape[0], dtype=x.dtype), x.new_empty(x.shape[0])
    torch.eye(*y.shape, out=y)
    torch.linspace(0, 1, x.shape[0], out=steps)
    y = y * steps + torch.full(y.shape, 0.1, out=torch.empty_like(y))
    resized = torch.empty(0, dtype=x.dtype)
    torch.mul(x.detach(), 2, out=resized)
    return y @ x * torch.arange(0, 4, out=x.new_empty(4)) * resized


def _written_without_gradient(x: Tensor) -> Tensor:
    scale = torch.ones(4, dtype=x.dtype)
    with torch.no_grad():
        scale.mul_(x.mean(0)).add_(1)
    return x * scale


def _axes_inserted_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.unsqueeze_(1).squeeze_(1).t_()
    y[1:].unsqueeze_(0).transpose_(0, 1).mul_(0.5)
    return y.mul_(2).sum(1)


def _counts_that_become_numbers(x: Tensor) -> Tensor:
    mask = x > 0
    return x / mask.sum(1, keepdim=True) + mask - 1 + (mask.long() * 2) ** 2 * 0.5


def _stack_of_two_types(x: Tensor) -> Tensor:
    return torch.stack([x.float().mean(), (x + x).sum()]) * x.mean()


def _place_among_numbers(x: Tensor) -> Tensor:
    return x * torch.bucketize(x.detach().sum(), torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype))


def _count_of_elements(x: Tensor) -> Tensor:
    return x.sum() / x.numel() + x.mT.numel() * x[0].numel()


def _power_in_place(x: Tensor) -> Tensor:
    y = (x + 1).pow_(2)
    return y.float_power_(3)


def _random_numbers_in_place(x: Tensor) -> Tensor:
    return (x * 2).normal_(1, 0).uniform_(3, 3) * x


def _one_of_several_results_written(x: Tensor) -> Tensor:
    largest, places = x.cummax(0)
    largest.T.mul_(2)
    return largest * places + x.median(1).values.cumsum_(0).sum()


def _numbers_read_out_of_tensors(x: Tensor) -> Tensor:
    low, high, narrow = x.detach().min().item(), x.detach().max().item(), x.detach().float().max().item()
    y = x * (high * 2.1 + x.shape[0] / 3) + narrow % 0.3 + max(low, 0.1) ** 2 + round(high * 7)
    return torch.add(y, x.clamp(low / 2, 0.7), alpha=high)


def _axes_of_numbers(x: Tensor) -> Tensor:
    y = x.sum()
    deviation, mean = torch.std_mean(y, 0, correction=0)
    return y.amax(0) * 2 + y.amin(-1, keepdim=True) + y.flip(0) * y + deviation * mean + y.std(0, False)


def _several_of_half_precision(x: Tensor) -> Tensor:
    deviation, mean = torch.std_mean((x.detach() * 8).round().bfloat16(), -1)
    return x.sum(-1) * mean + deviation.double()


def _extremes_of_a_number(x: Tensor) -> Tensor:
    least, largest = x.sum().aminmax(dim=0)
    return least * largest


def _mapped(x: Tensor) -> Tensor:
    scale = torch.linspace(0, 1, 4, dtype=x.dtype)
    whole, part = torch.vmap(lambda row, s: (torch.outer(row, s).add_(1), row[1:].mul(row.sum())), (0, None))(x, scale)
    inner = torch.vmap(torch.vmap(lambda a: a.sin() * 2))(x)
    return (whole.sum(1) * inner)[:, 1:] + part


def _counts_times_a_ratio_of_sizes(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0]) * (x.shape[0] / 3) - torch.arange(x.shape[0]) / max(x.shape[0] / 4, 1.0)
    return x * places[:, None]


def _data_read(x: Tensor) -> Tensor:
    return x.data * x


def _strides_of_a_memory_in_another_order(x: Tensor) -> Tensor:
    y = (x * 2).t()  # the memory is that of rows of x
    windows = y.as_strided((x.shape[0], 2, 2), (4, 1, 2))
    y[1].mul_(3)
    return (
        windows.sum(2) @ x[:2, :2] + y.contiguous().as_strided((2, 2), (1, 1)).sum() + x[1:].as_strided((2,), (3,), 5)
    )


def _written_to_without_gradients(x: Tensor) -> Tensor:
    """By ``out``, in a list, by name: the gradient goes on as if nothing had been."""
    first, second, third = x * 2, x + 1, x - 1
    with torch.no_grad():
        torch.mul(first, 2, out=first)
        torch._foreach_mul_([second, third], 3)
        torch.relu_(input=third)
    torch.add(second.detach(), 1, out=second.detach())
    torch._foreach_mul_([first.detach()], 0.5)
    return first * second + third.square()


def _strides_of_half_of_the_columns(x: Tensor) -> Tensor:
    """To torch their number may be 0, by which it counts strides."""
    return (x.chunk(2, -1)[0] * 1).as_strided((2,), (1,)) + x.chunk(2, 0)[0].exp().as_strided((2,), (1,))


def _strides_beyond_a_part(x: Tensor) -> Tensor:
    parts = (x.as_strided((2,), (1,)), (x * 2)[:1], x.t()[:, :2], x.diagonal(), x.unfold(1, 2, 1), x[:1].expand(3, -1))
    return torch.stack([p.as_strided((3, 2), (2, 1), 1).sum(1) for p in parts])


def _strides_beyond_a_part_of_what_is_written(x: Tensor) -> Tensor:
    """Then the view is one of all the memory."""
    y = x * 2
    beyond = y[:1].as_strided((3, 2), (2, 1), 1)
    y.mul_(2)
    return beyond


def _strides_of_what_has_no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        row = x[0]
    return y.as_strided((2,), (1,)) + row.as_strided((2,), (1,)) + y.exp().as_strided((2,), (1,)) + x[0, :2].sin()


def _one_of_tensors_made_alike_written(x: Tensor) -> Tensor:
    y = x * 1
    first, second = torch.broadcast_tensors(y, x[:1])
    first += 1
    return first * second + y + torch.atleast_2d(y, x)[0]


def _itself_without_gradient(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        same = y.flatten(0, 0).contiguous() + y.to(y.dtype)
    return y - same.detach()


def _written_after_nothing_was_dropped(x: Tensor) -> Tensor:
    y = x * 2
    same = F.dropout(F.dropout(y, 0.0), 0.5, training=False)
    F.relu(y, inplace=True)
    return same


def _windows_written(x: Tensor) -> Tensor:
    """Side by side, with places between them, and of no place."""
    y = x * 1
    windows = y.unfold(-1, 2, 2)
    windows.mul_(torch.tensor([2.0, 3.0], dtype=x.dtype))
    y[1:].unfold(0, 1, 3).copy_(y[:1].unfold(0, 1, 3) * 0.5)
    y.unfold(0, 2, 3)[..., 1].add_(x[0])
    y.unfold(1, 0, 1).zero_()
    return windows.sin().sum((1, 2)) * y.sum(1)


def _views_that_no_operator_promises(x: Tensor) -> Tensor:
    """Operators that return memory of their argument where nothing is left to do."""
    y, column = x * 1, x[:, 0] * 1
    torch.einsum("ij->ji", y)[0] = 1
    torch.einsum("ii->i", y[:3, :3]).mul_(2)
    F.alpha_dropout(y, 0.5, training=False).mul_(3)
    torch.moveaxis(y, 0, 1)[1].add_(1)
    rows, columns = torch.meshgrid(column, x[0], indexing="ij")
    column.mul_(2)
    return y * rows + columns


def _truth_written(x: Tensor) -> Tensor:
    """Autograd does not notice it, and passes gradients as if it were not there."""
    y, z = x * 2, (x * 3).round()
    y.logical_not_()
    z[0].logical_and_(z[1])
    return (y + x) * z


def _truth_written_to_a_part_with_a_hook(x: Tensor) -> Tensor:
    """The hook is called no more: it was one of what the part was."""
    y = x * 2
    part = y[:, 0]
    if part.requires_grad:
        part.register_hook(lambda g: g * 3)
    part.logical_not_()
    return y + part[:, None]


def _views_with_hooks_of_what_is_looked_at_anew(x: Tensor) -> Tensor:
    """Those of the view itself go on; those of others are of views that there are no more, though nothing changed."""
    made = []
    for change in (lambda t: t.unsqueeze_(0), lambda t: t.squeeze_(0), lambda t: t.transpose_(0, -1), lambda t: None):
        for chosen in (0, 1, 2):
            y = x * 2
            part, other = y[:, 0], y[:, 1]
            if part.requires_grad:
                part.register_hook(lambda g: g * 3)
            change((y, part, other)[chosen])
            made.append(part.flatten() * (len(made) + 1))
    return torch.stack(made)


def _result_of_several_calls_written_unseen(x: Tensor) -> Tensor:
    """What ``einsum`` returns is a view of what nobody sees."""
    y = torch.einsum("...d,dk->...k", x[:, None], x[0][:, None].expand(-1, 3))
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
    return y.square().sum((1, 2))


def _several_written_to_out(x: Tensor) -> Tensor:
    highest, places = x.new_empty(0), torch.empty(0, dtype=torch.int64)
    torch.max(x.detach(), 1, out=(highest, places))
    ordered, _ = torch.sort(x.detach(), 1, out=(torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)))
    ordered.mul_(2)
    return x * highest[:, None] + places[:, None] * ordered


def _many_at_once(x: Tensor) -> Tensor:
    parts, mean = [x * 1, x * 2], x.new_ones(4)
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_add_(parts, [x, x], alpha=0.5)
    torch._foreach_lerp_([mean], [x.detach().mean(0)], 0.1)
    return parts[0] * parts[1] * mean + sum(torch._foreach_exp(parts))


def _data_replaced(x: Tensor) -> Tensor:
    """autograd knows nothing of it."""
    y, z = x * 1, x * 3
    y.data = y.data * 2
    z.data = torch.ones_like(z)
    return y * y + z


def _layers_made_in_the_call(x: Tensor) -> Tensor:
    layers = nn.Sequential(nn.Linear(4, 3, dtype=x.dtype), nn.LayerNorm(3, dtype=x.dtype))
    nn.init.constant_(layers[0].weight, 0.1)
    nn.init.eye_(layers[0].weight)
    nn.init.zeros_(layers[0].bias)
    return layers(x)


def _written_by_name(x: Tensor) -> Tensor:
    y = x * 1
    torch.sigmoid_(input=y)
    y = y + 1
    with torch.no_grad():
        torch.relu_(input=y)
    positive = y > 1.6
    positive.logical_and_(other=x > 0)
    return torch.dropout(y, 0.5, train=False) * positive


@torch.inference_mode()
def _of_inference(x: Tensor) -> Tensor:
    return x.square()


def _regions_of_inference(x: Tensor) -> Tensor:
    y = x * 3
    with torch.inference_mode():
        y.mul_(2)
        constant = x.exp()
        with torch.inference_mode(mode=False):
            y = y * x
    with torch.no_grad(), torch.inference_mode(False):
        y = y + x.cos()
    return y + constant + _of_inference(x)


def _parts_told_from_the_end_written(x: Tensor) -> Tensor:
    y, rows = x * 2, x.shape[0]
    y.narrow(-1, -2, 2).mul_(3)
    y.narrow(0, 1 - rows, rows - 1).sub_(1)
    y.narrow(0, -2, rows - 2 if rows == 3 else 2).exp_()
    z = torch.complex(y, x)
    z.narrow(1, -3, 2).mul_(2)
    return z.real * z.imag


def _axes_swapped_in_place(x: Tensor) -> Tensor:
    y = x * 2
    z = y.view_as(y)
    z.swapdims_(0, 1)
    z[0] *= 3
    z.swapaxes_(axis0=-1, axis1=0)
    z[0] += 1
    torch.linalg.diagonal(y).mul_(2)
    torch.linalg.diagonal(y.unsqueeze(-1), offset=-1, dim1=0, dim2=1).add_(3)
    return y * z


def _written_as_another_type(x: Tensor) -> Tensor:
    constant, y, z = x.detach() * 1, x * 2, x.bfloat16()
    constant.t().view(torch.int64)[1:].bitwise_and_(-(1 << 40))
    bits = y.view(dtype=torch.int64)
    bits[0].bitwise_and_(-(1 << 40))
    halves = z.view(torch.float16)
    halves *= x[0].half()
    return constant * y.square() * z * halves.clamp(0, 1) * (bits > 0)


def _part_that_a_tensor_tells_written(x: Tensor) -> Tensor:
    y = x * 2
    start = (x[:, 0] < 0).sum().clamp(max=1)
    part = y.narrow(0, start, 2)
    part[0].mul_(x[0, 1])
    torch.narrow(y, -1, start - 3, 2).exp_()
    z = torch.complex(y, x)
    z.narrow(0, start, 2).add_(1)
    return part * z.real[:2] * z.imag[1:3]


def _complex_numbers_written_without_gradient(x: Tensor) -> Tensor:
    y = torch.complex(x, x.detach())
    with torch.no_grad():
        y.mul_(2)
        torch.view_as_real(y)[..., 0].add_(1)
    y.detach().t()[1:].mul_(3j)
    return (y * y).abs()


PIECES = {
    piece.__name__.strip("_").replace("_", " "): piece
    for piece in (
        _assigned_column,
        _assigned_slice_of_a_slice,
        _view_read_after_its_base_was_written,
        _base_read_after_its_view_was_written,
        _parts_written_one_after_the_other,
        _chunks_written,
        _columns_written,
        _detached_before_it_was_written,
        _parts_of_the_last_axis_written,
        _diagonal_filled,
        _masked,
        _in_place_activations,
        _written_to_out,
        _made_in_out,
        _written_without_gradient,
        _axes_inserted_in_place,
        _counts_that_become_numbers,
        _stack_of_two_types,
        _place_among_numbers,
        _count_of_elements,
        _power_in_place,
        _random_numbers_in_place,
        _one_of_several_results_written,
        _numbers_read_out_of_tensors,
        _axes_of_numbers,
        _several_of_half_precision,
        _extremes_of_a_number,
        _mapped,
        _counts_times_a_ratio_of_sizes,
        _data_read,
        _strides_of_a_memory_in_another_order,
        _strides_beyond_a_part,
        _strides_of_half_of_the_columns,
        _written_to_without_gradients,
        _strides_beyond_a_part_of_what_is_written,
        _strides_of_what_has_no_gradient,
        _one_of_tensors_made_alike_written,
        _itself_without_gradient,
        _written_after_nothing_was_dropped,
        _windows_written,
        _views_that_no_operator_promises,
        _truth_written,
        _truth_written_to_a_part_with_a_hook,
        _views_with_hooks_of_what_is_looked_at_anew,
        _result_of_several_calls_written_unseen,
        _several_written_to_out,
        _many_at_once,
        _data_replaced,
        _layers_made_in_the_call,
        _written_by_name,
        _regions_of_inference,
        _complex_numbers_written_without_gradient,
        _part_that_a_tensor_tells_written,
        _parts_told_from_the_end_written,
        _axes_swapped_in_place,
        _written_as_another_type,
    )
}


@pytest.mark.parametrize("name", PIECES)
def test_as_eager(name: str) -> None:
    eager = Piece(PIECES[name])
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (5, 3):
        x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        given = [x.clone().requires_grad_() for _ in range(2)]
        expected, found = eager(given[0]), wrapped(given[1])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for made, module in ((expected, eager), (found, wrapped)):
            module.zero_grad()
            try:
                made.square().sum().backward()
            except RuntimeError as error:  # torch 2.11 has no derivative of aminmax
                if made is expected and "is not implemented" in str(error):
                    pytest.skip(f"eager PyTorch: {error}")
                raise
        torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-11, atol=1e-12)


def test_a_number_made_of_sizes_needs_no_node_of_torch() -> None:
    module = Piece(_counts_times_a_ratio_of_sizes)
    graph = capture(module, (torch.randn(5, 4, dtype=torch.float64),), {}).graph
    assert "ATen" not in {node.op_type for node in graph.model.graph}


def test_a_write_that_has_no_other_form_is_refused() -> None:
    module = Piece(lambda x: x.clone().unfold(0, 2, 1).mul_(2))
    with pytest.raises(CaptureError, match="shares memory"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


def test_a_write_to_what_is_read_as_numbers_of_another_width_is_refused() -> None:
    module = Piece(lambda x: x + x.clone().view(torch.int32).bitwise_and_(-2).sum())
    with pytest.raises(CaptureError, match=r"aten\.view\.dtype.*shares memory"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


@pytest.mark.parametrize(
    "replace, what",
    [
        (lambda x: setattr(x, "data", x[:2]), "other sizes"),
        (lambda x: setattr(x[:2], "data", x[:2] * 2), "of a view"),
        (lambda x: setattr(x.detach(), "data", x * 2), "of a view"),
    ],
)
def test_data_that_is_replaced_by_what_does_not_fit_is_refused(replace: Callable[[Tensor], None], what: str) -> None:
    def code(x: Tensor) -> Tensor:
        replace(x)
        return x

    with pytest.raises(CaptureError, match=what):
        capture(Piece(code), (torch.ones(3, 4, dtype=torch.float64),), {})


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("written", ["whole", "mapped"])
def test_changes_of_what_a_mapped_function_only_looks_at_are_refused(axis: int, written: str) -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * 1
        mapped = torch.vmap(torch.t, out_dims=axis)(whole)
        (whole if written == "whole" else mapped).mul_(2)
        return whole * 1, mapped * 1

    with pytest.raises(CaptureError, match="shares memory with another tensor"):
        capture(Piece(code), (torch.randn(5, 4, 4, dtype=torch.float64),), {})


def test_strides_of_a_memory_that_is_not_known_are_refused() -> None:
    module = Piece(lambda x: x[:, :1].sum() + torch.empty_strided((3, 2), (4, 1)).as_strided((3,), (4,)).sum())
    with pytest.raises(CaptureError, match="as_strided on a part"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


def test_strides_of_a_part_that_a_tensor_tells_are_refused() -> None:
    """Where it begins is not known before it runs."""
    module = Piece(lambda x: x.narrow(0, torch.argmax(x[:2, 0]), 2).as_strided((2,), (1,)))
    with pytest.raises(CaptureError, match="as_strided on a part"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


def test_strides_beyond_a_tensor_are_refused() -> None:
    """Of a loss eager PyTorch reads there what its terms were."""
    module = Piece(lambda x: torch.nn.functional.soft_margin_loss(x, x.detach().sign()).as_strided((3,), (1,)))
    with pytest.raises(CaptureError, match="reads beyond"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


def test_strides_of_memory_that_is_read_as_another_type_are_refused() -> None:
    module = Piece(lambda x: torch.view_as_real(torch.complex(x, x)).as_strided((3,), (2,)))
    with pytest.raises(CaptureError, match="as_strided on a part"):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})


def test_strides_of_nothing_are_refused() -> None:
    """They read what lies beside it, to which eager PyTorch passes no gradient."""
    with pytest.raises(CaptureError, match="as_strided on a part"):
        capture(Piece(lambda x: x[:-1].as_strided((1,), (1,))), (torch.randn(1, 4, dtype=torch.float64),), {})


def test_strides_written_to_a_part_of_a_memory_are_refused() -> None:
    """The copy that eager PyTorch makes is one of the whole memory."""
    code = lambda x: torch.as_strided_scatter(torch.stack([x, x])[1], x[0, :2], (2,), (1,), 1)  # noqa: E731
    with pytest.raises(CaptureError, match="as_strided_scatter on a part"):
        capture(Piece(code), (torch.randn(5, 4, dtype=torch.float64),), {})


OVERWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda x: x.clone().fill_(0.5),
    "with zeros": lambda x: x.mul(2).zero_(),
    "with another tensor": lambda x: x.clone().copy_(torch.ones(4)),
    "with random numbers": lambda x: x.clone().normal_() * 0,
    "by an operator that returns": lambda x: torch.fill(x, 0.5),
    "a whole slice": lambda x: x.clone()[:].fill_(0.5),
    "detached before": lambda x: x.detach().clone().fill_(0.5),
}


def same_history(code: Callable[[Tensor], tuple[Tensor, ...]], differentiated: slice) -> ORTModule:
    """The wrapped code: outputs, which of them require a gradient, and the weight's from some of them are eager's."""
    wrapped, eager = ORTModule(Piece(code)), Piece(code)
    for size in (3, 5):
        x = torch.randn(size, 4, dtype=torch.float64)
        for ours, theirs in zip(wrapped(x), eager(x), strict=True):
            assert ours.requires_grad == theirs.requires_grad
            torch.testing.assert_close(ours, theirs)
        for run in (wrapped, eager):
            torch.stack([output.sum() for output in run(x)[differentiated]]).sum().backward()
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)
    return wrapped


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_what_is_overwritten_requires_a_gradient_as_before(name: str) -> None:
    """It is zeros; the graph does not keep what was there."""

    def code(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = OVERWRITTEN[name](x)
        return made, made * 2, x.square()

    assert same_history(code, slice(None)).graph("captured").count("Where") <= 1


def test_what_is_written_through_a_detached_name_has_no_history_under_the_other() -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            made = x.exp()
        name = made.detach()
        name.copy_(x * 2)
        return made, made * x, name * 3

    same_history(code, slice(1, None))


def test_what_is_looked_at_as_another_type_has_no_gradient() -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * x.view(torch.int64).view(torch.float64), x.bfloat16().view(torch.float16)

    same_history(code, slice(1))


def test_strides_of_a_detached_tensor_pass_no_gradient() -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detached = (x * 2).detach()
        return (
            detached.as_strided((2,), (1,)),
            x * detached.view(-1).as_strided((1,), (1,)),
            x.data.as_strided((2,), (1,)),
        )

    same_history(code, slice(1, 2))


def _renamed_view(x: Tensor) -> Tensor:
    y = x * 1
    part = y[:, :6]
    part.unsqueeze_(1)
    y[..., 0] *= 0.5
    return torch.addcmul(y, part.amax(0), x)


def _bits(x: Tensor) -> Tensor:
    mask, small = x > 0, (x > 0).to(torch.uint8)
    mask &= x < 1
    mask |= x[:1] > 2
    small <<= 2
    return x * mask * (small >> 1) * (mask & 3)


def _numbers_of_another_type(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0.5] = x.float().sum()
    y[x < -0.5] = torch.ones(1, dtype=torch.int64)
    return y + (x.float().abs() + 1) ** x.clamp(-1, 2) + x.bfloat16().scatter(0, (x[:1] > 9).long(), -1.5)


TYPED: dict[str, Callable[[Tensor], Tensor]] = {
    "a view that was given an axis": _renamed_view,
    "bits": _bits,
    "numbers of another type": _numbers_of_another_type,
}


@pytest.mark.parametrize("name", TYPED)
def test_written_as_eager_writes_it(name: str) -> None:
    wrapped, eager = ORTModule(Piece(TYPED[name])), Piece(TYPED[name])
    for size in (3, 5):
        x = torch.randn(size, 4, dtype=torch.float64)
        results = []
        for run in (wrapped, eager):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.sum().backward()
            results.append([y, leaf.grad])
        torch.testing.assert_close(*results)


def test_a_fault_within_says_the_line_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a size")

    monkeypatch.setattr("onnxtrain.capture.lowering.calls.promoted", broken)
    module = Piece(lambda x: x * 2)
    with pytest.raises(
        CaptureError, match=r"KeyError: .*(?s:.*)aten\.mul.*(?s:.*)test_lowering\.py.*(?s:.*)report this"
    ):
        capture(module, (torch.randn(5, 4, dtype=torch.float64),), {})
    x = torch.randn(5, 4)
    assert ORTModule(module, Options(fallback="eager"))(x).equal(module(x))
