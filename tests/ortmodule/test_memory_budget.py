"""A step within a stated number of bytes: predicted as it is, with eager's gradients, or an error that says why not."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import pair, same_step
from torch import Tensor, nn

from benchmarks.networks import UNet
from onnxtrain import Options, ORTModule
from onnxtrain.engine import budget
from onnxtrain.errors import BudgetError, OptionError
from onnxtrain.execute.torch import TorchBackend
from onnxtrain.execute.torch.allocations import peak_of
from onnxtrain.execute.torch.remembered import Remembered


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, dropout=0.1, batch_first=True)
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down, self.drop = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(3)))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [3, *[16] * 8]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in sizes[1:])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.head(x.mean((2, 3))).logsumexp(-1).sum()


class Gate(torch.autograd.Function):
    """The product of a tensor, its sigmoid, and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate, weight)
        return x * gate * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        return dy * weight * (gate + x * gate * (1 - gate)), (dy * x * gate).sum((0, 1))


class Masked(torch.autograd.Function):
    """Zeros at random places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) > 0.2
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * ctx.mask


class Classes(nn.Module):
    """Layers that call classes of a user's."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(size, 4 * size) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(4 * size, size) for _ in range(4))
        self.weights = nn.ParameterList(torch.ones(size) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down, weight in zip(self.norms, self.ups, self.downs, self.weights, strict=True):
            y = self.drop(nn.functional.gelu(up(Masked.apply(norm(x)))))
            x = x + Gate.apply(down(y), weight)
        return x.square().mean()


def rows_of_numbers(rows: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 32, 16),)


def words(rows: int = 16, length: int = 32) -> tuple[Tensor, ...]:
    return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


def images(rows: int = 8) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, 32, 32),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]]]] = {
    "language": (Language, words),
    "images": (Images, images),
    "classes": (Classes, rows_of_numbers),
}
BUDGETS = [None, 0.8, 0.6, "min"]


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(*batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_predicted_is_what_torch_allocates(name: str, budget: Any) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    wrapped = ORTModule(build(), options=Options(memory_budget=budget))
    given = batch()
    report = wrapped.memory_report(*given)
    for _ in range(3):  # the first one captures, and learns what receives gradients
        step(wrapped, given)
    wrapped.zero_grad()
    real = peak_of(lambda: step(wrapped, given))
    assert report.peak == pytest.approx(real, rel=0.01)
    assert all(p.grad is not None for p in wrapped.parameters())
    if isinstance(budget, float):
        assert real <= budget * report.before.peak
    assert bool(report.chosen) == (budget is not None)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_remembered_is_what_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch = MODELS[name]
    model, given = build(), batch()
    told = ORTModule(copy.deepcopy(model), options=Options(memory_budget=0.6)).memory_report(*given)
    ran: list[Any] = []
    monkeypatch.setattr(Remembered, "__call__", lambda self, f, args, kwargs: ran.append(f) or f(*args, **kwargs))
    seen = ORTModule(copy.deepcopy(model), options=Options(memory_budget=0.6)).memory_report(*given)
    assert ran
    assert (told.before, told.footprint) == (seen.before, seen.footprint)


@pytest.mark.parametrize("budget", BUDGETS[1:])
@pytest.mark.parametrize("name", MODELS)
def test_not_a_bit_of_a_gradient_is_another(name: str, budget: Any) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = build()
    free, bound = (
        ORTModule(copy.deepcopy(model), options=Options(memory_budget=b, density_threshold=0.0)) for b in (None, budget)
    )
    for _ in range(3):
        given = batch()
        assert torch.equal(step(free, given), step(bound, given))
        for (label, a), b in zip(free.named_parameters(), bound.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), label
        with torch.no_grad():
            for a, b in zip(free.parameters(), bound.parameters(), strict=True):
                a -= 0.01 * a.grad
                b -= 0.01 * b.grad


def test_a_smaller_budget_has_no_higher_peak() -> None:
    model, given = Language(), words()
    before = ORTModule(model).memory_report(*given)
    peaks, least = [], ORTModule(copy.deepcopy(model), options=Options(memory_budget="min")).memory_report(*given).peak
    for part in range(20):
        most = before.peak - (before.peak - least) * part // 19
        report = ORTModule(copy.deepcopy(model), options=Options(memory_budget=most)).memory_report(*given)
        assert report.peak <= most
        peaks.append(report.peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.6 * peaks[0]
    assert peaks[-1] == least, "what a report says is a budget that does"


class Dropped(nn.Module):
    """Dropout is most of what is kept: of what lies in order, of a transposed tensor, of whole channels, of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
            x = nn.functional.dropout(x.mT, 0.1).mT.relu()
            x = nn.functional.dropout1d(x, 0.5) + 0.1 * nn.functional.dropout(x, 1.0)
        return x.square().mean()


def test_masks_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, given, found = Dropped(), (torch.randn(64, 48, 32),), []
    for draws_again in (False, True):
        monkeypatch.setattr(TorchBackend, "draws_again", lambda self, device, answer=draws_again: answer)
        wrapped = ORTModule(copy.deepcopy(model), options=Options(memory_budget="min"))
        for _ in range(2):
            loss = step(wrapped, given)
        rest = torch.rand(3)
        wrapped.zero_grad()
        found.append((loss, rest, [p.grad for p in wrapped.parameters()], peak_of(lambda: step(wrapped, given))))  # noqa: B023
        assert wrapped.memory_report(*given).peak == pytest.approx(found[-1][-1], rel=0.01)
        assert ("DropoutMask" in wrapped.graph("backward")) == draws_again
    torch.testing.assert_close(found[1][:3], found[0][:3], rtol=0, atol=0)
    assert found[1][-1] < 0.95 * found[0][-1]


class Segments(UNet):
    """What the first layers give is read early in the backward pass, and what it is made of late."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(pixel_values, labels).loss


def test_what_is_read_early_is_kept_where_its_own_operands_would_be_there_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = torch.randn(8, 3, 32, 32), torch.randint(0, 5, (8, 32, 32))
    model = Segments(5, (16, 32, 64))
    least = ORTModule(copy.deepcopy(model), options=Options(memory_budget="min"))
    peak = least.memory_report(*batch).peak
    for _ in range(3):
        step(least, batch)
    least.zero_grad()
    assert abs(peak_of(lambda: step(least, batch)) - peak) <= 0.01 * peak
    wanted = copy.deepcopy(model)
    step(ORTModule(wanted), batch)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(least.parameters(), wanted.parameters(), strict=True))  # type: ignore[arg-type]
    monkeypatch.setattr(budget, "pruned", lambda training, plan, sizes, chosen, seen: chosen)
    assert peak < 0.95 * ORTModule(model, options=Options(memory_budget="min")).memory_report(*batch).peak


def test_a_budget_that_cannot_be_kept() -> None:
    wrapped = ORTModule(Language(), options=Options(memory_budget="20 KB"))
    with pytest.raises(BudgetError, match=r"at least \d+\.\d .iB .* the budget is 19\.5 KiB") as caught:
        wrapped(*words())
    assert "test_memory_budget.py" in str(caught.value), "what holds it up, by the user's lines"
    assert isinstance(caught.value, MemoryError)


def test_a_larger_batch_is_planned_for_when_it_comes() -> None:
    model = Language()
    whole = ORTModule(copy.deepcopy(model)).memory_report(*words(32)).peak
    wrapped = ORTModule(model, options=Options(memory_budget=int(whole * 0.6)))
    assert not wrapped.memory_report(*words(4)).chosen
    step(wrapped, words(4))
    report = wrapped.memory_report(*words(32))
    assert report.chosen
    assert report.peak <= whole * 0.6
    step(wrapped, words(32))
    assert peak_of(lambda: step(wrapped, words(32))) <= whole * 0.6


def test_a_worst_case_is_planned_for_at_once() -> None:
    whole = ORTModule(Language()).memory_report(*words(32)).peak
    options = Options(memory_budget=int(whole * 0.6), worst_case={"ids": (32, 32)})
    wrapped = ORTModule(Language(), options=options)
    report = wrapped.memory_report(*words(4))
    assert report.chosen
    assert set(report.sizes.values()) == {32}
    assert peak_of(lambda: step(wrapped, words(4))) < report.peak
    wrong = ORTModule(Language(), options=Options(memory_budget=0.5, worst_case={"idz": (32, 32)}))
    with pytest.raises(OptionError, match="no input idz"):
        wrong(*words())


def test_a_report_computes_nothing() -> None:
    wrapped, given = ORTModule(Language()), words()
    before = torch.get_rng_state()
    report = wrapped.memory_report(*given)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in wrapped.parameters())
    assert report.weights == sum(p.nbytes for p in wrapped.parameters())
    assert report.footprint.saved < report.peak


def test_a_report_of_a_batch_is_that_of_its_call() -> None:
    class Named(Language):
        def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            assert input_ids is not None
            assert labels is not None
            return super().forward(input_ids, labels)

    ids, labels = words()
    wrapped = ORTModule(Named())
    batch = {"labels": labels, "input_ids": ids}
    assert wrapped.memory_report(batch).peak == wrapped.memory_report(**batch).peak

    class OfTable(Language):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["input_ids"], batch["labels"])

    assert ORTModule(OfTable()).memory_report(batch).peak > 0


def test_a_report_as_text_and_as_a_page(tmp_path: Path) -> None:
    wrapped = ORTModule(Language(), options=Options(memory_budget="600 KiB"))
    report = wrapped.memory_report(*words(4))
    text = str(report)
    for part in ("a step needs", "the budget", "600.0 KiB", "what is in use at the peak", "backward", "Linear"):
        assert part in text, part
    assert report.largest is not None
    assert report.largest >= 4
    page = report.save(tmp_path / "memory.html").read_text()
    assert page.count("<svg") == 1
    assert "test_memory_budget.py" in page


def test_the_largest_batch_fits() -> None:
    model = Language()
    most = ORTModule(copy.deepcopy(model)).memory_report(*words(16)).peak
    wrapped = ORTModule(model, options=Options(memory_budget=most))
    report = wrapped.memory_report(*words(4))
    assert report.largest == 16
    assert wrapped.memory_report(*words(report.largest)).peak <= most


def test_graphs_say_what_is_computed_again() -> None:
    wrapped = ORTModule(Language(), options=Options(memory_budget="min"))
    step(wrapped, words())
    lines = [line for line in wrapped.graph().splitlines() if "recomputed" in line]
    assert any("Gelu" in line for line in lines)
    assert all("_recompute" in line for line in lines)
    assert "_recompute = ops." in wrapped.source("backward")


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_backward_pass(create_graph: bool) -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().sum()

    wrapped, eager = pair(Smooth().double(), memory_budget="min")
    x = torch.randn(32, 64, dtype=torch.double)
    for model in (wrapped, eager):
        given = x.clone().requires_grad_()
        loss = model(given)
        (slope,) = torch.autograd.grad(loss, given, create_graph=create_graph, retain_graph=True)
        (slope.square().sum() if create_graph else loss).backward()
    for a, b in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_rows_that_are_left_out() -> None:
    class Masked(Language):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.head(self.blocks(self.tokens(ids)))
            return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100)

    torch.manual_seed(0)
    wrapped, eager = pair(Masked().eval(), memory_budget=0.6, density_threshold=0.9)
    for kept in (0.2, 0.05, 0.4):
        ids, labels = words()
        labels[torch.rand(labels.shape) > kept] = -100
        same_step(wrapped, eager, ids, labels)


def test_parts_of_a_backward_pass() -> None:
    order: list[str] = []
    wrapped, eager = pair(Language().eval(), memory_budget="min", segments=3)
    for name, parameter in wrapped.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for _ in range(2):
        same_step(wrapped, eager, *words())
    assert order.index("blocks.2.up.weight") < order.index("blocks.0.up.weight")


def test_a_backend_that_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, eager = pair(Images().eval(), memory_budget=0.5, backend="onnxruntime")
    with caplog.at_level(logging.WARNING):
        same_step(wrapped, eager, *images())
    assert "the memory budget is kept by an estimate" in caplog.text
    assert "recomputed" in wrapped.graph()


@pytest.mark.parametrize(
    ("text", "count"), [("6GB", 6 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("7", 7), (8, 8), (0.5, 0.5)]
)
def test_budgets_as_people_write_them(text: Any, count: Any) -> None:
    assert Options(memory_budget=text).memory_budget == count


@pytest.mark.parametrize("wrong", ["6 apples", "0GB", "-1GB", 0, -3, 1.5, 0.0, True, "max"])
def test_budgets_that_are_none(wrong: Any) -> None:
    with pytest.raises(OptionError, match="memory_budget"):
        Options(memory_budget=wrong)


def test_worst_cases_that_are_none() -> None:
    with pytest.raises(OptionError, match="worst_case"):
        Options(worst_case={"ids": "many"})  # type: ignore[dict-item]
    assert hash(Options(worst_case={"ids": (3, 4)})) == hash(Options(worst_case={"ids": [3, 4]}))  # type: ignore[dict-item]


def test_a_plan_is_kept_beside_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Language(), words()
    options = Options(memory_budget=0.6, cache_dir=tmp_path)
    first = ORTModule(copy.deepcopy(model), options=options)
    report = first.memory_report(*batch)
    assert len(list(tmp_path.glob("*.plan"))) == 1
    monkeypatch.setattr(budget, "Search", lambda *_: pytest.fail("planned again"))
    second = ORTModule(copy.deepcopy(model), options=options)
    again = second.memory_report(*batch)
    assert (again.peak, again.before.peak) == (report.peak, report.before.peak)
    assert [(c.cluster, c.gain) for c in again.chosen] == [(c.cluster, c.gain) for c in report.chosen]
    assert step(first, batch).equal(step(second, batch))
    assert all(p.grad.equal(q.grad) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        ORTModule(model, options=dataclasses.replace(options, memory_budget=0.5)).memory_report(*batch)
