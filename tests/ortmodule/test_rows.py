"""Rows that nothing depends on are not computed: Transformers models under every kind of mask, against eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from catalogue import VOCABULARY, small
from parity import captures, check_gradients, check_losses, choices

from onnxtrain import Options, ORTModule
from onnxtrain.engine.bound import Chosen
from onnxtrain.optimize.rows import is_by_attention

BATCH, LENGTH = 3, 9
CLASSES = 3
Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """One architecture in one task.

    Args:
        model: the class in transformers.
        task: what its labels are: of ``tokens`` (which class), ``next`` (their own), ``sequence``,
            ``translation``.
        settings: of the configuration.
        drops: what leaves rows out: ``padding`` and labels, or ``labels`` alone.
        attentions: the implementations it has.
        quick: whether it is part of the quick tests.
    """

    model: str
    task: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drops: str = "padding"
    attentions: tuple[str, ...] = ("sdpa", "eager")
    quick: bool = False

    @property
    def id(self) -> str:
        return self.model


_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_T5 = {"decoder_start_token_id": 0}
_MODERN = {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
_PADDED = {"pad_token_id": 0}
_EAGER = ("eager",)
ROWS = [
    Row("BertForMaskedLM", "tokens", quick=True),
    Row("BertForTokenClassification", "tokens"),
    Row("BertForSequenceClassification", "sequence"),
    Row("DistilBertForTokenClassification", "tokens"),
    Row("RobertaForMaskedLM", "tokens"),
    Row("XLMRobertaForSequenceClassification", "sequence"),
    Row("CamembertForTokenClassification", "tokens"),
    Row("AlbertForSequenceClassification", "sequence"),  # a layer that is used twice
    Row("ElectraForSequenceClassification", "sequence"),
    Row("MPNetForMaskedLM", "tokens", attentions=_EAGER),
    Row("DebertaV2ForMaskedLM", "tokens", _DISENTANGLED, "labels", _EAGER),
    Row("ModernBertForMaskedLM", "tokens", _MODERN),
    Row("GPT2LMHeadModel", "next", quick=True),
    Row("GPT2ForSequenceClassification", "sequence", _PADDED),
    Row("GPTNeoXForCausalLM", "next"),
    Row("GPTJForCausalLM", "next", {"rotary_dim": 4}, attentions=_EAGER),
    Row("OPTForCausalLM", "next"),
    Row("BloomForCausalLM", "next", drops="labels", attentions=_EAGER),  # its GELU is an autograd.Function
    Row("LlamaForCausalLM", "next", quick=True),
    Row("LlamaForSequenceClassification", "sequence", _PADDED),
    Row("MistralForCausalLM", "next"),
    Row("Qwen2ForCausalLM", "next"),
    Row("Qwen3ForCausalLM", "next"),
    Row("GemmaForCausalLM", "next"),
    Row("Gemma3ForCausalLM", "next", _SLIDING),
    Row("PhiForCausalLM", "next"),
    Row("FalconForCausalLM", "next", {"head_dim": None}),
    Row("MptForCausalLM", "next", attentions=_EAGER),
    Row("T5ForConditionalGeneration", "translation", _T5, quick=True),
    Row("BartForConditionalGeneration", "translation"),
    Row("MBartForConditionalGeneration", "translation"),
    Row("PegasusForConditionalGeneration", "translation"),
    Row("MarianMTModel", "translation"),
]


def right() -> torch.Tensor:
    lengths = torch.tensor([4, LENGTH, 6])
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def left() -> torch.Tensor:
    return right().flip(1)


def holes() -> torch.Tensor:
    mask = (torch.rand(BATCH, LENGTH) < 0.6).long()
    mask[:, 0] = 1
    mask[:, 5] = 0
    return mask


def all_valid() -> torch.Tensor:
    return torch.ones(BATCH, LENGTH, dtype=torch.int64)


def a_single_token() -> torch.Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mask[torch.arange(BATCH), torch.tensor([0, LENGTH - 1, 3])] = 1
    return mask


MASKS: list[Callable[[], torch.Tensor]] = [right, left, holes, all_valid, a_single_token]
CASES = [
    pytest.param(row, kind, id=f"{row.id}-{kind}", marks=() if row.quick and kind == "sdpa" else pytest.mark.slow)
    for row in ROWS
    for kind in row.attentions
]


def build(row: Row, attention: str) -> torch.nn.Module:
    """A random model without dropout, in training mode."""
    kind = getattr(transformers, row.model)
    config = small(kind.config_class, dict(row.settings))
    config._attn_implementation = attention
    model = kind(config).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, shape)


def batch_of(task: str, mask: torch.Tensor) -> Batch:
    """Random ids and labels; labels are ignored where there is padding, and at random."""
    given = {"input_ids": ids(*mask.shape), "attention_mask": mask}
    if task == "sequence":
        return given | {"labels": torch.randint(0, CLASSES, mask.shape[:1])}
    if task == "translation":
        labels = ids(mask.shape[0], mask.shape[1] - 2)
        labels[0, 4:] = -100
        return given | {"labels": labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)}
    labels = torch.randint(0, CLASSES, mask.shape) if task == "tokens" else given["input_ids"].clone()
    labels[(mask == 0) | (torch.rand(mask.shape) < 0.4)] = -100
    sequence, place = max(mask.nonzero().tolist(), key=lambda at: at[1])
    labels[sequence, place] = 1  # one at least, that something predicts
    return given | {"labels": labels}


def padded_differently(given: Batch) -> Batch:
    """The same batch with other ids where the mask is 0."""
    mask = given["attention_mask"]
    return given | {"input_ids": torch.where(mask == 0, ids(*mask.shape), given["input_ids"])}


def step(model: torch.nn.Module, given: Batch) -> float:
    """The loss; gradients are on the parameters."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.item()


def wrapped_step(model: ORTModule, given: Batch) -> tuple[float, Chosen]:
    """The loss, and which rows were computed."""
    with choices() as found:
        loss = step(model, given)
    return loss, found[0]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(models: tuple[ORTModule, torch.nn.Module, torch.nn.Module], given: Batch) -> tuple[Chosen, float]:
    """A step of ours, of eager, and of eager in double precision, whose loss is returned."""
    wrapped, eager, exact = models
    ours, chosen = wrapped_step(wrapped, given)
    theirs, right = step(eager, given), step(exact, given)
    if right != right or any(g.isnan().any() for g in gradients(exact).values()):  # their masks are of single precision
        exact, right = eager, theirs
    check_losses(ours, theirs, right)
    check_gradients(*(dict(m.named_parameters()) for m in (wrapped, eager, exact)))
    return chosen, right


def check_padding_is_not_read(
    models: tuple[ORTModule, torch.nn.Module, torch.nn.Module], given: Batch, right: float
) -> None:
    """Where eager's loss does not depend on the ids of padding, ours and its gradients do not either."""
    wrapped, eager, exact = models
    other = padded_differently(given)
    moved = abs(step(eager, other) - step(eager, given))
    if abs(step(exact, other) - right) > 1e-10 * abs(right) or moved > 2e-7 * abs(right):
        return
    loss, before = wrapped_step(wrapped, given)[0], gradients(wrapped)
    assert abs(wrapped_step(wrapped, other)[0] - loss) <= 1e-6 * abs(loss)
    largest = max(g.abs().max().item() for g in before.values())
    for name, gradient in gradients(wrapped).items():
        assert (gradient - before[name]).abs().max().item() <= 1e-5 * largest, name


def triple(model: torch.nn.Module, **options: Any) -> tuple[ORTModule, torch.nn.Module, torch.nn.Module]:
    settings = Options(density_threshold=0.95, **options)  # the models are so small that nothing would be worth it
    return ORTModule(copy.deepcopy(model), options=settings), model, copy.deepcopy(model).double()


@pytest.mark.parametrize(("row", "attention"), CASES)
def test_every_mask_gives_eager_s_loss_and_gradients(row: Row, attention: str) -> None:
    models = triple(build(row, attention))
    for make in MASKS:
        given = batch_of(row.task, make())
        chosen, loss = compare(models, given)
        check_padding_is_not_read(models, given, loss)
        densities = chosen.batch.densities
        if make is right or (make is holes and row.task != "next"):
            by_padding = [s for s in chosen.batch.active if is_by_attention(s)]
            assert (row.drops == "padding") == any(densities[s] < 0.9 for s in by_padding), (make.__name__, densities)
        if row.task != "sequence" or make is right:
            assert chosen.batch.blind or chosen.batch.active, (make.__name__, densities)
    assert captures(models[0]) == 1


@pytest.mark.parametrize(("model", "task"), [("BertForMaskedLM", "tokens"), ("GPT2LMHeadModel", "next")])
def test_two_hundred_masks_and_sizes_share_a_graph(model: str, task: str) -> None:
    models = triple(build(Row(model, task), "sdpa"))
    for _ in range(200):
        mask = (torch.rand(int(torch.randint(1, 5, ())), int(torch.randint(3, 12, ()))) < torch.rand(())).long()
        mask[:, 0] = 1
        given = batch_of(task, mask)
        given["labels"][0, 1] = 1
        compare(models, given)
    assert captures(models[0]) == 1
    bound = models[0].__dict__["_ort_sessions"].entries[0].session.bound
    assert len(bound.variants()) <= 4, bound.variants()


def blocks(dtype: torch.dtype, causal: bool) -> torch.Tensor:
    """Two texts in each row and padding behind them, which sees itself: (batch, 1, queries, keys)."""
    text = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
    seen = text[:, None, :, None] == text[:, None, None, :]
    if causal:
        seen = seen & torch.ones(LENGTH, LENGTH).tril().bool()
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model", "task", "dtype"),
    [
        ("BertForMaskedLM", "tokens", torch.float32),
        ("LlamaForCausalLM", "next", torch.float32),
        ("GPT2LMHeadModel", "next", torch.float32),
        ("LlamaForCausalLM", "next", torch.bool),
    ],
)
def test_texts_packed_into_rows(model: str, task: str, dtype: torch.dtype, attention: str) -> None:
    if dtype == torch.bool and attention == "eager":
        pytest.skip("eager attention adds its mask")
    wrapped, eager, _ = triple(build(Row(model, task), attention))
    given = batch_of(task, all_valid())
    given["attention_mask"] = blocks(dtype, task == "next")
    given["labels"][0, 6:] = given["labels"][1, 5:] = -100  # nobody reads the padding, nor what comes last
    loss, chosen = wrapped_step(wrapped, given)
    check_losses(loss, step(eager, given), step(eager, given))
    check_gradients(*(dict(m.named_parameters()) for m in (wrapped, eager, eager)))
    assert any(is_by_attention(s) and chosen.batch.densities[s] < 0.9 for s in chosen.batch.active)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), [("BertForMaskedLM", "tokens"), ("GPT2LMHeadModel", "next")])
def test_onnxruntime(model: str, task: str) -> None:
    models = triple(build(Row(model, task), "sdpa"), backend="onnxruntime")
    for make in MASKS:
        chosen, _ = compare(models, batch_of(task, make()))
        if make is right:
            assert any(map(is_by_attention, chosen.batch.active))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task"), [("BertForMaskedLM", "tokens"), ("DistilBertForTokenClassification", "tokens")]
)
def test_double_precision(model: str, task: str) -> None:
    eager = build(Row(model, task), "sdpa").double()
    wrapped, _, _ = triple(eager)
    for make in (right, holes):
        given = batch_of(task, make())
        loss, chosen = wrapped_step(wrapped, given)
        assert chosen.batch.active and loss == pytest.approx(step(eager, given), rel=1e-12)
        for name, theirs in gradients(eager).items():
            torch.testing.assert_close(gradients(wrapped)[name], theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("frozen", ["bert.", "cls."])
def test_frozen_parameters(frozen: str) -> None:
    models = triple(build(Row("BertForMaskedLM", "tokens"), "sdpa"))
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    chosen, _ = compare(models, batch_of("tokens", right()))
    assert any(map(is_by_attention, chosen.batch.active))


def test_embeddings_instead_of_ids() -> None:
    wrapped, eager, _ = triple(build(Row("BertForMaskedLM", "tokens"), "sdpa"))
    given = batch_of("tokens", right())
    del given["input_ids"]
    made = torch.randn(BATCH, LENGTH, 32)
    found = []
    for model in (wrapped, eager):
        embeddings = made.clone().requires_grad_()
        with choices() as chosen:
            model(**given, inputs_embeds=embeddings).loss.backward()
        found.append(embeddings.grad)
        if model is wrapped:
            assert any(map(is_by_attention, chosen[0].batch.active))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
    assert not found[0][0, 4:].any()
