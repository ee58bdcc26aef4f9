"""Modules in which a row looks unneeded and is not: what is computed for them is what eager computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import check_gradients, check_losses, choices, pair, same_step
from torch import Tensor, nn

from onnxtrain import ORTModule
from onnxtrain.engine.bound import Chosen
from onnxtrain.optimize.rows import is_by_attention

WIDTH, HEADS, WORDS, CLASSES = 16, 2, 20, 5
LOWEST = torch.finfo(torch.float32).min


def heads(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width)."""
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return heads(q) @ heads(k).transpose(-1, -2) * 0.3


# attentions: queries, keys and values (batch, tokens, width), a mask (batch, tokens) that is 1 where a token counts


def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    seen = mask[:, None, None, :].bool()
    return together(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), seen))


def causal_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return together(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))


def added(lowest: float) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        hidden = (1.0 - mask[:, None, None, :].to(q.dtype)) * lowest
        return together((scores(q, k) + hidden).softmax(-1) @ heads(v))

    return attend


def filled(lowest: float) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        hidden = mask[:, None, None, :] == 0
        return together(scores(q, k).masked_fill(hidden, lowest).softmax(-1) @ heads(v))

    return attend


def weakly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Padding counts a little."""
    return together((scores(q, k) - 3.0 * (1.0 - mask[:, None, None, :].to(q.dtype))).softmax(-1) @ heads(v))


def raised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """An addend hides and another shows again."""
    hidden = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return together((scores(q, k) + hidden + hidden * -1.0).softmax(-1) @ heads(v))


def one_for_all_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The heads share their keys and values."""
    k, v = heads(k)[:, :1], heads(v)[:, :1]
    seen = mask[:, None, None, :].bool()
    return together((heads(q) @ k.mT).masked_fill(~seen, LOWEST).softmax(-1) @ v)


def one_for_all_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A batch shares its queries."""
    seen = mask[:, None, None, :].bool()
    return together(F.scaled_dot_product_attention(heads(q)[:1], heads(k), heads(v), seen))


def one_for_all_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A batch shares its keys and values."""
    return together(F.scaled_dot_product_attention(heads(q), heads(k)[:1], heads(v)[:1]))


def by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    a, b, c = (x.view(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    found = torch.einsum("bqhd,bkhd->bhqk", a, b).masked_fill(mask[:, None, None, :] == 0, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), c).flatten(2)


def merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Batch and heads are one axis."""
    a, b, c = (heads(x).flatten(0, 1) for x in (q, k, v))
    found = torch.bmm(a, b.transpose(1, 2)).view(mask.shape[0], HEADS, *[mask.shape[1]] * 2)
    weights = found.masked_fill(mask[:, None, None, :] == 0, LOWEST).softmax(-1)
    return together(torch.bmm(weights.flatten(0, 1), c).view(mask.shape[0], HEADS, mask.shape[1], -1))


def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A bias by distance, as baddbmm adds it."""
    a, b, c = (heads(x).flatten(0, 1) for x in (q, k, v))
    slopes = torch.arange(1, HEADS + 1, dtype=q.dtype).repeat(mask.shape[0])[:, None, None]
    place = (mask.cumsum(-1) * mask).to(q.dtype).repeat_interleave(HEADS, 0)[:, None]
    found = torch.baddbmm(slopes * place, a, b.transpose(1, 2)).view(mask.shape[0], HEADS, *[mask.shape[1]] * 2)
    weights = (found + (1.0 - mask[:, None, None, :].to(q.dtype)) * LOWEST).softmax(-1)
    return together(torch.bmm(weights.flatten(0, 1), c).view(mask.shape[0], HEADS, mask.shape[1], -1))


def after_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Weights are taken away after they were normalized: hidden keys still count in the sum."""
    return together((scores(q, k).softmax(-1) * mask[:, None, None, :].to(q.dtype)) @ heads(v))


def twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A mask before and after."""
    seen = mask[:, None, None, :].bool()
    weights = scores(q, k).masked_fill(~seen, LOWEST).softmax(-1)
    return together(weights.masked_fill(~seen, 0.0) @ heads(v))


def by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One head sees the padding."""
    seen = torch.stack((mask, torch.ones_like(mask)), 1)[:, :, None, :].bool()
    return together(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), seen))


def slid(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A window of three tokens."""
    place = torch.arange(mask.shape[1])
    near = (place[:, None] - place[None, :]).abs() <= 1
    seen = near[None, None] & mask[:, None, None, :].bool()
    return together(scores(q, k).masked_fill(~seen, LOWEST).softmax(-1) @ heads(v))


class Model(nn.Module):
    """Embeddings, layers of attention and a feed-forward block, and a loss that somebody wrote."""

    def __init__(self, attend: Callable[..., Tensor], read: Callable[..., Any], layers: int = 2) -> None:
        super().__init__()
        self.attend, self.read = attend, read
        self.words = nn.Embedding(WORDS, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.prefix = nn.Parameter(torch.randn(2, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def layers(self, x: Tensor, mask: Tensor) -> Tensor:
        for projection, block in zip(self.projections, self.blocks, strict=True):
            x = x + self.attend(*projection(x).chunk(3, -1), mask)
            x = x + block(x)
        return x

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        return self.read(self, ids, mask, labels)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), reduction="sum")


# losses, from everything that the module has


def by_labels(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m.head(m.layers(m.words(ids), mask)), labels)


def mean_of_all(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.layers(m.words(ids), mask).mean(1)), labels[:, 0].clamp(0))


def mean_of_valid(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x, weight = m.layers(m.words(ids), mask), mask[..., None].to(m.prefix.dtype)
    return F.cross_entropy(m.head((x * weight).sum(1) / weight.sum(1).clamp(1)), labels[:, 0].clamp(0))


def filled_mean(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask).masked_fill(mask[..., None] == 0, 0.0)
    return F.cross_entropy(m.head(x.sum(1)), labels[:, 0].clamp(0))


def maximum_of_valid(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask).masked_fill(mask[..., None] == 0, -1e9)
    return F.cross_entropy(m.head(x.amax(1)), labels[:, 0].clamp(0))


def last_token(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.layers(m.words(ids), mask)[:, -1]), labels[:, 0].clamp(0))


def first_tokens(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m.head(m.layers(m.words(ids), mask)[:, :2]), labels[:, :2].clamp(0).contiguous())


def last_valid_token(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    place = mask.sum(1) - 1
    x = m.layers(m.words(ids), mask)[torch.arange(ids.shape[0]), place]
    return F.cross_entropy(m.head(x), labels[:, 0].clamp(0))


def gathered_token(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    place = (mask.sum(1) - 1).clamp(0)[:, None, None].expand(-1, 1, WIDTH)
    x = m.layers(m.words(ids), mask).gather(1, place).squeeze(1)
    return F.cross_entropy(m.head(x), labels[:, 0].clamp(0))


def shifted(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.layers(m.words(ids), mask))
    return token_loss(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())


def normalized_over_tokens(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.norm(m.layers(m.words(ids), mask).transpose(1, 2)).transpose(1, 2)
    return token_loss(m.head(x), labels)


def convolved(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask)
    return token_loss(m.head(m.conv(x.transpose(1, 2)).transpose(1, 2)), labels)


def convolved_before(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.conv(m.words(ids).transpose(1, 2)).transpose(1, 2)
    return token_loss(m.head(m.layers(x, mask)), labels)


def summed_up(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m.head(m.layers(m.words(ids), mask).cumsum(1)), labels)


def through_time(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m.head(m.recurrent(m.layers(m.words(ids), mask))[0]), labels)


def two_losses(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask)
    return token_loss(m.head(x), labels) + 0.5 * F.cross_entropy(m.head(x[:, 0]), labels[:, 0].clamp(0))


def two_labels(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.layers(m.words(ids), mask))
    return token_loss(logits, labels) + token_loss(logits, labels.flip(1))


def and_a_norm(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask)
    return token_loss(m.head(x), labels) + x.square().mean()


def one_head(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Attention without an axis of heads."""
    x = F.scaled_dot_product_attention(m.words(labels.clamp(0)), *[m.words(ids)] * 2, mask[:, None].bool())
    return token_loss(m.head(x * mask[..., None].to(x.dtype)), labels)


def prefixed(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Two learned tokens before each sequence."""
    before = m.prefix[None].expand(ids.shape[0], -1, -1)
    x = torch.cat((before, m.words(ids)), 1)
    seen = torch.cat((torch.ones_like(mask[:, :2]), mask), 1)
    return token_loss(m.head(m.layers(x, seen)[:, 2:].contiguous()), labels)


def multiplied(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Hidden states times the mask, then mixed."""
    x = m.layers(m.words(ids), mask) * mask[..., None].to(m.prefix.dtype)
    return token_loss(m.head(m.conv(x.transpose(1, 2)).transpose(1, 2)), labels)


def shown(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer gives is an output without a gradient."""
    x = m.layers(m.words(ids), mask)
    return token_loss(m.head(x), labels), x.detach().sum()


def weights_returned(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    x = m.words(ids)
    q, k, v = m.projections[0](x).chunk(3, -1)
    weights = scores(q, k).masked_fill(mask[:, None, None, :] == 0, LOWEST).softmax(-1)
    return token_loss(m.head(x + together(weights @ heads(v))), labels), weights.sum()


def smoothed(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.layers(m.words(ids), mask))
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def weighted_by_class(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.layers(m.words(ids), mask))
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), m.head.bias.softmax(0).detach())


def likelihood(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    found = m.head(m.layers(m.words(ids), mask)).log_softmax(-1)
    return F.nll_loss(found.transpose(1, 2), labels)


def each_token(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A loss of each token, weighed by the mask."""
    logits = m.head(m.layers(m.words(ids), mask))
    found = F.cross_entropy(logits.view(-1, CLASSES), labels.clamp(0).view(-1), reduction="none")
    return (found * mask.view(-1).to(found.dtype)).sum() / mask.sum()


def each_of_a_sequence(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """The mean of sequences, each of its own tokens."""
    logits = m.head(m.layers(m.words(ids), mask))
    found = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none").view(labels.shape)
    return (found.sum(1) / (labels != -100).sum(1).clamp(1)).mean()


def each_by_class(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Classes on the second axis, and a loss that is not zero where a label is ignored."""
    found = F.cross_entropy(m.head(m.layers(m.words(ids), mask)).transpose(1, 2), labels, reduction="none")
    return found.topk(3, 1).values.sum() + (found + 1).log().sum()


def smoothed_by_class(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.layers(m.words(ids), mask)).transpose(1, 2)
    return F.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum")


def smoothed_by_hand(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """As the Transformers Trainer does."""
    found, ignored = -m.head(m.layers(m.words(ids), mask)).log_softmax(-1), (labels == -100).unsqueeze(-1)
    likely = found.gather(-1, labels.clamp(0).unsqueeze(-1)).masked_fill(ignored, 0.0).sum()
    spread = found.sum(-1, keepdim=True).masked_fill(ignored, 0.0).sum()
    count = ignored.numel() - ignored.long().sum()
    return 0.9 * likely / count + 0.1 * spread / (count * CLASSES)


def chosen_logits(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    chosen = labels != -100
    return F.cross_entropy(m.head(m.layers(m.words(ids), mask))[chosen], labels[chosen])


def chosen_states(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """The rows that have a label, by their places among all."""
    places = torch.nonzero(labels.view(-1) != -100).squeeze(-1)
    x = m.layers(m.words(ids), mask).view(-1, WIDTH)[places]
    return F.cross_entropy(m.head(x), labels.view(-1)[places])


def scored(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A number for each token, and a class for each sequence that has a label."""
    found = m.head(m.layers(m.words(ids), mask))
    errors = (found[..., 0] - labels).square() * mask
    return errors.sum() / mask.sum() + F.binary_cross_entropy_with_logits(found[:, 0, 1], mask[:, -1].to(found.dtype))


def other_tokens(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Tokens of one length attend to tokens of another."""
    x = m.layers(m.words(ids), mask)
    return token_loss(m.head(kernel(m.words(labels.clamp(0)), x, x, mask)), labels)


def batch(sizes: tuple[int, ...] = (4, 9, 6), length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask with padding on the right, labels that are ignored there and at random."""
    mask = (torch.arange(length) < torch.tensor(sizes)[:, None]).long()
    labels = torch.randint(0, CLASSES, mask.shape).masked_fill((mask == 0) | (torch.rand(mask.shape) < 0.3), -100)
    labels[-1, 0] = 1
    return torch.randint(0, WORDS, mask.shape), mask, labels


def steps(model: nn.Module, *batches: tuple[Any, ...], **options: Any) -> list[Chosen]:
    """What was computed of each batch; losses and gradients were those of eager."""
    wrapped, eager = pair(model.double(), **{"density_threshold": 0.95} | options)
    found = []
    for given in batches:
        with choices() as chosen:
            same_step(wrapped, eager, *given)
        found.append(chosen[0])
    return found


def padding(chosen: Chosen) -> float:
    """The smallest share of rows that were computed for attention's sake."""
    batch = chosen.batch
    return min((batch.densities[s] for s in batch.active if is_by_attention(s)), default=1.0)


def labelled(chosen: Chosen) -> float:
    """The smallest share of rows that were computed for a loss."""
    batch = chosen.batch
    return min((batch.densities[s] for s in batch.active if not is_by_attention(s)), default=1.0)


VALID = 19 / 27
SIZES = ((4, 9, 6), (2, 9), (3, 9, 5, 9))  # of sequences in batches


@pytest.mark.parametrize(
    "attend",
    [
        kernel, causal_kernel, added(-10000.0), added(LOWEST), filled(-10000.0), filled(LOWEST), filled(float("-inf")),
        twice, slid, one_for_all_heads,
    ],
    ids=lambda a: a.__qualname__,
)  # fmt: skip
def test_attention_written_by_hand_drops_padding(attend: Callable[..., Tensor]) -> None:
    (chosen,) = steps(Model(attend, by_labels), batch())
    assert padding(chosen) <= VALID + 1e-6, chosen.batch.densities


@pytest.mark.parametrize(
    "attend", [by_einsum, merged, biased, one_for_all_queries, one_for_all_keys], ids=lambda a: a.__qualname__
)
def test_attention_that_is_not_found_keeps_padding(attend: Callable[..., Tensor]) -> None:
    """Batch and heads are one axis, a whole batch shares rows, or a product is not a MatMul: labels alone drop."""
    (chosen,) = steps(Model(attend, by_labels), batch())
    assert padding(chosen) == 1.0 and labelled(chosen) < 1.0


@pytest.mark.parametrize("attend", [weakly, raised, after_softmax, by_head], ids=lambda a: a.__qualname__)
def test_attention_that_sees_padding_keeps_it(attend: Callable[..., Tensor]) -> None:
    ids, mask, labels = batch()
    labels[:, 0] = 1
    (chosen,) = steps(Model(attend, by_labels), (ids, mask, labels))
    assert padding(chosen) == 1.0 and labelled(chosen) < 1.0


@pytest.mark.parametrize(
    "read",
    [
        mean_of_all, normalized_over_tokens, convolved, summed_up, through_time, and_a_norm,
    ],
    ids=lambda r: r.__name__,
)  # fmt: skip
def test_padding_that_is_read_is_computed(read: Callable[..., Any]) -> None:
    (chosen,) = steps(Model(kernel, read), batch())
    assert padding(chosen) == 1.0, chosen.batch.densities


@pytest.mark.parametrize(
    ("read", "most"),
    [
        (mean_of_valid, VALID), (filled_mean, VALID), (maximum_of_valid, VALID), (last_token, (19 + 2) / 27),
        (first_tokens, VALID), (last_valid_token, VALID), (gathered_token, 1.0), (shifted, VALID),
        (convolved_before, VALID), (two_losses, VALID), (two_labels, 1.0), (prefixed, 1.0), (multiplied, VALID),
        (shown, 1.0), (weights_returned, 1.0), (weighted_by_class, VALID),
    ],
    ids=lambda r: getattr(r, "__name__", ""),
)  # fmt: skip
@pytest.mark.parametrize(
    "attend", [pytest.param(kernel, id="kernel"), pytest.param(filled(LOWEST), id="filled", marks=pytest.mark.slow)]
)
def test_readers(attend: Callable[..., Tensor], read: Callable[..., Any], most: float) -> None:
    """Every second batch is one that a graph for the first does not fit: all rows are valid, or padding is left."""
    ids, mask, labels = batch()
    dense = (ids, torch.ones_like(mask), labels)
    chosen, _, again, _ = steps(Model(attend, read), (ids, mask, labels), dense, batch((9, 1, 2)), batch((3, 3), 3))
    assert padding(chosen) <= most + 1e-6, chosen.batch.densities
    assert padding(again) <= max(most, 0.9)


@pytest.mark.parametrize(
    "read",
    [
        by_labels, smoothed, smoothed_by_class, smoothed_by_hand, weighted_by_class, likelihood, each_token,
        each_of_a_sequence, chosen_logits, chosen_states,
    ],
    ids=lambda r: r.__name__,
)  # fmt: skip
def test_losses_of_some_tokens(read: Callable[..., Any]) -> None:
    """The layers are computed for valid tokens, the head for those that count."""
    batches = [(i, m, labels.index_fill(1, torch.tensor([2]), -100)) for i, m, labels in map(batch, SIZES)]
    for chosen, (_, mask, labels) in zip(steps(Model(kernel, read), *batches), batches, strict=True):
        counted = mask if read is each_token else labels != -100
        assert padding(chosen) <= mask.double().mean(), chosen.batch.densities
        assert min(chosen.batch.densities.values()) == counted.double().mean()


@pytest.mark.parametrize("read", [each_by_class, scored])
def test_losses_of_all_tokens(read: Callable[..., Any]) -> None:
    """Rows whose label is ignored have a loss of zero, which may be read."""
    (chosen,) = steps(Model(kernel, read), batch())
    assert min(chosen.batch.densities.values()) <= VALID, chosen.batch.densities


def test_attention_without_an_axis_of_heads() -> None:
    """Its first axis is that of heads where a kernel is called: rows of the batch are no queries there."""
    (chosen,) = steps(Model(kernel, one_head), batch())
    assert min(chosen.batch.densities.values()) <= VALID
    steps(Model(kernel, one_head), *(batch(sizes) for sizes in SIZES), batch((1, 1), 1))


def test_sizes_that_were_once_the_same() -> None:
    """What was planned for tokens of one length is not used where there are two."""
    ids, mask, labels = batch()
    wrapped, eager = pair(Model(kernel, other_tokens).double(), density_threshold=0.95)
    for given in ((ids, mask, labels), (ids, mask, labels[:, :4]), batch((2, 5)), (ids[:, :5], mask[:, :5], labels)):
        same_step(wrapped, eager, *given)
    assert len(wrapped._ort_sessions.entries) == 1


ATTENDS = [kernel, added(-10000.0), added(LOWEST), filled(-10000.0), filled(LOWEST), merged, biased, twice]


@pytest.mark.slow
@pytest.mark.parametrize("read", [by_labels, mean_of_valid, last_token])
@pytest.mark.parametrize("attend", ATTENDS, ids=lambda a: a.__qualname__)
def test_a_sequence_without_any_token(attend: Callable[..., Tensor], read: Callable[..., Any]) -> None:
    """Its labels count, its queries see no key, and what they get is a mean of all values, or zeros."""
    ids, mask, labels = batch((4, 0, 6))
    labels[1, 2:5] = 3
    steps(Model(attend, read), (ids, mask, labels))


@pytest.mark.parametrize("attend", [kernel, added(LOWEST), filled(float("-inf"))], ids=lambda a: a.__qualname__)
def test_labels_on_padding(attend: Callable[..., Tensor]) -> None:
    ids, mask, labels = batch()
    labels[0, 6] = labels[2, -1] = 2
    (chosen,) = steps(Model(attend, by_labels), (ids, mask, labels))
    assert padding(chosen) == pytest.approx(21 / 27)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_depth(layers: int) -> None:
    steps(Model(kernel, by_labels, layers), batch())


def test_no_label_at_all() -> None:
    ids, mask, labels = batch()
    steps(Model(kernel, by_labels), (ids, mask, labels), (ids, mask, torch.full_like(labels, -100)))


def test_no_label_at_all_has_no_mean() -> None:
    wrapped, eager = pair(Model(kernel, smoothed), density_threshold=0.95)
    ids, mask, labels = batch()
    for given in (labels, torch.full_like(labels, -100)):
        assert torch.allclose(wrapped(ids, mask, given), eager(ids, mask, given), equal_nan=True)


def two_of_each(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    places = torch.stack([mask.sum(1) - 1, mask.sum(1) // 2], 1)
    x = m.layers(m.words(ids), mask)[torch.arange(ids.shape[0]).repeat_interleave(2), places.reshape(-1)]
    return F.cross_entropy(m.head(x), labels[:, :1].clamp(0).expand(-1, 2).reshape(-1))


def all_but_the_last(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x = m.layers(m.words(ids), mask)[torch.arange(ids.shape[0] - 1), mask.sum(1)[:-1] - 1]
    return F.cross_entropy(m.head(x), labels[:-1, 0].clamp(0))


@pytest.mark.parametrize("read", [two_of_each, all_but_the_last])
def test_tokens_that_are_not_one_of_each_sequence(read: Callable[..., Any]) -> None:
    steps(Model(kernel, read), batch(), batch((2, 7)), batch((9, 9, 9, 4)))


def within(m: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    x, inner = m.layers(m.words(ids), mask)[:, 1:-1], mask[:, 1:-1].to(m.words.weight.dtype)
    mean = (x * inner[..., None]).sum(1) / inner.sum(1, keepdim=True).clamp(1)
    return F.cross_entropy(m.head(mean), labels[:, 0].clamp(0))


def test_a_slice_that_leaves_no_token() -> None:
    steps(Model(kernel, within), batch(), batch((2, 2), 2), batch((1, 2), 2), batch((5, 3), 5))


def test_one_token_and_one_sequence() -> None:
    model = Model(kernel, by_labels)
    steps(model, batch(), batch((1,), 1), batch((1, 1), 1), batch((1,), 5))


def test_a_mask_that_needs_a_gradient_hides_nothing() -> None:
    ids, mask, labels = batch()
    soft = ((1.0 - mask.double()) * -10000.0).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return together((scores(q, k) + bias[:, None, None, :]).softmax(-1) @ heads(v))

    wrapped, eager = pair(Model(attend, by_labels).double(), density_threshold=0.95)
    same_step(wrapped, eager, ids, soft, labels)


def test_a_learned_bias_beside_the_mask() -> None:
    class Biased(Model):
        def __init__(self) -> None:
            super().__init__(self.attended, by_labels)
            self.bias = nn.Parameter(torch.randn(HEADS, 9, 9))

        def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            length = mask.shape[1]
            hidden = (1.0 - mask[:, None, None, :].to(q.dtype)) * LOWEST
            bias = self.bias[None, :, :length, :length] + hidden
            return together(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), bias))

        def __deepcopy__(self, memo: Any) -> Any:
            made = Biased().double()
            made.load_state_dict(self.state_dict())
            return made

    (chosen,) = steps(Biased(), batch())
    assert padding(chosen) <= VALID + 1e-6


class Layers(nn.Module):
    """Torch's own layers."""

    def __init__(self, make: Callable[[], nn.Module], whole: bool = False) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(WORDS, WIDTH), make(), nn.Linear(WIDTH, CLASSES)
        self.whole = whole

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, hidden = self.words(ids), mask == 0
        if self.whole:
            x = self.layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        else:
            x = self.layer(x, src_key_padding_mask=hidden)
        return token_loss(self.head(x), labels)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layers(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), True),
        lambda: Layers(lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)),
        lambda: Layers(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=True), 2
            )
        ),
    ],
    ids=["attention", "layer", "encoder"],
)
def test_layers_of_torch(make: Callable[[], nn.Module]) -> None:
    """They make one axis of batch and heads, which stay apart here."""
    model = make()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    (chosen,) = steps(model, batch())
    assert padding(chosen) < 1.0 and labelled(chosen) < 1.0


@pytest.mark.parametrize(
    "read", [by_labels, mean_of_valid, mean_of_all, last_token, each_of_a_sequence, chosen_logits, smoothed_by_hand]
)
@pytest.mark.parametrize("attend", [filled(LOWEST), one_for_all_heads], ids=["filled", "one_for_all_heads"])
def test_onnxruntime(attend: Callable[..., Tensor], read: Callable[..., Any]) -> None:
    wrapped, eager = pair(Model(attend, read), backend="onnxruntime", density_threshold=0.95)
    models = (wrapped, eager, copy.deepcopy(eager).double())
    for given in (batch(), batch((2, 7)), batch((9, 9, 9))):
        losses = []
        for model in models:
            model.zero_grad()
            losses.append(model(*given))
            losses[-1].backward()
        check_losses(*(loss.item() for loss in losses))
        check_gradients(*(dict(m.named_parameters()) for m in models))


def test_rows_are_kept_where_options_say_so() -> None:
    for options in ({"compute_optimizer": False}, {"sparse_optimizer": False}, {"density_threshold": 0.0}):
        (chosen,) = steps(Model(kernel, by_labels), batch(), **options)
        assert not chosen.batch.active
    (chosen,) = steps(Model(kernel, by_labels), batch(), embedding_sparse_optimizer=False)
    assert labelled(chosen) < 1.0 and padding(chosen) == 1.0


def test_dropout_draws_for_the_rows_that_are_computed() -> None:
    """Weights are kept or taken away with the chance that was asked for, and steps differ."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return token_loss(self.head(F.dropout(self.words(ids), 0.25)), labels)

    wrapped = ORTModule(Dropped())
    ids, _, labels = batch((40,) * 50, 40)
    losses = {wrapped(ids, labels).item() for _ in range(3)}
    assert len(losses) == 3
