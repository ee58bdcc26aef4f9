"""Models that people train on devices: exported to ONNX, with batches and the loss that torch takes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType

VOCABULARY, CLASSES = 120, 4


@dataclasses.dataclass
class Entry:
    """One model of the zoo.

    Args:
        module: makes the torch module.
        batch: makes the arrays of a batch from random numbers: inputs of the module, then labels.
        loss: torch's loss of the module's output and the labels.
        artifact_loss: the same for ``generate_artifacts``.
        dynamic: name of each dynamic axis of each input.
        scripted: exported by TorchScript, which keeps an LSTM as one operator where torch.export unrolls it.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], list[np.ndarray]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    artifact_loss: Any
    dynamic: list[dict[int, str]]
    scripted: bool = False


class Cnn(nn.Module):
    """Convolutions with batch normalization and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16 * 2 * 2, CLASSES)

    def forward(self, x):
        return self.head(self.dropout(self.features(x).flatten(1)))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = before * 4
        self.residual = before == after and stride == 1
        self.layers = nn.Sequential(
            nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNet(nn.Module):
    """A small MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(InvertedResidual(8, 8, 1), InvertedResidual(8, 16, 2), InvertedResidual(16, 16, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Tagger(nn.Module):
    """A bidirectional LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


class Layer(nn.Module):
    """A transformer layer, normalized before or after."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x, mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        x = self.first(x + self.attend(x, mask))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """A small BERT classifier: embeddings, a padding mask, the first token's state to classes."""

    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = VOCABULARY, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=False) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, ids, mask):
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        keep = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, keep)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class Gpt(nn.Module):
    """A small GPT whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer(32, 4, causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def _images(channels: int, size: int) -> Callable[[np.random.Generator], list[np.ndarray]]:
    def batch(random: np.random.Generator) -> list[np.ndarray]:
        n = int(random.integers(6, 12))
        x = random.standard_normal((n, channels, size, size), np.float32)
        return [x, random.integers(0, CLASSES, n)]

    return batch


def _rows(random: np.random.Generator) -> list[np.ndarray]:
    n = int(random.integers(8, 20))
    return [random.standard_normal((n, 10), np.float32), random.integers(0, CLASSES, n)]


def _ids(random: np.random.Generator) -> np.ndarray:
    return random.integers(0, VOCABULARY, (int(random.integers(3, 6)), int(random.integers(5, 12))))


def _tags(random: np.random.Generator) -> list[np.ndarray]:
    ids = _ids(random)
    labels = random.integers(0, CLASSES, ids.shape)
    labels[:, -1] = -100
    return [ids, labels]


def _sentences(random: np.random.Generator) -> list[np.ndarray]:
    ids = _ids(random)
    mask = (np.arange(ids.shape[1]) < random.integers(2, ids.shape[1] + 1, (len(ids), 1))).astype(np.int64)
    return [ids, mask, random.integers(0, CLASSES, len(ids))]


def _language(random: np.random.Generator) -> list[np.ndarray]:
    ids = _ids(random)
    return [ids, np.concatenate([ids[:, 1:], np.full((len(ids), 1), -100)], 1)]


def _per_token(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100)


_PER_TOKEN = onnxblock.loss.CrossEntropyLoss(ignore_index=-100, axis=-1)
_BATCH, _TEXT = {0: "batch"}, {0: "batch", 1: "length"}

ZOO = {
    "mlp": Entry(_mlp, _rows, F.cross_entropy, LossType.CrossEntropyLoss, [_BATCH]),
    "cnn": Entry(Cnn, _images(1, 8), F.cross_entropy, LossType.CrossEntropyLoss, [_BATCH]),
    "mobilenet": Entry(MobileNet, _images(3, 16), F.cross_entropy, LossType.CrossEntropyLoss, [_BATCH]),
    "lstm_tagger": Entry(Tagger, _tags, _per_token, _PER_TOKEN, [_TEXT], scripted=True),
    "bert": Entry(Bert, _sentences, F.cross_entropy, LossType.CrossEntropyLoss, [_TEXT, _TEXT]),
    "gpt": Entry(Gpt, _language, _per_token, _PER_TOKEN, [_TEXT]),
}


def export(module: nn.Module, inputs: list[np.ndarray], dynamic: list[dict[int, str]]) -> onnx.ModelProto:
    """The module as torch.onnx exports it, weights under their own names."""
    with _quiet():
        given = {"dynamo": True, "optimize": False, "verbose": False, "dynamic_shapes": tuple(dynamic)}
        return torch.onnx.export(module, tuple(map(torch.from_numpy, inputs)), **given).model_proto


def export_scripted(module: nn.Module, inputs: list[np.ndarray], dynamic: list[dict[int, str]]) -> onnx.ModelProto:
    """The module as TorchScript exports it for training."""
    names = [f"input_{i}" for i in range(len(inputs))]
    file = io.BytesIO()
    with _quiet():
        torch.onnx.export(
            module,
            tuple(map(torch.from_numpy, inputs)),
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=17,
            input_names=names,
            dynamic_axes=dict(zip(names, dynamic, strict=True)),
        )
    return onnx.load_model_from_string(file.getvalue())


@contextlib.contextmanager
def _quiet():
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def save(module: nn.Module, entry: Entry, folder: Path) -> Path:
    """Export one of the zoo to a file."""
    inputs = entry.batch(np.random.default_rng(0))[:-1]
    path = folder / "model.onnx"
    made = (export_scripted if entry.scripted else export)(module, inputs, entry.dynamic)
    onnx.save(made, path)
    return path
