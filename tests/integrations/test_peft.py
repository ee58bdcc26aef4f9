"""PEFT around a model whose base is an ORTModule, and inside of one, against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import captures
from transformers import GPT2Config, GPT2LMHeadModel

from onnxtrain import ORTModule

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes))


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_of_adapters_are_eagers(outside: bool, checkpointing: bool) -> None:
    eager = adapted(build())
    state = copy.deepcopy(eager.state_dict())
    ours = ORTModule(adapted(build())) if outside else adapted(ORTModule(build()))
    ours.load_state_dict(state)
    for model in (eager, ours):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
    for length in (8, 11):
        ids = torch.randint(50, (3, length))
        expected, found = gradients(eager, ids), gradients(ours, ids)
        assert expected.keys() == found.keys() and all("lora" in name for name in found)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert captures(ours if outside else ours.base_model.model) == 1
