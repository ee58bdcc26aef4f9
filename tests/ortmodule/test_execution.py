"""How steps follow each other and mix with the rest of autograd: behaviour.md §3.6, sentence by sentence."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step

from onnxtrain import Options, ORTModule
from onnxtrain.errors import GradientError, ModuleError


class Net(torch.nn.Module):
    """One hidden layer."""

    def __init__(self, inputs: int = 4, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(inputs, 6), torch.nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Chain(torch.nn.Module):
    """Parts one after the other, with eager work between them."""

    def __init__(self, *parts: torch.nn.Module) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).sin()
        return x


def x() -> torch.Tensor:
    return torch.randn(5, 4)


def grads(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def both(function: Any, *modules: torch.nn.Module) -> None:
    """The function on wrapped modules and on plain copies: the same gradients everywhere."""
    plain = [copy.deepcopy(m) for m in modules]
    wrapped = [ORTModule(m) for m in modules]
    torch.manual_seed(0)
    function(*wrapped)
    torch.manual_seed(0)
    function(*plain)
    for ours, theirs in zip(wrapped, plain, strict=True):
        torch.testing.assert_close(grads(ours), grads(theirs))
        assert grads(ours)


def test_chained() -> None:
    both(lambda a, b: b(a(x()).relu()).square().sum().backward(), Net(), Net())


def test_a_common_backbone_under_several_heads() -> None:
    def step(backbone: Any, one: Any, two: Any) -> None:
        hidden = backbone(x())
        (one(hidden).sum() + two(hidden).square().sum()).backward()

    both(step, Net(), Net(), Net())


def test_overlapping_forwards_and_backwards() -> None:
    def step(a: Any, b: Any) -> None:
        first, second = a(x()).square().sum(), b(x()).square().sum()
        third = a(x()).sum()
        second.backward()
        third.backward()
        first.backward()

    both(step, Net(), Net())


def test_several_forwards_before_one_backward() -> None:
    both(lambda a: sum(a(x()).square().sum() * k for k in range(3)).backward(), Net())


def test_mixed_with_plain_modules() -> None:
    plain = torch.nn.Linear(4, 4)
    both(lambda a, b: b(plain(a(x())).relu()).square().sum().backward(), Net(), Net())


def test_parts_of_an_eager_module() -> None:
    eager = Chain(Net(), Net())
    mixed = Chain(*(ORTModule(copy.deepcopy(p)) for p in eager.parts))
    given = x()
    for module in (eager, mixed):
        module(given).square().sum().backward()
    torch.testing.assert_close(grads(mixed), grads(eager))


def test_nested_in_a_module_that_is_wrapped_too() -> None:
    inner = ORTModule(Net())
    wrapped, eager = pair(Chain(inner, Net()))
    same_step(wrapped, eager, x())
    assert captures(wrapped) == 1 and captures(inner) == 0
    assert next(n for n, _ in wrapped.named_parameters()) == "parts.0.first.weight"
    wrapped.parts[0].module.eval()
    same_step(wrapped, eager, x())


def test_gradients_accumulate() -> None:
    def steps(a: Any) -> None:
        for _ in range(3):
            a(x()).square().mean().backward()

    both(steps, Net())


class Gated(torch.nn.Module):
    """One number multiplies a whole row: saved as a row whose elements are one place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = torch.nn.Linear(4, 1), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.value(x).relu() * self.gate(x).expand(-1, 6)).square()


def test_expanded_values_are_not_written_to() -> None:
    same_step(*pair(Gated().double()), torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("fused", [{}, {"foreach": True}, {"fused": True}])
def test_cached_casts_follow_the_optimizer(fused: dict[str, bool]) -> None:
    """Parameters are cast once for all steps of an accumulation, and again after each optimizer step."""
    wrapped, eager = pair(Net(), cache_casts=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, **fused) for m in (wrapped, eager)]
    for _ in range(3):
        for _ in range(2):
            given = x()
            for module in (wrapped, eager):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = module(given).square().mean()
                loss.backward()
            torch.testing.assert_close(grads(wrapped), grads(eager), rtol=2e-2, atol=2e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert "Cast(first.weight" not in wrapped.graph("forward")
    (bound,) = [e.session.bound for e in wrapped.__dict__["_ort_sessions"].entries]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped(x()).sum().backward()
        assert [kept.cast.dtype for kept in bound.casts._kept.values()] == [torch.bfloat16] * 4
        now = list(bound.casts._kept.values())
        wrapped(x()).sum().backward()
    assert all(a.cast is b.cast for a, b in zip(now, bound.casts._kept.values(), strict=True))


def _by_hand(module: torch.nn.Module, how: str) -> None:
    """Change parameters in a way that their versions do not count."""
    for p in module.parameters():
        if how == "written":
            p.data.add_(p.grad, alpha=-0.5)
            p.grad.data.zero_()
        elif how == "replaced":
            p.data = p.data - 0.5 * p.grad
            p.grad = None
        else:
            p.data.mul_(0.5)


@pytest.mark.parametrize("how", ["written", "replaced", "averaged"])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_cached_casts_follow_what_is_written_to_data(how: str, stepped: bool, set_to_none: bool) -> None:
    wrapped, eager = pair(Net(), cache_casts=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, eager)]
    for _ in range(4):
        given, results = x(), []
        for module, optimizer in zip((wrapped, eager), optimizers, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made = module(given)
            made.square().mean().backward()
            results.append(made)
            if stepped:
                optimizer.step()
            if stepped or how == "averaged":
                optimizer.zero_grad(set_to_none)
            if how == "averaged":  # another model's weights for an evaluation, and back
                before = [p.detach().clone() for p in module.parameters()]
                _by_hand(module, how)
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    results.append(module(given))
                for p, old in zip(module.parameters(), before, strict=True):
                    p.data.copy_(old)
            elif not stepped:
                _by_hand(module, how)
        half = len(results) // 2
        torch.testing.assert_close(results[:half], results[half:], rtol=2e-2, atol=2e-3)


def _states() -> list[object]:
    """What steps keep between forward and backward, in this process."""
    gc.collect()
    objects = gc.get_objects()
    return [o for o in objects if type(o).__name__ == "_State" and type(o).__module__.startswith("onnxtrain")]


def test_state_is_freed_after_backward_and_forwards_alone_do_not_leak() -> None:
    others = _states()  # of losses that other tests of this process keep
    wrapped = ORTModule(Net())
    wrapped(x()).sum().backward()
    given = x().requires_grad_()
    alive = weakref.ref(given)
    out = wrapped(given)
    out.sum().backward()
    del given, out
    for _ in range(3):
        wrapped(x())
    left = _states()
    assert alive() is None
    assert [s for s in left if not any(s is o for o in others)] == []


def test_second_backward_is_a_clear_error() -> None:
    wrapped = ORTModule(Net())
    loss = wrapped(x()).sum()
    loss.backward()
    with pytest.raises(GradientError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("what", ["parameter", "input", "output"])
def test_in_place_edits_are_caught(what: str) -> None:
    class Squares(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(super().forward(x) * x)

    wrapped = ORTModule(Squares())
    given = x()
    out = wrapped(given)
    with torch.no_grad():
        {"parameter": wrapped.second.weight, "input": given, "output": out}[what].mul_(2)
    with pytest.raises((GradientError, RuntimeError), match=r"modified (in place|by an inplace)"):
        out.sum().backward()


def test_the_mode_is_chosen_at_each_call() -> None:
    wrapped, eager = pair(torch.nn.Sequential(Net(), torch.nn.BatchNorm1d(4)))
    with torch.no_grad():
        same_step(wrapped, eager, x())
    same_step(wrapped, eager, x())
    wrapped.eval(), eager.eval()
    same_step(wrapped, eager, x())
    with torch.inference_mode():
        torch.testing.assert_close(wrapped(torch.ones(5, 4)), eager(torch.ones(5, 4)))
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(wrapped.get_buffer(name), buffer)


class _Noted:
    """Notes the calls of a hook."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def test_hooks_of_the_module_and_of_parameters_run_at_every_call() -> None:
    for register in ("before", "after"):
        inner = Net()
        noted = {k: _Noted() for k in ("forward", "pre", "backward", "backward_pre", "parameter", "accumulated")}
        wrapped = ORTModule(inner)
        target = inner if register == "before" else wrapped
        target.register_forward_hook(noted["forward"])
        target.register_forward_pre_hook(noted["pre"])
        target.register_full_backward_hook(noted["backward"])
        target.register_full_backward_pre_hook(noted["backward_pre"])
        inner.first.weight.register_hook(noted["parameter"])
        inner.first.weight.register_post_accumulate_grad_hook(noted["accumulated"])
        for _ in range(3):
            wrapped(x().requires_grad_()).sum().backward()
        assert {k: len(n.calls) for k, n in noted.items()} == dict.fromkeys(noted, 3)


def test_a_hook_may_change_the_output() -> None:
    wrapped, eager = pair(Net())
    for module in (wrapped, eager):
        module.register_forward_hook(lambda module, args, output: output * 2)
        module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    for _ in range(2):
        same_step(wrapped, eager, x())


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_submodules_are_refused_with_the_reason(kind: str) -> None:
    wrapped = ORTModule(Net())
    wrapped(x())
    handle = getattr(wrapped.second, f"register_{kind}")(lambda *args: print())
    with pytest.raises(ModuleError, match=r"submodule second has a .*hook.*lambda"):
        wrapped(x())
    handle.remove()
    wrapped(x()).sum().backward()
    assert captures(wrapped) == 1


def test_forward_hooks_of_submodules_can_be_captured() -> None:
    wrapped, eager = pair(Net(), hooks="trace")
    same_step(wrapped, eager, x())
    handles = [m.second.register_forward_hook(lambda m, a, output: output.sigmoid()) for m in (wrapped, eager)]
    same_step(wrapped, eager, x())
    for handle in handles:
        handle.remove()
    same_step(wrapped, eager, x())


def test_weight_normalization_is_captured() -> None:
    module = Net()
    torch.nn.utils.parametrizations.weight_norm(module.first)
    torch.nn.utils.parametrizations.spectral_norm(module.second)
    wrapped, eager = pair(module)
    for _ in range(2):
        same_step(wrapped, eager, x())


def test_data_parallel_is_refused_with_advice() -> None:
    with pytest.raises(ModuleError, match="DistributedDataParallel"):
        ORTModule(Net())._replicate_for_data_parallel()


def test_determinism_follows_torch() -> None:
    wrapped = ORTModule(Net(), options=Options(backend="onnxruntime"))
    wrapped(x())
    torch.use_deterministic_algorithms(True)
    try:
        wrapped(x())
    finally:
        torch.use_deterministic_algorithms(False)
    flags = [e.session.bound.options.deterministic for e in wrapped.__dict__["_ort_sessions"].entries]
    assert flags == [False, True]
    assert "determinism was switched" in wrapped.explain()


@pytest.mark.slow
def test_a_debugger_stops_inside_a_captured_module() -> None:
    program = """
import torch
from onnxtrain import ORTModule
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        answer = 41
        breakpoint()
        return self.linear(x)
print(ORTModule(Net())(torch.ones(2, 4)).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input="p answer + 1\nc\n" * 6, capture_output=True, text=True, timeout=120
    )
    assert "42" in done.stdout and "torch.Size([2, 4])" in done.stdout, done


def test_file_descriptors_do_not_leak() -> None:
    import os

    ORTModule(Net())(x()).sum().backward()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ORTModule(Net())(x()).sum().backward()
    assert len(os.listdir("/proc/self/fd")) <= before


class Parts(torch.nn.Module):
    """A tensor, and a number made of another one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.bmm(y, y.mT), x * 1, torch.nn.functional.smooth_l1_loss(x * 1, torch.zeros_like(x))


def test_a_retained_graph_is_walked_again_after_another_variant_was_learned() -> None:
    wrapped, eager = pair(Parts())
    for _ in range(2):
        found = []
        for model in (wrapped, eager):
            torch.manual_seed(1)
            given = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)
            loss = sum(part.sum() for part in model(*given))
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([t.grad for t in given])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)


class LeavesCircles(torch.nn.Module):
    """Makes objects that hold each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(3, 2), weakref.WeakSet[torch.nn.Module]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        circle = torch.nn.Identity()
        circle.__dict__["itself"] = circle
        self.seen.add(circle)
        return self.linear(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_of_a_capture_is_collected_with_nothing_else(frozen: bool) -> None:
    gc.collect()
    if frozen:
        gc.freeze()
    try:
        before = gc.get_stats()[2]["collections"]
        module = LeavesCircles()
        for _ in range(3):
            ORTModule(module)(torch.ones(2, 3)).sum().backward()
        assert not module.seen and gc.isenabled()
        assert bool(gc.get_freeze_count()) == frozen and gc.get_stats()[2]["collections"] == before
    finally:
        gc.unfreeze()
