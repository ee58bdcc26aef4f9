"""A rule that does not cover a case leaves it to torch; a rule with a fault is an error that names the node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.errors import RuleError
from onnxtrain.gradient import Context
from onnxtrain.gradient.registry import RULES


class Waves(torch.nn.Module):
    """Two operators that have a rule, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(x)).sum()


def gradient_of(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    module(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture(autouse=True)
def _rules() -> None:
    from onnxtrain.gradient import rules  # noqa: F401  (fills the table)


def test_a_case_that_a_rule_refuses_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(ctx: Context, dy: Any, x: Any) -> Any:
        raise ctx.unsupported("this case")

    monkeypatch.setitem(RULES, ("", "Tanh"), refuses)
    wrapped, x = ORTModule(Waves()), torch.randn(5)
    torch.testing.assert_close(gradient_of(wrapped, x), gradient_of(Waves(), x))
    text = wrapped.graph("captured")
    assert "aten::tanh" in text and "Sin(" in text


@pytest.mark.parametrize("fault", [TypeError("no such argument"), KeyError("axis"), AttributeError("dims")])
def test_a_fault_in_a_rule_surfaces(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def faulty(ctx: Context, dy: Any, x: Any) -> Any:
        raise fault

    monkeypatch.setitem(RULES, ("", "Tanh"), faulty)
    with pytest.raises(RuleError, match=f"rule of Tanh failed: {type(fault).__name__}") as raised:
        gradient_of(ORTModule(Waves()), torch.randn(5))
    assert raised.value.node.startswith("Tanh(") and "test_failures.py" in raised.value.source
    assert raised.value.__cause__ is fault
