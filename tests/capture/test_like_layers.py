"""Layers that are alike: four of them are traced, what is built of them is what all of them are."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxtrain import ORTModule
from onnxtrain.capture import like_layers
from tests.parity import same_step

COUNT = 8
WIDTH = 6


class Block(nn.Module):
    """A layer with a number of its own that it does not read."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Layers one after the other, between others."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(4, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def built_of_four(model: ORTModule) -> bool:
    """Whether layers of a module that has run had stand-ins."""
    return bool(model._sessions.entries[0].session.bound.report.layers)


def trained(module: nn.Module, *shapes: tuple[int, ...]) -> ORTModule:
    """A module trained for a step beside eager PyTorch at each shape."""
    model = ORTModule(module)
    for shape in shapes or ((5, 4), (3, 4), (1, 4)):
        same_step(module, model, (torch.randn(shape),))
    return model
