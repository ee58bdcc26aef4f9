"""Modules whose Python code looks into tensors: each way through is a path, a graph of its own; numbers are eager's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import Applied, captures, pair, same_step
from scipy.optimize import linear_sum_assignment

from onnxtrain import ORTModule, check, verify
from onnxtrain.engine.path_check import PathCheck

GENERATOR = torch.Generator().manual_seed(0)


def doubles(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=GENERATOR)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    GENERATOR.manual_seed(1)


class Base(torch.nn.Module):
    """One layer in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).double()


class IfAny(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 3).any():
            x = x.clamp(max=3)
        y = self.linear(x)
        if y.sum() > 0:
            return y.tanh()
        return y * 2


class WhileLoop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        while y.abs().max() > 1:
            y = y / 2
        return y


class CutToLongest(Base):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, : int(lengths.max())]).mean(1)


class CutByTensor(Base):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, : lengths.max()]).mean(1)


class ScaledByItem(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean().item() + 1.0
        return self.linear(x) / scale


class CountBranch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        if chosen.size(0) > 0:
            return self.linear(x[chosen]).sum()
        return self.linear(x).square().sum()


class ChosenMeetsAll(Base):
    """A single row that is chosen is broadcast to all; else all are chosen."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = self.linear(x[chosen])
        again = (made + x).mean() * made.clone()
        again[:, 0] = 0
        return again.sum(0) / again.shape[0] + again.cumsum(0).amax(0)


class ChosenSqueezed(Base):
    """A single row that is chosen is a vector."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = self.linear(x[chosen])
        return made.squeeze() @ made[-1] + made.squeeze(0).sum(-1) + made[None].squeeze((0, 1)).mean()


class CatchesSizes(Base):
    """What is caught depends on how many rows are chosen."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = self.linear(x[chosen])
        try:
            made = made + made.new_ones(3, 1)
        except RuntimeError:
            made = made * 2
        try:
            return made.view(-1, 2, 1, made.shape[1]).sum(1)
        except RuntimeError:
            return made.detach() * 0 + made.sum()


class ListLoop(Base):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row[:n]).mean(0) for row, n in zip(x, lengths.tolist(), strict=True)])


class Checks(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 4:
            raise ValueError("no such label")
        return F.cross_entropy(self.linear(x), labels)


class SizeOfBatch(Base):
    def forward(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(int(batch.max()) + 1, x.shape[1])
        return self.linear(made.index_add(0, batch, x))


class MoreThanOneNumber(Base):
    """No tensor has the number that was read as its size."""

    def forward(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(2 * int(batch.max()) + 3, 4) + self.linear(x).mean(0)
        return made.cumsum(0).gather(0, made.argsort(0)) + made.new_ones(int(batch.max()) + 1).sum()


class Compares(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.equal(x, y):
            return self.linear(x)
        return self.linear(x) - self.linear(y) if torch.allclose(x, y, atol=0.1) else self.linear(x * y)


LENGTHS = [torch.tensor(n) for n in ([2, 3], [5, 1], [3, 3], [4, 2], [5, 5])]
X = [doubles(2, 5, 4) for _ in LENGTHS]
A = doubles(3, 4)
CASES: dict[type[Base], Sequence[tuple[Any, ...]]] = {
    IfAny: [(s * doubles(3, 4) + o,) for s, o in ((1, 0), (9, 0), (1, 3), (1, -3), (1, 0), (1, 8))],
    WhileLoop: [(doubles(n, 4) * s,) for n, s in ((2, 0.1), (3, 1), (4, 4), (2, 30), (5, 0.1), (2, 1))],
    CutToLongest: list(zip(X, LENGTHS, strict=True)),
    CutByTensor: list(zip(X, LENGTHS, strict=True)),
    ScaledByItem: [(doubles(n, 4),) for n in (2, 3, 4, 2, 1)],
    CountBranch: [(doubles(n, 4).abs() * s,) for n, s in ((3, 1), (4, -1), (2, 1), (3, -1), (5, 1))],
    ChosenMeetsAll: [(doubles(n, 4), torch.arange(n) < k) for n, k in ((2, 2), (3, 1), (3, 3), (5, 1), (2, 1))],
    ChosenSqueezed: [(doubles(n, 4), torch.arange(n) < k) for n, k in ((2, 2), (3, 1), (3, 3), (5, 1), (2, 1))],
    CatchesSizes: [(doubles(5, 4), torch.arange(5) < k) for k in (2, 1, 3, 4, 5, 2)],
    ListLoop: list(zip(X[:3], LENGTHS[:3], strict=True)),
    Checks: [(doubles(4, 4), torch.tensor(labels)) for labels in ([0, 1, 2, 3], [1, 1, 1, 1])],
    SizeOfBatch: [(doubles(5, 4), torch.tensor(b)) for b in ([0, 0, 1, 2, 2], [0, 1, 1, 3, 4], [0, 0, 0, 0, 1])],
    MoreThanOneNumber: [(doubles(3, 4), torch.tensor([n])) for n in (3, 5, 0)],
    Compares: [(A, A), (A, A + 0.01), (A, A + 1), (A, A.clone())],
}


GRAPHS = {
    **dict.fromkeys((IfAny, Compares), 3),
    **dict.fromkeys((CutToLongest, CountBranch, ChosenMeetsAll, ChosenSqueezed, SizeOfBatch), 2),
    MoreThanOneNumber: 2,
    **dict.fromkeys((CutByTensor, ScaledByItem, ListLoop, Checks), 1),
    WhileLoop: 3,
    CatchesSizes: 4,
}


def sessions(wrapped: ORTModule) -> Any:
    return wrapped.__dict__["_ort_sessions"]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_steps_are_eagers_whichever_way_they_go(kind: type[Base]) -> None:
    wrapped, eager = pair(kind())
    for given in [*CASES[kind], *CASES[kind]]:
        same_step(wrapped, eager, *(x.clone().requires_grad_() if x.is_floating_point() else x for x in given))
    assert captures(wrapped) == GRAPHS[kind] and sessions(wrapped).eager == 0


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_inference_is_eagers_whichever_way_it_goes(kind: type[Base]) -> None:
    wrapped, eager = pair(kind().eval())
    with torch.no_grad():
        for given in CASES[kind]:
            same_step(wrapped, eager, *given)
    assert sessions(wrapped).eager == 0


class Stateful(Base):
    """Draws random numbers and moves running statistics before and after it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.extra = torch.nn.BatchNorm1d(4).double(), None
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y = F.dropout(self.norm(self.linear(x)), 0.3, training=self.training)
        self.extra = y.square().mean()
        if self.mean.max() > 0.2:
            y = y * F.dropout(x, 0.5, training=self.training)
        return y.sum(1)


def test_a_missed_path_leaves_nothing() -> None:
    wrapped, eager = pair(Stateful(), compute_optimizer=False)
    for step, offset in enumerate((0, 9, 0, -9, -9, 9, 9, 9, 0)):
        x = doubles(6, 4) + offset
        random = []
        for module in (wrapped, eager):
            torch.manual_seed(step)
            module.zero_grad()
            y = module(x)
            (y.square().mean() + module.extra).backward()
            gradients, buffers = [p.grad for p in module.parameters()], dict(module.named_buffers())
            random.append((y, torch.rand(1), module.extra, gradients, buffers))
        torch.testing.assert_close(*random)
    assert captures(wrapped) == 3 and sessions(wrapped).eager == 0, "one before there was an extra loss"


def test_gradients_of_several_paths_add_up() -> None:
    wrapped, eager = pair(IfAny())
    for module in (wrapped, eager):
        torch.stack([module(*given).square().sum() for given in CASES[IfAny]]).sum().backward()
    for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_paths_under_autocast() -> None:
    wrapped, eager = pair(IfAny().float())
    for scale in (1, 9, 1):
        x = scale * torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = wrapped(x), eager(x)
        torch.testing.assert_close(ours, theirs)


def test_what_inputs_tell_is_known_before_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ORTModule(CutByLabels())
    positive, negative = torch.tensor([1, 2, 3]), torch.tensor([-1, -1, -1])
    for labels in (positive, negative):
        wrapped(doubles(3, 4), labels)
    finished = []
    after = PathCheck.after
    monkeypatch.setattr(PathCheck, "after", lambda self, *given: (finished.append(self), after(self, *given)))
    for labels in (positive, negative, positive):
        wrapped(doubles(3, 4), labels)
    assert len(finished) == 3, "no forward pass ran in vain"


class CutByLabels(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if (labels >= 0).any():
            return self.linear(x).sum()
        return self.linear(x).tanh().sum()


class EachAnother(Base):
    """Looks at what is never the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort().tolist()  # looks
        return self.linear(F.dropout(x, 0.2)[order])


def test_from_eight_paths_on_eager_steps_serve_the_others(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, eager = pair(EachAnother(), compute_optimizer=False)
    torch.manual_seed(0)
    batches = [doubles(6, 4) for _ in range(12)]
    for step, x in enumerate([*batches, *batches[:3]]):
        outputs = []
        for module in (wrapped, eager):
            torch.manual_seed(step)
            outputs.append(module(x))
        torch.testing.assert_close(*outputs)
        outputs[0].sum().backward()
    assert captures(wrapped) == 8 and sessions(wrapped).eager == 4
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "paths" in r.getMessage()]
    lines, first = inspect.getsourcelines(EachAnother.forward)
    line = first + next(i for i, text in enumerate(lines) if "# looks" in text)
    assert f"test_paths.py:{line}, which saw 8 different" in told and "cure: keep it a tensor" in told
    assert "4 calls in eager PyTorch" in wrapped.explain()


def test_calls_that_are_never_on_a_known_path_are_rarely_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ORTModule(EachAnother())
    for _ in range(16):
        wrapped(doubles(6, 4))
    tried = []
    before = PathCheck.before
    monkeypatch.setattr(PathCheck, "before", lambda self, *given: (tried.append(self), before(self, *given)))
    for _ in range(16):
        wrapped(doubles(6, 4))
    assert 0 < len(tried) <= 2 * 8, "two of sixteen calls, each on eight paths at most"


def test_what_the_forward_pass_raises_is_eagers() -> None:
    wrapped, eager = pair(Checks())
    x, labels = doubles(4, 4), torch.tensor([0, 1, 2, 3])
    same_step(wrapped, eager, x, labels)
    with pytest.raises(ValueError, match="no such label"):
        wrapped(x, labels + 1)
    same_step(wrapped, eager, x, labels)
    with pytest.raises(ValueError, match="no such label"):
        ORTModule(Checks())(x, labels + 1)


def test_paths_are_explained() -> None:
    wrapped = ORTModule(CountBranch())
    for given in CASES[CountBranch]:
        wrapped(*given)
    lines, first = inspect.getsourcelines(CountBranch.forward)
    place = f"test_paths.py:{first + next(i for i, text in enumerate(lines) if 'nonzero' in text)}"
    assert f"{place} reads n, and 0 < n" in wrapped.explain() and f"{place} reads n, and n <= 0" in wrapped.explain()
    wrapped = ORTModule(WhileLoop())
    wrapped(torch.full((2, 4), 50.0, dtype=torch.float64))
    assert "saw True, " in wrapped.explain() and " times" in wrapped.explain()


class Matched(Base):
    """Pairs what it gives with targets outside of torch, as detectors do."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        rows, columns = linear_sum_assignment(torch.cdist(y, targets).detach().numpy())
        return (y[rows] - targets[columns]).abs()


def test_pairs_found_outside_of_torch() -> None:
    wrapped, eager = pair(Matched())
    for rows in (5, 4, 5):
        x, targets = doubles(rows, 4), doubles(3, 4)
        losses = [module(x, targets).mean() for module in (wrapped, eager)]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=1e-9, atol=1e-12)


class OneElement(Base):
    """Looks at tensors that hold one number, in one dimension or more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if torch.rand(1) < 0.5:  # a layer that is left out at times
            y = y.tanh()
        if y.mean().reshape(1, 1) > 0:
            y = y * 2
        first = int(y[0, :1].abs().mul(3))
        kinds = torch.nn.functional.one_hot(y.argmax(1))
        return y * float(y.detach().mean().reshape(1)) + first + y.detach().sum().reshape(1).item() + kinds.shape[1]


def test_tensors_of_one_element() -> None:
    wrapped, eager = pair(OneElement())
    for step in range(12):
        x, losses = doubles(3 + step % 2, 4), []
        for module in (wrapped, eager):
            torch.manual_seed(step)
            losses.append(module(x).square().mean())
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad, rtol=1e-9, atol=1e-12)


class Everything(Base):
    """Other ways to look."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if float(n) > 2.5 or 7 in n:
            y = y + 1
        if max(0.0, float(x.mean())) > 0:
            y = y * 2
        for _ in range(n):
            y = y.tanh()
        weights = [1.0, 2.0, 3.0, 4.0, 5.0]
        y = y * weights[n] + torch.arange(n, dtype=x.dtype).sum() + torch.from_numpy(n.numpy().astype("float64"))
        return torch.cat([y, y.new_ones(n, 4)])


def test_all_ways_to_look() -> None:
    wrapped, eager = pair(Everything())
    for n in (1, 3, 1, 2, 3):
        same_step(wrapped, eager, doubles(3, 4).abs() * (-1) ** n, torch.tensor(n))
    assert captures(wrapped) == 3 and sessions(wrapped).eager == 0


def _written_at(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x.argmax()] += 0.5
    y[x.argmin()] = 2
    return y


def _written_where_true(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x.max() > 1] = x.mean()
    return y


def _written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    row = y[x.argmax()]
    row.mul_(2)
    return y


PLACES = {
    "written": _written_at,
    "written where it is true": _written_where_true,
    "written through a view": _written_through_a_view,
    "all or nothing": lambda x: x[x.max() > 1].sum() + x,
    "read": lambda x: x[x.argmax()] * x,
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_one_number_says(name: str) -> None:
    """Torch reads the number itself."""

    wrapped, eager = pair(Applied(PLACES[name]))
    for length in (5, 5, 3, 8):
        same_step(wrapped, eager, torch.randn(length))


def test_checked_and_verified_as_others() -> None:
    x = doubles(3, 4)
    assert check(IfAny(), x), str(check(IfAny(), x))
    assert verify(IfAny(), x).worst.passed


SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "num_labels": 3,
}


@pytest.mark.parametrize("name", ["DebertaV2", "IBert"])
def test_libraries_that_look_train_as_in_eager(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    configuration = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}ForSequenceClassification")(configuration).double()
    wrapped, eager = pair(model, compute_optimizer=False)
    for step, labels in enumerate(([0, 1, 2], [1, 2], [2, 0, 0, 1])):
        batch = {"input_ids": torch.randint(2, 50, (len(labels), 7 + step)), "labels": torch.tensor(labels)}
        losses = []
        for module in (wrapped, eager):
            torch.manual_seed(step)
            module.zero_grad()
            losses.append(module(**batch).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for (path, ours), theirs in zip(wrapped.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=path)  # a loss in float32
    assert sessions(wrapped).eager == 0


class EachElement(Base):
    """Looks at each element of a batch, and makes a tensor of what it sees."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        levels = [[1.0] * label + [0.0] * (4 - label) for label in (int(i) for i in labels)]
        return F.binary_cross_entropy_with_logits(self.linear(x), x.new_tensor(levels))


def test_a_batch_of_one_is_looked_at_as_often_as_it_has_elements() -> None:
    wrapped, module = pair(EachElement(), summary=False)
    for labels in ([2], [0], [2], [1, 3], [3, 1]):
        same_step(wrapped, module, doubles(len(labels), 4), torch.tensor(labels))
    assert "in eager PyTorch" not in wrapped.explain()


def test_numbers_in_tensors_as_texts() -> None:
    def told(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x, f"{x.mean():.3f} {(x > 0).sum():3d} {(x > 0).any()}"

    wrapped, eager = pair(Applied(told))
    for x in (doubles(3), doubles(3), doubles(4)):
        assert wrapped(x)[1] == eager(x)[1]


def test_a_check_of_a_library_is_no_look() -> None:
    """Transformers asks ``torch._check`` on one line in eager PyTorch, and on another while a module is traced."""
    checked = pytest.importorskip("transformers.utils").torch_compilable_check

    def within(x: torch.Tensor) -> torch.Tensor:
        checked((x.abs() < 1e6).all(), "too large")
        return x * 2 if x.sum() > 0 else x.tanh()

    wrapped, eager = pair(Applied(within))
    for sign in (1, -1, 1):
        same_step(wrapped, eager, sign * doubles(3).abs())
    assert captures(wrapped) == 2 and "import_utils" not in wrapped.explain()
