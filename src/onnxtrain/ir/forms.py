"""What the numbers of a constant look like: values that follow a rule are computed by somebody, not learned."""

from __future__ import annotations

import enum

import numpy as np

_LINES, _LENGTH = 24, 256  # how much of a constant is looked at
_NEGATIVE = -99.0  # masks have at least this at hidden places
_TOLERANCE = 1e-3  # of the largest number: tables are computed in single precision
_MOSTLY_ZERO = 0.9


class Form(enum.Enum):
    """What the numbers look like; the text is the reason that is given for it."""

    SAME = "one number everywhere"
    MASK = "a mask: two numbers alone"
    REGULAR = "values that follow a rule, as tables of positions, frequencies and slopes do"
    REPEATED = "the same kernel for every channel"
    SPARSE = "zeros for the most part"
    IRREGULAR = "values that follow no rule"


def of(array: np.ndarray) -> Form:
    """The form of an array of any shape; of a large one a sample is looked at."""
    sample = array.reshape(-1)[:: max(1, array.size // 65536)]
    with np.errstate(all="ignore"):
        numbers = sample.astype(np.float64)
        if not numbers.size or (numbers == numbers[0]).all():
            return Form.SAME
        if _is_mask(numbers):
            return Form.MASK
        if _is_regular(array):
            return Form.REGULAR
    if array.ndim > 2 and len(array) > 1 and len(array) < _LENGTH and (array == array[:1]).all():
        return Form.REPEATED
    return Form.SPARSE if (numbers == 0).mean() > _MOSTLY_ZERO and numbers.size > 64 else Form.IRREGULAR


def _is_mask(numbers: np.ndarray) -> bool:
    """0 and 1 alone, or 0 and one number that hides what it is added to."""
    if numbers.size < 4:
        return False
    low, high = numbers.min(), numbers.max()
    if not ((numbers == low) | (numbers == high)).all():
        return False
    return (low == 0 and high == 1) or (high == 0 and low <= _NEGATIVE)


def _is_regular(array: np.ndarray) -> bool:
    """Whether along an axis each number follows from those before it, or diagonals hold one number each."""
    if not np.isfinite(array.reshape(-1)[:_LENGTH].astype(np.float64)).all():
        return True
    shape = array.shape
    if len(shape) == 1 and 2 <= array.size < 4:  # few frequencies of positions: 1, and far below
        return bool(array[0] == 1 and 0 < array[1] < 0.1) and _is_geometric(array.astype(np.float64))
    axes = [i for i, size in enumerate(shape) if size >= 4]
    if any(_recurs(_lines(array, axis)) for axis in axes):
        return True
    return len(shape) >= 2 and min(shape[-2:]) >= 4 and _is_toeplitz(array.reshape(-1, *shape[-2:])[0][:64, :64])


def _lines(array: np.ndarray, axis: int) -> np.ndarray:
    """Some of the lines along an axis, as columns."""
    moved = np.moveaxis(array, axis, 0)[:_LENGTH]
    flat = moved.reshape(len(moved), -1)
    return flat[:, :: max(1, flat.shape[1] // _LINES)].astype(np.float64)


def _recurs(lines: np.ndarray) -> bool:
    """Whether every line is geometric, or satisfies ``x[i + 2] = a·x[i + 1] + b·x[i]``: constants, straight lines,
    sines and cosines, and products of them with a geometric line do.
    """
    if (lines == lines[0]).all():  # repeated along the axis, which says nothing of what is repeated
        return False
    if all(_is_geometric(line) for line in lines.T):
        return True
    count, width = lines.shape
    enough = count >= 5 and (count - 4) * width >= 6  # equations beyond the two unknowns of each line
    return enough and all(_follows_two(line) for line in lines.T)


def _is_geometric(line: np.ndarray) -> bool:
    if (line == 0).any():
        return bool((line == line[0]).all())
    ratio = line[1:] / line[:-1]
    return bool(np.allclose(ratio, ratio[0], rtol=1e-4))


def _follows_two(line: np.ndarray) -> bool:
    scale = np.abs(line).max()
    if not scale:
        return True
    line = line / scale
    known = np.stack([line[1:-1], line[:-2]], 1)
    factors = np.linalg.lstsq(known, line[2:], rcond=None)[0]
    return bool(np.abs(known @ factors - line[2:]).max() < _TOLERANCE)


def _is_toeplitz(matrix: np.ndarray) -> bool:
    return bool((matrix[1:, 1:] == matrix[:-1, :-1]).all())
