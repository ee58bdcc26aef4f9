"""Short random programs: a value, a view of it, what changes one of them in place, and what reads them.

A program of many statements seldom changes what is worth changing: these find what they find in a tenth of the number.
"""

from __future__ import annotations

import numpy as np

from fuzz.modules.program import Program
from fuzz.modules.templates import Filler
from fuzz.modules.tensor_programs import try_family, written
from fuzz.modules.vocabulary import FAMILIES

TRIES = 40  # of a phrase
_ANY = tuple(FAMILIES)
_VIEWS = ("views", "slices", "indexing")
_CHANGES = ("in place",) * 6 + ("behind autograd",) * 3 + ("state",)


def generate(seed: int) -> Program:
    """The program of a seed."""
    return written(seed, np.random.default_rng([seed, 34]), _write, reach=1)


def _write(filler: Filler) -> None:
    """A source, at times a view, one or two changes with something between them, and at times a reader."""
    rng = filler.rng
    phrases = [_ANY, *([_VIEWS] if rng.random() < 0.6 else []), _CHANGES]
    if rng.random() < 0.5:
        phrases += [(*_VIEWS, *_ANY), _CHANGES]
    phrases += [_ANY] if rng.random() < 0.7 else []
    for families in phrases:
        for _ in range(TRIES):
            if try_family(filler, families[int(rng.integers(len(families)))]):
                break
