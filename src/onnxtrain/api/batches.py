"""A batch is checked before it runs, so that an error names the input and not a node of the graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import DataError

_TYPES = {"float": "float32", "double": "float64", "string": "str"}  # names of onnxruntime that are not numpy's


def check_batch(names: Sequence[str], batch: Sequence[Any], expected: Mapping[str, Any]) -> None:
    """Refuse a batch that a model cannot take.

    Args:
        names: of the inputs, in order.
        batch: an array or OrtValue for each.
        expected: what onnxruntime says of its inputs, by name.

    Raises:
        DataError: the number of inputs, a type or a size is wrong, sizes of one name differ, or there are no rows.
    """
    if len(batch) != len(names):
        raise DataError(f"{len(batch)} inputs were given, not {len(names)}", cure=f"pass {', '.join(names)}")
    given: dict[str, tuple[int, ...]] = {}
    for name, value in zip(names, batch, strict=True):
        if isinstance(value, np.ndarray):
            shape, kind = value.shape, "str" if value.dtype.kind in "OUS" else value.dtype.name
        elif hasattr(value, "data_type"):
            shape, kind = tuple(value.shape()), _numpy_name(value.data_type())
        else:
            raise DataError(f"{name} is {type(value).__name__}", cure="pass a numpy array or an OrtValue")
        if math.prod(shape) == 0:
            raise DataError(
                f"{name} has the shape {list(shape)}: there is nothing to learn from", cure="skip the batch"
            )
        if name in expected:
            _check(name, kind, shape, expected[name])
            given[name] = shape
    _check_names(given, {name: expected[name].shape for name in given})


def _check(name: str, kind: str, shape: tuple[int, ...], expected: Any) -> None:
    wanted, sizes = _numpy_name(expected.type), list(expected.shape)
    if kind != wanted:
        raise DataError(f"{name} is {kind}, not {wanted}", cure=f"pass {name}.astype({wanted!r})")
    if len(sizes) != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(sizes, shape, strict=True)):
        raise DataError(f"{name} has the shape {list(shape)}, not {sizes}", cure="check the sizes of the batch")


def _check_names(given: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int | str | None]]) -> None:
    """Refuse sizes that have the same name and differ: nothing else would, where a short input is broadcast."""
    rows = [
        (dim, size, name, axis)
        for name, sizes in given.items()
        for axis, (dim, size) in enumerate(zip(expected[name], sizes, strict=True))
        if isinstance(dim, str)
    ]
    found: dict[str, tuple[int, str, int]] = {}
    for dim, size, name, axis in rows:
        first = found.setdefault(dim, (size, name, axis))
        if first[0] != size:
            what = f"{name} has the size {size} on axis {axis}, {first[1]} has {first[0]} on axis {first[2]}"
            raise DataError(f"{what}; both are {dim!r}", cure="give inputs of the same batch")
    sizes = {dim: size for dim, (size, _, _) in found.items() if dim.isidentifier()}
    for dim, (size, name, axis) in found.items():
        wanted = None if dim.isidentifier() else _evaluate(dim, sizes)
        if wanted not in (None, size):
            what = f"{name} has the size {size} on axis {axis}, not {wanted}, which is {dim!r} here"
            raise DataError(what, cure="give inputs of the same batch")


def _evaluate(dim: str, sizes: Mapping[str, int]) -> int | None:
    """The number that an expression of sizes is; None where it is no expression or some are not known."""
    try:
        found = _expression(dim).evaluate(sizes)
    except ValueError:  # any text may name a dimension
        return None
    return found if isinstance(found, int) else None


@functools.cache
def _expression(dim: str) -> ir.SymbolicDim:
    """The expression that a text is, which is parsed at its first use."""
    return ir.SymbolicDim(dim)


def _numpy_name(kind: str) -> str:
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(name, name)
