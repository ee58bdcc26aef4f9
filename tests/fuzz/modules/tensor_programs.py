"""Random tensor programs over everything people write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.modules.manners import dressed
from fuzz.modules.program import Argument, Program
from fuzz.modules.scenes import Scenes, Unusable
from fuzz.modules.templates import Filler
from fuzz.modules.vocabulary import FAMILIES
from fuzz.modules.vocabulary.inputs import FIRST, INTEGERS, MASKS, NUMBERS, OPTIONAL, OTHERS

STATEMENTS, TRIES = 11, 500
SIZES = ((2, 5), (3, 4), (2, 3), (4, 7), (3, 6), (5, 8), (2, 8), (4, 5), (6, 6))
SMALL = ((1, 5), (1, 1), (4, 1), (1, 2), (2, 2), (1, 8), (2, 1))
EMPTY = ((0, 4), (3, 0), (0, 0))
_RARE = {  # the share of programs that have a family at all
    "half": 0.12, "looks": 0.06, "behind autograd": 0.03, "state": 0.4, "parts": 0.5,
    "mapped": 0.2, "differentiated": 0.2,
}  # fmt: skip


def generate(seed: int) -> Program:
    """The program of a seed."""
    return written(seed, np.random.default_rng([seed, 30]), _write_all)


def written(seed: int, rng: np.random.Generator, write: Callable[[Filler], None], reach: float = 3) -> Program:
    """A program whose statements are written by a function, and which is given, called and returned at random.

    Args:
        seed: of its values.
        rng: chooses.
        write: adds statements to the scenes.
        reach: how many of the newest tensors a statement is likely to read.
    """
    real = "float32" if rng.random() < 0.1 else "float64"
    sizes = _sizes(rng)
    scenes = Scenes(_arguments(rng), sizes, real, seed)
    write(Filler(scenes, rng, reach))
    returns = _returns(scenes, rng)
    orders = [sizes[int(i)] for i in rng.permutation(len(sizes))]
    settings = ", ".join(_settings(rng))
    body, initial = tuple(scenes.body), tuple(scenes.initial)
    training = bool(rng.random() < 0.85)
    program = Program(
        seed, tuple(scenes.arguments), initial, body, returns, (*orders, orders[0]), real, training, settings
    )
    return dressed(program, rng) if real == "float64" else program


def try_family(filler: Filler, family: str) -> bool:
    """Try to add one statement of a family; whether it was added."""
    templates = FAMILIES[family]
    template = templates[int(filler.rng.integers(len(templates)))]
    text, *initial = (template,) if isinstance(template, str) else template
    try:
        statement, lines = filler.fill(text, initial)
        filler.scenes.try_statement(statement, lines)
    except Unusable:
        return False
    return True


def _write_all(filler: Filler) -> None:
    """Several statements, of families that are likely in this program."""
    rng = filler.rng
    weights = _weights(rng)
    wanted, tries = int(rng.integers(3, STATEMENTS + 1)), 0
    while len(filler.scenes.body) < wanted and tries < TRIES:
        tries += 1
        try_family(filler, str(rng.choice(list(weights), p=list(weights.values()))))


def _sizes(rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    """Two sizes, a small one, and at times another that is small or empty."""
    two = [SIZES[int(i)] for i in rng.choice(len(SIZES), 2, replace=False)]
    small = SMALL[int(rng.integers(len(SMALL)))]
    further = EMPTY if rng.random() < 0.3 else SMALL
    more = [further[int(rng.integers(len(further)))]] if rng.random() < 0.3 else []
    return tuple(dict.fromkeys([*two, small, *more]))


def _arguments(rng: np.random.Generator) -> list[Argument]:
    first = f"torch.randn({FIRST[int(rng.integers(len(FIRST)))]}, dtype=REAL)"
    made = [Argument("x", _maybe_trained(first, rng, 0.7))]
    for place in range(int(rng.integers(0, 3))):
        made.append(Argument(f"y{place or ''}", _maybe_trained(OTHERS[int(rng.integers(len(OTHERS)))], rng, 0.5)))
    if rng.random() < 0.6:
        made.append(Argument("ids", INTEGERS[int(rng.integers(len(INTEGERS)))]))
    if rng.random() < 0.6:
        value = MASKS[int(rng.integers(len(MASKS)))]
        made.append(Argument("mask", value, is_keyword=bool(rng.random() < 0.5)))
    if rng.random() < 0.15:
        made.append(Argument("count", NUMBERS[int(rng.integers(len(NUMBERS)))], is_keyword=bool(rng.random() < 0.5)))
    if rng.random() < 0.25:
        made.append(Argument("opt", OPTIONAL[int(rng.integers(len(OPTIONAL)))], is_keyword=True))
    return made


def _maybe_trained(value: str, rng: np.random.Generator, share: float) -> str:
    return f"{value}.requires_grad_()" if rng.random() < share else value


def _weights(rng: np.random.Generator) -> dict[str, float]:
    """How likely each family is in this program."""
    drawn = dict(zip(FAMILIES, rng.gamma(0.7, 1.0, len(FAMILIES)), strict=True))
    for family, share in _RARE.items():
        drawn[family] = min(drawn[family], 1.0) * 0.5 if rng.random() < share else 0.0
    total = sum(drawn.values())
    return {family: weight / total for family, weight in drawn.items()}


def _returns(scenes: Scenes, rng: np.random.Generator) -> str:
    """What was computed and is read by no other statement, and some of the rest, in some structure."""
    values = [n for n in scenes.known if n.startswith("v")] or ["x * 1"]
    later = {n: " ".join(scenes.body).count(n) for n in values}
    last = sorted(values, key=lambda n: (later[n] > 1, -values.index(n)))
    chosen = last[: int(rng.choice([1, 2, 3, 5], p=[0.2, 0.3, 0.3, 0.2]))]
    trained = [n for n in values if n in scenes.known and scenes.known[n].is_trained]
    if trained and not any(n in trained for n in chosen):
        chosen.append(trained[-1])
    chosen += scenes.numbers[:1] if rng.random() < 0.1 else []
    return _structure(chosen, rng)


def _structure(names: list[str], rng: np.random.Generator) -> str:
    if len(names) == 1:
        return str(
            rng.choice(
                [names[0], f"({names[0]},)", f"{{'out': {names[0]}}}", f"{names[0]}.mean()"], p=[0.6, 0.1, 0.1, 0.2]
            )
        )
    kind = int(rng.integers(5))
    if kind == 0:
        return f"[{', '.join(names)}]"
    if kind == 1:
        return "{" + ", ".join(f"'{n}_out': {n}" for n in names) + "}"
    if kind == 2:
        rest = names[1] if len(names) == 2 else f"({', '.join(names[1:])})"
        return f"Output({names[0]}, {rest})"
    if kind == 3:
        return f"({names[0]}, {{'rest': [{', '.join(names[1:])}]}})"
    return f"({', '.join(names)})"


def _settings(rng: np.random.Generator) -> list[Any]:
    """How the outputs become a loss, and whether the parameters move."""
    made = []
    if rng.random() < 0.5:
        made.append(f"loss={str(rng.choice(['sum', 'squares', 'some', 'last']))!r}")
    if rng.random() < 0.4:
        made.append("moves=True")
    return made
