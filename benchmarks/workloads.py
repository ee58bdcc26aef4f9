"""What is trained: a model with random weights, and batches of a given shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer

from benchmarks.networks import Block, Perceptron, Tagger, UNet

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
        dropout: chance of every dropout that the model has.
        labels: share of the tokens that have a label; 0 takes the workload's own.
        vocabulary: number of tokens that there are.
    """

    layers: int = 4
    hidden: int = 768
    batch: int = 8
    length: int = 128
    valid_ratio: float = 1.0
    dropout: float = 0.0
    labels: float = 0.0
    vocabulary: int = 30522

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
        labels: share of the tokens that have a label, where the size does not say; 0 where tokens have none.
        layer: class of the parts that are checkpointed one by one; None where the model knows its own.
    """

    build: Callable[[Size], torch.nn.Module]
    batch: Callable[[Size, torch.Tensor, torch.Generator], dict[str, torch.Tensor]]
    labels: float = 0.0
    layer: type[torch.nn.Module] | None = None


def _sizes(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.hidden,
    }


def _dropout(size: Size) -> dict[str, float]:
    return dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), size.dropout)


def _bert(kind: str, **extra: Any) -> Callable[[Size], torch.nn.Module]:
    def build(size: Size) -> torch.nn.Module:
        config = transformers.BertConfig(**_sizes(size), **_dropout(size), vocab_size=size.vocabulary, **extra)
        return getattr(transformers, kind)(config)

    return build


def _gpt2(size: Size) -> torch.nn.Module:
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), size.dropout)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    shape = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "use_cache": False}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size.vocabulary, **shape, **special, **chances)
    )


def _llama(size: Size) -> torch.nn.Module:
    config = _sizes(size) | {"intermediate_size": size.hidden * 8 // 3, "num_key_value_heads": max(1, size.heads // 3)}
    if size.heads % config["num_key_value_heads"]:
        config["num_key_value_heads"] = size.heads
    config |= {"vocab_size": size.vocabulary, "attention_dropout": size.dropout}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **config))


def _deberta(size: Size) -> torch.nn.Module:
    attention = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    attention |= {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    config = _sizes(size) | _dropout(size) | attention
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(vocab_size=size.vocabulary, **config))


def _t5(size: Size) -> torch.nn.Module:
    config = {"d_model": size.hidden, "d_ff": 4 * size.hidden, "num_layers": size.layers, "num_heads": size.heads}
    config |= {"d_kv": size.hidden // size.heads, "dropout_rate": size.dropout, "vocab_size": size.vocabulary}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, use_cache=False, **config)
    )


def _vit(size: Size) -> torch.nn.Module:
    config = transformers.ViTConfig(image_size=size.length, num_labels=CLASSES, **_sizes(size), **_dropout(size))
    return transformers.ViTForImageClassification(config)


def _resnet(size: Size) -> torch.nn.Module:
    depths = [max(1, size.layers // 2)] * 4
    widths = [max(8, size.hidden // 12 * 2**i) for i in range(4)]
    config = {"embedding_size": widths[0], "hidden_sizes": widths, "depths": depths, "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES, **config))


def _unet(size: Size) -> torch.nn.Module:
    return UNet(CLASSES, tuple(max(8, size.hidden // 16 * 2**i) for i in range(size.layers + 1)))


def _mobilenet(size: Size) -> torch.nn.Module:
    config = transformers.MobileNetV2Config(
        num_labels=CLASSES, image_size=size.length, classifier_dropout_prob=size.dropout
    )
    return transformers.MobileNetV2ForImageClassification(config)


def _lstm(size: Size) -> torch.nn.Module:
    return Tagger(size.vocabulary, CLASSES, size.hidden, size.layers, size.dropout)


def _mlp(size: Size) -> torch.nn.Module:
    return Perceptron(CLASSES, size.hidden, size.layers)


def _lora(size: Size) -> torch.nn.Module:
    import peft

    chosen = peft.LoraConfig(r=8, lora_dropout=size.dropout, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(_llama(size), chosen)


def _tokens(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    width = int(lengths.max())
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(5, size.vocabulary, (len(lengths), width), generator=rng) * mask
    return {"input_ids": ids, "attention_mask": mask}


def _classified(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_tokens(size, lengths, rng), "labels": torch.randint(0, CLASSES, (len(lengths),), generator=rng)}


def _masked(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    given = _tokens(size, lengths, rng)
    chosen = torch.rand(given["input_ids"].shape, generator=rng) < size.labels
    chosen[:, 0] = True
    return {**given, "labels": given["input_ids"].masked_fill(~chosen | (given["attention_mask"] == 0), -100)}


def _language(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    given = _tokens(size, lengths, rng)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def _answers(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """The end of each row is the answer, and the only part that has labels: at least its last token."""
    given = _language(size, lengths, rng)
    prompt = (lengths * (1 - size.labels)).floor().clamp(max=lengths - 1)
    in_prompt = torch.arange(given["labels"].shape[1]) < prompt[:, None]
    return {**given, "labels": given["labels"].masked_fill(in_prompt, -100)}


def _images(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(size.batch, 3, size.length, size.length, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (size.batch,), generator=rng)}


def _segmented(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = _images(size, lengths, rng)["pixel_values"]
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, pixels[:, 0].shape, generator=rng)}


def _tagged(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    given = _tokens(size, lengths, rng)
    labels = torch.randint(0, CLASSES, given["input_ids"].shape, generator=rng)
    return {"input_ids": given["input_ids"], "labels": labels.masked_fill(given["attention_mask"] == 0, -100)}


def _features(size: Size, lengths: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, CLASSES, (size.batch,), generator=rng)
    return {"features": torch.randn(size.batch, size.hidden, generator=rng), "labels": labels}


WORKLOADS = {
    "bert_classify": Workload(_bert("BertForSequenceClassification", num_labels=CLASSES), _classified),
    "bert_mlm": Workload(_bert("BertForMaskedLM"), _masked, labels=0.15),
    "gpt2_lm": Workload(_gpt2, _language, labels=1.0),
    "gpt2_sft": Workload(_gpt2, _answers, labels=0.3),
    "llama_sft": Workload(_llama, _answers, labels=0.5),
    "deberta_mlm": Workload(_deberta, _masked, labels=0.15),
    "t5": Workload(_t5, _language, labels=1.0),
    "vit": Workload(_vit, _images),
    "resnet": Workload(_resnet, _images, layer=ResNetBasicLayer),
    "unet": Workload(_unet, _segmented, layer=Block),
    "mobilenet": Workload(_mobilenet, _images),
    "llama_lora": Workload(_lora, _answers, labels=0.5),
    "lstm": Workload(_lstm, _tagged, labels=1.0),
    "mlp": Workload(_mlp, _features),
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
    size = dataclasses.replace(size, labels=size.labels or workload.labels)
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


@dataclasses.dataclass(frozen=True)
class Composition:
    """What batches consist of, in the mean of a batch.

    Args:
        positions: elements of the inputs, padding included.
        tokens: those that are not padding.
        labels: labels that are not ignored.
    """

    positions: float
    tokens: float
    labels: float

    @property
    def padding(self) -> float:
        """The share of padding."""
        return 1 - self.tokens / self.positions


def composition(data: list[dict[str, torch.Tensor]]) -> Composition | None:
    """What batches consist of; None where they have no tokens."""
    if "attention_mask" not in data[0]:
        return None
    totals = (
        sum(b["input_ids"].numel() for b in data),
        sum(int(b["attention_mask"].sum()) for b in data),
        sum(int((b["labels"] != -100).sum()) for b in data),
    )
    return Composition(*(total / len(data) for total in totals))


@dataclasses.dataclass(frozen=True)
class Run:
    """A workload at a stated size.

    Args:
        workload: name of what is trained.
        size: the shape of it.
        variants: who trains it.
        dtype: float32, or what autocast computes in.
        optimizer: one of ``measure.OPTIMIZERS``.
    """

    workload: str
    size: Size
    variants: tuple[str, ...]
    dtype: str = "float32"
    optimizer: str = "sgd"


_THREE = ("eager", "compile", "torch")
_BOTH = (*_THREE, *(f"{name}-grouped" for name in _THREE))  # where no row is padded, grouping changes nothing
_CLASSIFY = Size(batch=16, valid_ratio=0.4, dropout=0.1)
_OTHERS = ("eager", "checkpoint", "compile", "compile-0.5", "compile-0")
_BUDGETS = (*_OTHERS, "torch", "torch-0.75", "torch-0.5", "torch-min")
_LANGUAGE = ("bert_mlm", "gpt2_lm", "llama_sft", "deberta_mlm", "t5")
_DENSE = Size(hidden=256, batch=16, dropout=0.1)
_PADDED = dataclasses.replace(_DENSE, valid_ratio=0.6)
_PIXELS = dataclasses.replace(_DENSE, length=64)
_ALL = ("eager", "eager-default", "compile", "torch")
_ALL_GROUPED = (*_ALL, *(f"{name}-grouped" for name in _ALL))
_ON_GPU = Size(layers=12, batch=64, length=512, valid_ratio=0.4, dropout=0.1)
_COMPILED = (*_THREE, "torch-codegen")
_SHORT = dataclasses.replace(_CLASSIFY, layers=4)
PRESETS: dict[str, dict[str, Run]] = {
    "skip": {  # what is gained where padding and ignored labels need not be computed; dense: what that costs elsewhere
        "bert_classify": Run("bert_classify", _CLASSIFY, _BOTH),
        "bert_mlm": Run("bert_mlm", Size(labels=0.15, dropout=0.1), _THREE),
        "gpt2_sft": Run("gpt2_sft", Size(valid_ratio=0.6, labels=0.3, vocabulary=50257, dropout=0.1), _BOTH),
        "dense": Run("bert_classify", dataclasses.replace(_CLASSIFY, valid_ratio=1.0), (*_THREE, "torch-off")),
    },
    "memory": {  # what a step needs, what is told before, and what less costs; sizes at which activations dominate
        **{name: Run(name, _DENSE, _BUDGETS) for name in _LANGUAGE},
        **{f"{name}-padded": Run(name, _PADDED, _BUDGETS) for name in _LANGUAGE},
        "vit": Run("vit", dataclasses.replace(_DENSE, length=176), _BUDGETS),
        "resnet": Run("resnet", dataclasses.replace(_PIXELS, length=128), _BUDGETS),
        "unet": Run("unet", _PIXELS, _BUDGETS),
    },
    "gpu": {  # sizes at which a large GPU is busy; what matters most comes first
        name: dataclasses.replace(run, dtype="bfloat16", optimizer="adamw")
        for name, run in {
            "bert_classify, 12 layers": Run("bert_classify", _ON_GPU, (*_BOTH, "torch-codegen")),
            "bert_classify, dense": Run("bert_classify", dataclasses.replace(_ON_GPU, valid_ratio=1.0), _COMPILED),
            "gpt2_sft, 60 % tokens, 30 % of them labels": Run(
                "gpt2_sft", dataclasses.replace(_ON_GPU, valid_ratio=0.6, labels=0.3, vocabulary=50257), _BOTH
            ),
            "llama_sft, dense, half of it labels": Run(
                "llama_sft", Size(layers=8, hidden=2048, batch=16, length=512, labels=0.5), _COMPILED
            ),
            "resnet": Run("resnet", Size(hidden=768, batch=64, length=224), _COMPILED),
            "mlp": Run("mlp", Size(layers=3, hidden=64), _COMPILED),
        }.items()
    },
    "page": {  # what docs/benchmarks.md shows
        name: dataclasses.replace(run, optimizer="adamw")
        for name, run in {
            "bert_classify, 12 layers": Run("bert_classify", dataclasses.replace(_CLASSIFY, layers=12), _ALL_GROUPED),
            "bert_classify, 4 layers": Run("bert_classify", _SHORT, (*_ALL_GROUPED, "onnxruntime")),
            "bert_classify, dense": Run("bert_classify", dataclasses.replace(_SHORT, valid_ratio=1.0), _ALL),
            "bert_classify, dense, bfloat16": Run(
                "bert_classify", dataclasses.replace(_SHORT, valid_ratio=1.0), _ALL, dtype="bfloat16"
            ),
            "bert_mlm, 15 % labels": Run("bert_mlm", Size(labels=0.15, dropout=0.1), _ALL),
            "gpt2_sft, 60 % tokens, 30 % of them labels": Run(
                "gpt2_sft", Size(valid_ratio=0.6, labels=0.3, vocabulary=50257, dropout=0.1), _ALL_GROUPED
            ),
            "gpt2_lm, dense": Run("gpt2_lm", Size(), _ALL),
            "llama_sft, dense, half of it labels": Run("llama_sft", Size(labels=0.5), _ALL),
            "llama_lora, 60 % tokens, half of them labels": Run("llama_lora", Size(valid_ratio=0.6), _ALL_GROUPED),
            "vit": Run("vit", Size(hidden=384, length=224), _ALL),
            "resnet": Run("resnet", Size(hidden=256, length=128), _ALL),
            "mobilenet": Run("mobilenet", Size(length=128), _ALL),
            "unet": Run("unet", Size(hidden=256, length=64), _ALL),
            "lstm": Run("lstm", Size(layers=2, hidden=256), _ALL),
            "mlp": Run("mlp", Size(layers=3, hidden=64), _ALL),
        }.items()
    },
}
