"""torch.nn.RNN, GRU and LSTM inside of a module: eager's outputs, states and gradients, at any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import captures, pair, same_step

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
