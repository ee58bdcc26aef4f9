"""Settings that are numbers or names, checked where they are given: an error says which, and what it may be."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import ArtifactError, OnnxTrainError

_WIDEST = 2**63 - 1


def check_number(
    name: str,
    given: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    error: type[OnnxTrainError] = ArtifactError,
) -> float:
    """A finite number within bounds; no bool and no text is one.

    Args:
        name: of the setting.
        given: its value.
        least: a bound that it may have.
        most: the other.
        above: a bound that it may not have.
        below: the other.
        error: what is raised else.
    """
    number: Any = given if isinstance(given, numbers.Real) and not isinstance(given, bool) else math.nan
    if not (abs(number) <= sys.float_info.max and least <= number <= most and above < number < below):
        raise error(f"{name}={given!r} is no {_range(least, most, above, below)}", cure=f"give another {name}")
    return number if isinstance(number, int | float) else float(number)


def check_whole(
    name: str,
    given: Any,
    *,
    least: int = -_WIDEST,
    most: int = _WIDEST,
    error: type[OnnxTrainError] = ArtifactError,
) -> int:
    """A whole number within bounds, as ``check_number``."""
    if not isinstance(given, numbers.Integral) or isinstance(given, bool):
        raise error(f"{name}={given!r} is no whole number", cure=f"give another {name}")
    check_number(name, given, least=least, most=most, error=error)
    return int(given)


def _range(least: float, most: float, above: float, below: float) -> str:
    bounds = [(least, "of {} or more"), (most, "of {} or less"), (above, "above {}"), (below, "below {}")]
    said = [text.format(f"{bound:g}") for bound, text in bounds if math.isfinite(bound) and abs(bound) != _WIDEST]
    return " and ".join(["finite number", *said]).replace("number and", "number", 1)


def check_pair(name: str, given: Any, *, error: type[OnnxTrainError] = ArtifactError) -> tuple[Any, Any]:
    """Two values."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise error(f"{name}={given!r} are not two values", cure=f"give two {name}")
    return given[0], given[1]


def check_names(name: str, given: Any, *, error: type[OnnxTrainError] = ArtifactError) -> tuple[str, ...]:
    """Names or patterns of names; one text alone is not a list of them."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(n, str) for n in given):
        raise error(f"{name}={given!r} is no list of names", cure=f"pass {name} as a list of strings")
    return tuple(given)


def check_weights(name: str, given: Any, *, least: float = 0.0, rank: int | None = None) -> np.ndarray | None:
    """Finite numbers of a least size, None where none are given.

    Raises:
        ArtifactError: they are something else, or have another rank.
    """
    if given is None:
        return None
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ArtifactError(f"{name} is no array of numbers", cure=f"give {name} as a floating array")
    if not array.size or not np.isfinite(array).all() or (array < least).any():
        raise ArtifactError(f"{name} has numbers that are not finite, or below {least:g}", cure=f"mend {name}")
    if rank is not None and array.ndim != rank:
        raise ArtifactError(f"{name} has the shape {list(array.shape)}, not {rank} axes", cure=f"reshape {name}")
    return array
