"""Training on a CUDA device: architectures, precisions, padded batches, budgets, kernels, and where the host waits."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator

import accelerator
import architectures
import pytest
import torch
import transformers
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.execute.torch.allocations import peak_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DEVICE = "cuda"
SIZES_BY_CONTENT = (
    "DebertaV2ForSequenceClassification", "LongformerForMaskedLM", "ViltForQuestionAnswering", "Wav2Vec2ForCTC"
)  # fmt: skip


@pytest.mark.parametrize("way", architectures.WAYS)
@pytest.mark.parametrize("name", (*accelerator.ARCHITECTURES, *SIZES_BY_CONTENT))
def test_architectures(name: str, way: str) -> None:
    architectures.prepare()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        outcome = architectures.parity(architectures.MODELS[name], way, DEVICE)
    assert outcome.status == "pass", outcome


def bert(dropout: float = 0.0) -> nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    chances = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = transformers.BertConfig(vocab_size=500, num_labels=5, **sizes, **chances)
    return transformers.BertForSequenceClassification(config).to(DEVICE)


def padded(length: int = 64, rows: int = 16) -> dict[str, Tensor]:
    """A batch of which about 40 % are tokens."""
    lengths = torch.linspace(4, 0.7 * length, rows).long()
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(5, 500, (rows, length)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 5, (rows,))}
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference as a part of the largest element of all."""
    largest = max(float(g.abs().max()) for g in other.values())
    return max(float((one[name] - g).abs().max()) for name, g in other.items()) / largest


def trained(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The gradients of a step under autocast."""
    model.zero_grad()
    with torch.autocast(torch.device(DEVICE).type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**batch).loss
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_no_farther_from_double_precision_than_eager(dtype: torch.dtype) -> None:
    eager, batch = bert(), padded()
    exact = trained(copy.deepcopy(eager).double(), batch)
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    assert apart(trained(ours, batch, dtype), exact) < 2 * apart(trained(eager, batch, dtype), exact)


def test_a_grad_scaler_steps_as_in_eager() -> None:
    eager = bert()
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    losses = []
    for model in (eager, ours):
        torch.manual_seed(0)
        scaler, kept = torch.amp.GradScaler(DEVICE), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(5):
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(**padded()).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kept.append(loss.item())
        losses.append(torch.tensor(kept))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-2)


def test_rows_without_a_token_are_dropped_and_nobody_waits_but_for_their_count() -> None:
    eager = bert()
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    first, second = padded(), padded()
    trained(ours, first)
    expected = trained(eager, second)
    ours.zero_grad()
    with waits() as found:
        ours(**second).loss.backward()
    assert "rows" in str(ours.explain())
    assert len(found) <= 1, found
    assert apart(gradients(ours), expected) < 1e-5


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Where the host waits for the device: what torch tells of it."""
    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield found
            found += [str(w.message) for w in seen if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("budget", [0.6, "min"])
def test_a_budget_holds_and_changes_no_bit(budget: float | str, offload: str | None) -> None:
    eager, batch = bert(dropout=0.1), padded(128, 32)
    free = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    tight = ORTModule(
        copy.deepcopy(eager), options=Options(summary=False, memory_budget=budget, memory_offload=offload)
    )
    found, peaks = [], []
    for model in (free, tight):
        told = model.memory_report(**batch).peak
        torch.manual_seed(1)
        found.append(trained(model, batch))
        model.zero_grad()
        torch.manual_seed(2)
        peaks.append(peak_of(lambda m=model: m(**batch).loss.backward(), torch.device(DEVICE)))
        assert peaks[-1] <= 1.05 * told, (peaks[-1], told)
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("codegen", ["auto", "inductor"])
def test_compiled_kernels(codegen: str) -> None:
    eager = bert()
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False, codegen=codegen))
    for length in (64, 48, 80):
        batch = padded(length)
        assert apart(trained(ours, batch), trained(eager, batch)) < 1e-5


def test_a_mask_of_dropout_is_drawn_from_the_devices_generator() -> None:
    ours = ORTModule(bert(dropout=0.5), options=Options(summary=False))
    batch, found = padded(), []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        found.append(trained(ours, batch))
    assert apart(found[0], found[1]) == 0 < apart(found[0], found[2])


def test_an_optimizers_step_goes_into_the_backward_pass() -> None:
    from onnxtrain.optim import step_in_backward

    eager = bert()
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (eager, ours)]
    stepper = step_in_backward(optimizers[1])
    for _ in range(3):
        batch = padded()
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    stepper.remove()
    for expected, found in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_several_sizes_have_one_graph() -> None:
    eager = bert()
    ours = ORTModule(copy.deepcopy(eager), options=Options(summary=False))
    for batch in _sizes():
        assert apart(trained(ours, batch), trained(eager, batch)) < 1e-5


def _sizes() -> Iterator[dict[str, Tensor]]:
    for length in (8, 33, 64, 127):
        yield padded(length, rows=3 + length % 5)
