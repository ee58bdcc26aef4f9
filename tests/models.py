"""Small random models of the architectures that people train, and batches for them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.utils import logging

logging.set_verbosity_error()
VOCABULARY = 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model family at toy size.

    Args:
        name: the family.
        build: the model with an attention implementation and a dropout probability.
        batch: a batch of a size and a length.
    """

    name: str
    build: Callable[[str, float], torch.nn.Module]
    batch: Callable[[int, int], dict[str, Any]]


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids and a mask whose first row is padded by a third."""
    ids = torch.randint(3, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, length - length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def classified(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids with a class for each row."""
    return {**tokens(batch, length), "labels": torch.randint(0, 2, (batch,))}


def language(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids that are their own labels where the mask is 1."""
    given = tokens(batch, length)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def translated(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids with labels of another length."""
    return {**tokens(batch, length), "labels": torch.randint(3, VOCABULARY, (batch, length + 2))}


def images(size: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Images of a size with a class for each."""
    return lambda batch, _: {
        "pixel_values": torch.randn(batch + 2, 3, size, size),
        "labels": torch.randint(0, 2, (batch + 2,)),
    }


def sounds(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Spectra of 40 frames with token ids to write down."""
    return {"input_features": torch.randn(batch, 8, 40), "labels": torch.randint(3, VOCABULARY, (batch, length))}


def captioned(batch: int, length: int) -> dict[str, Any]:
    """Images, each with a text; a contrastive loss needs several."""
    given = tokens(batch + 3, length)
    return {**given, "pixel_values": torch.randn(batch + 3, 3, 16, 16), "return_loss": True}


def _encoder(kind: str, config: str, **extra: Any) -> Callable[[str, float], torch.nn.Module]:
    def build(attention: str, dropout: float) -> torch.nn.Module:
        chances = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        made = getattr(transformers, config)(attn_implementation=attention, **SIZES, **chances, **extra)
        return getattr(transformers, kind)(made)

    return build


def _decoder(kind: str, config: str, **extra: Any) -> Callable[[str, float], torch.nn.Module]:
    def build(attention: str, dropout: float) -> torch.nn.Module:
        sizes = SIZES | {"vocab_size": VOCABULARY, "attention_dropout": dropout}
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return getattr(transformers, kind)(
            getattr(transformers, config)(attn_implementation=attention, **{**sizes, **special, **extra})
        )

    return build


def _distilbert(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, attn_implementation=attention,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout,
        )
    )  # fmt: skip


def _gpt2(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation=attention,
        )
    )  # fmt: skip


def _opt(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
            max_position_embeddings=64, word_embed_proj_dim=32, dropout=dropout, attention_dropout=dropout,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _t5(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout,
            decoder_start_token_id=0, attn_implementation=attention,
        )
    )  # fmt: skip


def _resnet(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )


def _convnext(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0)
    )


def _bloom(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=dropout,
            attention_dropout=dropout, attn_implementation=attention,
        )
    )  # fmt: skip


def _bart(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY, **_TWO_STACKS, dropout=dropout, attention_dropout=dropout,
            max_position_embeddings=64, attn_implementation=attention,
        )
    )  # fmt: skip


def _whisper(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY, **_TWO_STACKS, dropout=dropout, attention_dropout=dropout, num_mel_bins=8,
            max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None, attn_implementation=attention,
        )
    )  # fmt: skip


def _swin(attention: str, dropout: float) -> torch.nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 2], window_size=4,
            drop_path_rate=dropout, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _clip(attention: str, dropout: float) -> torch.nn.Module:
    towers = {
        "text_config": {**_WORDS, **SIZES, "eos_token_id": 2, "attention_dropout": dropout},
        "vision_config": {**_VIT, **SIZES, "attention_dropout": dropout},
    }
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            **towers, projection_dim=16, logit_scale_init_value=1.0, attn_implementation=attention
        )
    )  # fmt: skip


_TWO_STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
_WORDS = {"vocab_size": VOCABULARY}
_DEBERTA = {
    **_WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "share_att_key": True, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
_SMALL = {**_WORDS, "embedding_size": 32}
_ALBERT = {**_SMALL, "classifier_dropout_prob": 0.0}
_VIT = {"image_size": 16, "patch_size": 4}

ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("bert", _encoder("BertForSequenceClassification", "BertConfig", **_WORDS), classified),
        Architecture("roberta", _encoder("RobertaForMaskedLM", "RobertaConfig", **_WORDS), language),
        Architecture("distilbert", _distilbert, classified),
        Architecture("deberta-v2", _encoder("DebertaV2ForMaskedLM", "DebertaV2Config", **_DEBERTA), language),
        Architecture("gpt2", _gpt2, language),
        Architecture("opt", _opt, language),
        Architecture("llama", _decoder("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2), language),
        Architecture("qwen2", _decoder("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2), language),
        Architecture("t5", _t5, translated),
        Architecture("vit", _encoder("ViTForImageClassification", "ViTConfig", **_VIT), images(16)),
        Architecture("electra", _encoder("ElectraForSequenceClassification", "ElectraConfig", **_SMALL), classified),
        Architecture("albert", _encoder("AlbertForSequenceClassification", "AlbertConfig", **_ALBERT), classified),
        Architecture("mpnet", _encoder("MPNetForSequenceClassification", "MPNetConfig", **_WORDS), classified),
        Architecture("gpt-neox", _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig"), language),
        Architecture("bloom", _bloom, language),
        Architecture("mistral", _decoder("MistralForCausalLM", "MistralConfig", num_key_value_heads=2), language),
        Architecture("gemma", _decoder("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=8), language),
        Architecture("phi", _decoder("PhiForCausalLM", "PhiConfig"), language),
        Architecture("bart", _bart, translated),
        Architecture("resnet", _resnet, images(32)),
        Architecture("convnext", _convnext, images(32)),
        Architecture("swin", _swin, images(32)),
        Architecture("whisper", _whisper, sounds),
        Architecture("clip", _clip, captioned),
    )
}
ONE_ATTENTION = ("deberta-v2", "mpnet", "bloom", "resnet", "convnext")  # no sdpa kernel, or no attention


def build(name: str, attention: str = "sdpa", dropout: float = 0.0) -> torch.nn.Module:
    """A model in training mode."""
    return ARCHITECTURES[name].build("eager" if name in ONE_ATTENTION else attention, dropout).train()
