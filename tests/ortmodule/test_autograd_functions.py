"""Classes of torch.autograd.Function inside a wrapped module: behaviour.md §8, sentence by sentence, beside eager."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from parity import captures, pair, same_step
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from onnxtrain import Options, ORTModule
from onnxtrain.capture import capture
from onnxtrain.errors import BackendError, CaptureError, GradientError
from onnxtrain.ortmodule import register_custom_function_schema_supplementary

Function = torch.autograd.Function
Tensor = torch.Tensor


class Net(torch.nn.Module):
    """A layer, a function of its result and of a weight, a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        self.weight = torch.nn.Parameter(torch.randn(6))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        made = self.function(self.first(x), self.weight)
        return self.second(made) if isinstance(made, Tensor) else tuple(map(self._out, made))

    def _out(self, made: Any) -> Any:
        return self.second(made) if isinstance(made, Tensor) and made.shape[-1:] == (6,) else made


def x(rows: int = 5) -> Tensor:
    return torch.randn(rows, 4, requires_grad=True)


def check(function: Callable[..., Any], **options: Any) -> ORTModule:
    """Three training steps of different batch sizes and one without gradients, beside eager."""
    wrapped, eager = pair(Net(function), **options)
    for rows in (5, 3, 1):
        same_step(wrapped, eager, x(rows), may_be_zeros=True)
    with torch.no_grad():
        same_step(wrapped, eager, x(), may_be_zeros=True)
    return wrapped


def nodes(wrapped: ORTModule) -> list[Any]:
    session = wrapped.__dict__["_ort_sessions"].entries[0].session
    return [n for n in session.captured.graph.model.graph if n.op_type == "PythonOp"]


class Scale(Function):
    """A product whose backward is three times too large, so that no one can mistake it for the forward's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy * w * ctx.factor * 3, (dy * x).sum(0) * ctx.factor * 3, None


def test_each_call_is_one_node_with_its_full_name() -> None:
    wrapped = check(lambda x, w: Scale.apply(x, w, 2.5))
    (node,) = nodes(wrapped)
    assert node.attributes["func_name"].value == f"{__name__}.Scale"
    assert node.attributes["input_convention"].value == "ddc"
    assert node.attributes["arguments"].value == '[{"tensor": 0}, {"tensor": 1}, 2.5]'
    assert captures(wrapped) == 1


def gelu(factor: float) -> type[Function]:
    class Gelu(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy * factor * factor

    return Gelu


def test_classes_of_the_same_name_do_not_clash() -> None:
    one, two = gelu(2.0), gelu(3.0)
    assert one.__name__ == two.__name__
    check(lambda x, w: two.apply(one.apply(x) * w))


class Constants(Function):
    """Every kind of argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, flag, count, rate, flags, counts, rates, nothing, text, thing = args
        assert (flag, count, text, nothing) == (True, 3, "text", None)
        assert (flags, counts, rates) == ((True, False), (1, 2), (0.5, 0.25))
        assert isinstance(thing, Thing)
        ctx.rate = rate + thing.value
        return x * ctx.rate

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.rate, *[None] * 9


class Thing:
    """An object that no graph can hold."""

    value = 2.0


def test_scalars_tuples_and_objects() -> None:
    thing, rest = Thing(), (True, 3, 0.1, (True, False), (1, 2), (0.5, 0.25), None, "text")
    wrapped = check(lambda x, w: Constants.apply(x, *rest, thing) * w)
    (node,) = nodes(wrapped)
    assert node.attributes["arguments"].value.endswith(f'"text", {{"object": "{__name__}.Thing"}}]')


class Sized(Function):
    """Arguments made of sizes of the input, and a list of tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, shape: torch.Size, factor: float, several: list[Tensor]) -> Tensor:
        assert type(shape) is torch.Size
        ctx.factor = rows * factor / (shape[0] + shape[1])
        return x * ctx.factor + several[1].sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.factor, None, None, None, None


def test_sizes_of_the_input_and_lists_of_tensors() -> None:
    wrapped = check(lambda x, w: Sized.apply(x, x.shape[0], x.shape, x.shape[0] ** 0.5, [w, w * 2]))
    assert captures(wrapped) == 1


class Several(Function):
    """Results that are no tensors among those that are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 2, 7, "seven", x.sin(), None

    @staticmethod
    def backward(ctx: Any, da: Tensor, di: Any, ds: Any, db: Tensor, dn: Any) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        assert di is None and ds is None and dn is None
        return da * 5 + db * x.cos()


def test_results_that_are_no_tensors() -> None:
    wrapped, eager = pair(Net(lambda x, w: Several.apply(x * w)))
    output, _ = same_step(wrapped, eager, x(), may_be_zeros=True)
    assert output[1:3] == (7, "seven") and output[4] is None


def test_a_size_that_depends_on_content() -> None:
    class Positive(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mask = x > 0
            ctx.save_for_backward(mask)
            return x[mask]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            (mask,) = ctx.saved_tensors
            return torch.zeros(mask.shape).masked_scatter(mask, dy * 3)

    check(lambda x, w: Positive.apply(x * w).sum() + x)


def test_a_result_that_changes_is_an_error() -> None:
    class Counting(Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            Counting.calls += 1
            return x * 2, Counting.calls

        @staticmethod
        def backward(ctx: Any, dy: Tensor, _: Any) -> Tensor:  # type: ignore[override]
            return dy

    with pytest.raises(BackendError, match=r"Counting returned \d as result 1, which was \d"):
        ORTModule(Net(lambda x, w: Counting.apply(x)[0]))(x())


def test_one_of_two_outputs_is_not_used() -> None:
    seen: list[Any] = []

    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, da: Tensor, db: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(db)
            return da * 2 + db * 3

    check(lambda x, w: Two.apply(x)[0] * w)
    assert all(db is not None and not db.any() for db in seen)


@pytest.mark.parametrize("materialize", [True, False])
def test_set_materialize_grads(materialize: bool) -> None:
    seen: list[Any] = []

    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.set_materialize_grads(materialize)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, da: Tensor | None, db: Tensor | None) -> Any:  # type: ignore[override]
            seen.append(da)
            assert db is not None
            return db * 3

    check(lambda x, w: Two.apply(x)[1] * w)
    assert len(seen) == 6 and all((da is None) != materialize for da in seen)


class InPlace(Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        return dy * 2, w.sign()


def test_mark_dirty_changes_what_is_read_later() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1
        before = y.exp()
        z = InPlace.apply(y, w)
        return z + y.cos() + before

    check(function)


def test_mark_dirty_of_a_part_of_a_tensor() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        InPlace.apply(y[:, :2], w)
        return y

    check(function)


def test_a_differentiated_argument_that_is_changed_without_a_word() -> None:
    class Silent(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mul_(2).clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy

    with pytest.raises(CaptureError, match=r"Silent changes an argument in place.*\n.*\n.*mark_dirty"):
        ORTModule(Net(lambda x, w: Silent.apply(x)))(x())


class Running(torch.nn.Module):
    """Statistics that a function updates, as batch normalization does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Center.apply(self.linear(x), self.mean)


class Center(Function):
    """Subtracts the batch's mean, and notes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, running: Tensor) -> Tensor:
        running.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy - dy.mean(0), None


def test_a_buffer_is_changed_in_place() -> None:
    wrapped, eager = pair(Running())
    for _ in range(3):
        same_step(wrapped, eager, x(), may_be_zeros=True)
    torch.testing.assert_close(dict(wrapped.named_buffers()), dict(eager.named_buffers()))


def test_mark_non_differentiable() -> None:
    class Top(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            best, where = x.max(-1)
            ctx.mark_non_differentiable(best, where)
            return x * 2, best, where

        @staticmethod
        def backward(ctx: Any, dy: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
            return dy * 2

    wrapped = check(lambda x, w: Top.apply(x * w))
    output = wrapped(x())
    assert [t.requires_grad for t in output] == [True, False, False]


@pytest.mark.parametrize("view", ["as it is", "transposed", "part"])
def test_outputs_that_share_memory_with_inputs(view: str) -> None:
    class View(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x if view == "as it is" else x.t() if view == "transposed" else x[:, :3]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            if view == "part":
                return torch.cat([dy * 7, dy * 5], -1)
            return dy * 7 if view == "as it is" else dy.t() * 7

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x + w
        z = View.apply(y)
        whole = torch.cat([z, z], -1) if view == "part" else z.t() if view == "transposed" else z
        return whole.relu() + y.relu() * w

    check(function)


def test_gradients_that_are_none() -> None:
    class NoGradient(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            return None, None

    wrapped = check(lambda x, w: NoGradient.apply(x, w) + x)
    assert wrapped.module.weight.grad is None, "as in eager: no optimizer touches it"
    check(lambda x, w: NoGradient.apply(x, w * 2) + x)  # zeros, where an operator reads the gradient


@pytest.mark.parametrize(("trained", "expected"), [(True, (True, True, False)), (False, (True, False, False))])
def test_needs_input_grad(trained: bool, expected: tuple[bool, ...]) -> None:
    seen: list[Any] = []

    class Asking(Scale):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
            if not isinstance(x, FakeTensor):
                seen.append(tuple(ctx.needs_input_grad))
            return Scale.forward(ctx, x, w, factor)

    wrapped = ORTModule(Net(lambda x, w: Asking.apply(x, w, 2.0)))
    wrapped.module.weight.requires_grad_(trained)
    wrapped(x()).sum().backward()
    assert seen.pop() == expected
    wrapped.eval()
    wrapped(x()).sum().backward()
    assert seen.pop() == expected, "evaluation mode is not inference: gradients are wanted"
    with torch.no_grad():
        wrapped(x())
    assert seen.pop() == (False, False, False)


def test_no_tensor_requires_a_gradient() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(Scale.apply(x, torch.ones(4), 2.0))

    wrapped, eager = pair(Net())
    same_step(wrapped, eager, torch.randn(3, 4), may_be_zeros=True)


def test_no_tensor_at_all() -> None:
    class Table(Function):
        @staticmethod
        def forward(ctx: Any, size: int) -> Tensor:
            return torch.arange(float(size))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> None:  # type: ignore[override]
            return None

    check(lambda x, w: x * w + Table.apply(6))


def test_called_twice_with_the_same_inputs() -> None:
    wrapped = check(lambda x, w: Scale.apply(x, w, 2.0) * Scale.apply(x, w, 2.0))
    assert len(nodes(wrapped)) == 2, "a class may do anything: its calls are not merged"


def test_one_input_given_twice() -> None:
    check(lambda x, w: Scale.apply(x, x[0], 2.0) + x)

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            a, b = ctx.saved_tensors
            return dy * b * 2, dy * a * 5

    check(lambda x, w: Product.apply(w, w).mean() + x)


class Inner(Function):
    """Calls a module and another function in its forward pass, and differentiates them itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, module: torch.nn.Module) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            made = module(Scale.apply(*leaves, 2.0))
        ctx.leaves, ctx.made = leaves, made
        return made.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return *torch.autograd.grad(ctx.made, ctx.leaves, dy), None


def test_the_forward_pass_calls_modules_and_other_functions() -> None:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
    wrapped = check(lambda x, w: Inner.apply(x, w, module))
    assert len(nodes(wrapped)) == 1


def test_the_forward_pass_calls_a_module_of_the_captured_one() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.weight = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return Inner.apply(x * 1.0, self.weight, self.part) * self.weight

    wrapped, eager = pair(Outer())
    for _ in range(2):
        same_step(wrapped, eager, x(), may_be_zeros=True)


def test_new_style_classes() -> None:
    class New(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Any:  # type: ignore[override]
            return x * w, x.exp()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs, output[1])
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx: Any, dy: Tensor, _: Any) -> Any:  # type: ignore[override]
            x, w, _ = ctx.saved_tensors
            return dy * w * 3, (dy * x).sum(0)

    class WithVmap(New):
        generate_vmap_rule = False

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
            return New.apply(x, w), (0, 0)

    check(lambda x, w: New.apply(x, w)[0])
    check(lambda x, w: WithVmap.apply(x, w)[0])


def test_an_output_that_is_saved_and_attributes_of_the_context() -> None:
    class Exp(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
            y = x.exp()
            ctx.power, ctx.shape = power, x.shape
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            return (dy * y**ctx.power).reshape(ctx.shape), None

    check(lambda x, w: Exp.apply(x * w, 2).relu() * w)


class Noise(Function):
    """Multiplies by random numbers, which its backward pass needs again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * ctx.saved_tensors[0]


class Heads(torch.nn.Module):
    """Two outputs made of the same random numbers: the second is not expected to receive a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = Noise.apply(self.linear(x))
        return y.mean(), y.sin()


def test_a_forward_pass_that_runs_again_draws_the_same_numbers() -> None:
    wrapped, eager = pair(Heads())
    data = torch.randn(3, 4)
    for part in (0, 1):
        for module in (wrapped, eager):
            module.zero_grad()
            torch.manual_seed(7)
            module(data)[part].sum().backward()
        for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(torch.rand(2), torch.rand(2)) is False  # the generator goes on after the step


def test_autocast() -> None:
    seen: list[Any] = []

    class Mixed(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.diag()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            seen.append((dy @ w.diag()).dtype)
            return dy @ w.diag(), (x * dy).sum(0)

    class Exact(Mixed):
        forward = staticmethod(
            torch.amp.custom_fwd(Mixed.forward.__wrapped__, device_type="cpu", cast_inputs=torch.float32)
        )

    for kind, inside in ((Mixed, torch.bfloat16), (Exact, torch.float32)):
        wrapped, eager = pair(Net(lambda x, w, kind=kind: kind.apply(x, w)))
        data, outputs = torch.randn(5, 4), []
        for module in (wrapped, eager):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(module(data))
            outputs[-1].float().sum().backward()
        assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
        torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
        assert seen == [inside] * 2
        torch.testing.assert_close(wrapped.module.weight.grad, eager.weight.grad, rtol=2e-2, atol=2e-2)
        seen.clear()


def test_double_precision() -> None:
    wrapped, eager = pair(Net(lambda x, w: Scale.apply(x, w, 2.0)).double())
    same_step(wrapped, eager, torch.randn(3, 4, dtype=torch.float64, requires_grad=True), may_be_zeros=True)


def test_double_backward_is_an_error() -> None:
    data = x()
    wrapped = ORTModule(Net(lambda x, w: Scale.apply(x, w, 2.0)))
    (dx,) = torch.autograd.grad(wrapped(data).sum(), data, create_graph=True)
    assert dx.any()  # the first one is right, and may be used
    with pytest.raises(GradientError, match=r"double backward.*Scale"):
        dx.sum().backward()


def test_nothing_is_kept_after_the_backward_pass() -> None:
    kept: list[Any] = []

    class Keeping(Scale):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
            inner = x.exp()
            ctx.inner = inner
            if not isinstance(x, FakeTensor):
                kept.append(weakref.ref(inner))
                kept.append(weakref.ref(ctx))
            return Scale.forward(ctx, x, w, factor)

    wrapped = ORTModule(Net(lambda x, w: Keeping.apply(x, w, 2.0)))
    gc.disable()
    try:
        for _ in range(2):
            loss = wrapped(x()).sum()
            assert all(r() is not None for r in kept[-2:])
            loss.backward()
            assert all(r() is None for r in kept), "without the help of the garbage collector"
    finally:
        gc.enable()


def test_a_step_without_backward_keeps_nothing() -> None:
    kept: list[Any] = []

    class Keeping(Scale):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
            ctx.inner = x.exp()
            if not isinstance(x, FakeTensor):
                kept.append(weakref.ref(ctx.inner))
            return Scale.forward(ctx, x, w, factor)

    wrapped = ORTModule(Net(lambda x, w: Keeping.apply(x, w, 2.0)))
    with torch.no_grad():
        wrapped(x())
    assert kept[-1]() is None
    output = wrapped(x())
    assert kept[-1]() is not None
    del output
    gc.collect()
    assert kept[-1]() is None


def test_arguments_live_as_long_as_the_graph() -> None:
    def function(thing: Thing) -> Callable[..., Any]:
        rest = (True, 3, 0.1, (True, False), (1, 2), (0.5, 0.25), None, "text")
        return lambda x, w: Constants.apply(x, *rest, thing) * w

    module = Net(function(Thing()))
    reference = weakref.ref(module.function.__closure__[1].cell_contents)
    assert isinstance(reference(), Thing)
    wrapped = ORTModule(module)
    wrapped(x()).sum().backward()
    module.function = None
    gc.collect()
    assert reference() is not None
    del wrapped, module
    gc.collect()
    assert reference() is None


def test_a_saved_tensor_that_is_modified_is_noticed() -> None:
    wrapped = ORTModule(Net(lambda x, w: Scale.apply(x, w, 2.0)))
    loss = wrapped(x()).sum()
    with torch.no_grad():
        wrapped.module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_errors_of_the_user_arrive_as_they_are() -> None:
    class Failing(Scale):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            raise ZeroDivisionError("in the user's backward")

    with pytest.raises(ZeroDivisionError, match="in the user's backward"):
        ORTModule(Net(lambda x, w: Failing.apply(x, w, 2.0)))(x()).sum().backward()


def test_an_effect_happens_even_where_no_result_is_read() -> None:
    seen: list[int] = []

    class Noting(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                seen.append(len(x))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy

    def function(x: Tensor, w: Tensor) -> Tensor:
        Noting.apply(x)
        return x * w

    wrapped = check(function)
    assert seen == [5, 5, 3, 3, 1, 1, 5, 5] and captures(wrapped) == 1


def test_under_no_grad() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = Scale.apply(x, w, 2.0)
        return x * y

    check(function)


class Content(Function):
    """Needs the content of its argument: it cannot run without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.factor = 2.0 if x.abs().sum().item() > 0 else 3.0
        return x * ctx.factor, torch.cat([w, w])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dw: Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.factor, dw[:6] + dw[6:]


def test_a_class_that_needs_content_is_told_to_infer_its_shapes() -> None:
    with pytest.raises(CaptureError, match=r"Content cannot run on tensors without content") as caught:
        ORTModule(Net(lambda x, w: Content.apply(x, w)[0]))(x())
    assert "register_custom_function_schema_supplementary" in str(caught.value)
    assert "test_autograd_functions.py" in str(caught.value)


def test_infer_shape() -> None:
    @register_custom_function_schema_supplementary
    class Inferred(Content):
        @staticmethod
        def infer_shape(node: onnx.NodeProto, shapes: list[Any], dtypes: list[int]) -> Any:
            assert len(node.input) == 2 and dtypes == [onnx.TensorProto.FLOAT] * 2
            return [shapes[0], [shapes[1][0] * 2]], dtypes

    wrapped = check(lambda x, w: (lambda y, z: y * z[:6])(*Inferred.apply(x, w)))
    assert captures(wrapped) == 1


def test_a_change_in_place_that_capture_could_not_see_is_an_error() -> None:
    @register_custom_function_schema_supplementary
    class Hidden(InPlace):
        @staticmethod
        def infer_shape(node: onnx.NodeProto, shapes: list[Any], dtypes: list[int]) -> Any:
            return shapes[:1], dtypes[:1]

    with pytest.raises(BackendError, match="Hidden changed its tensor 0 in place, and did not when it was captured"):
        ORTModule(Net(lambda x, w: Hidden.apply(x * 1, w)))(x())


def reusing(forward_map: list[int], backward_map: list[int], copies: bool = False) -> type[Function]:
    class Reusing(Function):
        @staticmethod
        def forward(ctx: Any, factor: int, x: Tensor) -> Tensor:
            return x.clone() if copies else x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
            return None, dy.clone() if copies else dy

        @staticmethod
        def alias_input(node_text: bytes) -> Any:
            node = onnx.NodeProto()
            node.ParseFromString(node_text)
            assert len(node.input) == 1 and len(node.output) == 2
            return forward_map, backward_map

    return register_custom_function_schema_supplementary(Reusing)  # type: ignore[return-value]


def test_declared_and_real_reuse() -> None:
    kind = reusing([1], [-1, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = check(lambda x, w: kind.apply(3, x * w).relu() + w)
    assert list(nodes(wrapped)[0].attributes["tensor_reuse_map"].value) == [-1, 0]


def test_declared_reuse_that_is_not_real_is_an_error() -> None:
    kind = reusing([1], [-1, -1], copies=True)
    with pytest.raises(BackendError, match="output 0 reuses the memory of tensor 0; it reuses that of none"):
        ORTModule(Net(lambda x, w: kind.apply(3, x * w)))(x())
    kind = reusing([-1], [-1, 0], copies=True)
    with pytest.raises(BackendError, match="gradient of tensor 0 reuses that of output 0"):
        ORTModule(Net(lambda x, w: kind.apply(3, x * w)))(x()).sum().backward()


def test_real_reuse_that_is_not_declared_is_copied_with_a_warning() -> None:
    kind = reusing([-1], [-1, -1])
    wrapped = ORTModule(Net(lambda x, w: kind.apply(3, x * w).relu() + w))
    with pytest.warns(UserWarning, match="output 0 of .*Reusing reuses the memory of tensor 0.* copied"):
        output = wrapped(x())
    with pytest.warns(UserWarning, match="gradient of tensor 0 of .*Reusing reuses that of output 0.* copied"):
        output.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(lambda x, w: kind.apply(3, x * w).relu() + w)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (([-1, -1], [-1, -1]), "2 and 2 entries"),
        (([-1], [-1]), "1 and 1"),
        (([0], [-1, -1]), "argument 0 is not"),
        (([-1], [-1, 1]), "no output 1"),
    ],
)
def test_reuse_maps_that_do_not_fit(maps: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        ORTModule(Net(lambda x, w: reusing(*maps).apply(3, x * w)))(x())


def test_what_can_be_registered() -> None:
    with pytest.raises(TypeError, match="not a subclass"):
        register_custom_function_schema_supplementary(Thing)
    with pytest.raises(TypeError, match="neither infer_shape nor alias_input"):
        register_custom_function_schema_supplementary(Scale)


class Checkpointed(torch.nn.Module):
    """A region of dropout and a function, checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), reentrant
        self.weight = torch.nn.Parameter(torch.randn(6))

    def part(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(Scale.apply(self.first(x).tanh(), self.weight, 2.0), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.part, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_captured_through(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, eager = pair(Checkpointed(reentrant))
    with caplog.at_level("INFO", "onnxtrain"):
        for _ in range(2):
            _seeded_step(wrapped, eager)
    assert "memory optimizer" in caplog.text
    assert [n.attributes["func_name"].value for n in nodes(wrapped)] == [f"{__name__}.Scale"]


class Counted(Checkpointed):
    """A checkpointed region that updates buffers, which eager PyTorch does again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))

    def part(self, x: Tensor) -> Tensor:
        made = self.norm(torch.nn.functional.dropout(self.first(x), 0.5))
        self.mean.mul_(0.9).add_(0.1 * made.detach().mean(0))
        return made.tanh()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_counts_is_counted_again_in_the_backward_pass(reentrant: bool) -> None:
    wrapped, eager = pair(Counted(reentrant))
    for training, gradients in ((True, True), (True, True), (True, False), (False, True), (True, True)):
        for module in (wrapped.train(training), eager.train(training)):
            with torch.set_grad_enabled(gradients):
                torch.manual_seed(3)
                loss = module(torch.linspace(-1, 2, 20).view(5, 4).requires_grad_()).square().sum()
            if gradients:
                loss.backward()
        theirs = dict(eager.named_buffers())
        for name, buffer in wrapped.named_buffers():
            torch.testing.assert_close(buffer, theirs[name])


def test_checkpoints_are_kept_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", "1")
    wrapped, eager = pair(Checkpointed(True))
    for _ in range(2):
        _seeded_step(wrapped, eager)
    assert [n.attributes["func_name"].value for n in nodes(wrapped)] == ["torch.utils.checkpoint.CheckpointFunction"]


def _seeded_step(wrapped: ORTModule, eager: torch.nn.Module) -> None:
    data, gradients = torch.randn(5, 4), []
    for module in (wrapped, eager):
        module.zero_grad()
        torch.manual_seed(3)
        leaf = data.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("given", [True, False])
def test_complex_numbers_are_refused(given: bool) -> None:
    class Complex(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.real * 2 if given else torch.complex(x, x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return torch.complex(dy, dy) if given else dy.real

    class Applied(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Complex.apply(torch.complex(x, x) if given else x).real  # type: ignore[no-untyped-call]

    with pytest.raises(CaptureError, match=r"Complex, a torch.autograd.Function, takes or gives complex") as caught:
        ORTModule(Applied())(torch.randn(3, 4))
    assert __file__ in caught.value.source and "view_as_real" in caught.value.cure


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0")
    with pytest.raises(CaptureError, match=r"Scale, a torch.autograd.Function.*\n.*test_autograd_functions.py"):
        ORTModule(Net(lambda x, w: Scale.apply(x, w, 2.0)))(x())


def test_torch_is_as_before_after_a_capture() -> None:
    before = Function.__dict__["apply"], torch.utils.checkpoint._checkpoint_without_reentrant_generator
    check(lambda x, w: Scale.apply(x, w, 2.0))
    assert before == (Function.__dict__["apply"], torch.utils.checkpoint._checkpoint_without_reentrant_generator)


def test_onnxruntime_says_that_it_cannot() -> None:
    with pytest.raises(BackendError, match=r"cannot run the torch.autograd.Function .*Scale\n(.*\n)*.*backend='torch'"):
        ORTModule(Net(lambda x, w: Scale.apply(x, w, 2.0)), options=Options(backend="onnxruntime"))(x())


def test_a_graph_with_calls_is_not_kept_on_disk(tmp_path: Any) -> None:
    check(lambda x, w: Scale.apply(x, w, 2.0), cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_verified_step() -> None:
    wrapped, eager = pair(Net(lambda x, w: Scale.apply(x, w, 2.0)), verify=True)
    same_step(wrapped, eager, x(), may_be_zeros=True)


def test_the_graph_is_the_same_each_time() -> None:
    texts = set()
    for _ in range(2):
        graph = capture(Net(lambda x, w: Scale.apply(x, w, 2.0)), (x(),), {}).graph
        texts.add("\n".join(map(str, graph.model.graph)))
    assert len(texts) == 1


def test_copies_of_a_wrapped_module() -> None:
    wrapped = ORTModule(Net(lambda x, w: Scale.apply(x, w, 2.0)))
    wrapped(x()).sum().backward()
    same_step(copy.deepcopy(wrapped), copy.deepcopy(wrapped.module), x(), may_be_zeros=True)
