"""Outputs beside a loss are computed when they are read: values, gradients, and what does not compute them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import choices
from torch import Tensor, nn

from onnxtrain import Options, ORTModule
from onnxtrain.engine.deferred import DeferredTensor
from onnxtrain.engine.late import Late

WORDS, WIDTH, CLASSES = 20, 16, 5
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


class Tagger(nn.Module):
    """One attention; a loss of tokens, their scores, and what the attention gave."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.projection, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(ids)
        q, k, v = (t.view(*ids.shape, 2, -1).transpose(1, 2) for t in self.projection(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :].bool())
        hidden = x + self.mixed(seen.transpose(1, 2).flatten(2))
        logits = self.head(self.dropout(hidden))
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return {"loss": loss, "logits": logits, "hidden": hidden}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    mask = (torch.arange(8) < torch.tensor([3, 8, 5])[:, None]).long()
    labels = torch.randint(0, CLASSES, mask.shape).masked_fill((mask == 0) | (torch.rand(mask.shape) < 0.4), -100)
    labels[:, 0] = 2
    return torch.randint(0, WORDS, mask.shape), mask, labels


def pair(dropout: float = 0.0, **options: Any) -> tuple[ORTModule, nn.Module]:
    eager = Tagger(dropout)
    return ORTModule(copy.deepcopy(eager), options=Options(density_threshold=0.95, **options)), eager


class Count:
    """How often outputs were computed late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, compute = 0, Late.outputs

        def counted(late: Late) -> dict[str, Tensor]:
            self.times += not late._outputs
            return compute(late)

        monkeypatch.setattr(Late, "outputs", counted)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, n=name: f"{n}: {text}", **TOLERANCE)


def test_nothing_is_computed_that_is_not_read(count: Count) -> None:
    wrapped, eager = pair()
    for _ in range(3):
        given = batch()
        ours, theirs = wrapped(*given), eager(*given)
        torch.testing.assert_close(ours["loss"], theirs["loss"], **TOLERANCE)
        for module, output in ((wrapped, ours), (eager, theirs)):
            module.zero_grad()
            output["loss"].backward()
        same_gradients(wrapped, eager)
        assert isinstance(ours["logits"], DeferredTensor) and isinstance(ours["hidden"], DeferredTensor)
    assert count.times == 0


def metadata() -> list[Callable[[Tensor], Any]]:
    return [
        lambda t: t.shape, lambda t: t.size(1), lambda t: t.dim(), lambda t: t.ndim, lambda t: t.dtype,
        lambda t: t.device, lambda t: t.numel(), len, lambda t: t.is_floating_point(), lambda t: t.requires_grad,
        lambda t: t.layout, lambda t: t.element_size(), lambda t: t.nbytes, lambda t: t.is_cuda,
    ]  # fmt: skip


def test_sizes_and_types_are_known_without_computing(count: Count) -> None:
    wrapped, eager = pair()
    given = batch()
    ours, theirs = wrapped(*given)["logits"], eager(*given)["logits"]
    for ask in metadata():
        assert ask(ours) == ask(theirs)
    assert isinstance(ours, Tensor) and hash(ours) == hash(ours)
    assert count.times == 0


READS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "numpy": lambda t: t.detach().numpy(),
    "array": lambda t: np.asarray(t.detach()),
    "argmax": lambda t: t.argmax(-1),
    "copy": copy.copy,
    "stack": lambda t: torch.stack([t, t]),
    "concatenate": lambda t: torch.cat((t, t)),
    "detach": lambda t: t.detach(),
    "float": lambda t: t.float(),
    "double": lambda t: t.double(),
    "index": lambda t: t[0, 1],
    "mask": lambda t: t[t > 0],
    "list": lambda t: t.tolist(),
    "item": lambda t: t[0, 0, 0].item(),
    "iterate": lambda t: [row.sum() for row in t],
    "view": lambda t: t.view(-1, CLASSES),
    "transpose": lambda t: t.mT,
    "add": lambda t: 1 + t,
    "matmul": lambda t: t @ torch.ones(CLASSES, 2),
    "compare": lambda t: t > 0,
    "clone": lambda t: t.clone(),
    "function": lambda t: F.softmax(t, -1),
    "out": lambda t: torch.zeros(t.shape).copy_(t.detach()),
    "save": lambda t: _saved(t.detach()),
}


def _saved(tensor: Tensor) -> Tensor:
    place = io.BytesIO()
    torch.save(tensor, place)
    place.seek(0)
    return torch.load(place)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_gives_what_eager_gives_in_all_rows(read: Callable[[Tensor], Any], count: Count) -> None:
    wrapped, eager = pair()
    given = batch()
    ours, theirs = wrapped(*given)["logits"], eager(*given)["logits"]
    found, expected = read(ours), read(theirs)
    if isinstance(expected, str):
        assert found.startswith("tensor([") and "grad_fn" in found
    else:
        assert not isinstance(found, DeferredTensor) or read is copy.copy
        torch.testing.assert_close(found, expected, **TOLERANCE, check_layout=False)
    assert count.times == 1
    read(ours)
    assert count.times == 1, "computed a second time"


@pytest.mark.parametrize("dump", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
def test_copies_are_plain_tensors(dump: Callable[[Tensor], Tensor]) -> None:
    wrapped, eager = pair()
    given = batch()
    with torch.no_grad():
        theirs = eager(*given)["logits"]
    ours = wrapped(*given)["logits"].detach()
    torch.testing.assert_close(dump(ours), theirs, **TOLERANCE)
    assert type(dump(ours)) is Tensor


@pytest.mark.parametrize("name", ["logits", "hidden"])
def test_a_gradient_flows_through_what_was_read(name: str) -> None:
    """At padded rows too."""
    wrapped, eager = pair()
    for _ in range(3):
        given = batch()
        for module in (wrapped, eager):
            module.zero_grad()
            output = module(*given)
            (output["loss"] + 0.1 * output[name].square().sum()).backward()
        same_gradients(wrapped, eager)


def test_a_gradient_flows_after_the_backward_pass_of_the_loss() -> None:
    wrapped, eager = pair()
    given = batch()
    for module in (wrapped, eager):
        output = module(*given)
        output["loss"].backward(retain_graph=module is eager)
        output["logits"].square().sum().backward()
    same_gradients(wrapped, eager)


def test_dropout_draws_the_numbers_of_the_step() -> None:
    """Loss and scores of one step are of the same draw, and reading draws none."""
    wrapped, _ = pair(0.5)
    ids, mask, labels = batch()
    labels = labels.clamp(0)  # all rows are needed, so that one loss is that of all scores
    output = wrapped(ids, torch.ones_like(mask), labels)
    before = torch.get_rng_state()
    expected = F.cross_entropy(output["logits"].detach().view(-1, CLASSES), labels.view(-1))
    torch.testing.assert_close(output["loss"], expected, **TOLERANCE)
    assert torch.equal(before, torch.get_rng_state())


def test_what_was_read_is_computed_with_the_loss_from_then_on(count: Count) -> None:
    wrapped, eager = pair()
    given = batch()
    wrapped(*given)["logits"].sum()
    for _ in range(3):
        given = batch()
        with choices() as found:
            output = wrapped(*given)
        logits, theirs = output["logits"], eager(*given)["logits"]
        assert not isinstance(logits, DeferredTensor) and isinstance(output["hidden"], DeferredTensor)
        kept = given[1].bool()
        torch.testing.assert_close(logits[kept], theirs[kept], **TOLERANCE)
        assert not logits[~kept].any() and theirs[~kept].any()
        assert found[0].batch.active
        wrapped.zero_grad()
        eager.zero_grad()
        output["loss"].backward()
        eager(*given)["loss"].backward()
        same_gradients(wrapped, eager)
    assert count.times == 1


def test_reading_after_the_step_of_an_optimizer_warns_once() -> None:
    wrapped, eager = pair()
    given = batch()
    output = wrapped(*given)
    output["loss"].backward()
    torch.optim.SGD(wrapped.parameters(), 0.5).step()
    with pytest.warns(UserWarning, match=r"was read after parameters or inputs changed.*lazy_outputs=False"):
        late = output["logits"].detach()
    eager.load_state_dict(wrapped.module.state_dict())
    torch.testing.assert_close(late, eager(*given)["logits"].detach(), **TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = wrapped(*given)
        output["loss"].backward()
        before = output["logits"].detach().clone()
        torch.optim.SGD(wrapped.parameters(), 0.5).step()
        assert torch.equal(output["logits"], before)


def test_nothing_waits_where_options_say_so(count: Count) -> None:
    wrapped, eager = pair(lazy_outputs=False)
    given = batch()
    ours, theirs = wrapped(*given), eager(*given)
    kept = given[1].bool()
    for name in ("logits", "hidden"):
        assert not isinstance(ours[name], DeferredTensor)
        torch.testing.assert_close(ours[name][kept], theirs[name][kept], **TOLERANCE)
        assert not ours[name][~kept].any()
    assert count.times == 0


@pytest.mark.parametrize("lazy", [True, False])
def test_strict_outputs_are_eager_s_everywhere(lazy: bool) -> None:
    wrapped, eager = pair(strict=True, lazy_outputs=lazy)
    for _ in range(2):
        given = batch()
        ours, theirs = wrapped(*given), eager(*given)
        for name in ("loss", "logits", "hidden"):
            torch.testing.assert_close(ours[name].detach(), theirs[name].detach(), **TOLERANCE)


def test_nothing_waits_in_evaluation_or_without_gradients(count: Count) -> None:
    wrapped, eager = pair()
    given = batch()
    wrapped(*given)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(*given)["logits"], eager(*given)["logits"], **TOLERANCE)
    wrapped.eval()
    output = wrapped(*given)
    torch.testing.assert_close(output["logits"].detach(), eager.eval()(*given)["logits"].detach(), **TOLERANCE)


def test_an_output_with_a_gradient_of_its_own_does_not_wait() -> None:
    """A module without a scalar has nothing beside which to wait."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    wrapped = ORTModule(Plain())
    assert type(wrapped(torch.randn(2, WIDTH))) is Tensor


def test_gradients_that_are_accumulated() -> None:
    wrapped, eager = pair()
    for _ in range(3):
        given = batch()
        for module in (wrapped, eager):
            module(*given)["loss"].backward()
    same_gradients(wrapped, eager)


def test_two_steps_that_are_read_in_the_other_order() -> None:
    wrapped, eager = pair()
    first, second = batch(), batch()
    a, b = wrapped(*first), wrapped(*second)
    torch.testing.assert_close(b["logits"].detach(), eager(*second)["logits"].detach(), **TOLERANCE)
    torch.testing.assert_close(a["logits"].detach(), eager(*first)["logits"].detach(), **TOLERANCE)


class Beside(nn.Module):
    """A loss, and beside it what depends on an input that is trained, and what depends on nothing that is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * self.weight).square().mean(), (x * self.weight).exp(), y * 2


def test_what_is_read_late_gives_gradients_to_inputs_and_says_whether_it_requires_one() -> None:
    eager = Beside()
    wrapped = ORTModule(copy.deepcopy(eager))
    gradients = []
    for module in (eager, wrapped):
        x = torch.full((3, 4), 0.5, dtype=torch.float64, requires_grad=True)
        loss, seen, apart = module(2 * x, torch.ones(3, dtype=torch.float64))
        assert seen.requires_grad and not apart.requires_grad
        (loss + seen.sum() + apart.sum()).backward()
        gradients.append((x.grad, module.weight.grad))
    for found, wanted in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_an_output_that_is_read_late_beside_one_that_is_not_expected() -> None:
    """The gradient of the first comes on its own, that of the second makes the forward pass run again."""

    class Several(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.einsum("bhid,bhjd->bhij", x, x), x.tensor_split(3, 2)[-1], y.square().mean()

    wrapped = ORTModule(Several())
    for _ in range(3):
        x = torch.randn(1, 3, 4, 4, requires_grad=True)
        scores, part, _ = wrapped(x, torch.randn(1, 4))
        (ours,) = torch.autograd.grad(scores.square().sum() + part.sum(), x)
        scores, part, _ = Several()(x, torch.randn(1, 4))
        (right,) = torch.autograd.grad(scores.square().sum() + part.sum(), x)
        torch.testing.assert_close(ours, right)


class Remembers(nn.Module):
    """Keeps for its next call what its loss does not need."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(4, 4), where
        self.register_buffer("buffer", torch.zeros(4))
        self.attribute: Tensor | None = None
        self.held = {"sum": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "buffer":
            before, self.buffer = self.buffer, self.layer(x).mean(0).detach()
        elif self.where == "attribute":
            before, self.attribute = self.attribute, self.layer(x).mean(0).detach()
        else:
            before, self.held["sum"] = self.held["sum"], self.layer(x).mean(0).detach()
        return (x * self.layer.bias).sum() if before is None else (x * self.layer.bias * before).sum()


@pytest.mark.parametrize("where", ["buffer", "attribute", "dict"])
def test_what_the_next_call_reads_does_not_wait(where: str) -> None:
    """It would be computed with the weights of then."""
    module = Remembers(where)
    eager = copy.deepcopy(module)
    for model in (ORTModule(module), eager):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(model(torch.randn(3, 4)))
            losses[-1].backward()
            model.get_parameter("layer.weight").grad = torch.ones(4, 4)
            optimizer.step()
        model.losses = torch.stack(losses).detach()
    torch.testing.assert_close(module.losses, eager.losses)
