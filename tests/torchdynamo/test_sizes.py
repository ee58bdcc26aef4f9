"""Sizes that Dynamo calls dynamic: one graph serves all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from compiled import captures, compiled, piece
from transformers import BertConfig, BertForMaskedLM

from onnxtrain.torchdynamo import pieces

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 99}


@pytest.mark.slow
def test_a_hundred_sizes_through_one_graph() -> None:
    eager = BertForMaskedLM(BertConfig(**SMALL, **STILL)).double()
    ours = copy.deepcopy(eager)
    made = compiled(ours, dynamic=True)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (ours, eager)]
    sizes = [(2 + i % 7, 9 + 3 * i % 50) for i in range(100)]
    for rows, length in sizes:
        ids = torch.randint(99, (rows, length))
        labels = torch.where(torch.rand(rows, length) < 0.3, ids, -100)
        labels[:, 0] = ids[:, 0]
        losses = []
        for model, optimizer in zip((made, eager), optimizers, strict=True):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    assert len(set(sizes)) == 100 and captures() == 1 and piece().calls == 100


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2), (False, 4)])
def test_dynamo_says_which_sizes_are_free(dynamic: bool | None, graphs: int) -> None:
    layer = torch.nn.Linear(4, 4)
    made = compiled(lambda x: layer(x).relu().sum() * x.shape[0], dynamic)
    for rows in (3, 5, 7, 11):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(made(x), layer(x).relu().sum() * rows)
    assert len(pieces()) == captures() == graphs


def test_a_marked_axis_is_free_from_the_first_call_on() -> None:
    layer = torch.nn.Linear(4, 4)
    made = compiled(layer)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(made(x), layer(x))
    assert captures() == 1


def test_numbers_that_vary() -> None:
    layer = torch.nn.Linear(4, 4)
    made = compiled(lambda x, scale, count: layer(x) * scale + count, dynamic=True)
    for scale, count in ((2.5, 3), (3.5, 4), (4.5, 7), (0.5, 9)):
        x = torch.randn(3, 4)
        torch.testing.assert_close(made(x, scale, count), layer(x) * scale + count)
    assert captures() <= 2


def test_rows_that_nobody_needs_are_skipped_and_logits_wait() -> None:
    model = BertForMaskedLM(BertConfig(**SMALL, **STILL))
    eager = copy.deepcopy(model)
    made = compiled(model, dynamic=True, density_threshold=0.9)
    ids = torch.randint(99, (4, 16))
    labels = torch.where(torch.rand(4, 16) < 0.2, ids, -100)
    labels[:, 0] = ids[:, 0]
    for _ in range(2):
        output, expected = made(input_ids=ids, labels=labels), eager(input_ids=ids, labels=labels)
        torch.testing.assert_close(output.loss, expected.loss)
        output.loss.backward()
    assert "rows where labels != -100" in piece().explain()
    read = torch.compile(lambda logits: logits.softmax(-1), backend="onnxtrain")
    torch.testing.assert_close(read(output.logits), expected.logits.softmax(-1), rtol=1e-4, atol=1e-6)
