"""What a stated budget allows, and the search for the first of a list of choices that is within it."""

from __future__ import annotations

from collections.abc import Callable


def allowed(budget: int | float | str, need: int) -> int:
    """The bytes that a budget allows; none where it is ``"min"``.

    Args:
        budget: bytes, a share, or ``"min"``, as ``Options.memory_budget`` has them.
        need: bytes that a step needs without a budget.
    """
    if isinstance(budget, str):
        return 0
    return int(budget * need) if isinstance(budget, float) else budget


def first_within(count: int, peak: Callable[[int], int], most: int) -> int:
    """The first number of choices, up to all of them, whose peak is at most so many bytes; all where there is none.

    Args:
        count: how many choices there are.
        peak: bytes with the first so many of them; taken to fall.
        most: bytes.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= most else (middle + 1, high)
    return low
