"""Random transformers in which rows can be left out: padding, tokens without a label, tokens that no one reads."""

from __future__ import annotations

import numpy as np

from fuzz.modules.program import Argument, Program, indented
from fuzz.modules.vocabulary import transformers as parts

SIZES = ((3, 7), (2, 9), (4, 6), (5, 8), (2, 12), (4, 9))
SMALL = ((1, 6), (1, 2), (1, 1), (2, 1), (4, 1), (1, 9))
_LAYER = (
    "self.layers = nn.ModuleList(\n"
    "    nn.ModuleDict(\n"
    "        dict(three=nn.Linear(8, 24), out=nn.Linear(8, 8), wide=nn.Linear(8, 12), narrow=nn.Linear(12, 8),\n"
    "             gate=nn.Linear(8, 2), first=nn.LayerNorm(8), second={norm})\n"
    "    )\n"
    "    for _ in range({layers})\n"
    ")"
)


class _Writer:
    """Collects parts: lines of ``forward`` and of ``__init__``."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.body: list[str] = []
        self.initial: list[str] = ["self.words = nn.Embedding(20, 8)"]

    def take(self, table: tuple[parts.Part, ...], first: int = 0) -> str:
        """The lines of one of the parts; the first few are three times as likely as the others."""
        weights = np.array([3.0] * first + [1.0] * (len(table) - first))
        text, *initial = table[int(self.rng.choice(len(table), p=weights / weights.sum()))]
        self.initial += [line for line in initial if line not in self.initial]
        return text

    def add(self, *texts: str) -> None:
        """Statements of ``forward``."""
        self.body += texts


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng([seed, 31])
    writer = _Writer(rng)
    writer.add(writer.take(parts.PLACES, 3), writer.take(parts.SEEN, 3))
    _layers(writer)
    if rng.random() < 0.12:
        writer.add(writer.take(parts.CROSSED))
    if rng.random() < 0.6:
        writer.add(writer.take(parts.LOGITS), writer.take(parts.TOKEN_LOSSES, 5))
    else:
        writer.add(writer.take(parts.POOLED, 5), writer.take(parts.POOLED_LOSSES))
    returns = parts.RETURNS[int(rng.integers(len(parts.RETURNS)))]
    moves = ", moves=True" if rng.random() < 0.3 else ""
    settings = f"loss='first'{moves}, density_threshold=0.99, strict=True"
    initial, body = tuple(writer.initial), tuple(writer.body)
    training = bool(rng.random() < 0.9)
    return Program(
        seed, _arguments(), initial, body, returns, _sizes(rng), "float64", training, settings, _prepared(rng)
    )


def _layers(writer: _Writer) -> None:
    """One to three layers as a loop over modules, and at times what mixes rows before or after them."""
    rng = writer.rng
    if rng.random() < 0.1:
        writer.add(writer.take(parts.MIXING))
    if rng.random() < 0.12:
        writer.add(writer.take(parts.WHOLE))
    else:
        lines = [
            writer.take(parts.HEADS, 2),
            *_attention(writer),
            writer.take(parts.TOGETHER),
            writer.take(parts.FORWARD),
        ]
        if rng.random() < 0.08:
            lines.append(writer.take(parts.MIXING))
        norm = str(rng.choice(["nn.LayerNorm(8)", "nn.RMSNorm(8)", "nn.Identity()"]))
        writer.initial.append(_LAYER.format(norm=norm, layers=int(rng.integers(1, 4))))
        writer.add("for layer in self.layers:\n" + indented(lines, 4))
    if rng.random() < 0.15:
        writer.add(writer.take(parts.MIXING))


def _attention(writer: _Writer) -> list[str]:
    if writer.rng.random() < 0.35:
        return [writer.take(parts.KERNELS, 2)]
    return [writer.take(parts.SCORES, 3), writer.take(parts.HIDDEN, 6), "mixed = weights @ v"]


def _prepared(rng: np.random.Generator) -> tuple[str, ...]:
    """Ids, a mask and labels that belong together."""
    style = str(rng.choice(list(parts.LENGTHS), p=[0.45, 0.15, 0.2, 0.12, 0.08]))
    share = float(rng.choice([0.0, 0.3, 0.8]))
    return (
        parts.LENGTHS[style],
        "ids = torch.randint(1, 20, (B, L)) * mask" if rng.random() < 0.6 else "ids = torch.randint(0, 20, (B, L))",
        f"labels = torch.randint(0, 20, (B, L)).masked_fill((mask == 0) | (torch.rand(B, L) < {share}), -100)",
        "labels[-1, mask[-1].argmax()] = 1",
    )


def _arguments() -> tuple[Argument, ...]:
    return (Argument("ids", "ids"), Argument("mask", "mask"), Argument("labels", "labels"))


def _sizes(rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    two = [SIZES[int(i)] for i in rng.choice(len(SIZES), 2, replace=False)]
    made = [*two, SMALL[int(rng.integers(len(SMALL)))]]
    return tuple(made[int(i)] for i in rng.permutation(3))
