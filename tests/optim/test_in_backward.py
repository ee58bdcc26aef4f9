"""Optimizers that step within the backward pass: bit for bit the ordinary loop, or refused with words."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from onnxtrain import Options, ORTModule
from onnxtrain.errors import OptimizerError
from onnxtrain.optim import StepInBackward, step_in_backward

STEPS = 4


class Net(nn.Module):
    """Layers, a table whose weights are shared with the head, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 70), nn.LayerNorm(70), nn.GELU(), nn.Linear(70, 8))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight
        self.some = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, some: bool = False) -> torch.Tensor:
        hidden = self.layers(self.table(x))
        return self.head(self.some(hidden) if some else hidden)


def batch(step: int) -> torch.Tensor:
    return torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = batch(step)
    return nn.functional.cross_entropy(model(x, step % 2 == 1).flatten(0, 1), x.roll(1, 1).flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weight decay for matrices alone."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def assert_same(ours: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any]) -> None:
    for (name, a), b in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(a, b), name
    assert same_state(ours[1].state_dict(), theirs[1].state_dict())


Make = Callable[[nn.Module], torch.optim.Optimizer]
optim = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "sgd momentum": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": lambda m: optim.SGD(groups_of(m), lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda m: optim.SGD(groups_of(m), lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda m: optim.SGD(groups_of(m), lr=0.1, fused=True),
    "adam": lambda m: optim.Adam(groups_of(m), lr=0.01),
    "adam tensor": lambda m: optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "adamw": lambda m: optim.AdamW(groups_of(m), lr=0.01),
    "adamw amsgrad": lambda m: optim.AdamW(groups_of(m), lr=0.01, amsgrad=True, maximize=True),
    "adamw foreach": lambda m: optim.AdamW(groups_of(m), lr=0.01, foreach=True),
    "adamw fused": lambda m: optim.AdamW(groups_of(m), lr=0.01, fused=True, amsgrad=True),
    "adamw named": lambda m: optim.AdamW(m.named_parameters(), lr=0.01),
    "adagrad": lambda m: optim.Adagrad(groups_of(m), lr=0.01, initial_accumulator_value=0.1),
    "adagrad fused": lambda m: optim.Adagrad(groups_of(m), lr=0.01, fused=True),
    "rmsprop": lambda m: optim.RMSprop(groups_of(m), lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda m: optim.NAdam(groups_of(m), lr=0.01, decoupled_weight_decay=True),
    "radam": lambda m: optim.RAdam(groups_of(m), lr=0.01),
    "adamax": lambda m: optim.Adamax(groups_of(m), lr=0.01),
    "adadelta": lambda m: optim.Adadelta(groups_of(m)),
    "asgd": lambda m: optim.ASGD(groups_of(m)),
    "rprop": lambda m: optim.Rprop(m.parameters()),
    "adafactor": lambda m: optim.Adafactor(groups_of(m)),
    "muon": lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2]),
}


def trained(make: Make, apart: bool, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **settings: Any) -> Any:
    """The model and its optimizer after some steps with a schedule, the loop the same either way."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    stepper = step_in_backward(optimizer, **settings) if apart else None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    used = wrap(model)
    for step in range(STEPS):
        loss_of(used, step).backward()
        if stepper is not None and len(optimizer.param_groups) == 2:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_ordinary_loop(name: str) -> None:
    assert_same(trained(OPTIMIZERS[name], True), trained(OPTIMIZERS[name], False))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "whole": ORTModule,
    "in parts": lambda m: ORTModule(m, options=Options(segments=8)),
    "compiled": lambda m: torch.compile(m, backend="onnxtrain"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("kind", WRAPS)
def test_it_is_the_ordinary_loop_of_a_graph(kind: str) -> None:
    make = OPTIMIZERS["adamw amsgrad"]
    assert_same(trained(make, True, WRAPS[kind]), trained(make, False, WRAPS[kind]))


def test_each_gradient_is_gone_before_the_next_comes() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    alive: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in p_all)))
    p_all = list(model.parameters())
    step_in_backward(optimizer)
    model(torch.randn(2, 8)).sum().backward()
    assert alive == [1] * 8


def test_checkpoints_have_the_ordinary_form_either_way() -> None:
    ordinary = trained(OPTIMIZERS["adamw"], False)
    whole = [copy.deepcopy(ordinary[0]), None]
    for apart in (False, True):
        torch.manual_seed(1)
        model, optimizer = trained(OPTIMIZERS["adamw"], apart)
        stepper = step_in_backward(optimizer) if not apart else None
        model.load_state_dict(ordinary[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(ordinary[1].state_dict()))
        loss_of(model, 7).backward()
        optimizer.step()
        if whole[1] is None:
            whole = [model, optimizer]
        assert stepper is None or repr(stepper) == "StepInBackward(AdamW, 9 parameters)"
    assert_same((model, optimizer), (whole[0], whole[1]))
    loss_of(ordinary[0], 7).backward()
    ordinary[1].step()
    assert_same((model, optimizer), ordinary)


def test_groups_that_are_added_and_parameters_that_are_frozen() -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
        model.layers[0].bias.requires_grad_(False)
        if apart:
            step_in_backward(optimizer)
        for step in range(5):
            if step == 1:
                optimizer.add_param_group({"params": [model.table.weight], "lr": 0.5})
            if step == 3:
                model.layers[0].bias.requires_grad_()
                model.layers[3].bias.requires_grad_(False)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()  # of what the optimizer does not have
        return model, optimizer

    assert_same(run(True), run(False))


def test_gradients_accumulate_in_a_context() -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        stepper = step_in_backward(optimizer) if apart else None
        for step in range(0, 6, 2):
            if stepper is None:
                loss_of(model, step + 1).backward()
            else:
                with stepper.accumulate():
                    loss_of(model, step + 1).backward()
            loss_of(model, step).backward()  # `some` has a gradient of the first one alone
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    assert_same(run(True), run(False))


def test_a_step_within_accumulate_is_an_ordinary_one() -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepper = step_in_backward(optimizer) if apart else None
        for step in range(4):
            if stepper is None:
                loss_of(model, step).backward()
            else:
                with stepper.accumulate():
                    loss_of(model, step).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step(lambda: None)
            optimizer.zero_grad()
        return model, optimizer

    assert_same(run(True), run(False))


def test_a_closure_runs_within_the_step() -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        model, losses = Net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if apart:
            step_in_backward(optimizer)
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return model, optimizer, losses

    ours, theirs = run(True), run(False)
    assert_same(ours[:2], theirs[:2])
    assert ours[2] == theirs[2]


def test_hooks_on_the_optimizer_are_called_once_for_each_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    step_in_backward(optimizer)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize("name", ["adamw", "sgd foreach"])
@pytest.mark.parametrize("wrap", [lambda m: m, ORTModule], ids=["eager", "graph"])
def test_each_gradient_is_clipped_by_its_own_norm(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    ours = trained(OPTIMIZERS[name], True, wrap, max_norm=0.01)
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    used = wrap(model)
    for step in range(STEPS):
        loss_of(used, step).backward()
        for p in model.parameters():
            clip_grad_norm_([p], 0.01)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert_same(ours, (model, optimizer))


def test_what_is_updated_after_the_backward_pass_is_clipped_too() -> None:
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.layers.parameters(), lr=0.1) for m in models]
    stepper = step_in_backward(optimizers[0], max_norm=1e-3)
    optimizers[0].add_param_group({"params": [models[0].table.weight]})
    optimizers[1].add_param_group({"params": [models[1].table.weight]})
    with stepper.accumulate():
        loss_of(models[0], 0).backward()
    loss_of(models[1], 0).backward()
    for p in models[1].parameters():
        clip_grad_norm_([p], 1e-3)
    for optimizer in optimizers:
        optimizer.step()
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@pytest.mark.parametrize("wrap", [lambda m: m, ORTModule], ids=["eager", "graph"])
def test_two_passes_clip_by_the_norm_of_all(max_norm: float, wrap: Callable[[nn.Module], nn.Module]) -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        model, norms = Net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stepper = step_in_backward(optimizer, max_norm=max_norm, clip="global") if apart else None
        used = wrap(model)
        for step in range(STEPS):
            loss = loss_of(used, step)
            if stepper is None:
                loss.backward()
                norms.append(clip_grad_norm_(model.parameters(), max_norm))
            else:
                norms.append(stepper.backward(loss))
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, norms

    ours, theirs = run(True), run(False)
    assert_same(ours[:2], theirs[:2])
    assert all(map(torch.equal, ours[2], theirs[2]))


def test_two_passes_are_asked_for() -> None:
    model = Net()
    stepper = step_in_backward(torch.optim.SGD(model.parameters()), max_norm=1.0, clip="global")
    with pytest.raises(OptimizerError, match=r"clipped by the norm of all\n.*backward"):
        loss_of(model, 0).backward()
    with pytest.raises(OptimizerError, match="has a gradient before the first of two passes"):
        stepper.backward(loss_of(model, 0))
    with pytest.raises(OptimizerError, match="accumulate and clip"), stepper.accumulate():
        pass
    other = Net()
    assert step_in_backward(torch.optim.SGD(other.parameters())).backward(loss_of(other, 0)) is None


def test_sparse_gradients() -> None:
    def run(apart: bool) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(30, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        if apart:
            step_in_backward(optimizer)
        for step in range(3):
            table(batch(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return table, optimizer

    assert_same(run(True), run(False))


def test_gradients_of_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    step_in_backward(optimizers[0])
    for m, optimizer in zip((model, other), optimizers, strict=True):
        x = torch.ones(2, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (slope.square().sum() + m(x).sum()).backward(retain_graph=True)
        optimizer.step()
    assert_same((model, optimizers[0]), (other, optimizers[1]))
    with pytest.raises(OptimizerError, match="create_graph=True"):
        model(torch.ones(2, 8)).sum().backward(create_graph=True)


def stepped() -> tuple[Net, torch.optim.Optimizer, StepInBackward]:
    model = Net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    stepper = step_in_backward(optimizer)
    loss_of(model, 1).backward()
    return model, optimizer, stepper


def test_a_second_backward_pass_of_a_step_is_refused() -> None:
    model, optimizer, _ = stepped()
    with pytest.raises(OptimizerError, match=r"received a second gradient before optimizer\.step\(\)") as caught:
        loss_of(model, 2).backward()
    assert "stepper.accumulate()" in str(caught.value) and "layers.3.bias" in str(caught.value)
    optimizer.zero_grad()
    optimizer.step()
    loss_of(model, 3).backward()


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_, torch.nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("one", [True, False])
def test_clipping_after_the_backward_pass_is_refused(clip: Callable[..., Any], one: bool) -> None:
    model, optimizer, stepper = stepped()
    with pytest.raises(OptimizerError, match="parameters were updated in the backward pass, not clipped"):
        clip(model.table.weight if one else model.parameters(), 1.0)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1.0)  # nothing was updated since
    stepper.remove()
    loss_of(model, 1).backward()
    clip(model.parameters(), 1e-9)
    assert sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None) < 1e-6


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_norms_are_told_once_they_are_asked_for(kind: float) -> None:
    def run(apart: bool) -> list[float]:
        torch.manual_seed(0)
        model, norms = Net(), []
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "layers" in n], lr=0.1)
        stepper = step_in_backward(optimizer, max_norm=1e9) if apart else None
        for step in range(4):
            model.zero_grad()
            loss_of(model, step).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), float("inf"), norm_type=kind)))
            optimizer.step()
        assert stepper is None or stepper.was_updated(model.table.weight) is False
        return norms

    ours, theirs = run(True), run(False)
    assert math.isnan(ours[0]) and ours[1:] == theirs[1:]


def test_clipping_is_as_it_was() -> None:
    step_in_backward(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    other = nn.Linear(2, 2)
    other(torch.ones(3, 2)).sum().backward()
    norm = sum(p.grad.square().sum() for p in other.parameters()).sqrt()
    torch.testing.assert_close(clip_grad_norm_((p for p in other.parameters()), 1.0, norm_type=2), norm)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
    assert clip_grad_norm_.__name__ == "clip_grad_norm_"


def test_a_scaler_of_gradients_is_refused() -> None:
    model = Net()
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        stepper = step_in_backward(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 1)).backward()
        with pytest.raises(OptimizerError, match=r"GradScaler.*\n.*bfloat16"):
            scaler.step(optimizer)
        stepper.remove()
        assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) == fused
    optimizer = torch.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    loss_of(model, 0).backward()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_gradients_that_come_after_the_update_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_in_backward(optimizer)
        replica = nn.parallel.DistributedDataParallel(model)
        replica(torch.ones(2, 3)).sum().backward()
        with pytest.raises(OptimizerError, match=r"another gradient after its update.*\n.*fully_shard"):
            optimizer.step()
        del replica  # what holds the last reference to a process group waits for its threads, which may wait for Python
    finally:
        dist.destroy_process_group()


class Own(torch.optim.SGD):
    """A user's own; ``alpha`` of a gradient says how it is used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * self.factor(group, p), alpha=-group["lr"])

    def begin(self) -> None:
        pass

    def factor(self, group: Any, p: torch.Tensor) -> Any:
        return 1.0


class Counts(Own):
    """Counts its steps, in its groups and on itself."""

    count = 0

    def begin(self) -> None:
        self.count += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1

    def factor(self, group: Any, p: torch.Tensor) -> float:
        return self.count / group["k"] ** 2


class CountsParameters(Own):
    """Counts the parameters that it updates."""

    count = 0

    def factor(self, group: Any, p: torch.Tensor) -> float:
        self.count += 1
        return self.count


class NormOfAll(Own):
    """Scales by the norm of all gradients, across groups."""

    def begin(self) -> None:
        every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = 1 + sum(g.square().sum() for g in every)

    def factor(self, group: Any, p: torch.Tensor) -> torch.Tensor:
        return 1 / self.norm


class Noisy(Own):
    """Uses random numbers."""

    def factor(self, group: Any, p: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(p)


def test_optimizers_may_count_their_steps() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Counts(groups_of(model), lr=0.1)

    ours, theirs = trained(make, True), trained(make, False)
    assert_same(ours, theirs)
    assert ours[1].count == STEPS


@pytest.mark.parametrize("kind", [CountsParameters, NormOfAll])
@pytest.mark.parametrize("together", [True, False])
def test_optimizers_that_are_not_of_each_parameter_are_refused(kind: type[Own], together: bool) -> None:
    parameters = list(nn.Linear(4, 4).parameters())
    optimizer = kind(parameters if together else [{"params": [p]} for p in parameters], lr=0.1)
    with pytest.raises(OptimizerError, match=f"{kind.__name__} does not update each parameter by itself"):
        step_in_backward(optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer.state


def test_what_cannot_be_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match=r"LBFGS cannot update each parameter by itself.*closure"):
        step_in_backward(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptimizerError, match="differentiable=True"):
        step_in_backward(torch.optim.SGD(model.parameters(), differentiable=True))
    with pytest.raises(OptimizerError, match=r"Linear is no torch\.optim\.Optimizer"):
        step_in_backward(model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters())
    for settings in ({"clip": "all"}, {"clip": "global"}, {"max_norm": 0.0}, {"max_norm": float("nan")}):
        with pytest.raises(OptimizerError):
            step_in_backward(optimizer, **settings)
    stepper = step_in_backward(optimizer)
    for again in (optimizer, torch.optim.AdamW([model.bias])):
        with pytest.raises(OptimizerError, match="already"):
            step_in_backward(again)
    stepper.remove()
    step_in_backward(torch.optim.AdamW([model.bias]))


def test_trying_changes_nothing() -> None:
    model, optimizer = trained(OPTIMIZERS["adamw"], False)
    noisy = Noisy(nn.Linear(3, 3).parameters())
    weights, state, random = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    step_in_backward(noisy)
    step_in_backward(optimizer)
    assert_same((model, optimizer), (weights, optimizer))
    assert same_state(optimizer.state_dict(), state) and torch.equal(torch.get_rng_state(), random)


def test_remove_gives_the_ordinary_optimizer_back() -> None:
    make = OPTIMIZERS["adamw"]
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        if step == 1:
            stepper = step_in_backward(optimizer)
        if step == 3:
            stepper.remove()
        loss_of(model, step).backward()
        assert (model.table.weight.grad is None) == (step in (1, 2))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert_same((model, optimizer), trained(make, False))


def test_an_optimizer_that_is_gone_updates_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(step_in_backward(optimizer))
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.warns(UserWarning, match="the optimizer that was to update it in the backward pass is gone") as said:
        loss_of(model, 0).backward()
        loss_of(model, 0).backward()
    assert len(said) == 1
    assert model.table.weight.grad is not None
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


def test_models_are_copied_and_written_as_before() -> None:
    model, optimizer, _ = stepped()
    other = copy.deepcopy(model)
    loss_of(other, 1).backward()
    loss_of(other, 1).backward()
    assert other.table.weight.grad is not None
    written = io.BytesIO()
    torch.save((model, optimizer), written)
    written.seek(0)
    read, _ = torch.load(written, weights_only=False)
    loss_of(read, 1).backward()
    assert read.table.weight.grad is not None
    copied = copy.deepcopy(optimizer)
    copied.step()


def test_it_is_there_without_importing_it() -> None:
    import onnxtrain

    assert onnxtrain.optim.step_in_backward is step_in_backward


def test_a_table_of_sparse_gradients_has_a_dense_one_in_a_graph() -> None:
    table = nn.Embedding(30, 4, sparse=True)
    ORTModule(table)(batch(0)).sum().backward()
    ours, table.weight.grad = table.weight.grad, None
    table(batch(0)).sum().backward()
    assert not ours.is_sparse and torch.equal(ours, table.weight.grad.to_dense())
