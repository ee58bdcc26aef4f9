"""Networks that no library has in this form: for images, for sequences, and a small one."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor, nn


@dataclasses.dataclass
class Trained:
    """What a network returns."""

    loss: Tensor


class Block(nn.Sequential):
    """Two convolutions, each with batch normalization.

    Args:
        before: channels of the input.
        after: channels of the output.
    """

    def __init__(self, before: int, after: int) -> None:
        pairs = ((before, after), (after, after))
        super().__init__(*(p for i, o in pairs for p in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())))


class UNet(nn.Module):
    """Ronneberger et al., 2015, with batch normalization and fewer channels.

    Args:
        classes: of a pixel.
        widths: channels of each level.
    """

    def __init__(self, classes: int = 5, widths: tuple[int, ...] = (16, 32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first, self.down = Block(3, widths[0]), nn.ModuleList(Block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(Block(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Trained:
        """Cross entropy of images of shape (rows, 3, height, width) with labels of shape (rows, height, width)."""
        seen = [self.first(pixel_values)]
        for down in self.down:
            seen.append(down(nn.functional.max_pool2d(seen[-1], 2)))
        x = seen.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([seen.pop(), up(x)], 1))
        return Trained(nn.functional.cross_entropy(self.last(x), labels))


class Tagger(nn.Module):
    """A class for each token, by an LSTM.

    Args:
        vocabulary: number of tokens that there are.
        classes: of a token.
        hidden: width.
        layers: of the LSTM.
        dropout: between its layers.
    """

    def __init__(self, vocabulary: int, classes: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = nn.LSTM(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.last = nn.Linear(hidden, classes)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Trained:
        """Cross entropy of tokens and labels of shape (rows, length); a label of -100 is none."""
        scores = self.last(self.layers(self.words(input_ids))[0])
        return Trained(nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Perceptron(nn.Module):
    """Layers of one width.

    Args:
        classes: of a row.
        hidden: width.
        layers: number of layers.
    """

    def __init__(self, classes: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(hidden, hidden), nn.ReLU())))
        self.last = nn.Linear(hidden, classes)

    def forward(self, features: Tensor, labels: Tensor) -> Trained:
        """Cross entropy of features of shape (rows, hidden) and labels of shape (rows)."""
        return Trained(nn.functional.cross_entropy(self.last(self.layers(features)), labels))
