"""Weights of 4 and 8 bits of bitsandbytes, with adapters and without, beside eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import captures
from torch import nn
from transformers import BitsAndBytesConfig

from onnxtrain import Options, ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.execute.torch.allocations import peak_of

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
adapted_training = pytest.importorskip("adapted_training", reason="peft is not installed")
step = adapted_training.step
pytestmark = pytest.mark.slow


def made(kind: str, **form: Any) -> nn.Module:
    torch.manual_seed(0)
    make = bnb.nn.Linear4bit if kind == "4 bits" else bnb.nn.Linear8bitLt
    form = {"has_fp16_weights": False, "threshold": 6.0} if kind == "8 bits" else form
    return adapted_training.Layers(lambda bias: make(64, 64, bias=bias, **form)).to("cpu").train()


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("4 bits", {"quant_type": "nf4", "compress_statistics": False}),
    "nf4, scales in codes too": ("4 bits", {"quant_type": "nf4"}),
    "fp4": ("4 bits", {"quant_type": "fp4"}),
    "nf4, stored as floats": ("4 bits", {"quant_type": "nf4", "quant_storage": torch.float32}),
    "computed in bfloat16": ("4 bits", {"quant_type": "nf4", "compute_dtype": torch.bfloat16}),
    "int8": ("8 bits", {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_step_is_eagers(name: str) -> None:
    kind, form = FORMS[name]
    eager = made(kind, **form)
    module = copy.deepcopy(eager)
    wrapped = ORTModule(module)
    tolerance = {"rtol": 0.05, "atol": 2e-4} if "bfloat16" in name else {"rtol": 1e-4, "atol": 1e-6}
    for rows in (5, 3):
        x = torch.randn(rows, 7, 64)
        torch.testing.assert_close(step(wrapped, module, x), step(eager, eager, x), **tolerance)
    assert captures(wrapped) == 1
    nodes = [
        line for line in str(wrapped.graph("captured")).splitlines() if "MatMulBnb4(" in line or "Int8Weight(" in line
    ]
    assert len(nodes) == 3


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_what_eager_ran_before_makes_no_difference(kind: str) -> None:
    """Its first call moves what the codes mean, and sets the type that it computes in."""
    eager = made(kind)
    fresh = copy.deepcopy(eager)
    x = torch.randn(4, 64)
    wanted = step(eager, eager, x)
    for module in (copy.deepcopy(eager), fresh):
        torch.testing.assert_close(step(ORTModule(module), module, x), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(step(fresh, fresh, x), wanted, rtol=1e-4, atol=1e-6)  # and eager goes on after it


def test_a_large_weight_is_never_there_as_a_whole() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(bnb.nn.Linear4bit(2048, 4096, bias=False), nn.Linear(4096, 1)).to("cpu")
    x, whole = torch.randn(8, 2048, requires_grad=True), 4 * 2048 * 4096
    wrapped = ORTModule(module)
    wrapped(x).sum().backward()
    told = wrapped.memory_report(x).peak
    found = peak_of(lambda: wrapped(x).sum().backward())
    assert found < 0.6 * whole < whole <= peak_of(lambda: module(x).sum().backward())
    assert told == pytest.approx(found, rel=0.05)


def test_a_second_process_needs_no_trace(tmp_path: Path) -> None:
    x = torch.randn(4, 64)
    wanted = step(eager := made("4 bits"), eager, x)
    for _ in range(2):
        module = made("4 bits")
        wrapped = ORTModule(module, options=Options(cache_dir=tmp_path))
        torch.testing.assert_close(step(wrapped, module, x), wanted, rtol=1e-4, atol=1e-6)


def test_evaluation_and_a_second_derivative() -> None:
    module = made("4 bits")
    wrapped, x = ORTModule(copy.deepcopy(module)), torch.randn(4, 64)
    found = []
    for called in (module, wrapped):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(called(leaf), leaf, create_graph=called is wrapped)
        found.append(slope)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    found[1].square().sum().backward()  # which bitsandbytes itself does not do
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), module.train()(x), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_captured_is_said() -> None:
    module = made("8 bits").eval()
    with pytest.raises(CaptureError, match="a Linear8bitLt multiplies integers here") as raised:
        ORTModule(module)(torch.randn(4, 64))
    assert "quantize to 4 bits" in str(raised.value)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_a_quantized_model(bits: int, checkpointing: bool, tmp_path: Path) -> None:
    """QLoRA: loaded by Transformers, prepared and adapted by PEFT, trained for some steps."""
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **(four if bits == 4 else {}))
    adapted_training.adapters_train_as_in_eager(tmp_path, config, checkpointing)
