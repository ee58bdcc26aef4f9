"""What is trained beside weights that are quantized: small layers, and adapters of PEFT on a model of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from parity import captures
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onnxtrain import ORTModule


class Layers(nn.Module):
    """Three layers with frozen weights, each beside a small one that is trained.

    Args:
        make: makes a frozen one from 64 features to 64, with a bias or without.
    """

    def __init__(self, make: Callable[[bool], nn.Module]) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(make(i != 1) for i in range(3))
        self.trained = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, trained in zip(self.frozen, self.trained, strict=True):
            x = nn.functional.gelu(frozen(x) + trained(x))
        return x.square().mean()


def step(called: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss of a step, and the gradients of its input and of the module's parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    loss = called(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]  # type: ignore[list-item]


def adapters_train_as_in_eager(folder: Path, config: Any, checkpointing: bool) -> None:
    """Some steps of adapters alone, whose losses and gradients are compared; they are saved in the end.

    Args:
        folder: for the model and the adapters.
        config: how Transformers quantizes the model.
        checkpointing: whether layers are computed again in the backward pass.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **sizes)).save_pretrained(folder)
    eager, module = (_adapted(folder, config, checkpointing) for _ in range(2))
    module.load_state_dict({n: t for n, t in eager.state_dict().items() if "lora" in n}, strict=False)
    wrapped = ORTModule(module)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in (eager, module)]
    for rows, length in ((2, 7), (3, 5), (4, 12)):
        ids = torch.randint(100, (rows, length))
        mask = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        losses = []
        for model, optimizer in zip((eager, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(**batch).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for (name, p), (_, q) in zip(eager.named_parameters(), module.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == ("lora" not in name)
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert captures(wrapped) == 1
    wrapped.save_pretrained(folder / "adapter")
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


def _adapted(folder: Path, config: Any, checkpointing: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, adapter).train()
