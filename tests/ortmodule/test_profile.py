"""Where the time of a step goes: every operator is seen, counted right, and nothing is changed by looking."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from onnxtrain import Options, ORTModule
from onnxtrain.errors import BackendError, ModuleError


class Net(nn.Module):
    """Products, a normalization with statistics, dropout, and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(1000, 8), nn.BatchNorm1d(8)
        self.linear, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.norm(self.embedding(ids))
        y = self.out(nn.functional.dropout(self.linear(x).relu(), 0.1, self.training))
        return y if target is None else nn.functional.cross_entropy(y, target)


class Looks(nn.Module):
    """Has two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() if x.sum() > 0 else self.linear(x).square().sum()


class Recurrence(nn.Module):
    """A loop whose body has operators."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(self.cell(h) + row)
            return new, new * row

        return scan(step, torch.zeros_like(x[0]), x, dim=0)[0].sum()


def batch(rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1000, (rows,), generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def lines(wrapped: ORTModule) -> list[str]:
    """The lines of the programs that call an operator."""
    text = "\n".join(wrapped.source(part) for part in ("forward", "backward"))
    return [line.strip() for line in text.splitlines() if " = ops." in line]


def test_every_operator_is_seen_and_counted() -> None:
    wrapped = ORTModule(Net())
    wrapped(*batch()).backward()
    report = wrapped.profile(*batch())
    assert [cost.line for cost in report.costs] == lines(wrapped)
    assert all(cost.calls == 1 and cost.seconds > 0 for cost in report.costs)
    flops = {c.line.partition(" = ")[0]: c.flops for c in report.costs if c.flops}
    forward = 2 * 32 * 8 * 16 + 2 * 32 * 16 * 4
    assert sum(flops.values()) == 3 * forward, flops  # products for both operands in the backward pass
    of = {c.operator: c for c in report.costs if c.part == "forward"}
    rows = 32 * 8 * 4  # bytes
    assert of["Embedding"].moved == 2 * rows  # those that are read, not the whole table
    assert of["Relu"].moved == 2 * 32 * 16 * 4
    assert all(c.least > 0 for c in report.costs if c.moved)
    assert report.sizes["ids_dim0"] == 32


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    module = Net()
    twin, wrapped = ORTModule(copy.deepcopy(module)), ORTModule(module)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(3):
        if step < 2:  # before there is a gradient, and with one
            state, generator = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
            before = [copy.deepcopy(p.grad) for p in wrapped.parameters()]
            assert wrapped.profile(*batch(), optimizer=optimizer).optimizer
            torch.testing.assert_close(dict(module.state_dict()), dict(twin.module.state_dict()), rtol=0, atol=0)
            assert torch.equal(torch.get_rng_state(), generator)
            torch.testing.assert_close([p.grad for p in wrapped.parameters()], before)
            torch.testing.assert_close(optimizer.state_dict(), state)
        losses = []
        for model, opt in ((wrapped, optimizer), (twin, other)):
            torch.manual_seed(step)
            opt.zero_grad()
            losses.append(model(*batch(8 + step)))
            losses[-1].backward()
            opt.step()
        assert torch.equal(*losses)


def test_a_call_that_is_not_trained() -> None:
    wrapped = ORTModule(Net().eval())
    with torch.no_grad():
        report = wrapped.profile(batch()[0])
    assert report.costs and {c.part for c in report.costs} == {"forward"}
    assert "backward" not in str(report).splitlines()[2] and report.optimizer is None


def test_the_body_of_a_loop_is_counted_apart() -> None:
    """What runs in the body, once for each row, is no part of the loop's own time."""
    x = torch.randn(200, 2, 4)
    costs = ORTModule(Recurrence()).profile(x).costs
    forward = [c for c in costs if c.part == "forward"]
    (loop,) = [c for c in forward if c.operator == "Scan"]
    body = [c for c in forward if c.calls == len(x)]
    assert {"Linear", "Tanh"} <= {c.operator for c in body}
    assert all(c.calls == 1 for c in forward if c not in body)
    assert loop.seconds < sum(c.seconds for c in body)


def test_rows_that_nobody_needs_are_not_counted() -> None:
    """A profile is of the step as it runs: with rows skipped."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 256)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x.tanh()).flatten(0, 1), labels.flatten())

    wrapped = ORTModule(Loss())
    x, labels = torch.randn(8, 64, 64), torch.full((8, 64), -100)
    labels[0] = 3
    report = wrapped.profile(x, labels)
    assert max(c.flops for c in report.costs) == 2 * 64 * 64 * 256


def test_text_numbers_and_page(tmp_path: Path) -> None:
    wrapped = ORTModule(Net())
    report = wrapped.profile({"ids": batch()[0], "target": batch()[1]}, optimizer=torch.optim.SGD(wrapped.parameters()))
    text = str(report)
    for expected in ("forward", "backward", "optimizer", "around the operators", "GFLOP/s in products of float32"):
        assert expected in text
    assert re.search(r"\d+ %  Linear, test_profile.py:\d+", text), text
    told: dict[str, Any] = json.loads(json.dumps(report.as_dict()))
    assert told["total"] == pytest.approx(told["choosing"] + told["step"] + told["optimizer"])
    assert len(told["lines"]) == len(report.costs)
    page = report.save(tmp_path / "time.html").read_text()
    assert page.count("<title>") == 1 + len(report.costs) and "Time of a step" in page


def test_what_cannot_be_told() -> None:
    with pytest.raises(BackendError, match="cannot tell what its operators cost"):
        ORTModule(Net(), options=Options(backend="onnxruntime")).profile(*batch())
    wrapped = ORTModule(Looks())
    wrapped(torch.ones(2, 4))
    with pytest.raises(ModuleError, match="another path"):
        wrapped.profile(-torch.ones(2, 4))
    wrapped(-torch.ones(2, 4))
    assert any(c.operator == "Mul" for c in wrapped.profile(-torch.ones(2, 4)).costs)
