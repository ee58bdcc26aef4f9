"""Weights that torchao quantizes, which are tensors made of others, with adapters and without, beside eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures
from torch import Tensor, nn
from transformers import TorchAoConfig

import onnxtrain
from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.execute.torch.allocations import peak_of

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
adapted_training = pytest.importorskip("adapted_training", reason="peft is not installed")
step = adapted_training.step
pytestmark = pytest.mark.slow


def is_frozen(layer: nn.Module, name: str) -> bool:
    return isinstance(layer, nn.Linear) and name.startswith("frozen")


def plain() -> nn.Module:
    return adapted_training.Layers(lambda bias: nn.Linear(64, 64, bias=bias).requires_grad_(False))


def made(form: Any) -> nn.Module:
    torch.manual_seed(0)
    module = plain()
    quantization.quantize_(module, form, filter_fn=is_frozen)
    return module


FORMS = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int8, products of integers": quantization.Int8DynamicActivationInt8WeightConfig(),
    "int4": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "int4 in groups": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32)),
    "float8": quantization.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_step_is_eagers(name: str, autocast: bool) -> None:
    eager = made(FORMS[name])
    module = copy.deepcopy(eager)
    wrapped = ORTModule(module)
    tolerance = {"rtol": 0.05, "atol": 2e-4} if autocast else {"rtol": 1e-5, "atol": 1e-7}
    for rows in (5, 3):
        x = torch.randn(rows, 7, 64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x), **tolerance)
    assert captures(wrapped) == 1
    assert str(wrapped.graph("captured")).count("onnxtrain::linear_of_parts") == 3


def test_by_torch_compile() -> None:
    eager, x = made(FORMS["int8"]), torch.randn(4, 64)
    module = copy.deepcopy(eager)
    torch.testing.assert_close(step(torch.compile(module, backend="onnxtrain"), module, x), step(eager, eager, x))


def test_a_trained_bias_and_evaluation() -> None:
    eager = made(FORMS["int8"])
    eager.frozen[0].bias.requires_grad_()  # type: ignore[union-attr]
    module = copy.deepcopy(eager)
    wrapped, x = ORTModule(module), torch.randn(4, 64)
    torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x))
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), eager.eval()(x))


def test_other_weights_are_read_where_they_lie() -> None:
    """A state that is loaded into the parameters or put in their places, another type, other settings."""
    eager, x = made(FORMS["int8"]), torch.randn(4, 64)
    module = copy.deepcopy(eager)
    wrapped = ORTModule(module)
    torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x))
    torch.manual_seed(1)
    other = plain()
    quantization.quantize_(other, FORMS["int8"], filter_fn=is_frozen)
    for assign in (False, True):
        for m in (eager, module):
            m.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            m.trained.requires_grad_()
        torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x))
    assert captures(wrapped) == 1
    for m in (eager, module):
        m.frozen[0] = copy.deepcopy(made(FORMS["int8, products of integers"]).frozen[0])
    torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x))
    for m in (eager, module):
        m.to(torch.bfloat16)
    found, wanted = (step(c, m, x.bfloat16()) for c, m in ((wrapped, module), (eager, eager)))
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=1e-3)


def test_no_weight_is_kept_as_floats() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)), nn.Linear(1024, 1))
    module[:6].requires_grad_(False)
    quantization.quantize_(module, FORMS["int8"], filter_fn=lambda layer, name: name.isdigit() and int(name) < 6)
    x, whole = torch.randn(8, 1024, requires_grad=True), 4 * 1024 * 1024
    wrapped = ORTModule(module)
    wrapped(x).sum().backward()
    assert peak_of(lambda: wrapped(x).sum().backward()) < 2.5 * whole  # one is made at a time


def test_a_second_process_and_a_verified_step(tmp_path: Path) -> None:
    x = torch.randn(4, 64)
    wanted = step(eager := made(FORMS["int8"]), eager, x)
    for _ in range(2):
        module = made(FORMS["int8"])
        wrapped = ORTModule(module, options=Options(cache_dir=tmp_path))
        torch.testing.assert_close(step(wrapped, module, x), wanted)
    onnxtrain.verify(made(FORMS["int8"]), x)


def test_what_cannot_be_captured_is_said() -> None:
    trained = made(FORMS["int8"])
    with pytest.raises(CaptureError, match="input 0 is a Int8Tensor, a tensor made of others, which"):
        ORTModule(nn.ReLU())(trained.frozen[0].weight)

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = trained

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding(x, self.inner.frozen[0].weight)  # type: ignore[union-attr,arg-type]

    with pytest.raises(
        CaptureError,
        match=r"embedding is given a Int8Tensor, .* which a graph takes as the weight of a linear layer alone",
    ) as raised:
        ORTModule(Read())(torch.arange(4))
    assert "quantize linear layers alone" in str(raised.value)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_a_quantized_model(checkpointing: bool, tmp_path: Path) -> None:
    """Loaded by Transformers, adapted by PEFT, trained for some steps."""
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    adapted_training.adapters_train_as_in_eager(tmp_path, config, checkpointing)
