"""Names of ``onnxruntime.training`` that programs import, and what they mean."""

from __future__ import annotations

import sys

import pytest
import torch
from parity import pair, same_step

import onnxtrain
from onnxtrain import Options, ORTModule, ortmodule
from onnxtrain.errors import OptionError
from onnxtrain.ortmodule import ORTModuleFallbackException, ORTModuleInitException, options
from onnxtrain.utils import data
from onnxtrain.utils.data import sampler


def test_modules_of_their_names() -> None:
    assert options.DebugOptions is onnxtrain.DebugOptions and options.LogLevel is onnxtrain.LogLevel
    assert sampler.LoadBalancingDistributedSampler is data.LoadBalancingDistributedSampler
    assert sampler.LoadBalancingDistributedBatchSampler is data.LoadBalancingDistributedBatchSampler
    assert ortmodule.is_ortmodule_available() is onnxtrain.is_ortmodule_available() is True
    assert all(hasattr(ortmodule, name) for name in ortmodule.__all__)


def test_what_cannot_be_wrapped_raises_the_init_exception() -> None:
    with pytest.raises(ORTModuleInitException):
        ORTModule(len)  # type: ignore[arg-type]


def test_what_a_policy_would_catch_is_a_fallback_exception() -> None:
    with pytest.raises(ORTModuleFallbackException):
        ORTModule(torch.nn.Linear(2, 2))(object())


@pytest.mark.parametrize("strategy", onnxtrain.PropagateCastOpsStrategy)
def test_strategies_are_options(strategy: onnxtrain.PropagateCastOpsStrategy) -> None:
    assert Options(propagate_cast_ops_strategy=strategy) == Options(propagate_cast_ops_strategy=strategy.name)
    wrapped, eager = pair(torch.nn.Linear(4, 4), propagate_cast_ops_strategy=strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_step(wrapped, eager, torch.randn(2, 4))
    with pytest.raises(OptionError, match="FLOOD_FILL"):
        Options(propagate_cast_ops_strategy="FLOOD")


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("seed", [ortmodule.set_seed, ortmodule.override_torch_manual_seed])
def test_seeds_decide_what_random_operators_draw(backend: str, seed) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5))
    wrapped, x = ORTModule(module, options=Options(backend=backend)), torch.ones(4, 8)
    wrapped(x)
    drawn = []
    for number in (3, 3, 4, -1, sys.maxsize):
        seed(number)
        drawn.append(wrapped(x) == 0)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert ortmodule.override_torch_manual_seed(5) is torch.default_generator and torch.initial_seed() == 5
