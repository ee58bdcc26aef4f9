"""What capture keeps: names, symbols, source lines, training semantics, ATen operators."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import Options, ORTModule
from onnxtrain.capture import capture
from onnxtrain.errors import BackendError, CaptureError
from onnxtrain.ir import shapes
from onnxtrain.ir.graphs import source_of
from onnxtrain.ir.verify import verify


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4, padding_idx=0)
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(ids) * weights["scale"]
        return self.linear(self.norm(x.flatten(0, 1)))


def example(batch: int = 3, length: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.randint(0, 9, (batch, length)), {"scale": torch.rand(batch, length, 1)}


def test_names_are_the_users() -> None:
    graph = capture(Layers(), example(), {}).graph
    signature = graph.signature
    assert signature.user_inputs == ("ids", "weights_scale")
    assert set(signature.parameters) == {n for n, _ in Layers().named_parameters()}
    assert set(signature.buffer_updates) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert [str(v.name) for v in graph.model.graph.inputs] == list(signature.inputs)
    verify(graph.model)


def test_dimensions_are_symbols_even_for_batch_one() -> None:
    graph = capture(Layers(), example(1, 5), {}).graph.model.graph
    dims = shapes.known_dims(graph.inputs[0])
    assert [getattr(d, "value", d) for d in dims] == ["ids_dim0", "ids_dim1"]


def test_every_node_knows_its_line() -> None:
    graph = capture(Layers(), example(), {}).graph.model.graph
    lines = [source_of(n) for n in graph if n.op_type in ("Embedding", "Linear", "BatchNormTraining")]
    assert len(lines) == 3 and all(line.startswith("test_capture.py:") for line in lines)


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_opset_21(backend: str) -> None:
    eager = Layers()
    wrapped, given = ORTModule(copy.deepcopy(eager), options=Options(backend=backend, opset=21)), example()
    for run in (wrapped, eager):
        run(*given).square().mean().backward()
    assert capture(eager, given, {}, opset=21).graph.model.graph.opset_imports[""] == 21
    torch.testing.assert_close(wrapped.embed.weight.grad, eager.embed.weight.grad, rtol=1e-4, atol=1e-6)


def test_same_module_same_text() -> None:
    from onnxtrain.ir.printer import to_text

    net, given = Layers(), example()
    assert to_text(capture(net, given, {}).graph.model) == to_text(capture(net, given, {}).graph.model)


def test_padding_row_gets_no_gradient() -> None:
    eager = Layers()
    wrapped, (ids, weights) = ORTModule(copy.deepcopy(eager)), example()
    ids[:, 0] = 0
    for run in (wrapped, eager):
        run(ids, weights).square().sum().backward()
    assert wrapped.embed.weight.grad[0].abs().max() == 0
    torch.testing.assert_close(wrapped.embed.weight.grad, eager.embed.weight.grad)


def test_detach_and_no_grad_regions_stop_gradients() -> None:
    class Stops(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.randn(3)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x * self.a
            return (y * self.c + (x * self.b).detach() + x * self.c).sum()

    eager = Stops()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(3)
    for run in (wrapped, eager):
        run(x).backward()
    assert wrapped.a.grad is None and wrapped.b.grad is None
    torch.testing.assert_close(wrapped.c.grad, eager.c.grad)


class Untranslatable(torch.nn.Module):
    """Uses operators that torch.onnx has no translation for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i1e(x @ self.weight).sum() + torch.linalg.matrix_exp(self.weight).sum()


def test_operators_without_translation_become_aten_nodes() -> None:
    eager = Untranslatable()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(3, 4)
    for run in (wrapped, eager):
        run(x).backward()
    assert "ATen(" in wrapped.graph("captured")
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-5)


def test_aten_node_on_onnxruntime_names_the_operator() -> None:
    wrapped = ORTModule(Untranslatable(), options=Options(backend="onnxruntime"))
    with pytest.raises(BackendError, match=r"aten::(special_i1e|linalg_matrix_exp)") as raised:
        wrapped(torch.randn(3, 4))
    assert "torch" in raised.value.cure and "test_capture.py" in raised.value.source


@pytest.mark.parametrize("causal", [False, True])
def test_attention_stays_one_node(causal: bool) -> None:
    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.linear(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()

    eager = Attends()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 5, 4)
    for run in (wrapped, eager):
        run(x).backward()
    name = "CausalScaledDotProductAttention" if causal else "ScaledDotProductAttention"
    assert f"= {name}(" in wrapped.graph("captured") and f"= {name}Grad(" in wrapped.graph("training")
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad)


def test_clamp_with_bounds_of_two_kinds() -> None:
    class Clamps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-3, 3, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight.clamp(0.1, 2)).sum()

    eager = Clamps()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(4, 7)
    for run in (wrapped, eager):
        run(x).backward()
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)


def test_learned_attention_bias_gets_its_gradient() -> None:
    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(5, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, self.bias).square().sum()

    eager = Biased()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 3, 5, 4)
    for run in (wrapped, eager):
        run(x).backward()
    torch.testing.assert_close(wrapped.bias.grad, eager.bias.grad)


def test_heads_that_are_viewed_together_after_attention() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(query, key, value).permute(0, 2, 1, 3).contiguous()
            return mixed.view(*mixed.size()[:-2], 8).square().sum()  # where attention's layout is this, only a view

    eager = Heads()
    wrapped, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 5, 8)
    for run in (wrapped, eager):
        run(x).backward()
    torch.testing.assert_close(wrapped.project.weight.grad, eager.project.weight.grad)


def test_a_float_minus_a_mask_of_integers() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-3, 3, 7))

        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return ((1.0 - mask) * self.weight).square().sum()

    eager = Masked()
    wrapped, mask = ORTModule(copy.deepcopy(eager)), torch.randint(0, 3, (4, 7))
    losses = [run(mask) for run in (wrapped, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad)


def test_a_parameter_that_gets_a_history_is_refused_where_it_does() -> None:
    class Mixed(torch.nn.Linear):
        def forward(self, x):
            self.bias += self.weight.mean(1)  # the line
            return super().forward(x)

    module = Mixed(4, 4)
    module.bias.requires_grad_(False)
    with pytest.raises(CaptureError, match="add_ changes a tensor, a parameter") as caught:
        capture(module, [torch.randn(3, 4)], {})
    assert caught.value.source.startswith(__file__)


def _without_gradient(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    def changed(h: torch.Tensor) -> None:
        with torch.no_grad():
            change(h)

    return changed


HIDDEN = {
    "elements": _without_gradient(lambda h: operator.setitem(h, h > 0, 0.0)),
    "all": _without_gradient(lambda h: h.clamp_(-0.1, 0.1)),
    "twice": _without_gradient(lambda h: h.mul_(2).add_(1)),
    "row": _without_gradient(lambda h: h[0].mul_(3)),
    "view of a view": _without_gradient(lambda h: h[:2][:, 1:].mul_(3)),
    "transposed": _without_gradient(lambda h: h.t().mul_(2)),
    "copied": _without_gradient(lambda h: h.copy_(h.round())),
    "detached": lambda h: h.detach().mul_(2),
    "data": lambda h: h.data.add_(1),
    "part of what is detached": lambda h: operator.isub(h.detach()[0], 1),
    "told to be in place": _without_gradient(lambda h: F.leaky_relu(h, 0.1, True)),
    "detached, told to be in place": lambda h: F.relu(h.detach(), inplace=True),
    "a layer that is in place": _without_gradient(torch.nn.Hardtanh(inplace=True)),
    "second of two parts": lambda h: [x.detach() for x in (h[0], h[1])][1].mul_(2),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_gradients_pass_changes_that_autograd_does_not_see(name: str, views: bool) -> None:
    """Of items, and of what is detached, in whose memory the tensor is that goes on; views of it are changed, too."""

    class Changed(torch.nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            others = (h[:, :2], h.t(), h.detach()) if views else ()
            HIDDEN[name](h)
            return h.square().sum() + sum(other.sin().sum() for other in others)

    eager = Changed(4, 4).double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        losses = [run(x) for run in (wrapped, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-12, atol=1e-12)


VIEWS_OF_WHAT_A_CALL_MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda h: F.bilinear(h, h, torch.ones(2, 4, 4, dtype=h.dtype)),
    "einsum": lambda h: torch.einsum("bi,bj->ji", h, h),
    "tensordot": lambda h: torch.tensordot(h, h.t(), 1),
    "inner": lambda h: torch.inner(h, h),
    "matrices": lambda h: (h[None] @ h.t())[0],
    "pixels": lambda h: F.pixel_shuffle(h.view(1, 4, -1, 1), 2)[0, 0],
    "repeated": lambda h: h.repeat_interleave(2, 1),
    "expanded once more": lambda h: F.bilinear(h, h, torch.ones(2, 4, 4, dtype=h.dtype))[..., None][..., 0],
}


@pytest.mark.parametrize("change", ["detached", "part of what is detached", "transposed"])
@pytest.mark.parametrize("call", VIEWS_OF_WHAT_A_CALL_MADE)
def test_hidden_changes_of_what_a_call_returns_as_a_view(call: str, change: str) -> None:
    class Changed(torch.nn.Linear):
        def forward(self, x):
            h = VIEWS_OF_WHAT_A_CALL_MADE[call](super().forward(x))
            HIDDEN[change](h)
            return h.square()

    eager = Changed(4, 4).double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5):
        x = torch.randn(rows, 4, dtype=torch.float64)
        results = [run(x) for run in (wrapped, eager)]
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-12, atol=1e-12)


def _detached(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    def code(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        d = h.detach()
        change(d, h, x)
        return d * x + d * h

    return code


WRITTEN_TO_DETACHED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "difference": _detached(lambda d, h, x: d.sub_(h)),
    "product": _detached(lambda d, h, x: d.mul_(x)),
    "copy": _detached(lambda d, h, x: d.copy_(x)),
    "row": _detached(lambda d, h, x: operator.setitem(d, 0, x[0])),
    "transposed": _detached(lambda d, h, x: d.t().lerp_(h.t(), 0.3)),
    "twice": _detached(lambda d, h, x: d.mul_(x).mul_(2)),
    "without, then with": _detached(lambda d, h, x: d.mul_(2).add_(h)),
    "and the other afterwards": _detached(lambda d, h, x: (d.mul_(x), h.add_(1))),
    "detached once more": _detached(lambda d, h, x: (d.add_(x), d.detach().mul_(2))),
    "under no_grad": _detached(lambda d, h, x: (d.add_(x), _without_gradient(lambda d: d.mul_(2))(d))),
    "part": lambda h, x: operator.isub(h[:, 1:].detach(), h[:, 1:]) * x[:, 1:] * h[:, 1:],
    "data": lambda h, x: operator.imul(h.data, x) * h,
    "view of it": _detached(lambda d, h, x: d[0].add_(x[0] + h[0])),
    "of what a call made": lambda h, x: operator.itruediv((k := torch.inner(h, x)).detach(), h.sum()) * k,
}


@pytest.mark.parametrize("name", WRITTEN_TO_DETACHED)
def test_what_is_written_to_a_detached_tensor_has_a_gradient_there(name: str) -> None:
    class Written(torch.nn.Linear):
        def forward(self, x):
            return WRITTEN_TO_DETACHED[name](super().forward(x), x)

    eager = Written(4, 4).double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5):
        given = torch.randn(rows, 4, dtype=torch.float64)
        inputs = [given.clone().requires_grad_() for _ in range(2)]
        results = [run(x) for run, x in zip((wrapped, eager), inputs, strict=True)]
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wrapped.weight.grad, eager.weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)


def test_an_input_that_is_detached_itself_is_refused() -> None:
    class Detached(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.contiguous().detach_())

    capture(Detached(4, 4).train(), [torch.randn(3, 4)], {})
    with pytest.raises(CaptureError, match="detach_ takes the gradient from an input"):
        capture(Detached(4, 4).train(), [torch.randn(3, 4, requires_grad=True)], {})


def test_a_detached_tensor_that_nobody_else_reads_may_be_changed() -> None:
    class Changed(torch.nn.Linear):
        def forward(self, x):
            weights = super().forward(x).detach()
            weights.mul_(2)
            weights[0] = 3
            return (super().forward(x) * weights).sum()

    capture(Changed(4, 4).train(), [torch.randn(3, 4)], {})


def test_two_threads_capture_one_after_the_other() -> None:
    found: list[object] = []

    def work() -> None:
        try:
            found.append(capture(torch.nn.Linear(4, 4), [torch.randn(3, 4)], {}))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(f).__name__ for f in found] == ["Captured"] * 4


def test_a_call_that_the_forward_does_not_take() -> None:
    for given in ({}, {"input": torch.ones(2, 3), "labels": torch.ones(2)}):
        with pytest.raises(CaptureError, match="argument") as refused:
            ORTModule(torch.nn.Linear(3, 3))(**given)
        assert refused.value.cure == "call it with the arguments that its forward takes"
