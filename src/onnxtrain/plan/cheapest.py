"""What to compute again in the least time within a number of bytes: a program of integers, solved by HiGHS.

Each choice is made or not; at each place of a step the bytes that all of them together free or take are a sum. That is
what the choices do one after the other, which is nearly what any of them do: who asks looks at the peak that comes of
it. Of choices that take as long those with the lowest peak are the best, so that of two limits the lower one has no
higher peak. Where layers repeat, so do their choices; of equal ones an earlier layer's comes first, whose values are
kept longest, so that the solver need not try which.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onnxtrain.plan.recompute import Choice

_SECONDS = 10.0  # for the solver; what it has not proved by then is not used
_CALL = 5e-6  # seconds that each operator takes beside its work
_TIE = 1e-4  # of all the time: what the whole peak counts
_ALL = 1e3  # what all the time counts, and
_LIMIT = 1e5  # what the limit counts: the solver takes a millionth of one for nothing
_TRIES = 6  # of choices that keep the limit by what each of them changes
_SHARE = 50  # of a limit: so much less is tried where what was left out is needed by others


def cheapest_within(
    choices: Sequence[Choice],
    before: np.ndarray,
    changes: np.ndarray,
    most: int,
    need: Callable[[Sequence[Choice]], int | None],
) -> Sequence[Choice] | None:
    """The choices that take the least time of those with which a step needs at most so many bytes.

    Args:
        choices: all that there are.
        before: bytes in use with none of them, ``[places]``.
        changes: the bytes that each adds, ``[choices, places]``.
        most: bytes.
        need: the bytes that a step needs with some; None where they do not go together.

    Returns:
        They, or None where they are not found: then choices keep too much, or scipy is not there.
    """
    room = most
    for _ in range(_TRIES):
        chosen = cheapest(choices, before, changes, room)
        if chosen is None:
            break
        needed = need(chosen)
        if needed is not None and needed <= most:
            return chosen
        room -= most // _SHARE if needed is None else needed - most
    return None


def cheapest(choices: Sequence[Choice], before: np.ndarray, changes: np.ndarray, most: int) -> list[Choice] | None:
    """The choices that take the least time; None where none are found that keep the limit, or scipy is not there.

    Args:
        choices: all that there are.
        before: bytes in use with none of them, ``[places]``.
        changes: the bytes that each adds, ``[choices, places]``.
        most: bytes.
    """
    try:
        scipy: Any = importlib.import_module("scipy.optimize")
    except ModuleNotFoundError:
        return None
    if not choices:
        return None
    sums, limits = _limits(before, changes, most)
    pairs = [*_repeated(choices)]
    order = np.zeros((len(pairs), len(choices) + 1))
    for row, (first, then) in enumerate(pairs):
        order[row, first], order[row, then] = -1.0, 1.0
    seconds = np.array([c.seconds + _CALL * len(c.nodes) for c in choices])
    found = scipy.milp(
        np.append(_ALL * seconds / seconds.sum(), _ALL * _TIE / _LIMIT),
        integrality=np.append(np.ones(len(choices)), 0),
        bounds=scipy.Bounds(0.0, np.append(np.ones(len(choices)), _LIMIT)),
        constraints=[scipy.LinearConstraint(sums, ub=limits), scipy.LinearConstraint(order, ub=0.0)],
        options={"time_limit": _SECONDS, "mip_rel_gap": 0.0},
    )
    if found.status != 0:
        return None
    return [c for c, share in zip(choices, found.x, strict=False) if share > 0.5]


def _limits(before: np.ndarray, changes: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """For places that may hold more than the limit: what choices, and the peak, add ``[places, choices + 1]``, and
    what that may be at most. Of neighbours with equal changes the one with most bytes stands for all.
    """
    above = before + np.maximum(changes, 0).sum(0) > most
    before, changes = before[above], changes[:, above]
    if not before.size:
        return np.zeros((0, len(changes) + 1)), before
    starts = np.flatnonzero(np.append(True, np.any(changes[:, 1:] != changes[:, :-1], axis=0)))
    unit = max(most, 1) / _LIMIT
    rows, limits = changes[:, starts].T / unit, -np.maximum.reduceat(before, starts) / unit
    needed = _needed(rows, limits)
    return np.hstack([rows[needed], -np.ones((len(needed), 1))]), limits[needed]


def _needed(rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The places of limits that no other one implies: a limit that is no higher, of a sum that is no smaller."""
    left = np.arange(len(rows))
    for place in np.argsort(limits, kind="stable"):
        if place in left:
            others = (limits[left] < limits[place]) | np.any(rows[left] > rows[place], axis=1)
            left = left[others | (left == place)]
    return left


def _repeated(choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Neighbours among equal choices, the one whose values are needed again last comes first."""
    equal: dict[tuple[str, int, float], list[int]] = {}
    for place, choice in enumerate(choices):
        equal.setdefault((choice.cluster, choice.gain, round(choice.seconds, 9)), []).append(place)
    for places in equal.values():
        yield from itertools.pairwise(sorted(places, key=lambda i: -choices[i].at))
