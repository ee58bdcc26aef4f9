"""Programs with and without graph breaks, trained by ``torch.compile(backend="onnxtrain")`` as in eager PyTorch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import captures, compiled, piece, same_steps
from parity import captures as graphs_of
from parity import pair, same_step
from torch import nn
from torch._functorch import autograd_function
from torch.utils.checkpoint import checkpoint

from onnxtrain.errors import CaptureError, OnnxTrainError
from onnxtrain.torchdynamo import pieces

Tensor = torch.Tensor


class Layers(torch.nn.Module):
    """Two layers, a buffer and dropout, for a forward pass of the test's."""

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.norm, self.dropout = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(4))
        self.program = program

    def forward(self, *inputs: Any) -> Any:
        return self.program(self, *inputs)


class Cubed(torch.autograd.Function):
    """x³, with a gradient that is not its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 5 * dy * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """Twice its argument, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 3 * dy


def one(rows: int = 3) -> tuple[Tensor]:
    return (torch.randn(rows, 4),)


def two() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


@torch._dynamo.disable
def outside(h: Tensor) -> Tensor:
    return h * h.detach().std()


def printing(self: Layers, x: Tensor) -> Any:
    h = self.first(x).relu()
    torch._dynamo.graph_break()
    return self.second(h)


def branch_on_content(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    return self.second(h) if h.sum() > 0 else self.second(-h) * 2


def loop_over_a_number(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    for _ in range(int(h.abs().sum().item()) % 3 + 1):
        h = self.second(h).tanh()
    return h


def view_across(self: Layers, x: Tensor) -> Any:
    y = self.first(x)
    first = y[0]
    torch._dynamo.graph_break()
    return self.second(y), first * 2


def buffer_across(self: Layers, x: Tensor) -> Any:
    self.seen.add_(x.mean(0))
    torch._dynamo.graph_break()
    h = self.norm(self.first(x)) + self.seen
    self.seen.mul_(0.5)
    return h, self.seen.clone()


def dropout_across(self: Layers, x: Tensor) -> Any:
    h = self.dropout(self.first(x))
    torch._dynamo.graph_break()
    return self.dropout(self.second(h))


def numpy_across(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    largest = float(h.detach().numpy().max())
    return self.second(h) * largest


def no_grad_across(self: Layers, x: Tensor) -> Any:
    with torch.no_grad():
        h = self.first(x)
        torch._dynamo.graph_break()
        h = h * 2
    return self.second(h + x), h


def autocast_across(self: Layers, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.first(x)
        torch._dynamo.graph_break()
        h = self.second(h)
    return h.float()


def nested_outputs(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    torch._dynamo.graph_break()
    return {"hidden": [h, self.second(h)], "rows": x.shape[0], "none": None}


def function_outside(self: Layers, x: Tensor) -> Any:
    return self.second(outside(self.first(x)))


def in_place_across(self: Layers, x: Tensor, y: Tensor) -> Any:
    h = self.first(y)
    x.mul_(0.5)
    torch._dynamo.graph_break()
    x[0] = 1.0
    return self.second(h) + x


def written_with_gradient(self: Layers, x: Tensor, y: Tensor) -> Any:
    z = self.first(y).clone()
    torch._dynamo.graph_break()
    z.mul_(self.second(x))
    return z


def strides_across(self: Layers, x: Tensor) -> Any:
    h = self.first(x).view(1, -1, 4).transpose(0, 1)
    torch._dynamo.graph_break()
    return h.as_strided((h.size(0), h.size(2)), (h.stride(0), h.stride(2))) * 2


def heads(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.view(torch.Size([*x.size()[:-1], 2, 2])).permute(1, 0, 2)


def view_written_across(self: Layers, x: Tensor) -> Any:
    y = heads(self.first(x))
    y += 1
    return self.second(y.flatten(1).t().reshape(-1, 4))


def read_after_a_write(self: Layers, x: Tensor) -> Any:
    y = x * 1
    first = y[1:].detach()
    y.mul_(2)
    torch._dynamo.graph_break()
    return self.second(F.layer_norm(first, (4,))) + self.first(y)[1:]


BREAKS = [
    *((f, one) for f in (printing, branch_on_content, loop_over_a_number, view_across, buffer_across)),
    *((f, one) for f in (dropout_across, numpy_across, no_grad_across, autocast_across, nested_outputs)),
    *((f, one) for f in (function_outside, strides_across, view_written_across, read_after_a_write)),
    *((f, two) for f in (in_place_across, written_with_gradient)),
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("program", "inputs"), BREAKS, ids=[f.__name__ for f, _ in BREAKS])
def test_each_piece_between_graph_breaks_is_a_graph(
    program: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]], dynamic: bool | None
) -> None:
    same_steps(lambda: Layers(program), inputs, dynamic=dynamic)
    assert 2 <= captures() <= len(pieces())


def views(self: Layers, x: Tensor) -> Any:
    x.add_(0.1)
    return x.view(-1), x[1:], x.t(), self.first(x * 2), x


def checkpointed(self: Layers, x: Tensor) -> Any:
    return checkpoint(lambda z: self.second(self.first(z).relu()), x, use_reentrant=False)


def own_functions(self: Layers, x: Tensor) -> Any:
    return Cubed.apply(self.first(x)) + Cubed.apply(self.second(x))


def branches(self: Layers, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda z: self.first(z), lambda z: self.second(z), (x,))


def numbers(self: Layers, x: Tensor) -> Any:
    return self.first(x), x.shape[0] * 2, x.size(1), 3, "text", None


def statistics(self: Layers, x: Tensor) -> Any:
    return self.norm(self.first(x)), self.first.weight, self.first.weight.t()


def autocast_inside(self: Layers, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            h = self.second(h.float())
        return h @ h.t()


def data_of(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    return self.second(h) * h.data.max()


def dirty(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    y = h * 1
    return Doubled.apply(y) + self.second(h), y


def views_without_gradients(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    with torch.no_grad():
        v, (w, _) = h.view(-1), h.chunk(2)
    return h, v, v[1:], w, h.view(-1)


def written_unseen(self: Layers, x: Tensor) -> Any:
    """Writes that torch does not count: through ``.data``, and to several tensors at once."""
    y = x * 3
    torch._foreach_add_([x], 1.0)
    x.data.mul_(0.5)
    return y, self.second(x)


def shaped_in_place(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    first = h[0]
    h.unsqueeze_(0).add_(1)
    return h, first


def data_given(self: Layers, x: Tensor) -> Any:
    self.second.weight.data = self.first.weight * 0.5
    return self.second(x)


def mapped(self: Layers, x: Tensor) -> Any:
    return torch.vmap(lambda row, w: (row * w).sum())(self.first(x), x), torch.vmap(lambda row: row.view(2, 2))(x)


def differentiated(self: Layers, x: Tensor) -> Any:
    h = self.first(x)
    slopes = torch.func.grad(lambda z: self.second(z).tanh().sum())(h)
    return slopes, torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(h)


def derivatives(self: Layers, x: Tensor) -> Any:
    row = self.first(x)[0]
    value, slope = torch.func.jvp(torch.tanh, (row,), (row * 2,))
    with torch.no_grad():
        fixed = torch.func.grad(lambda z: torch.vmap(torch.sin, out_dims=1)(z).prod())(self.second(x))
    return value, slope, torch.func.jacrev(torch.sin)(row), torch.func.hessian(lambda z: (z**3).sum())(row), fixed


def nothing_given(self: Layers, x: Tensor) -> Any:
    h = torch.zeros(3, 4)
    torch._dynamo.graph_break()
    return self.first(x + h)


def chunks(self: Layers, x: Tensor) -> Any:
    """Parts that overlap, along an axis that is padded: strides are products of sizes."""
    h = self.first(x)
    h = torch.nn.functional.pad((h @ h.t())[None], (0, 0, 2, 2))
    (batch, row, column), (_, length, width) = h.stride(), h.size()
    return h.as_strided((1, length - 1, 2, width), (batch, row, row, column))


WHOLE = (
    views,
    chunks,
    checkpointed,
    own_functions,
    branches,
    numbers,
    statistics,
    autocast_inside,
    data_of,
    views_without_gradients,
    written_unseen,
    shaped_in_place,
    data_given,
    mapped,
    differentiated,
    derivatives,
    nothing_given,
)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", WHOLE, ids=[f.__name__ for f in WHOLE])
def test_what_a_program_does(program: Callable[..., Any], dynamic: bool | None) -> None:
    same_steps(lambda: Layers(program), one, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_function_that_changes_its_input(dynamic: bool | None) -> None:
    """Dynamo of torch 2.11 does not say what one marks as changed, and its own backends lose gradients."""
    if "dirty_idx" in inspect.getsource(autograd_function):
        same_steps(lambda: Layers(dirty), one, dynamic=dynamic)
    else:
        with pytest.raises(CaptureError, match="changes an argument in place that is differentiated"):
            compiled(Layers(dirty), dynamic)(*one())


def test_only_views_need_no_graph() -> None:
    same_steps(lambda: Layers(lambda self, x: (x.view(2, 6), x[0])), one)
    assert piece().captures == 0 and "nothing to compute" in piece().explain()


def test_a_view_of_an_input_shares_its_memory() -> None:
    made = compiled(lambda x: (x.t(), x * 2))
    x = torch.zeros(2, 3)
    view, _ = made(x)
    view.add_(1)
    assert x.eq(1).all()


WRITTEN = [
    lambda x, y: F.relu(x, True),
    lambda x, y: F.elu(x, 1.0, True),
    lambda x, y: F.hardtanh(x, -1.0, 1.0, True),
    lambda x, y: F.dropout(x, 0.5, False, True),
    lambda x, y: torch.add(y, 1, out=x),
    lambda x, y: Doubled.apply(x),
    lambda x, y: torch.max(y.expand(3, 4), 0, out=(x, torch.zeros(4, dtype=torch.long)))[0],
    lambda x, y: x.contiguous(),
]


@pytest.mark.parametrize("program", WRITTEN)
def test_what_a_call_returns_as_it_is_is_the_same_tensor(program: Callable[..., Any]) -> None:
    inputs = [(torch.linspace(-2, 2, 4), torch.arange(4.0)) for _ in range(2)]
    run, (x, y) = compiled(program), inputs[0]
    assert run(x, y) is x
    program(*inputs[1])
    torch.testing.assert_close(*inputs)


def test_weights_in_one_memory_that_was_written_before() -> None:
    layer = torch.nn.Linear(4, 4)
    torch.nn.utils.vector_to_parameters(torch.arange(20.0), layer.parameters())
    same_steps(lambda: lambda x: layer(x), one)


def test_what_is_written_after_another_call_is_no_matter() -> None:
    """Two steps are open at once, each with its own weights: layers of one class share a piece."""
    layers = [torch.nn.Linear(4, 4).double() for _ in range(3)]
    torch._dynamo.reset()
    run = torch.compile(lambda layer, x: layer(x).tanh(), backend="onnxtrain")
    x = torch.randn(2, 4, dtype=torch.float64)
    outputs = [run(layer, x) for layer in layers]
    for layer, output in reversed(list(zip(layers, outputs, strict=True))):
        output.square().sum().backward()
        expected = torch.autograd.grad(layer(x).tanh().square().sum(), list(layer.parameters()))
        torch.testing.assert_close([p.grad for p in layer.parameters()], list(expected))


def test_functions_have_gradients_of_their_inputs() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1)

    same_steps(lambda: function, lambda: (torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)))
    assert [given.name for given in piece().inputs] == ["x", "w"]


class Named(torch.nn.Module):
    """Layers inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "norm": torch.nn.BatchNorm1d(4)})

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.body["norm"](self.body["first"](x)) * others["scale"]


def test_weights_have_the_names_of_the_module() -> None:
    model = Named()
    compiled(model)(torch.randn(3, 4), scale=torch.randn(4)).sum().backward()
    text, names = (
        piece().graph(),
        ("x", "others_scale", "body.first.weight", "body.first.bias", "body.norm.running_mean"),
    )
    assert all(f"input {name}:" in text for name in names)
    assert "test_programs.py:" in text and "test_programs.py:" in piece().explain()


def test_weights_of_one_name_are_told_apart() -> None:
    """Two modules of a function, of which one is inside of another of the same name."""
    torch.manual_seed(0)
    layer, outer = torch.nn.Linear(4, 4), torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 4)})
    again = {"layer": torch.nn.Linear(4, 4), "weight": torch.randn(4, requires_grad=True)}

    def function(x: Tensor, weight: Tensor, layer_weight: Tensor) -> Tensor:
        return again["layer"](outer["layer"](layer(x))) * weight * again["weight"] + layer_weight

    (given,), weight, other = one(), torch.randn(4, requires_grad=True), torch.randn(4)
    made = compiled(function)(given, weight, other)
    expected = function(given, weight, other)
    torch.testing.assert_close(made, expected)
    wanted = [weight, again["weight"], layer.weight, outer["layer"].weight, again["layer"].weight]
    ours, theirs = (torch.autograd.grad(y.sum(), wanted) for y in (made, expected))
    torch.testing.assert_close(ours, theirs)
    assert len({given.name for given in piece().inputs}) == len(piece().inputs)


def test_modes_have_graphs_of_their_own() -> None:
    model = Layers(lambda self, x: self.norm(self.dropout(self.first(x))))
    made, eager = same_steps(lambda: model, one)
    (x,) = one()
    for mode in (False, True, False):
        made.train(mode), eager.train(mode)
        torch.manual_seed(1)
        ours = made(x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, eager(x))
    with torch.no_grad():
        ours = made(x)
        assert not ours.requires_grad
        torch.testing.assert_close(ours, eager(x))
    with torch.inference_mode():
        torch.testing.assert_close(made(x), eager(x))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_whole_step_is_compiled(kind: Any) -> None:
    """Forward, backward and optimizer: Dynamo keeps what the optimizer writes as tensors of the graph.

    AdamW's correction of its averages is computed in single precision, as by any backend.
    """
    models = [torch.nn.Linear(4, 2).double(), torch.nn.Linear(4, 2).double()]
    models[1].load_state_dict(models[0].state_dict())

    def made(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = kind(model.parameters(), lr=1e-2)

        def step(x: Tensor) -> Tensor:
            loss = model(x).tanh().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    ours, eager = compiled(made(models[0])), made(models[1])
    for rows in (3, 4, 5, 6):
        x = torch.randn(rows, 4).double()
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-5, atol=1e-6)
    weights = [model.weight.detach() for model in models]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_two_names_for_one_memory_are_refused() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    x = torch.zeros(3)
    with pytest.raises(CaptureError, match="x is modified in place and shares memory with y"):
        compiled(function)(x, x[:])


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_written_beside_another_input(axis: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    whole, other = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    made = compiled(function)(*whole.chunk(2, axis))
    torch.testing.assert_close(made, function(*other.chunk(2, axis)))
    torch.testing.assert_close(whole, other)


def test_tensors_of_inference_mode_are_written() -> None:
    @torch.inference_mode()
    def function(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    with torch.inference_mode():
        x = torch.zeros(3)
    torch.testing.assert_close(compiled(function)(x), torch.full((3,), 2.0))
    assert x.eq(1).all()


def test_an_error_names_the_line() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).abs()

    with pytest.raises(OnnxTrainError, match=r"test_programs\.py:\d+"):
        compiled(function, backend="onnxruntime")(torch.randn(4, 4))


def test_derivatives_at_several_sizes() -> None:
    def function(x: Tensor) -> Any:
        return torch.func.jacrev(torch.sin)(x), torch.func.hessian(lambda z: (z**3).sum())(x)

    made = compiled(function, dynamic=True)
    for size in (3, 5, 4, 3):
        x = torch.randn(size)
        torch.testing.assert_close(made(x), function(x))


def test_a_gradient_penalty() -> None:
    """A gradient that is differentiated again, which PyTorch's own backends refuse."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 1)).double()
    module = copy.deepcopy(eager)
    ours = compiled(module, dynamic=True)
    for rows in (4, 5, 7):
        batch = torch.randn(rows, 6).double()
        for called, owner in ((ours, module), (eager, eager)):
            x = batch.clone().requires_grad_()
            owner.zero_grad()
            scores = called(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            (scores.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert captures() == 1


class Branch(nn.Module):
    """One of two branches, by content, as an operator that has both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v * self.weight, lambda v: v - self.weight, (x,))


def test_what_dynamo_records_for_a_capture_of_ours_is_not_passed_over() -> None:
    """``torch.cond`` has Dynamo look at its branches from within our capture, which is not among the files it skips."""
    wrapped, eager = pair(Branch())
    for sign in (1.0, -1.0):
        same_step(wrapped, eager, sign * torch.rand(3, 4, requires_grad=True).detach())


@pytest.mark.parametrize("backend", ["eager", "onnxtrain"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_compiled_ortmodule_is_the_module_that_it_wraps(is_captured: bool, backend: str) -> None:
    torch._dynamo.reset()
    wrapped, eager = pair(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    x = torch.randn(5, 3)
    if is_captured:
        wrapped(x)
    torch.testing.assert_close(torch.compile(wrapped, backend=backend)(x), eager(x))
    assert graphs_of(wrapped) == int(is_captured)
