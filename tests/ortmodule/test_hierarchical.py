"""HierarchicalORTModule: the largest parts that can be captured run as graphs, and the report says which."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError, ModuleError
from onnxtrain.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule


class Block(torch.nn.Module):
    """Can be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x))) + x


class Branch(torch.nn.Module):
    """Cannot be captured: it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.calls = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), bytearray(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.left(x) if self.calls[0] < 0 else self.right(x)


class Model(torch.nn.Module):
    """Parts of both kinds, one of them called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.branch, self.never = Branch(), torch.nn.Linear(3, 3)
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.branch(self.blocks[0](x))) * scale


def test_trains_as_eager_does_and_reports_each_part() -> None:
    plain = Model()
    wrapped = HierarchicalORTModule(copy.deepcopy(plain))
    assert "not called" in wrapped.report()
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (wrapped, plain)]
    for size in (4, 7, 5):
        x = torch.randn(size, 8)
        losses = []
        for module, optimizer in zip((wrapped, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = module(x, scale=0.5).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        torch.testing.assert_close(*losses)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(plain.state_dict()))
    states = {v.path: v.wrapped for v in wrapped.verdicts}
    assert states == {
        "": False,
        "blocks.0": True,
        "blocks.1": True,
        "branch": False,
        "branch.left": False,
        "branch.right": True,
        "never": False,
        "head": True,
    }
    reasons = {v.path: v.reason for v in wrapped.verdicts}
    assert "changes the number calls" in reasons["branch"] and "test_hierarchical.py" in reasons["branch"]
    assert reasons["never"] == "it was not called"
    assert "4 parts run as graphs" in wrapped.report()
    wrapped.eval(), plain.eval()
    torch.testing.assert_close(wrapped(torch.ones(2, 8)), plain(torch.ones(2, 8)))


def test_a_module_that_can_be_captured_is_one_graph() -> None:
    wrapped = HierarchicalORTModule(Block(), options=Options(backend="onnxruntime"))
    wrapped(torch.randn(4, 8)).sum().backward()
    assert [(v.path, v.wrapped) for v in wrapped.verdicts] == [("", True)]
    assert wrapped.linear.weight.grad is not None


def test_the_first_call_leaves_no_trace() -> None:
    """Splitting calls the module, and its parts, more than once."""
    torch.manual_seed(0)
    plain = Model()
    wrapped = HierarchicalORTModule(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    wrapped(x)
    after = torch.rand(3)
    torch.manual_seed(1)
    plain(x)
    torch.testing.assert_close(torch.rand(3), after)
    torch.testing.assert_close(dict(wrapped.named_buffers()), dict(plain.named_buffers()))
    assert all(not m._forward_pre_hooks for m in wrapped.modules())


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(ModuleError):
        HierarchicalORTModule(len)  # type: ignore[arg-type]
    assert isinstance(HierarchicalORTModule(Model()).module, Model)
    assert not isinstance(HierarchicalORTModule(Model()).blocks[0], ORTModule)


def test_a_weight_made_of_other_tensors_stays_in_eager_pytorch() -> None:
    """As torchao's quantized ones are, but that what is computed with it is made of others, too."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    weight = module[0].weight.detach()
    module[0].weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    with pytest.raises(
        CaptureError, match="a linear layer with a TwoTensor gives a TwoTensor, a tensor made of others"
    ):
        ORTModule(module)(torch.randn(3, 8))
    wrapped = HierarchicalORTModule(module)
    wrapped(torch.randn(3, 8)).sum().backward()
    for told in (
        "0: Linear: eager, because a linear layer with a TwoTensor gives",
        "2: Linear: eager, because input 0 is a TwoTensor",
    ):
        assert told in wrapped.report()


class WritesToItsInput(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x)


def test_the_first_call_writes_to_its_input_once() -> None:
    x = torch.ones(3, 4)
    HierarchicalORTModule(WritesToItsInput())(x)
    assert torch.equal(x, torch.full((3, 4), 2.0))
