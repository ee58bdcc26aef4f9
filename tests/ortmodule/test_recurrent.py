"""torch.nn.RNN, GRU and LSTM inside of a module: eager's outputs, states and gradients, at any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import captures, pair, same_step
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from onnxtrain import Options, ORTModule
from onnxtrain.execute.torch.lowerings import recurrent

BACKENDS = ("torch", "onnxruntime")
LAYERS = {
    "LSTM": torch.nn.LSTM,
    "GRU": torch.nn.GRU,
    "RNN": torch.nn.RNN,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without-bias": {"bias": False},
}


class Tagger(torch.nn.Module):
    """Tokens, a recurrent layer, one class for each token."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(11, 3), layer
        self.out = torch.nn.Linear(4 * (2 if layer.bidirectional else 1), 5)

    def forward(self, ids: torch.Tensor, state: Any = None) -> Any:
        """Scores, and the last state."""
        y, last = self.layer(self.words(ids)) if state is None else self.layer(self.words(ids), state)
        return self.out(y), last


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layer(kind: str, setting: str, backend: str) -> None:
    wrapped, eager = pair(Tagger(LAYERS[kind](3, 4, **SETTINGS[setting])), backend=backend)
    for shape in ((6, 2), (4, 3)):
        same_step(wrapped, eager, torch.randint(11, shape))
    assert captures(wrapped) == 1, "a size made a new graph"


@pytest.mark.parametrize("backend", BACKENDS)
def test_relu(backend: str) -> None:
    wrapped, eager = pair(Tagger(torch.nn.RNN(3, 4, nonlinearity="relu", bidirectional=True)), backend=backend)
    same_step(wrapped, eager, torch.randint(11, (6, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_states_get_gradients(backend: str) -> None:
    wrapped, eager = pair(Tagger(torch.nn.LSTM(3, 4, num_layers=2)), backend=backend)
    state = tuple(torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    same_step(wrapped, eager, torch.randint(11, (6, 3)), state)


def test_dropout_between_layers_is_drawn_anew() -> None:
    wrapped, eager = pair(Tagger(torch.nn.LSTM(3, 4, num_layers=2, dropout=0.5)), backend="torch")
    ids = torch.randint(11, (6, 3))
    assert not torch.equal(wrapped(ids)[0], wrapped(ids)[0])
    same_step(wrapped.eval(), eager.eval(), ids)


def test_projections_run_on_torch() -> None:
    layer = torch.nn.LSTM(3, 8, proj_size=4)
    wrapped, eager = pair(Tagger(layer), backend="torch")
    same_step(wrapped, eager, torch.randint(11, (6, 2)))


def test_training_follows_eager() -> None:
    wrapped, eager = pair(Tagger(torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)), backend="torch")
    optimizers = [torch.optim.Adam(m.parameters(), 0.05) for m in (wrapped, eager)]
    ids, labels = torch.randint(11, (6, 4)), torch.randint(5, (6, 4))
    for _ in range(3):
        losses = []
        for module, optimizer in zip((wrapped, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(ids)[0].flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Packs(torch.nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, kind: str, how: str, **settings: Any) -> None:
        super().__init__()
        self.layer, self.how = LAYERS[kind](3, 4, batch_first=True, **settings), how

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        """What the layer gives, by how it is used."""
        if self.how == "sorted":
            packed = pack_padded_sequence(x, lengths.sort(descending=True).values, batch_first=True)
        else:
            given = lengths.tolist() if self.how == "a list" else lengths.cpu()
            packed = pack_padded_sequence(x, given, batch_first=True, enforce_sorted=False)
        y, last = self.layer(packed)
        if self.how == "data":
            return y.data.sin(), y.batch_sizes, last
        if self.how == "replaced":
            y = PackedSequence(torch.tanh(y.data), y.batch_sizes, y.sorted_indices, y.unsorted_indices)
        settings = {"a value": {"padding_value": -1.0}, "in full": {"total_length": x.shape[1], "batch_first": True}}
        return *pad_packed_sequence(y, **settings.get(self.how, {"batch_first": True})), last


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "how", "settings"),
    [
        ("LSTM", "plain", {"bidirectional": True}),
        ("GRU", "sorted", {"num_layers": 2, "bidirectional": True}),
        ("RNN", "in full", {}),
        ("LSTM", "a value", {"bias": False}),
        ("GRU", "a list", {}),
        ("LSTM", "data", {}),
        ("GRU", "replaced", {}),
    ],
)
def test_packed_sequences(kind: str, how: str, settings: dict[str, Any], backend: str) -> None:
    wrapped, eager = pair(Packs(kind, how, **settings), backend=backend)
    for steps, lengths in ((4, [3, 4]), (5, [1, 5, 2]), (3, [2]), (6, [2, 2, 2, 2]), (5, [4, 5, 2]), (7, [7, 1])):
        x = torch.randn(len(lengths), steps, 3, requires_grad=True)
        same_step(wrapped, eager, x, torch.tensor(lengths))
    assert captures(wrapped) <= 5


class Given(torch.nn.Module):
    """A layer that is given a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(3, 4)

    def forward(self, sequences: PackedSequence) -> Any:
        return self.layer(sequences)


@pytest.mark.parametrize("module", [Given(), torch.nn.GRU(3, 4)], ids=["within", "alone"])
def test_packed_sequences_as_inputs(module: torch.nn.Module) -> None:
    wrapped, eager = pair(module)
    for lengths in ([3, 2], [4, 4, 1], [2, 1]):
        given = pack_sequence([torch.randn(n, 3) for n in lengths])
        same_step(wrapped, eager, given, loss=lambda output: output[0].data.square().sum())


def test_lengths_in_another_order_raise_as_in_eager() -> None:
    class Trusting(Packs):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            return self.layer(pack_padded_sequence(x, lengths, batch_first=True))[0].data

    wrapped, _ = pair(Trusting("GRU", ""))
    x = torch.randn(2, 4, 3)
    wrapped(x, torch.tensor([4, 2]))
    with pytest.raises(RuntimeError, match="sorted"):
        wrapped(x, torch.tensor([2, 4]))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sequence_without_elements_keeps_its_state(kind: str) -> None:
    """As the nodes do that ONNX writes out, in graphs that are no module's."""
    from onnxtrain.execute.torch.lowerings import recurrent

    torch.manual_seed(0)
    width = 4 * {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    x, w, r, h = torch.randn(3, 2, 5), torch.randn(1, width, 5), torch.randn(1, width, 4), torch.randn(1, 2, 4)
    chosen = recurrent.setting(kind, {"hidden_size": 4, **({"linear_before_reset": 1} if kind == "GRU" else {})})
    y, last, *_ = recurrent._run(chosen, [x, w, r, None, torch.tensor([2, 0]), h, None, None], training=False)
    torch.testing.assert_close(last[:, 1], h[:, 1])
    assert not y[:, :, 1].any() and not y[2].any() and y[:2, :, 0].all()


class Stacked(torch.nn.Module):
    """Layers whose results are changed by what may be computed in place."""

    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.second = kind(4, 8, 2), kind(8, 8, bidirectional=True)
        self.out = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.first(x)[0] * 2).relu()
        return self.out(self.second(y)[0].tanh() + 1).square().mean()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that ran."""
    seen, run = list[str](), recurrent._run

    def counted(chosen: Any, inputs: Sequence[torch.Tensor | None], training: bool) -> tuple[torch.Tensor, ...]:
        seen.append(chosen.kind)
        return run(chosen, inputs, training)

    monkeypatch.setattr(recurrent, "_run", counted)
    return seen


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_each_layer_runs_once(kind: type[torch.nn.RNNBase], runs: list[str]) -> None:
    wrapped, eager = pair(Stacked(kind))
    for length in (5, 3, 1):
        runs.clear()
        same_step(wrapped, eager, torch.randn(length, 2, 4, requires_grad=True))
        assert runs == [kind.__name__] * 3
    runs.clear()
    with torch.no_grad():
        wrapped(torch.randn(5, 2, 4))
    assert runs == [kind.__name__] * 3


def test_within_a_budget_they_run_again(runs: list[str]) -> None:
    """What they keep is memory that no plan tells."""
    wrapped = ORTModule(Stacked(torch.nn.LSTM), options=Options(memory_budget=0.9))
    wrapped(torch.randn(5, 2, 4)).backward()  # planned in it, too
    runs.clear()
    wrapped(torch.randn(5, 2, 4)).backward()
    assert len(runs) == 6


def test_backward_twice() -> None:
    wrapped, eager = pair(Stacked(torch.nn.LSTM))
    x = torch.randn(5, 2, 4)
    for model in (wrapped, eager):
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close([p.grad for p in wrapped.parameters()], [p.grad for p in eager.parameters()])
