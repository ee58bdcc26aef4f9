"""What is trained: a model with random weights, and batches of a given shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 30522
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a workload.

    Args:
        layers: number of layers.
        hidden: width.
        batch: rows of a batch.
        length: longest row, in tokens; side of an image, in pixels.
        valid_ratio: mean share of a row that is not padding; 1 is dense.
    """

    layers: int = 4
    hidden: int = 768
    batch: int = 8
    length: int = 128
    valid_ratio: float = 1.0

    @property
    def heads(self) -> int:
        """Attention heads of 64."""
        return max(1, self.hidden // 64)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One thing to train.

    Args:
        build: the model of a size.
        batch: one batch of a size, with the row lengths to use.
        has_lengths: whether rows have lengths, so that padding can be avoided.
    """

    build: Callable[[Size], torch.nn.Module]
    batch: Callable[[Size, torch.Tensor, torch.Generator], dict[str, torch.Tensor]]
    has_lengths: bool = True


def _sizes(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.hidden,
    }


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(kind: str, **extra: Any) -> Callable[[Size], torch.nn.Module]:
    def build(size: Size) -> torch.nn.Module:
        config = transformers.BertConfig(**_sizes(size), **_NO_DROPOUT, vocab_size=VOCABULARY, **extra)
        return getattr(transformers, kind)(config)

    return build


def _gpt2(size: Size) -> torch.nn.Module:
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    shape = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **shape, **special, **chances))


def _llama(size: Size) -> torch.nn.Module:
    config = _sizes(size) | {"intermediate_size": size.hidden * 8 // 3, "num_key_value_heads": max(1, size.heads // 3)}
    if size.heads % config["num_key_value_heads"]:
        config["num_key_value_heads"] = size.heads
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **config))


def _vit(size: Size) -> torch.nn.Module:
    config = transformers.ViTConfig(image_size=size.length, num_labels=CLASSES, **_sizes(size), **_NO_DROPOUT)
    return transformers.ViTForImageClassification(config)


def _resnet(size: Size) -> torch.nn.Module:
    depths = [max(1, size.layers // 2)] * 4
    widths = [max(8, size.hidden // 12 * 2**i) for i in range(4)]
    config = {"embedding_size": widths[0], "hidden_sizes": widths, "depths": depths, "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES, **config))


def _tokens(lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    width = int(lengths.max())
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(5, VOCABULARY, (len(lengths), width), generator=rng) * mask
    return {"input_ids": ids, "attention_mask": mask}


def _classified(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_tokens(lengths, rng), "labels": torch.randint(0, CLASSES, (len(lengths),), generator=rng)}


def _masked(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    given = _tokens(lengths, rng)
    chosen = torch.rand(given["input_ids"].shape, generator=rng) < 0.15
    chosen[:, 0] = True
    return {**given, "labels": given["input_ids"].masked_fill(~chosen | (given["attention_mask"] == 0), -100)}


def _language(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    given = _tokens(lengths, rng)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def _answers(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """The second half of each row is the answer, and the only part that has labels."""
    given = _language(size, lengths, rng)
    prompt = torch.arange(given["labels"].shape[1]) < (lengths[:, None] // 2)
    return {**given, "labels": given["labels"].masked_fill(prompt, -100)}


def _images(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(size.batch, 3, size.length, size.length, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (size.batch,), generator=rng)}


WORKLOADS = {
    "bert_classify": Workload(_bert("BertForSequenceClassification", num_labels=CLASSES), _classified),
    "bert_mlm": Workload(_bert("BertForMaskedLM"), _masked),
    "gpt2_lm": Workload(_gpt2, _language),
    "llama_sft": Workload(_llama, _answers),
    "vit": Workload(_vit, _images, has_lengths=False),
    "resnet": Workload(_resnet, _images, has_lengths=False),
}


def row_lengths(size: Size, rows: int, rng: torch.Generator) -> torch.Tensor:
    """Row lengths around ``valid_ratio`` of the longest; every row where it is 1."""
    if size.valid_ratio >= 1.0:
        return torch.full((rows,), size.length)
    spread = min(size.valid_ratio, 1 - size.valid_ratio)
    share = size.valid_ratio + spread * (2 * torch.rand(rows, generator=rng) - 1)
    return (share * size.length).round().clamp(2, size.length).long()


def batches(workload: Workload, size: Size, steps: int, seed: int, grouped: bool) -> list[dict[str, torch.Tensor]]:
    """The batches of a run.

    Args:
        workload: what is trained.
        size: shape of a batch.
        steps: number of batches.
        seed: the same rows, whatever ``grouped`` is.
        grouped: rows of similar length share a batch, as a length-grouped sampler does; the longest come first.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = row_lengths(size, steps * size.batch, rng)
    if grouped:
        lengths = lengths.sort(descending=True).values
    parts = list(lengths.split(size.batch))
    if grouped:
        parts = [parts[i] for i in torch.randperm(len(parts), generator=rng)]
    elif size.valid_ratio < 1.0:
        for part in parts:
            part[0] = size.length  # naive padding: every batch as long as the longest row
    return [workload.batch(size, part, rng) for part in parts]
