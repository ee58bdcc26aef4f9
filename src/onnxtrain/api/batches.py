"""A batch is checked before it runs, so that an error names the input and not a node of the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import DataError

_TYPES = {"float": "float32", "double": "float64", "string": "str"}  # names of onnxruntime that are not numpy's


def check_batch(names: Sequence[str], batch: Sequence[Any], expected: Mapping[str, Any]) -> None:
    """Refuse a batch that a model cannot take.

    Args:
        names: of the inputs, in order.
        batch: an array or OrtValue for each.
        expected: what onnxruntime says of its inputs, by name.

    Raises:
        DataError: the number of inputs, a type or a size is wrong, or there are no rows.
    """
    if len(batch) != len(names):
        raise DataError(f"{len(batch)} inputs were given, not {len(names)}", cure=f"pass {', '.join(names)}")
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


def _check(name: str, kind: str, shape: tuple[int, ...], expected: Any) -> None:
    wanted, sizes = _numpy_name(expected.type), list(expected.shape)
    if kind != wanted:
        raise DataError(f"{name} is {kind}, not {wanted}", cure=f"pass {name}.astype({wanted!r})")
    if len(sizes) != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(sizes, shape, strict=True)):
        raise DataError(f"{name} has the shape {list(shape)}, not {sizes}", cure="check the sizes of the batch")


def _numpy_name(kind: str) -> str:
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(name, name)
