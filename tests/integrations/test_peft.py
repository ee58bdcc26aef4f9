"""PEFT around a model whose base is an ORTModule, and inside of one, against eager."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from parity import captures
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from onnxtrain import ORTModule
from onnxtrain.ir.modules import modules_of

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


TUNERS: dict[str, Any] = {
    "lora of all, scaled by its rank": lambda: peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "lora of the embedding, a head that is trained": lambda: peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]
    ),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(
        target_modules=LAYERS, init_r=4, target_r=2, total_step=20, tinit=1, tfinal=5
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=LAYERS),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, r=0, target_modules=LAYERS),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=LAYERS),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
LAYERS = ["q_proj", "v_proj"]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", TUNERS)
def test_each_kind_of_adapter_trains_as_in_eager(name: str, outside: bool, tmp_path: Path) -> None:
    config = TUNERS[name]()
    config.task_type = "CAUSAL_LM"
    eager = peft.get_peft_model(llama(), config).double().train()
    randomize(eager)
    again = copy.deepcopy(config)
    ours = ORTModule(copy.deepcopy(eager)) if outside else peft.get_peft_model(ORTModule(llama()), again)
    ours.double().train().load_state_dict(eager.state_dict())
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (eager, ours)]
    for step, (rows, length) in enumerate(((2, 7), (3, 5), (2, 9))):
        ids = torch.randint(100, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(**batch).loss.backward()
        for (key, p), (_, q) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=key)
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            optimizer.step()
            if name == "adalora":
                model.base_model.update_and_allocate(step + 2)
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()


def test_what_is_frozen_below_the_adapters_has_no_backward_pass_and_saves_nothing() -> None:
    config = peft.LoraConfig(r=4, target_modules=LAYERS, layers_to_transform=[2], task_type="CAUSAL_LM")
    model = ORTModule(peft.get_peft_model(llama(layers=3), config)).train()
    ids = torch.randint(100, (2, 7))
    model(input_ids=ids, labels=ids).loss.backward()
    plan = model.__dict__["_ort_last"].bound.latest.plan
    assert plan.backward is not None and all("lora" in name for name in plan.gradients)
    made = [(layers_of(node), value) for node in plan.forward.graph for value in node.outputs]
    assert {0, 1, 2} <= set().union(*(layers for layers, _ in made))
    saved = [(layers, value) for layers, value in made if value.name in plan.saved]
    widths = [value.shape[-1] for layers, value in saved if value.shape and layers & {0, 1}]
    assert not {32, 64} & {*widths}, "but angles and the mask, which the last layer reads too"
    assert any(layers == {2} for layers, _ in saved)
    assert not {0, 1} & set().union(*map(layers_of, plan.backward.graph))


def layers_of(node: ir.Node) -> set[int]:
    """The numbers of the layers that a node belongs to."""
    paths = [re.search(r"layers\.(\d+)", name) for name, _ in modules_of(node)]
    return {int(found[1]) for found in paths if found}


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **sizes))


def randomize(model: torch.nn.Module) -> None:
    """Adapters begin as none; so that each has a gradient they do not here."""
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
