"""Random stacks of layers that are alike or nearly so: what they keep, read of themselves, and hand to each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuzz.modules.program import Argument, Program, indented
from fuzz.modules.vocabulary import stacks as parts

SIZES = ((4, 3), (2, 5), (3, 4), (2, 2), (5, 3), (3, 7))
SMALL = ((1, 3), (1, 1), (4, 1), (1, 2))


class _Writer:
    """Fills parts with the numbers of one stack."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.count = int(rng.choice([6, 7, 8, 9, 11]))

    def take(self, table: Sequence[str], **further: str) -> str:
        """One of some parts."""
        return self.filled(str(table[int(self.rng.integers(len(table)))]), **further)

    def filled(self, text: str, **further: str) -> str:
        """A part with its numbers."""
        j, k = int(self.rng.integers(self.count)), int(self.rng.integers(8))
        return text.format(j=j, k=k, n=self.count, **further)

    def has(self, share: float) -> bool:
        """True as often as that."""
        return bool(self.rng.random() < share)


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng([seed, 35])
    writer = _Writer(rng)
    keeper = _keeper(writer) if writer.has(0.6) else ""
    is_pair = writer.has(0.25)
    given = "torch.randn(B, L, 3, dtype=REAL)" + (".requires_grad_()" if writer.has(0.7) else "")
    settings = f"loss={str(rng.choice(['weighted', 'first', 'some', 'last']))!r}" + ", moves=True" * writer.has(0.3)
    definitions = ("TOTAL = []\n", *([parts.KEEPER + keeper] if keeper else []), _layer(writer, bool(keeper), is_pair))
    initial, body = _initial(writer), _body(writer, bool(keeper), is_pair)
    returns = _returns(writer, bool(keeper))
    if writer.has(0.3):
        made, beside = _tower(writer, bool(keeper), is_pair)
        initial, body = (*initial, made), (*body[:1], "z = x", *body[1:], *beside)
    return Program(
        seed, (Argument("x", given),), initial, body, returns, _sizes(rng), "float64", writer.has(0.8), settings,
        definitions=definitions,
    )  # fmt: skip


def _keeper(writer: _Writer) -> str:
    kind = str(writer.rng.choice(list(parts.KEEPERS)))
    lines = writer.filled(parts.KEEPERS[kind].replace("{}", "{{}}"))
    return "\n    def update(self, k, v, layer_idx):\n" + indented([lines]) + "\n"


def _layer(writer: _Writer, has_keeper: bool, is_pair: bool) -> str:
    """The class of the layers."""
    lines = [writer.take(parts.KEYS), writer.take(parts.VALUES)]
    if has_keeper:
        lines.append(writer.take(parts.HANDED))
    lines += [writer.take(parts.THEN) for _ in range(int(writer.rng.integers(0, 4)))]
    if writer.has(0.15):
        lines.append(writer.take(parts.NUMBERS))
    if has_keeper and writer.has(0.12):
        lines.append(writer.take(parts.LOOKS))
    result = writer.take(parts.RESULTS)
    lines += [f"y = {result}", "return y, v" if is_pair else "return y"]
    head = writer.filled(
        parts.LAYER,
        scale="i / 10" if writer.has(0.15) else "0.5",
        rate="0.1 * i" if writer.has(0.5) else "0.1",
        buffer="i / 7" if writer.has(0.3) else "0.3",
    )
    return f"{head}{indented(lines)}\n\n\n{parts.OTHER}"


def _initial(writer: _Writer) -> tuple[str, ...]:
    held = parts.HELD[:1] if writer.has(0.6) else parts.HELD
    number = str(writer.rng.choice(["i", "i", "i", f"{writer.count} - i", "i * 2", "0"]))
    return (
        "self.first, self.last, self.shared = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 4)",
        f"self.n = {writer.count}",
        "self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2 * self.n))",
        writer.take(held, number=number),
    )


def _body(writer: _Writer, has_keeper: bool, is_pair: bool) -> tuple[str, ...]:
    order = writer.take(parts.ORDERS) if writer.has(0.3) else "self.layers"
    calls = parts.CALLS if not has_keeper else [c for c in parts.CALLS if "checkpoint" not in c]  # which calls twice
    call = writer.take(calls) if writer.has(0.3) else calls[0]
    lines = [f"x, e = {call}" if is_pair else f"x = {call}"]
    if writer.has(0.35):
        lines.insert(int(writer.rng.integers(2)), writer.take(parts.LOOPS))
    return (
        "x = self.first(x)",
        f"c = {'Keeper()' if has_keeper else None}",
        "m, s, first, seen, e = torch.ones_like(x), x.mean(), None, [], x",
        f"for j, layer in enumerate({order}):\n{indented(lines, 4)}",
    )


def _tower(writer: _Writer, has_keeper: bool, is_pair: bool) -> tuple[str, tuple[str, ...]]:
    """Further layers beside the others: what holds them, and the lines that call them and join both results."""
    keeper = "Keeper()" if has_keeper else "None"
    call = f"{'z, e' if is_pair else 'z'} = layer(z, d, m, s)"
    lines = (f"d = {keeper}", f"for layer in self.tower:\n    {call}", writer.take(parts.JOINS))
    return f"self.tower = nn.ModuleList(Layer(i) for i in range({int(writer.rng.integers(5, 9))}))", lines


def _returns(writer: _Writer, has_keeper: bool) -> str:
    made = ["self.last(x)", *(writer.take(parts.FURTHER) for _ in range(int(writer.rng.integers(0, 3))))]
    if has_keeper:
        made += [writer.take(parts.OF_KEEPERS) for _ in range(int(writer.rng.integers(0, 3)))]
    return f"({', '.join(made)},)"


def _sizes(rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    two = [SIZES[int(i)] for i in rng.choice(len(SIZES), 2, replace=False)]
    made = [*two, SMALL[int(rng.integers(len(SMALL)))]]
    return tuple(made[int(i)] for i in rng.permutation(3))
