"""verify finds what differs and names it."""

from __future__ import annotations

import pytest
import torch

from onnxtrain import Options, ORTModule, verify
from onnxtrain.errors import ModuleError, VerificationError
from onnxtrain.execute.torch.registry import LOWERINGS, Lowering
from onnxtrain.ir.graphs import DOMAIN


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.tanh(self.linear(self.norm(x)))
        return {"loss": y.square().mean(), "y": y}


def test_report_of_a_good_step() -> None:
    net = Net()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    report = verify(net, (torch.randn(6, 4),))
    kinds = {c.kind for c in report.comparisons}
    assert kinds == {"loss", "output", "gradient", "buffer"}
    assert {"norm.running_var", "linear.weight"} <= {c.name for c in report.comparisons}
    assert report.worst.passed and "worst:" in str(report)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items()), "the user's module is not touched"


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_as_an_option(backend: str) -> None:
    wrapped = ORTModule(Net(), options=Options(backend=backend, verify=True))
    wrapped(torch.randn(6, 4))["loss"].backward()
    assert wrapped.verification is not None
    assert {c.kind for c in wrapped.verification.comparisons} == {"loss", "output", "gradient", "buffer"}


def test_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LOWERINGS[DOMAIN, "TanhGrad"]
    wrong = Lowering(lambda dy, y: dy * 0.5, right.host, right.view, None, right.wants)
    monkeypatch.setitem(LOWERINGS, (DOMAIN, "TanhGrad"), wrong)
    with pytest.raises(VerificationError, match=r"gradient linear\.\w+: error .* \(tolerance"):
        verify(Net(), torch.randn(6, 4))


def test_wrong_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LOWERINGS["", "Tanh"]
    monkeypatch.setitem(LOWERINGS, ("", "Tanh"), Lowering(torch.sin, right.host, right.view, None, right.wants))
    with pytest.raises(VerificationError, match="loss"):
        verify(Net(), {"x": torch.randn(6, 4)})


class Leaving(torch.nn.Module):
    """Leaves a number that it has left before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        return self.linear(x).sum()


def test_what_is_left_may_be_there_already() -> None:
    wrapped = ORTModule(Leaving(), options=Options(verify=True))
    for rows in (6, 6, 3):
        wrapped(torch.randn(rows, 4)).backward()
        assert wrapped.rows == rows
    assert wrapped.verification is not None and wrapped.verification.worst.passed


@pytest.mark.parametrize("layers", [[], [torch.nn.BatchNorm1d(4, affine=False)], [torch.nn.Dropout(0.5)]])
def test_a_module_of_which_nothing_is_trained(layers: list[torch.nn.Module]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), *layers, torch.nn.Tanh()).requires_grad_(False)
    report = verify(net, torch.randn(6, 4))
    assert "output" in {c.kind for c in report.comparisons} and report.worst.passed


def test_a_wrong_output_of_which_nothing_is_trained_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LOWERINGS["", "Tanh"]
    monkeypatch.setitem(LOWERINGS, ("", "Tanh"), Lowering(torch.sin, right.host, right.view, None, right.wants))
    with pytest.raises(VerificationError, match="output"):
        verify(torch.nn.Tanh(), torch.randn(6, 4))


def test_needs_a_module() -> None:
    with pytest.raises(ModuleError, match="verify needs"):
        verify(print, ())  # type: ignore[arg-type]
